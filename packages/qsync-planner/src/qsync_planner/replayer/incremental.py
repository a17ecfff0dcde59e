"""Long sequences whose sum is kept up to date: a few new entries make a new sum in O(log n), details follow on demand.

The nodes of the balanced tree never change.  The old root stays what it was, so that undoing a change means forgetting it, and
details can be worked out from a root later.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import total_ordering
from operator import itemgetter
from typing import Any, Generic, TypeVar

Node = tuple[Any, ...]
"""What a run of the sequence amounts to.  Above the leaves the first two entries are the nodes of its halves."""
T = TypeVar("T")
BITS = 3
"""A leaf sums up so many entries, as a power of two: summing up a few anew takes less than the nodes above them would."""
_number = itemgetter(0)


class SequenceTree:
    """A sequence, given by how a short run of it is summed up and how two neighbouring runs add up, the earlier one first.

    Whose entries these are mostly owns the tree, and sums them up: the tree does not keep ``fold``, so that both are gone when
    nobody needs the owner, and Python has no circle to look for.

    Args:
        stays: no entry will change, so that one leaf does for all.

    Attributes:
        root: the node of the whole sequence.
        half: how many leaves lie below each half of the root (0: the root is the only leaf).
    """

    def __init__(
        self, count: int, fold: Callable[[int, int], Node], join: Callable[[Node, Node], Node], *, stays: bool = False
    ) -> None:
        self._count, self._join, self._bits = count, join, count.bit_length() if stays else BITS
        nothing = fold(count, count)
        level = [self._leaf(number, fold) for number in range(-(-count >> self._bits))] or [nothing]
        self.half = 0
        while len(level) > 1:
            if len(level) % 2:
                level.append(nothing)
            level = [join(level[i], level[i + 1]) for i in range(0, len(level), 2)]
            nothing = join(nothing, nothing)
            self.half = 2 * self.half or 1
        self.root = level[0]

    def _leaf(self, number: int, fold: Callable[[int, int], Node]) -> Node:
        first = number << self._bits
        return fold(first, min(first + (1 << self._bits), self._count))

    def refresh(self, positions: Iterable[int], fold: Callable[[int, int], Node]) -> None:
        """Account for entries that changed."""
        leaves = [(number, self._leaf(number, fold)) for number in sorted({position >> self._bits for position in positions})]
        if leaves:
            self.root = self._replaced(self.root, self.half, leaves)

    def _replaced(self, node: Node, half: int, leaves: Sequence[tuple[int, Node]]) -> Node:
        """A node with leaves exchanged: down to the leaf, or to where the ways to several part, and up again."""
        join = self._join
        first, last = leaves[0][0], leaves[-1][0]
        siblings: list[Node] = []
        while half:
            if first & half:
                sibling, node = node[0], node[1]
            elif last & half:
                middle = bisect_left(leaves, last & -half, key=_number)
                before = self._replaced(node[0], half >> 1, leaves[:middle])
                node = join(before, self._replaced(node[1], half >> 1, leaves[middle:]))
                break
            else:
                node, sibling = node[0], node[1]
            siblings.append(sibling)
            half >>= 1
        else:
            node = leaves[0][1]
        for sibling in reversed(siblings):
            half = 2 * half or 1
            node = join(sibling, node) if first & half else join(node, sibling)
        return node


@total_ordering
class Deferred(Generic[T]):
    """Compares to another as the values do."""

    __slots__ = ("_make", "_value")

    def __init__(self, make: Callable[[], T]) -> None:
        self._make: Callable[[], T] | None = make
        self._value: T

    @property
    def value(self) -> T:
        """The value."""
        if self._make is not None:
            self._value = self._make()
            self._make = None
        return self._value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Deferred) and bool(self.value == other.value)

    def __lt__(self, other: Deferred[Any]) -> bool:
        return bool(self.value < other.value)

    def __hash__(self) -> int:
        return hash(self.value)

    def __repr__(self) -> str:
        return repr(self.value)
