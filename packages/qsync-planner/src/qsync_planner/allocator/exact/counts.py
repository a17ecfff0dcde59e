"""What labels count of the rows: one number for all rows that took the same so far, and one for all that will take the same.

See docs/design/exact-allocator.md#stages.  Deadlines of one step are alike in most stages: those whose buckets are to come have
taken the same, and those whose buckets are past take all that follows, so that of these the one with the least room counts.  So
dozens of deadlines are two numbers of a label, and so are moments of memory that differ in few stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np

from qsync_planner.allocator.exact.stages import Indices, Numbers


@attrs.frozen(eq=False)
class Merger:
    """Counts of which from here on that with the least room counts.

    Attributes:
        counts: by member which count it is of.
        behind: by member by how much its limit is above the limit of the row that stays.
        prices: by member that of its row.
    """

    counts: Indices
    behind: Numbers
    prices: Numbers


@attrs.frozen(eq=False)
class Counting:
    """What one stage does to a label's counts: these add what the stage takes, and then become those of the next stage.

    Attributes:
        source: by count of this stage which of the stage before it continues.
        row: by count a row whose amounts it adds.
        kept: the counts that go on as they are; those of mergers follow them.
        mergers: counts that become one.
        cut: by count that goes on the rows that it stands for.
        prices: of rows, with those of rows that they stand for.
        surplus: excess that every path has by now: a price times what a row has more room than one that takes the same.
    """

    source: Indices
    row: Indices
    kept: Indices
    mergers: tuple[Merger, ...]
    cut: tuple[tuple[int, ...], ...]
    prices: Numbers
    surplus: float
    is_unchanged: bool = False
    """Whether the counts stay what they are."""

    def added(self, taken: Numbers, amounts: Numbers) -> Numbers:
        """The counts after arcs that take ``amounts`` of the rows, of shape (labels, rows) or (rows,)."""
        return taken[:, self.source] + amounts[..., self.row]

    def merged(self, taken: Numbers) -> tuple[Numbers, Numbers | float]:
        """The counts as the next stage has them; and what rows that no longer count leave unused, times their prices."""
        if not self.mergers:
            return (taken if len(self.kept) == taken.shape[1] else taken[:, self.kept]), self.surplus
        unused: Numbers | float = self.surplus
        found = [taken[:, self.kept]]
        for merger in self.mergers:
            own = taken[:, merger.counts] - merger.behind
            most = own.max(axis=1)
            found.append(most[:, None])
            if merger.prices.any():
                unused = unused + (most[:, None] - own) @ merger.prices
        return np.concatenate(found, axis=1), unused


def countings(amounts: Numbers, limits: Numbers, prices: Numbers, first: Indices) -> Iterator[Counting]:
    """What every stage does to the counts; before the first one, all rows have taken nothing, which is one count.

    Args:
        amounts: of shape (arcs, rows), the arcs by stage.
        limits: what all arcs of a path may take of each row.
        prices: of the rows.
        first: by stage its first arc, and the end of all.
    """
    rows = len(limits)
    begins, ends = _differences(amounts, first)
    prices = prices.copy()
    counts: list[tuple[int, ...]] = [tuple(range(rows))] if rows else []
    eventful = {-1, 0, *np.unique(begins).tolist(), *np.unique(ends).tolist()}
    same: Counting | None = None
    for stage in range(len(first) - 1):
        if stage not in eventful:  # the counts stay what they are
            same = same or _unchanged(counts, prices)
            yield same
            continue
        same = None
        source, own = [], []
        for number, members in enumerate(counts):
            for alike in _alike(members, begins > stage):
                source.append(number)
                own.append(alike)
        kept, mergers, surplus = [*own], [], 0.0
        of_count = {member: number for number, members in enumerate(own) for member in members}
        for alike in _alike(tuple(of_count), ends <= stage):
            if len(alike) == 1:
                continue
            stays = min(alike, key=lambda row: limits[row])
            behind, own_prices = limits[list(alike)] - limits[stays], prices[list(alike)]
            numbers = [of_count[row] for row in alike]
            kept = [tuple(row for row in members if row not in alike) for members in kept]
            if len(set(numbers)) == 1:
                surplus += float(behind @ own_prices)
                kept[numbers[0]] = (*kept[numbers[0]], stays)
            else:
                mergers.append((stays, Merger(np.asarray(numbers), behind, own_prices)))
            prices[list(alike)] = 0.0
            prices[stays] = own_prices.sum()
        going = [number for number, members in enumerate(kept) if members]
        counts = [*(kept[number] for number in going), *((stays,) for stays, _ in mergers)]
        yield Counting(
            np.asarray(source, dtype=np.int64),
            np.asarray([members[0] for members in own], dtype=np.int64),
            np.asarray(going, dtype=np.int64),
            tuple(merger for _, merger in mergers),
            tuple(counts),
            prices.copy(),
            surplus,
        )


def _unchanged(counts: list[tuple[int, ...]], prices: Numbers) -> Counting:
    """What a stage does in which no two rows begin or cease to differ."""
    every = np.arange(len(counts))
    rows = np.asarray([members[0] for members in counts], dtype=np.int64)
    return Counting(every, rows, every, (), tuple(counts), prices.copy(), 0.0, is_unchanged=True)


def _differences(amounts: Numbers, first: Indices) -> tuple[Indices, Indices]:
    """Find by pairs of rows the first and the last stage in which some arc takes not the same of both (none: after all, and −1)."""
    rows, stages = amounts.shape[1], len(first) - 1
    begins, ends = np.full((rows, rows), stages), np.full((rows, rows), -1)
    if not len(amounts):
        return begins, ends
    stage_of = np.repeat(np.arange(stages), np.diff(first))
    for row in range(rows - 1):
        differ = amounts[:, row + 1 :] != amounts[:, row, None]
        some = differ.any(axis=0)
        begins[row, row + 1 :][some] = stage_of[differ.argmax(axis=0)[some]]
        ends[row, row + 1 :][some] = stage_of[len(amounts) - 1 - differ[::-1].argmax(axis=0)[some]]
    return np.minimum(begins, begins.T), np.maximum(ends, ends.T)


def _alike(rows: Sequence[int], same: np.ndarray[Any, np.dtype[np.bool_]]) -> list[tuple[int, ...]]:
    """The rows in classes of those that are the same."""
    found: list[list[int]] = []
    for row in rows:
        for members in found:
            if same[members[0], row]:
                members.append(row)
                break
        else:
            found.append([row])
    return [tuple(members) for members in found]
