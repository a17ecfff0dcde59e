"""The store through which ranks and their probes tell what they find: messages by name and rank, and signs of life."""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any

import attrs
import torch.distributed as dist

from qsync_core.errors import RankError
from qsync_torch.distributed.ranks import not_met

PAUSE_S = 0.1
_BEAT_S = 0.5
_GRACE_S = 2.0
"""For PyTorch's own time-out to come first, which says more."""


@attrs.frozen
class Place:
    """This process's place in a job, as torchrun (or another launcher) says in the environment."""

    rank: int
    world: int
    host: str
    port: int
    agent_store: bool

    @classmethod
    def from_environment(cls) -> Place | None:
        """None outside a job of several processes.

        Raises:
            RankError: where the environment says only half of it.
        """
        try:
            world = int(os.environ.get("WORLD_SIZE", "1"))
            if world < 2 or "RANK" not in os.environ:
                return None
            return cls(
                int(os.environ["RANK"]),
                world,
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True),
            )
        except (KeyError, ValueError) as error:
            raise RankError(
                f"this process is one of {os.environ.get('WORLD_SIZE')}, but its place among them is not known ({error}): start it "
                "under torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
            ) from None

    def store(self, timeout_s: float, *, holds: bool = False) -> dist.TCPStore:
        """A connection of its own to the job's store.

        Args:
            timeout_s: how long to try.
            holds: on rank 0, where torchrun keeps no store, this process keeps it.

        Raises:
            RankError: when it cannot be reached.
        """
        try:
            return _within(
                timeout_s,
                lambda: dist.TCPStore(
                    self.host,
                    self.port,
                    is_master=holds and self.rank == 0 and not self.agent_store,
                    timeout=timedelta(seconds=timeout_s),
                    wait_for_workers=False,
                ),
            )
        except (dist.DistError, TimeoutError) as error:
            raise RankError(not_met(error)) from None


def _within(timeout_s: float, connect: Callable[[], dist.TCPStore]) -> dist.TCPStore:
    """What ``connect`` gives.  PyTorch's time-out ends neither it nor Ctrl-C where another program has the port, takes the
    connection and says nothing; a thread that waits so can be left behind.

    Raises:
        TimeoutError: when it gives nothing.
    """
    done: Future[dist.TCPStore] = Future()

    def run() -> None:
        try:
            done.set_result(connect())
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=run, name="qsync-doctor-store", daemon=True).start()
    try:
        return done.result(timeout_s + _GRACE_S)
    except TimeoutError:
        raise TimeoutError(f"what listens there has said nothing for {timeout_s:g} s, as another program would") from None


class Mailbox:
    """Messages of one run of the doctor; every process has a connection of its own."""

    def __init__(self, place: Place, timeout_s: float, *, holds: bool = False) -> None:
        self.place = place
        self._keeper = place.store(timeout_s, holds=holds)
        self._store = dist.PrefixStore("qsync doctor", self._keeper)

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
                    done.wait(_BEAT_S)

        thread = threading.Thread(target=run, name=f"qsync-doctor-{what}", daemon=True)
        thread.start()

        def end() -> None:
            done.set()
            thread.join(_BEAT_S)

        atexit.register(end)  # a thread that the interpreter's end meets inside the store aborts the process

    def beats(self, what: str, ranks: Sequence[int]) -> dict[int, int]:
        """How often each rank has shown that it lives."""
        return {rank: self._store.add(f"{what}/{rank}", 0) for rank in ranks}
