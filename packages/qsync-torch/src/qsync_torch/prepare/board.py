"""Progress of every rank in one place: rank 0's terminal, or its lines where that is none."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import attrs
import torch.distributed as dist

from qsync_core.cli.output import open_console, progress_lines, say
from qsync_core.progress import ProgressCallback
from qsync_torch.distributed.mailbox import Mailbox, beside

_PURPOSE = "qsync/prepare/board"
_TELL_EVERY_S = 0.5
_LOOK_EVERY_S = 1.0
_SHORTEST_PART_S = 0.1
"""Parts of a stage that are shorter than this are not told."""

Show = Callable[[int, int, int, str], None]
"""Shows one rank's state: rank, done, total, what."""


@attrs.define(eq=False)
class Board:
    """The board on which this rank says how far it is, and what a person should know.

    When a stage ends, one line says how long it took, and its parts: what a stage says of itself before a colon.

    Attributes:
        members: the ranks; None in a job of one.
        clock: seconds.
    """

    members: Mailbox | None
    label: str = ""
    clock: Callable[[], float] = time.monotonic
    _notes: int = 0
    _told: float = float("-inf")
    _running: str = ""
    _part: str = ""
    _since: float = 0.0
    _seconds: dict[str, float] = attrs.field(factory=dict)
    _show: Show | None = None
    _say: Callable[[str], None] = lambda text: say(f"note: {text}")

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.members.rank if self.members else 0

    def stage(self, name: str) -> ProgressCallback:
        """A callback for a function that reports its progress; the stage ends with its last part, or when another one begins."""

        def update(done: int, total: int, what: str, /) -> None:
            now = self.clock()
            if self._running != name:
                self.end()
                self._running, self._part, self._since = name, "", now
            self._count(now, what.partition(":")[0])
            if done == total:
                self.end()
                return
            text = f"{name}: {what}" if what else name
            if self.members is None or self.rank == 0:
                if self._show is not None:
                    self._show(self.rank, done, total, f"{self.label}{text}")
            elif now - self._told >= _TELL_EVERY_S:
                self._told = now
                self._post("state", [self._notes, done, total, f"{self.label}{text}"])

        return update

    def _count(self, now: float, part: str) -> None:
        """Give the time since the last call to the part that was under way."""
        self._seconds[self._part] = self._seconds.get(self._part, 0.0) + now - self._since
        self._part, self._since = part, now

    def end(self) -> None:
        """Say how long the stage took that is under way, if one is."""
        if not self._running:
            return
        self._count(self.clock(), "")
        parts = [f"{part} {s:.1f} s" for part, s in self._seconds.items() if part and s >= _SHORTEST_PART_S]
        label = self.label or (f"rank {self.rank}, " if self.rank else "")
        took = f"{label}{self._running} took {sum(self._seconds.values()):.1f} s" + f" ({', '.join(parts)})" * bool(parts)
        self._running, self._seconds = "", {}
        if self.rank:
            self._tell([1, 1, took])
        elif self._show is not None:
            self._show(0, 1, 1, took)

    def note(self, text: str) -> None:
        """A sentence of this rank, which rank 0 prints."""
        text = f"{self.label}{text}"
        if self.rank == 0:
            self._say(text)
            return
        self._tell(text)

    def note_of_job(self, text: str) -> None:
        """A sentence of the whole job, which rank 0 prints; others, and where it is empty all, say nothing."""
        if text and self.rank == 0:
            self._say(text)

    def _tell(self, said: str | list[Any]) -> None:
        """What rank 0 is to show whatever follows it: a note, or a state."""
        self._post(f"note {self._notes}", said)
        self._notes += 1

    @contextmanager
    def shown(self, *, quiet: bool = False) -> Iterator[None]:
        """Show the ranks' progress on rank 0 while the block runs."""
        if self.rank or quiet:
            yield
            self.end()
            return
        ranks = list(self.members.ranks) if self.members else [0]
        with _display(ranks) as (self._show, self._say), ExitStack() as ending:
            ending.callback(setattr, self, "_show", None)
            ending.enter_context(beside("qsync-board", _Reader(self, ranks[1:]).run))
            ending.callback(self.end)
            yield

    def _post(self, name: str, value: object) -> None:
        assert self.members is not None
        with suppress(dist.DistError):  # that the store has gone is noticed where it is needed
            self.members.part(_PURPOSE).say(name, value)


class _Reader:
    """Reads on rank 0 what the others say."""

    def __init__(self, board: Board, ranks: Sequence[int]) -> None:
        self._board, self._read = board, dict.fromkeys(ranks, 0)
        self._last: dict[int, list[Any]] = {}

    def run(self, done: threading.Event) -> None:
        """Show what the others say until ``done``, and then the rest."""
        if self._board.members is None:
            return
        box = self._board.members.part(_PURPOSE)
        with suppress(dist.DistError):
            while True:
                last = done.wait(_LOOK_EVERY_S)
                for rank in self._read:
                    self._look(box, rank)
                if last:
                    return

    def _look(self, box: Mailbox, rank: int) -> None:
        while found := box.heard(name := f"note {self._read[rank]}", [rank]):
            said = found[rank]
            if isinstance(said, str):
                self._board._say(said)
            elif self._board._show is not None:
                self._board._show(rank, *said)
            box.forget(name, rank=rank)
            self._read[rank] += 1
        state = box.heard("state", [rank]).get(rank)
        if state is not None and state != self._last.get(rank):
            self._last[rank] = state
            before, *shown = state
            if self._board._show is not None and before == self._read[rank]:  # else what was told since is later
                self._board._show(rank, *shown)


@contextmanager
def _display(ranks: Sequence[int]) -> Iterator[tuple[Show, Callable[[str], None]]]:
    """What shows states and prints notes: bars on a terminal, else lines on standard error."""
    if not sys.stderr.isatty():
        with ExitStack() as open_lines:
            lines = {rank: open_lines.enter_context(progress_lines()) for rank in ranks}
            yield lambda rank, done, total, what: lines[rank](done, total, what), _print_note
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = open_console(stderr=True)
    with Progress(
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), console=console, transient=True
    ) as bars:
        tasks = {rank: bars.add_task(f"rank {rank}", total=None) for rank in ranks}

        def show(rank: int, done: int, total: int, what: str) -> None:
            bars.update(tasks[rank], completed=done, total=total, description=what)

        yield show, lambda text: console.print(f"note: {text}", soft_wrap=True)


def _print_note(text: str) -> None:
    say(f"note: {text}")
