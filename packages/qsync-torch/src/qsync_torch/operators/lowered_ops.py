"""A lowered operator as one node of a compiled graph: ``torch.ops.qsync.lowered_linear`` and ``lowered_conv2d``.

``torch.compile`` puts an autograd function into its graph as two bodies.  What these operators put there can be read, and given an
activation's 8-bit copy that another node has made (:mod:`qsync_torch.compiling`).  They are composite: a compiler that has read the
graph runs :class:`~.linear.QuantizedLinear` and :class:`~.conv2d.QuantizedConv2d`, whose casts and products become nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch

from qsync_torch.aten.random_bits import Offset, as_kernels_take
from qsync_torch.kernels.binding import BOUND, OperatorBinding
from qsync_torch.kernels.library_ops import is_plain
from qsync_torch.operators.casts import Operand, Seeds, apply_of
from qsync_torch.operators.conv2d import QuantizedConv2d, run_conv2d
from qsync_torch.operators.linear import QuantizedLinear, run_linear

_ARGUMENTS = (
    "(Tensor x, Tensor weight, Tensor? bias, str binding, SymInt x_seed, SymInt w_seed, SymInt grad_seed, Tensor offset, "
    "Tensor? q=None, Tensor? scale=None, Tensor? stream=None) -> Tensor"
)


def offset_of(offset: torch.Tensor, x: torch.Tensor) -> Offset:
    """The number in the tensor where a kernel is called right away, and no device has to be waited for."""
    return as_kernels_take(offset) if is_plain(x) else offset


_Run = Callable[..., torch.Tensor]


def _lowered(function: type[torch.autograd.Function], run: _Run) -> _Run:
    """What an operator runs: ``run``, or where it is given the activation's copy, its autograd function alone."""

    def lowered(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        key: str,
        x_seed: int,
        w_seed: int,
        grad_seed: int,
        offset: torch.Tensor,
        q: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
        stream: torch.Tensor | None = None,
    ) -> torch.Tensor:
        binding = cast(OperatorBinding, BOUND[key])
        seeds = Seeds(x_seed, w_seed, offset_of(offset, x), grad_seed)
        if q is None or scale is None or stream is None:
            return run(x, weight, bias, binding, seeds)
        x_copy = Operand(q, scale, stream)
        return apply_of(function, binding, seeds)(x, weight, bias, binding, seeds, torch.is_grad_enabled(), None, None, x_copy)

    return lowered


_LIBRARY = torch.library.Library("qsync", "FRAGMENT")
for _name, _function, _run in (("lowered_linear", QuantizedLinear, run_linear), ("lowered_conv2d", QuantizedConv2d, run_conv2d)):
    _LIBRARY.define(_name + _ARGUMENTS)
    _LIBRARY.impl(_name, _lowered(_function, _run), "CompositeImplicitAutograd")


_LIBRARY.define("offset_of_step(Tensor offset) -> ()")
_LIBRARY.impl("offset_of_step", lambda offset: None, "CompositeImplicitAutograd")


def lowered_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, binding: OperatorBinding, seeds: Seeds
) -> torch.Tensor:
    """``run_linear`` in 8 bit while a compiler traces."""
    op = torch.ops.qsync.lowered_linear.default
    return cast(torch.Tensor, op(x, weight, bias, binding.key, seeds.x, seeds.w, seeds.grad, seeds.offset))


def lowered_conv2d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, binding: OperatorBinding, seeds: Seeds
) -> torch.Tensor:
    """``run_conv2d`` in 8 bit while a compiler traces."""
    op = torch.ops.qsync.lowered_conv2d.default
    return cast(torch.Tensor, op(x, weight, bias, binding.key, seeds.x, seeds.w, seeds.grad, seeds.offset))


LOWERED_LINEAR, LOWERED_CONV2D = torch.ops.qsync.lowered_linear.default, torch.ops.qsync.lowered_conv2d.default
"""What stands in a graph for an 8-bit operator of a plan."""
OFFSET_OF_STEP = torch.ops.qsync.offset_of_step.default
"""Names, in a graph, the offset of this step's random numbers, for chains in a graph without 8-bit operators; it does nothing."""
