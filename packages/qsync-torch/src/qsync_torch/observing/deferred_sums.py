"""Sums of products of numbers that are still on the device: nothing waits for them until all are fetched at once."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import attrs
import torch


@attrs.frozen(eq=False)
class Deferred:
    """``constant`` times the product of ``factors``, 0-d tensors."""

    factors: tuple[torch.Tensor, ...]
    constant: float = 1.0


@attrs.define
class DeferredSum:
    """A sum of deferred products."""

    terms: list[Deferred] = attrs.field(factory=list)

    def add(self, *factors: torch.Tensor, constant: float = 1.0) -> None:
        """Add a product."""
        self.terms.append(Deferred(factors, constant))


class Fetched:
    """The values of deferred sums, fetched with one transfer for each device and dtype."""

    def __init__(self, sums: Iterable[DeferredSum]) -> None:
        tensors = {id(factor): factor for one in sums for term in one.terms for factor in term.factors}
        groups: defaultdict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        for tensor in tensors.values():
            groups[tensor.device, tensor.dtype].append(tensor)
        self._values: dict[int, float] = {}
        for group in groups.values():
            self._values.update(zip(map(id, group), torch.stack(group).tolist(), strict=True))

    def value(self, one: DeferredSum) -> float:
        """Of one of the sums."""
        return math.fsum(term.constant * math.prod(self._values[id(f)] for f in term.factors) for term in one.terms)
