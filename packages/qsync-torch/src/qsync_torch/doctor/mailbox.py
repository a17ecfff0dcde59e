"""The store through which ranks and their probes tell what they find: messages by name and rank, and signs of life."""

from __future__ import annotations

import atexit
import json
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from qsync_torch.distributed.bounded_store import BoundedStore
from qsync_torch.distributed.meeting import Place

PAUSE_S = 0.1
BEAT_S = 0.5


class Mailbox:
    """Messages of one run of the doctor; every process has a connection of its own."""

    def __init__(self, place: Place, *, holds: bool = False) -> None:
        self.place = place
        self._store = BoundedStore(place.store(holds=holds)).under("qsync doctor")

    def say(self, what: str, message: Any = None) -> None:
        """Leave this rank's message."""
        self.post(f"{what}/{self.place.rank}", message)

    def post(self, key: str, message: Any) -> None:
        """Leave a message for all."""
        self._store.set(key, json.dumps(message))

    def missing(self, what: str) -> list[int]:
        """Ranks that have left no message of that name."""
        everyone = range(self.place.world)
        if self._store.check([f"{what}/{rank}" for rank in everyone]):
            return []
        return [rank for rank in everyone if not self.has(f"{what}/{rank}")]

    def has(self, key: str) -> bool:
        """Whether there is such a message."""
        return bool(self._store.check([key]))

    def read(self, key: str) -> Any:
        """A message that is there."""
        return json.loads(self._store.get(key))

    def heard(self, what: str) -> dict[int, Any]:
        """Messages of that name by rank, of those who left one."""
        return {rank: self.read(f"{what}/{rank}") for rank in range(self.place.world) if self.has(f"{what}/{rank}")}

    def wait(self, key: str) -> Any:
        """The message of that name, once it is there."""
        while not self.has(key):
            time.sleep(PAUSE_S)
        return self.read(key)

    def beat(self, what: str) -> None:
        """Show, from another thread and until this process ends or stops, that it lives."""
        done = threading.Event()

        def run() -> None:
            with suppress(RuntimeError):  # the store has gone: the next round notices
                while not done.is_set():
                    self._store.add(f"{what}/{self.place.rank}", 1)
                    done.wait(BEAT_S)

        thread = threading.Thread(target=run, name=f"qsync-doctor-{what}", daemon=True)
        thread.start()

        def end() -> None:
            done.set()
            thread.join(BEAT_S)

        atexit.register(end)  # a thread that the interpreter's end meets inside the store aborts the process

    def beats(self, what: str, ranks: Sequence[int]) -> dict[int, int]:
        """How often each rank has shown that it lives."""
        return {rank: self._store.add(f"{what}/{rank}", 0) for rank in ranks}
