"""Training in two passes over a batch: one without gradients for what the loss reads, one with them for the parameters (GradCache).

The second pass repeats the first: with other random numbers, gradients of the one's representations would enter the other's.  The
first is known by the tensors that it was called with.  Of a script's first such forwards the values are compared too, so that a
batch which is copied for the second pass does not go unnoticed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

_MOST = 4096
_COMPARED = 8
COPIED = "copied"
"""What stands for a position: other tensors of the same values have run without gradients."""


class FirstPasses:
    """Forwards without gradients, each until the same part has run on the same tensors with them."""

    def __init__(self) -> None:
        self._positions: dict[tuple[Any, ...], tuple[list[weakref.ref[torch.Tensor]], Any]] = {}
        self._sums: set[tuple[Any, ...]] = set()
        self._compared = 0

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
        if len(self._sums) < _COMPARED and self._compared < _COMPARED:
            self._sums.add(_sums(module, tensors))
        if len(self._positions) > _MOST:
            del self._positions[next(iter(self._positions))]

    def take(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The place of the forward without gradients that one with them repeats, or ``COPIED``; None where there was none."""
        if not self._positions:
            return None
        tensors = list(_tensors(args, kwargs))
        if any(tensor.is_inference() for tensor in tensors):
            return None
        found = self._positions.pop(_key(module, tensors), None)
        if found is not None and all(source() is _source(tensor) for source, tensor in zip(found[0], tensors, strict=True)):
            return found[1]
        if self._compared == _COMPARED or not tensors:
            return None
        self._compared += 1
        return COPIED if _sums(module, tensors) in self._sums else None


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


def _sums(module: nn.Module, tensors: list[torch.Tensor]) -> tuple[Any, ...]:
    found: list[Any] = [id(module)]
    for tensor in tensors:
        found += [tensor.shape, tensor.dtype]
        if not (tensor.is_complex() or (tensor.is_cuda and torch.cuda.is_current_stream_capturing())):
            values = tensor.detach().double().flatten()
            order = torch.arange(len(values), dtype=values.dtype, device=values.device)
            found += [values.square().sum().item(), (values * order).sum().item()]
    return tuple(found)
