"""A long sequence summed up in a balanced tree whose nodes never change: a few new entries make a new root in O(log n).

The old root stays what it was, so that undoing a change is forgetting it, and whoever keeps a root can ask for details later.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

Node = tuple[Any, ...]
"""``(left, right, *what they amount to)``; a leaf has None twice and an entry of the sequence."""
Join = Callable[[Node, Node], Node]
"""Makes the node above two neighbours, the earlier one first."""
_position = itemgetter(0)


class SequenceTree:
    """A sequence of leaves and how neighbours add up.

    Attributes:
        root: the node of the whole sequence.
        half: how many leaves lie below each child of the root (0: the root is the only leaf).
    """

    def __init__(self, leaves: Sequence[Node], nothing: Node, join: Join) -> None:
        self._join = join
        level = list(leaves) or [nothing]
        self.half = 0
        while len(level) > 1:
            if len(level) % 2:
                level.append(nothing)
            level = [join(level[i], level[i + 1]) for i in range(0, len(level), 2)]
            nothing = join(nothing, nothing)
            self.half = 2 * self.half or 1
        self.root = level[0]

    def replace(self, changes: Sequence[tuple[int, Node]]) -> None:
        """Exchange leaves, given by position in ascending order, each once."""
        if changes:
            self.root = self._replaced(self.root, self.half, changes)

    def _replaced(self, node: Node, half: int, changes: Sequence[tuple[int, Node]]) -> Node:
        """A node with leaves exchanged: down to the leaf, or to where the ways to the leaves part, and up again."""
        join = self._join
        first, last = changes[0][0], changes[-1][0]
        siblings = []
        while half:
            if first & half:
                sibling, node = node[0], node[1]
            elif last & half:
                boundary = last & -half
                middle = bisect_left(changes, boundary, key=_position)
                node = join(
                    self._replaced(node[0], half >> 1, changes[:middle]), self._replaced(node[1], half >> 1, changes[middle:])
                )
                break
            else:
                node, sibling = node[0], node[1]
            siblings.append(sibling)
            half >>= 1
        else:
            node = changes[0][1]
        half = 2 * half or 1
        while siblings:
            node = join(siblings.pop(), node) if first & half else join(node, siblings.pop())
            half *= 2
        return node
