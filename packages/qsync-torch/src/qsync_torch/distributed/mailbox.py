"""The one way in which ranks speak to each other outside collectives: messages by name and rank, and signs of life.

They lie in the store that the ranks meet in, each as JSON.  It pairs nothing with a collective that another rank is in, and needs
no device, so that a rank which never comes is one that has said nothing, and not a hang or a garbled answer.  Every call ends
(:mod:`qsync_torch.distributed.bounded_store`); who waits for others does so in :mod:`qsync_torch.distributed.exchange`, for one
round, in :mod:`qsync_torch.distributed.watch`, for as long as a command runs, or looks for itself.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import attrs
import torch.distributed as dist

from qsync_torch.distributed.bounded_store import BoundedStore, bounded
from qsync_torch.distributed.meeting import Place
from qsync_torch.distributed.process_group import rank_count

PIECE_BYTES = 4 << 20
"""A TCPStore takes values of up to 8 MiB."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1


@attrs.frozen(eq=False)
class Mailbox:
    """Messages among some ranks of a job.

    Attributes:
        rank: this process's, in the job.
        ranks: of all members, in the job.
        store: of theirs alone.
        patience_s: how long anything in this store may take.
    """

    rank: int
    ranks: Sequence[int]
    store: BoundedStore = attrs.field(converter=bounded)
    patience_s: float

    @classmethod
    def of_group(cls, group: dist.ProcessGroup | None) -> Mailbox | None:
        """Find the ranks of a process group, by default the job's; None outside one, and on a rank alone in it or not of it."""
        if rank_count(group) < 2:
            return None
        whole = dist.group.WORLD if group is None else group
        assert whole is not None
        store = whole.get_group_store()
        patience: timedelta = store.timeout  # type: ignore[attr-defined]  # which torch's stubs leave out
        return cls(dist.get_rank(), dist.get_process_group_ranks(group), store, patience.total_seconds())

    @classmethod
    def at_place(cls, place: Place, purpose: str, *, holds: bool = False) -> Mailbox:
        """The whole job's, over a connection of its own, which every process of a rank may have (``holds`` as in :class:`Place`).

        Raises:
            RankError: when the store cannot be reached.
        """
        store = bounded(place.store(holds=holds)).under(purpose)
        return cls(place.rank, range(place.world), store, dist.constants.default_pg_timeout.total_seconds())

    def part(self, purpose: str) -> Mailbox:
        """The messages of one purpose, which meet no others of these names."""
        return attrs.evolve(self, store=self.store.under(purpose))

    def say(self, name: str, message: Any = None) -> None:
        """Leave this rank's message, in the place of an earlier one."""
        self.store.set(f"{name}/{self.rank}", json.dumps(message))

    def post(self, name: str, message: Any = None) -> None:
        """Leave a message that is of no rank."""
        self.store.set(name, json.dumps(message))

    def count(self, name: str) -> int:
        """Count one more of something on this rank; how many there are."""
        return self.store.add(f"{name}/{self.rank}", 1)

    def posted(self, name: str) -> bool:
        """Whether there is such a message of no rank."""
        return self.store.check([name])

    def read(self, name: str) -> Any:
        """A message of no rank that is there."""
        return json.loads(self.store.get(name))

    def missing(self, name: str, ranks: Collection[int] | None = None) -> list[int]:
        """The ranks, of all by default, that have left no message of that name."""
        ranks = self.ranks if ranks is None else ranks
        if self.store.check([f"{name}/{rank}" for rank in ranks]):
            return []
        return [rank for rank in ranks if not self.store.check([f"{name}/{rank}"])]

    def heard(self, name: str, ranks: Collection[int] | None = None) -> dict[int, Any]:
        """Messages of that name by rank, of those ranks, all by default, that have left one."""
        ranks = self.ranks if ranks is None else ranks
        missing = set(self.missing(name, ranks))
        came = [rank for rank in ranks if rank not in missing]
        said = self.store.multi_get([f"{name}/{rank}" for rank in came]) if came else []
        return {rank: json.loads(text) for rank, text in zip(came, said, strict=True)}

    def wait(self, name: str, until: float, ranks: Collection[int] | None = None, *, or_posted: str = "") -> bool:
        """Whether those ranks, all by default, have said something, or another message is posted, before a moment.

        Not ``store.wait``, which keeps a TCPStore's connection from all other threads until it returns.

        Args:
            until: the moment, on :func:`time.monotonic`'s clock.
            or_posted: the name of the other message.
        """
        keys = [f"{name}/{rank}" for rank in (self.ranks if ranks is None else ranks)]
        pause_s = _FIRST_PAUSE_S
        while not self.store.check(keys) and not (or_posted and self.posted(or_posted)):
            left_s = until - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return True

    def forget(self, *names: str, posted: Sequence[str] = (), rank: int | None = None) -> None:
        """Remove messages of a rank, this one by default, and posted ones."""
        for key in (*(f"{name}/{self.rank if rank is None else rank}" for name in names), *posted):
            self.store.delete_key(key)

    def send(self, name: str, data: bytes) -> int:
        """Leave bytes of any length; in how many pieces, which those need to know who :meth:`take` them."""
        starts = range(0, len(data), PIECE_BYTES)
        for piece, start in enumerate(starts):
            self.store.set(f"{name}/{self.rank}/{piece}", data[start : start + PIECE_BYTES])
        return len(starts)

    def take(self, name: str, rank: int, pieces: int) -> bytes:
        """The bytes that a rank has sent."""
        return b"".join(self.store.get(f"{name}/{rank}/{piece}") for piece in range(pieces))

    def unsend(self, name: str, pieces: int) -> None:
        """Remove the bytes that this rank has sent."""
        for piece in range(pieces):
            self.store.delete_key(f"{name}/{self.rank}/{piece}")

    def beat(self, name: str, every_s: float, done: threading.Event) -> None:
        """Show again and again that this process lives, until ``done``; for a thread beside the one that works."""
        with suppress(RuntimeError):  # a store that has gone is noticed by the thread that needs it
            while True:
                self.count(name)
                if done.wait(every_s):
                    return

    def beat_until_exit(self, name: str, every_s: float) -> Callable[[], None]:
        """Show from another thread, until this process ends or stops, that it lives; what is returned ends it sooner."""
        done = threading.Event()
        thread = threading.Thread(target=self.beat, args=(name, every_s, done), name=f"qsync-{name}", daemon=True)
        thread.start()

        def end() -> None:
            done.set()
            thread.join(every_s)

        atexit.register(end)  # a thread that the interpreter's end meets inside the store aborts the process
        return end

    def beats(self, name: str, ranks: Collection[int]) -> Mapping[int, int]:
        """How often each of some ranks has shown that it lives."""
        return {rank: self.store.add(f"{name}/{rank}", 0) for rank in ranks}


@contextmanager
def beside(name: str, work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Do ``work`` in a thread of this name while the block runs; what it is given is set when the block has ended."""
    done = threading.Event()
    thread = threading.Thread(target=work, args=(done,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
