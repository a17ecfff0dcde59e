"""Stored weights that functional calls read, as ``F.linear(x, self.weight)`` of a layer that has its adapters beside its weight.

The product is the plan's, as that of a module of PyTorch's own; anything else reads the weight dequantized.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from qsync_torch.apply.handles import OperatorCall, multiplied, plain
from qsync_torch.apply.stored_modules import HeldWeight, ReadWeight
from qsync_torch.kinds.kind import OperatorKind, Settings
from qsync_torch.kinds.table import SPELLED
from qsync_torch.operators.stored import run_in_own_format
from qsync_torch.torch_internals import DisableTorchFunction


def as_held(
    function: Callable[..., torch.Tensor],
    x: torch.Tensor,
    weight: Any,
    bias: torch.Tensor | None,
    kind: OperatorKind,
    settings: Settings = (),
) -> torch.Tensor:
    """A call in the format in which the script has the weight."""
    if not isinstance(weight, HeldWeight):
        return function(x, weight, bias, *settings)
    y = run_in_own_format(x, weight.tensors, weight.storage, weight.shape, weight.dtype, bias, kind, settings)
    return function(x, weight.dequantized(), bias, *settings) if y is None else y


class UnreadWeight(ReadWeight):
    """A stored weight that nobody has read yet: it has a shape, a format and a device, and no values until it is asked for them.

    Attributes:
        call: what runs in the place of products with it.
        owner: the module it was read from.
        source: what those read.
    """

    call: OperatorCall
    owner: nn.Module
    source: HeldWeight
    transposed = False

    @classmethod
    def of_call(cls, held: HeldWeight, call: OperatorCall, owner: nn.Module) -> UnreadWeight:
        """What a module's own code gets when it reads its weight."""
        unread: UnreadWeight = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=held.device)
        unread.held = unread.source = held
        unread.call, unread.owner = call, owner
        return unread

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run a product of the plan, or the function on the dequantized weight."""
        kwargs = kwargs or {}
        if func in _ASKED:
            with DisableTorchFunction():
                return func(*args, **kwargs)
        if (spelled := SPELLED.get(func)) is not None:
            place, name = spelled[1].place, spelled[1].name
            weight = args[place] if len(args) > place else kwargs.get(name)
            if isinstance(weight, cls) and (y := weight._multiplied(*spelled, args, kwargs)) is not None:
                return y
        return func(*map(_dequantized, args), **{name: _dequantized(value) for name, value in kwargs.items()})

    def _multiplied(self, kind: OperatorKind, spelling: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The product, as planned or as the script has it; None where this is none."""
        if self.call.is_on(self.owner):
            return multiplied(self, kind, spelling, args, kwargs)
        if spelling.transposed or self.dim() != kind.weight_dimensions:
            return None
        x, bias, settings = spelling.read(args, kwargs, self)
        return as_held(kind.function, x, self.held, plain(bias), kind, settings) if type(x) is torch.Tensor else None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """What comes here past classes' functions reads the dequantized weight too."""
        return func(*map(_plainly, args), **{name: _plainly(value) for name, value in (kwargs or {}).items()})


def _dequantized(value: Any) -> Any:
    if isinstance(value, UnreadWeight):
        return ReadWeight.of(value.held)
    return type(value)(map(_dequantized, value)) if type(value) in (list, tuple) else value


def _plainly(value: Any) -> Any:
    return value.held.dequantized() if isinstance(value, UnreadWeight) else value


_T = torch.Tensor
_ASKED = frozenset(
    {
        *(_T.size, _T.dim, _T.numel, _T.is_floating_point),
        *(getattr(_T, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "grad_fn")),
    }
)
"""What asks for no values."""
