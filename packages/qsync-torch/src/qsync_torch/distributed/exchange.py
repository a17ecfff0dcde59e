"""One round in which every rank says something and hears all others, through their mailbox.

What was said in a round goes when the next one is complete.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import NoReturn

import attrs
import torch.distributed as dist

from qsync_core.errors import RankError
from qsync_core.printable import printable
from qsync_torch.distributed.bounded_store import TIMEOUT_VARIABLE, StoreSilent
from qsync_torch.distributed.mailbox import Mailbox, beside

_GRACE_S = 5.0
"""How long a rank that gives up stays at most, so that the others hear why: rank 0 may hold the store."""
_GRACE = 0.25
"""How long a rank that gives up stays at most, as a share of the time that it has waited."""
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


class Exchange:
    """One round of reports; its number is the count of rounds that this rank has begun among these members.

    Args:
        members: the ranks that take part.
        what: the call that every rank must be in.
        timeout_s: how long the others may take to come after this rank has.
        slow: the others may take as long as their processes live, at most as long as the group's own timeout; within ``timeout_s``
            they must show that they live (:meth:`alive`).
    """

    def __init__(self, members: Mailbox, what: str, timeout_s: float, *, slow: bool = False) -> None:
        self.rank, self.ranks = members.rank, members.ranks
        self._what, self._timeout_s, self._slow = what, timeout_s, slow
        self._limit_s = max(timeout_s, members.patience_s) if slow else timeout_s
        number = members.count("qsync/rounds")
        self._first = number == 1
        self._box, self._previous = (members.part(f"qsync/{n}") for n in (number, number - 1))

    def alive(self) -> AbstractContextManager[None]:
        """Show the others that this process lives, from another thread; without ``slow`` does nothing."""
        if not self._slow:
            return nullcontext()
        return beside("qsync-alive", partial(self._box.beat, "alive", self._timeout_s / BEATS_PER_TIMEOUT))

    def given_up(self, until: threading.Event) -> tuple[str, dict[int, Report]] | None:
        """Wait in another thread until the others end the round without this rank, and some seconds more.

        Returns:
            Who did not come in time, as a sentence that may be empty, and what the others have said; None where ``until`` is set
            before that.

        Raises:
            DistError: the process that holds the store has ended.
        """
        while not self._box.posted("over"):
            if until.wait(_WATCH_EVERY_S):
                return None
        found = self._missing(), self._reports()
        self._box.say("heard")
        return None if until.wait(grace_s(self._timeout_s)) else found

    def say(self, mine: Report) -> None:
        """Publish this rank's report, and where it refuses end the round for all."""
        self._box.say("report", attrs.asdict(mine))
        if mine.refusal:
            self._box.post("over", "")

    def leave(self, mine: Report) -> None:
        """:meth:`say` in a rank that ends now, and will not hear the others: none waits for that."""
        with suppress(dist.DistError):
            self.say(mine)
            self._box.say("heard")

    def hear(self) -> dict[int, Report]:
        """The reports of all ranks, or where one refuses those of the ranks that came in time; call it after :meth:`say`.

        Every rank returns once all have heard, because the one that leaves first may take the store with it.

        Raises:
            RankError: a rank has not come in time, or its process has ended; on every rank that came.
        """
        self._await_reports(time.monotonic())
        missing, reports = self._missing(), self._reports()
        self._box.say("heard")
        # One that has reported looks every tenth of a second; where one is missing, that long was waited already.
        until = time.monotonic() + (grace_s(self._timeout_s) if missing else self._timeout_s)
        with suppress(dist.DistError):  # all that matters is read: the rank that holds the store may have left
            all_heard = self._box.wait("heard", until, [*reports] if missing else self.ranks)
            if self._box.posted("over"):  # now that all have heard, all see the same
                missing, reports = self._missing(), self._reports()
            elif not all_heard:
                missing = self._dead(self._box.missing("heard")[0])
            else:  # so all have left the round before
                self._previous.forget("report", "heard", "alive", posted=["over"])
        if missing:
            raise RankError(missing)
        return reports

    def _await_reports(self, came: float) -> None:
        """Wait until all have come or the round is over; end it where one does not come."""
        watched, since = (-1, -1), came
        look_every_s = self._timeout_s / BEATS_PER_TIMEOUT
        while not self._box.wait("report", min(time.monotonic() + look_every_s, came + self._limit_s), or_posted="over"):
            now = time.monotonic()
            if not (silent := self._box.missing("report")):
                return
            if now - came >= self._limit_s:
                self._box.post("over", late(silent, self._what, self._limit_s, self.rank))
                return
            if self._slow:  # the first silent one alone: the others' turn comes when it has reported
                (beat,) = self._box.beats("alive", silent[:1]).items()
                if beat != watched:
                    watched, since = beat, now
                elif now - since >= self._timeout_s:
                    came_ever = beat[1] or not self._first
                    dead = self._dead(silent[0]) if came_ever else absent(silent[:1], self._what, self._timeout_s, self.rank)
                    self._box.post("over", dead)
                    return

    def _missing(self) -> str:
        """Who has not come, as the rank that ended the round for this says; else empty."""
        return str(self._box.read("over")) if self._box.posted("over") else ""

    def _dead(self, silent: int) -> str:
        return no_sign_of_life([silent], self._what, self._timeout_s, self.rank)

    def _reports(self) -> dict[int, Report]:
        names = [field.name for field in attrs.fields(Report)]  # another version of QSync may say more
        return {rank: Report(**{name: said[name] for name in names}) for rank, said in self._box.heard("report").items()}


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


def absent(silent: Sequence[int], what: str, limit_s: float, rank: int) -> str:
    """Who has never been seen, as a sentence."""
    return (
        f"{rank_list(silent)} did not come to {what} within {limit_s:g} s of rank {rank}: start it, or see what was printed there "
        f"last; where it only takes long, set {TIMEOUT_VARIABLE} to more seconds"
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
