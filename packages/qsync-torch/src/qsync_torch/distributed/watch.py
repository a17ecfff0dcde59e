"""Ranks that watch each other for as long as a command runs: one that is frozen, killed or has failed ends all, with a sentence.

A rank may wait for another one in a collective, in the store or in a driver, and nothing in Python interrupts that.  So a thread
of each rank shows that its process lives, and looks whether the others do.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import attrs
import torch.distributed as dist

from qsync_core.errors import RankError
from qsync_torch.distributed.bounded_store import rank_timeout_s
from qsync_torch.distributed.exchange import BEATS_PER_TIMEOUT, end_process, grace_s, late, no_sign_of_life, store_has_gone
from qsync_torch.distributed.mailbox import Mailbox, beside

_LEFT = "left"
_BEATS_MISSED = 2.5
"""Signs of life that a rank does not give in time, after which it is taken to be gone where another one must be."""


@contextmanager
def watched(what: str, members: Mailbox | None) -> Iterator[Callable[[], list[int]]]:
    """Run a block on every rank, which ends with the process where another rank gives no sign of life or fails.

    The others' silence is noticed after ``QSYNC_RANK_TIMEOUT_S`` seconds.  This rank then has a moment to end by itself, where it
    has noticed too (and as many seconds where another one has failed, and not fallen silent); else the sentence goes to standard
    error, and the process ends with status 1.

    Args:
        what: the call, as its user knows it; equal on all ranks.
        members: the ranks that take part; None where this one is alone.

    Yields:
        What finds the ranks that live no longer, in a quarter of that time, for who has seen that one is lost
        (:func:`~qsync_torch.distributed.ranks.naming_lost_ranks`).  Where one torchrun has started all of them it finds none:
        torchrun says itself which has ended, and ends the others before that.

    Raises:
        RankError: when the store does not answer.
    """
    if members is None:
        yield list
        return
    try:
        watch = _Watch(what, members)
    except dist.DistError as error:
        raise RankError(store_has_gone(what, error)) from None
    try:
        with beside("qsync-watch", watch.run):
            yield list if _of_one_torchrun() else watch.gone
    except BaseException as error:
        watch.leave(f"{type(error).__name__}: {error}".partition("\n")[0])
        raise
    watch.leave("")


def _of_one_torchrun() -> bool:
    """Whether one agent of torchrun has started all ranks."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")


class _Watch:
    def __init__(self, what: str, members: Mailbox) -> None:
        self._what, self._rank, self._timeout_s = what, members.rank, rank_timeout_s()
        self._others = [rank for rank in members.ranks if rank != members.rank]
        self._box = attrs.evolve(members, store=members.store.own_connection()).part("qsync")
        self._name = f"watch{self._box.count('watches')}"
        self._beats = 0

    def leave(self, error: str) -> None:
        """Tell the others that this rank is not to be waited for: it is done, or has failed."""
        with suppress(dist.DistError):
            self._say({_LEFT: error})

    def gone(self) -> list[int]:
        """The ranks that give no sign of life now, and have not said that they end; none where the store has gone too."""
        try:
            before = self._box.heard(self._name, self._others)
            time.sleep(_BEATS_MISSED * self._timeout_s / BEATS_PER_TIMEOUT)
            now = self._box.heard(self._name, self._others)
        except dist.DistError:
            return []
        return [rank for rank in self._others if now.get(rank) == before.get(rank) and _LEFT not in now.get(rank, {})]

    def run(self, done: threading.Event) -> None:
        """Show that this rank lives, and look after the others until one is missing."""
        heard: dict[int, Any] = {}
        since = dict.fromkeys(self._others, time.monotonic())
        while True:
            moment_s = grace_s(self._timeout_s)
            try:
                self._beat()
                if found := self._failed(heard, since):
                    moment_s = self._timeout_s  # this rank may only be busy, and hear the reason in the other's own words
                else:
                    found = self._missing(heard, since)
            except dist.DistError as error:
                found = store_has_gone(self._what, error)
            if found and not self._ends(done, moment_s):
                end_process(found)
            if done.wait(self._timeout_s / BEATS_PER_TIMEOUT):
                return

    def _ends(self, done: threading.Event, moment_s: float) -> bool:
        """Whether the block ends within a moment; until then this rank is not gone."""
        until = time.monotonic() + moment_s
        with suppress(dist.DistError):
            while time.monotonic() < until:
                if done.wait(self._timeout_s / BEATS_PER_TIMEOUT):
                    return True
                self._beat()
        return done.wait(max(0.0, until - time.monotonic()))

    def _beat(self) -> None:
        self._beats += 1
        self._say({"beats": self._beats})

    def _say(self, state: dict[str, object]) -> None:
        self._box.say(self._name, state)

    def _failed(self, heard: dict[int, Any], since: dict[int, float]) -> str:
        """Hear the other ranks; which one has failed, as a sentence that may be empty."""
        for rank, state in self._box.heard(self._name, list(since)).items():
            if state != heard.get(rank):
                heard[rank], since[rank] = state, time.monotonic()
            if (error := state.get(_LEFT)) is not None:
                del since[rank]
                if error:
                    return f"rank {rank} has failed in {self._what} ({error}): see what it printed last"
        return ""

    def _missing(self, heard: dict[int, Any], since: dict[int, float]) -> str:
        """Which rank has not come, or gives no sign of life any more, as a sentence that may be empty."""
        now = time.monotonic()
        silent = [rank for rank, last in since.items() if now - last >= self._timeout_s]
        absent = [rank for rank in silent if rank not in heard]
        if absent:
            return late(absent, self._what, self._timeout_s, self._rank)
        return no_sign_of_life(silent, self._what, self._timeout_s, self._rank) if silent else ""
