"""Directions in which stored weights move the gradients together: what random directions tell slowly is measured along these, and
where derivatives do not tell how far, they are taken on the way.

See docs/design/indicator.md#stored-weights.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from qsync_core.ir.noise import StoredError

Direction = Mapping[torch.Tensor, torch.Tensor]
"""A tensor for each trained parameter."""
MOST, MIXED = 10, 6
"""Such directions, of those that an update takes in all, and how many of them mixtures of storages have at least."""
_NEW = 1e-2
"""What a change has of its own beside others, at least, to be a direction."""
_OUTER = math.sqrt(0.15)
ON_THE_WAY = ((0.0, ((0.5, 1.0),)), (8 / 18, ((0.5 - _OUTER, 5 / 18), (0.5 + _OUTER, 5 / 18))))
"""Where derivatives are taken on the way from weights to what is stored, stage by stage: how much those before count then, and
points with how much each counts.  Gauss's rules of one point and of three, which are exact for changes of up to the second and the
sixth order and have their midpoint in common."""
_MISSED = 0.1
"""The part of a change that derivatives at its begin may miss."""


@contextmanager
def displaced(
    weights: Mapping[str, torch.nn.Parameter], read: Callable[[str], torch.Tensor], kept: Mapping[str, torch.Tensor]
) -> Iterator[None]:
    """A block in which frozen weights hold other values.

    Args:
        weights: those of the model; read: their other values; kept: what they hold, for the end.
    """
    try:
        with torch.no_grad():
            for name, weight in weights.items():
                weight.data.copy_(read(name))
        yield
    finally:
        with torch.no_grad():
            for name, weight in weights.items():
                weight.data.copy_(kept[name])


def mixtures(alike: Sequence[Mapping[str, StoredError]], count: int, seed: int) -> list[dict[str, StoredError]]:
    """Draw for each weight one of the ways in which it can be stored, or none.

    Args:
        alike: for each way, the weights that can be stored so.
    """
    draw, names = random.Random(seed), dict.fromkeys(name for weights in alike for name in weights)
    drawn = [{name: draw.choice([None, *(w[name] for w in alike if name in w)]) for name in names} for _ in range(count)]
    return [{name: way for name, way in mixture.items() if way is not None} for mixture in drawn]


def orthonormal(changes: Iterable[Direction]) -> list[Direction]:
    """The changes of the gradients, of length 1 and at right angles; without those that are others' sums, or not finite."""
    found: list[Direction] = []
    for change in changes:
        length = math.sqrt(dot(change, change))
        if not 0 < length < math.inf:
            continue
        rest = {parameter: value / length for parameter, value in change.items()}
        for _ in range(2):  # the second time takes out what rounding left
            for one in found:
                along = dot(rest, one)
                rest = {parameter: value - along * one[parameter] for parameter, value in rest.items()}
        own = math.sqrt(dot(rest, rest))
        if own > _NEW:
            found.append({parameter: value / own for parameter, value in rest.items()})
    return found


def dot(a: Direction, b: Direction) -> float:
    """The inner product."""
    parts = [torch.sum(value * b[parameter], dtype=torch.float64) for parameter, value in a.items()]
    return float(torch.stack([part.cpu() for part in parts]).sum()) if parts else 0.0


class Split:
    """Directions of an update: some known ones, and random ones of which these are taken out.

    The mean of the squares of :meth:`numbers` estimates the squared length of a change, and has no error in the span of the known.

    Args:
        changes: of the gradients, of which the known directions are made.
        count: of all directions.
    """

    def __init__(self, changes: Sequence[Direction], count: int) -> None:
        self.known, self._count, self._changes = orthonormal(changes), count, changes
        self._overlaps: dict[int, list[float]] = {}
        self._of_changes = {number: [dot(change, one) for change in changes] for number, one in enumerate(self.known, 1)}

    def is_random(self, number: int) -> bool:
        """Whether a direction is: the first one, and those behind the known."""
        return not 1 <= number <= len(self.known)

    def meet(self, number: int, direction: Direction, scale: float) -> None:
        """Note what a random direction, which is ``scale`` times as long as it counts, has of the known and of the changes."""
        self._overlaps[number] = [dot(one, direction) / scale for one in self.known]
        self._of_changes[number] = [dot(change, direction) / scale for change in self._changes]

    def is_missed(self, change: int, along: Sequence[float]) -> bool:
        """Whether derivatives do not tell a change of the gradients, of which a part may be missed.

        Args:
            change: which of them.
            along: the inner products of what the derivatives say with each direction.
        """
        true = [self._of_changes[number][change] for number in range(len(along))]
        missed = self.numbers([said - value for said, value in zip(along, true, strict=True)])
        length = math.hypot(*self.numbers(true))
        return math.isfinite(length) and math.hypot(*missed) > _MISSED * length

    def numbers(self, along: Sequence[float]) -> list[float]:
        """Numbers whose squares have the squared length of a change as their mean.

        Args:
            along: the inner products of the change with each direction, the known of length 1.
        """
        known = [value for number, value in enumerate(along) if not self.is_random(number)]
        weight = math.sqrt(self._count / (self._count - len(known)))
        return [
            weight * (value - math.fsum(a * b for a, b in zip(known, self._overlaps.get(number, ()), strict=False)))
            if self.is_random(number)
            else math.sqrt(self._count) * value
            for number, value in enumerate(along)
        ]
