"""Training in two passes over a batch: one without gradients for what the loss reads, one with them for the parameters (GradCache).

The second pass repeats the first: with other random numbers, gradients of the one's representations would enter the other's.  The
first is known by the tensors that it was called with.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

_MOST = 4096


class FirstPasses:
    """Forwards without gradients, each until the same part has run on the same tensors with them."""

    def __init__(self) -> None:
        self._positions: dict[tuple[Any, ...], tuple[list[weakref.ref[torch.Tensor]], Any]] = {}

    def remember(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], position: Any) -> None:
        """A forward without gradients begins.

        Args:
            module: the model or the part that was called.
            args, kwargs: with what.
            position: its place in the sequence of random numbers.
        """
        tensors = list(_tensors(args, kwargs))
        if not tensors or any(tensor.is_inference() for tensor in tensors):
            return
        self._positions[_key(module, tensors)] = [weakref.ref(_source(tensor)) for tensor in tensors], position
        if len(self._positions) > _MOST:
            del self._positions[next(iter(self._positions))]

    def take(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The place of the forward without gradients that one with them repeats; None where there was none."""
        if not self._positions:
            return None
        tensors = list(_tensors(args, kwargs))
        if any(tensor.is_inference() for tensor in tensors):
            return None
        found = self._positions.pop(_key(module, tensors), None)
        if found is None or any(source() is not _source(tensor) for source, tensor in zip(found[0], tensors, strict=True)):
            return None
        return found[1]


def _tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    return (leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor))


def _source(tensor: torch.Tensor) -> torch.Tensor:
    """Parts of a batch may be cut out of it anew in each pass."""
    return tensor if tensor._base is None else tensor._base


def _key(module: nn.Module, tensors: list[torch.Tensor]) -> tuple[Any, ...]:
    return (
        id(module),
        *((id(_source(one)), one._version, one.storage_offset(), one.shape, one.stride(), one.dtype) for one in tensors),
    )
