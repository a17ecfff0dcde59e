"""One round in which every rank of a process group says something and hears all others, through the group's store.

A store pairs nothing with a collective that another rank is in, and needs no device, so that a rank which never comes is a rank
that has said nothing, and not a hang or a garbled answer.  Keys of a round go when the next one is complete.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import NoReturn

import attrs
import torch.distributed as dist

from qsync_core.errors import RankError
from qsync_core.printable import printable
from qsync_torch.distributed.bounded_store import TIMEOUT_VARIABLE, BoundedStore, StoreSilent, bounded
from qsync_torch.distributed.process_group import rank_count

_GRACE_S = 5.0
"""How long a rank that gives up stays at most, so that the others hear why: rank 0 may hold the store."""
_GRACE = 0.25
"""How long a rank that gives up stays at most, as a share of the time that it has waited."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1
BEATS_PER_TIMEOUT = 10
_WATCH_EVERY_S = 0.5


@attrs.frozen
class Report:
    """What one rank says.

    Attributes:
        what: the call that it is in.
        facts: what must be equal on all ranks.
        refusal: the sentence of its error; empty where there is none.
        kind: the class of that error in :mod:`qsync_core.errors`; empty for any other class.
    """

    what: str
    facts: Mapping[str, str] = {}
    refusal: str = ""
    kind: str = ""


@attrs.frozen
class Members:
    """The ranks that take part in rounds, and where they meet.

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
    def of_group(cls, group: dist.ProcessGroup | None) -> Members | None:
        """Find the ranks of a process group, by default the job's; None outside one, and on a rank alone in it or not of it."""
        if rank_count(group) < 2:
            return None
        whole = dist.group.WORLD if group is None else group
        assert whole is not None
        store = whole.get_group_store()
        patience: timedelta = store.timeout  # type: ignore[attr-defined]  # which torch's stubs leave out
        return cls(dist.get_rank(), dist.get_process_group_ranks(group), store, patience.total_seconds())


class Exchange:
    """One round of reports; its number is the count of rounds that this rank has begun among these members.

    Args:
        members: the ranks that take part.
        what: the call that every rank must be in.
        timeout_s: how long the others may take to come after this rank has.
        slow: the others may take as long as their processes live, at most as long as the group's own timeout; within ``timeout_s``
            they must show that they live (:meth:`alive`).
    """

    def __init__(self, members: Members, what: str, timeout_s: float, *, slow: bool = False) -> None:
        self.rank, self.ranks, store = members.rank, members.ranks, members.store
        self._what, self._timeout_s, self._slow = what, timeout_s, slow
        self._limit_s = max(timeout_s, members.patience_s) if slow else timeout_s
        number = store.add(f"qsync/rounds/{self.rank}", 1)
        self._store, self._previous = (store.under(f"qsync/{n}") for n in (number, number - 1))

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Show the others that this process lives, from another thread; without ``slow`` does nothing."""
        if not self._slow:
            yield
            return

        def beat(done: threading.Event) -> None:
            with suppress(RuntimeError):  # a store that has gone is noticed by the thread that needs it
                while True:
                    self._store.add(f"alive/{self.rank}", 1)
                    if done.wait(self._timeout_s / BEATS_PER_TIMEOUT):
                        return

        with beside("qsync-alive", beat):
            yield

    def given_up(self, until: threading.Event) -> tuple[str, dict[int, Report]] | None:
        """Wait in another thread until the others end the round without this rank, and some seconds more.

        Returns:
            Who did not come in time, as a sentence that may be empty, and what the others have said; None where ``until`` is set
            before that.

        Raises:
            DistError: the process that holds the store has ended.
        """
        while not self._store.check(["over"]):
            if until.wait(_WATCH_EVERY_S):
                return None
        found = self._missing(), self._reports()
        self._store.set(f"heard/{self.rank}", "")
        return None if until.wait(grace_s(self._timeout_s)) else found

    def say(self, mine: Report) -> None:
        """Publish this rank's report, and where it refuses end the round for all."""
        self._store.set(f"report/{self.rank}", json.dumps(attrs.asdict(mine)))
        if mine.refusal:
            self._store.set("over", "")

    def leave(self, mine: Report) -> None:
        """:meth:`say` in a rank that ends now, and will not hear the others: none waits for that."""
        with suppress(dist.DistError):
            self.say(mine)
            self._store.set(f"heard/{self.rank}", "")

    def hear(self) -> dict[int, Report]:
        """The reports of all ranks, or where one refuses those of the ranks that came in time; call it after :meth:`say`.

        Every rank returns once all have heard, because the one that leaves first may take the store with it.

        Raises:
            RankError: a rank has not come in time, or its process has ended; on every rank that came.
        """
        self._await_reports(time.monotonic())
        missing, reports = self._missing(), self._reports()
        self._store.set(f"heard/{self.rank}", "")
        # One that has reported looks every tenth of a second; where one is missing, that long was waited already.
        until = time.monotonic() + (grace_s(self._timeout_s) if missing else self._timeout_s)
        with suppress(dist.DistError):  # all that matters is read: the rank that holds the store may have left
            all_heard = self._poll([f"heard/{rank}" for rank in (reports if missing else self.ranks)], until)
            if self._store.check(["over"]):  # now that all have heard, all see the same
                missing, reports = self._missing(), self._reports()
            elif not all_heard:
                missing = self._dead(next(rank for rank in self.ranks if not self._store.check([f"heard/{rank}"])))
            else:  # so all have left the round before
                for key in (f"report/{self.rank}", f"heard/{self.rank}", f"alive/{self.rank}", "over"):
                    self._previous.delete_key(key)
        if missing:
            raise RankError(missing)
        return reports

    def _await_reports(self, came: float) -> None:
        """Wait until all have come or the round is over; end it where one does not come."""
        keys = [f"report/{rank}" for rank in self.ranks]
        watched, since = (-1, -1), came
        while not self._poll(
            keys, min(time.monotonic() + self._timeout_s / BEATS_PER_TIMEOUT, came + self._limit_s), or_key="over"
        ):
            now = time.monotonic()
            silent = [rank for rank in self.ranks if not self._store.check([f"report/{rank}"])]
            if not silent:
                return
            if now - came >= self._limit_s:
                self._store.set("over", late(silent, self._what, self._limit_s, self.rank))
                return
            if self._slow:  # the first silent one alone: the others' turn comes when it has reported
                beat = (silent[0], self._store.add(f"alive/{silent[0]}", 0))
                if beat != watched:
                    watched, since = beat, now
                elif now - since >= self._timeout_s:
                    self._store.set("over", self._dead(silent[0]))
                    return

    def _missing(self) -> str:
        """Who has not come, as the rank that ended the round for this says; else empty."""
        return self._store.get("over").decode() if self._store.check(["over"]) else ""

    def _dead(self, silent: int) -> str:
        return no_sign_of_life([silent], self._what, self._timeout_s, self.rank)

    def _poll(self, keys: Sequence[str], until: float, or_key: str = "") -> bool:
        """Whether all keys (or the other one) are there, before the time is over.

        Not ``store.wait``, which keeps a TCPStore's connection from all other threads until it returns.
        """
        pause_s = _FIRST_PAUSE_S
        while not self._store.check(list(keys)) and not (or_key and self._store.check([or_key])):
            left_s = until - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return True

    def _reports(self) -> dict[int, Report]:
        here = [rank for rank in self.ranks if self._store.check([f"report/{rank}"])]
        said = [json.loads(text) for text in self._store.multi_get([f"report/{rank}" for rank in here])]
        names = [field.name for field in attrs.fields(Report)]  # another version of QSync may say more
        return {rank: Report(**{name: report[name] for name in names}) for rank, report in zip(here, said, strict=True)}


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


def grace_s(timeout_s: float) -> float:
    """How long a rank stays that gives up after a time of waiting."""
    return min(_GRACE_S, _GRACE * timeout_s)


def end_process(error: str) -> NoReturn:
    """End this process with a sentence from a thread beside one that waits without end.

    On the standard error that the process was started with: a bar of progress may have put a writer of its own in its place, which
    writes when the next line of the main thread comes.
    """
    print(printable(f"error: {error}"), file=sys.__stderr__ or sys.stderr, flush=True)
    os._exit(1)


def late(silent: Sequence[int], what: str, limit_s: float, rank: int) -> str:
    """Who has not come, as a sentence."""
    return (
        f"{rank_list(silent)} did not reach {what} within {limit_s:g} s of rank {rank}: see what was printed "
        "there last, and call it on every rank, in the same order; where a rank takes longer to come there, set "
        f"{TIMEOUT_VARIABLE} to more seconds"
    )


def no_sign_of_life(silent: Sequence[int], what: str, timeout_s: float, rank: int) -> str:
    """Who came and is silent, as a sentence."""
    those = ("it", "its process has ended or hangs") if len(silent) == 1 else ("them", "their processes have ended or hang")
    return (
        f"{rank_list(silent)} gave no sign of life for {timeout_s:g} s while rank {rank} waited for {those[0]} in {what}: "
        f"{those[1]}, see what was printed there last; where it only takes long, set {TIMEOUT_VARIABLE} to more seconds"
    )


def store_has_gone(what: str, error: Exception) -> str:
    """What has become of the store, as a sentence."""
    holder = "it is rank 0's, or the torchrun of node rank 0"
    if isinstance(error, StoreSilent):
        return (
            f"the process that holds the process group's store is silent while this rank is in {what} ({error}): {holder}, and is "
            f"stopped or cannot be reached any more; where it only takes long, set {TIMEOUT_VARIABLE} to more seconds"
        )
    first = str(error).partition("\n")[0]
    return (
        f"the process that holds the process group's store has ended while this rank was in {what}: {holder}, see what it printed "
        f"last ({first})"
    )


def rank_list(ranks: Sequence[int]) -> str:
    """``rank 1``, or ``ranks 1, 3``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def by_value(values: Mapping[int, str]) -> str:
    """Which ranks have which value: ``2.13 on ranks 0, 2; 2.12 on rank 1``."""
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return "; ".join(f"{value} on {rank_list(who)}" for value, who in ranks.items())
