"""The custom operators ``torch.ops.qsync.*``: functional, with fake implementations, so that ``torch.compile`` takes them whole.

Each allocates its output and calls a backend's kernel on it.  Gradients are attached where the operators are put together (
:mod:`qsync_torch.operators`), because an operator's backward reads the saved 8-bit copies and never the float activation.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from qsync_core.kernels.backend import Op
from qsync_torch.kernels.binding import kernel_for, parse_binding
from qsync_torch.kernels.dispatch import eager_or_dispatched

_LIBRARY = torch.library.Library("qsync", "FRAGMENT")
_LIBRARY.define("linear_output(Tensor x, Tensor x_scale, Tensor w, Tensor w_scale, Tensor? bias, str binding) -> Tensor")
_LIBRARY.define("linear_grad_input(Tensor grad, Tensor w, Tensor scale, str binding, ScalarType? dtype=None) -> Tensor")
_LIBRARY.define("linear_grad_weight(Tensor grad, Tensor x, Tensor scale, str binding) -> Tensor")
_LIBRARY.define("conv2d_output(Tensor x, Tensor x_scale, Tensor w, Tensor w_scale, Tensor? bias, str binding) -> Tensor")
_LIBRARY.define(
    "conv2d_grad_input(Tensor grad, Tensor w, Tensor scale, SymInt[] x_shape, str binding, ScalarType? dtype=None) -> Tensor"
)
_LIBRARY.define("conv2d_grad_weight(Tensor grad, Tensor x, Tensor x_scale, Tensor w, str binding) -> Tensor")


def _shape(x: torch.Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """A matrix of the last dimension; one that is a matrix already is not even viewed, which would take a microsecond."""
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


def _linear_output_out(x: torch.Tensor, w: torch.Tensor, binding: str) -> torch.Tensor:
    dtype = parse_binding(binding).output
    return x.new_empty((*x.shape[:-1], w.shape[0]), dtype=dtype)


def _linear_output(
    x: torch.Tensor, x_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, bias: torch.Tensor | None, binding: str
) -> torch.Tensor:
    out = _linear_output_out(x, w, binding)
    x_MK = _rows(x)
    kernel = kernel_for(Op.LINEAR_OUTPUT, binding, (_shape(x_MK), _shape(w)), x.device)
    kernel(x_MK, x_scale, w, w_scale, bias, _rows(out))
    return out


def _linear_output_fake(
    x: torch.Tensor, x_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, bias: torch.Tensor | None, binding: str
) -> torch.Tensor:
    return _linear_output_out(x, w, binding)


def _linear_grad_input_out(grad: torch.Tensor, w: torch.Tensor, binding: str, dtype: torch.dtype | None) -> torch.Tensor:
    dtype = dtype or parse_binding(binding).grad_input
    return grad.new_empty((*grad.shape[:-1], w.shape[1]), dtype=dtype)


def _linear_grad_input(
    grad: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, binding: str, dtype: torch.dtype | None = None
) -> torch.Tensor:
    out = _linear_grad_input_out(grad, w, binding, dtype)
    grad_MN = _rows(grad)
    kernel = kernel_for(Op.LINEAR_GRAD_INPUT, binding, (_shape(grad_MN), _shape(w)), grad.device)
    kernel(grad_MN, w, scale, _rows(out))
    return out


def _linear_grad_input_fake(
    grad: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, binding: str, dtype: torch.dtype | None = None
) -> torch.Tensor:
    return _linear_grad_input_out(grad, w, binding, dtype)


def _linear_grad_weight(grad: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, binding: str) -> torch.Tensor:
    out = grad.new_empty((grad.shape[-1], x.shape[-1]), dtype=torch.float32)
    grad_MN, x_MK = _rows(grad), _rows(x)
    kernel = kernel_for(Op.LINEAR_GRAD_WEIGHT, binding, (_shape(grad_MN), _shape(x_MK)), grad.device)
    kernel(grad_MN, x_MK, scale, out)
    return out


def _linear_grad_weight_fake(grad: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, binding: str) -> torch.Tensor:
    return grad.new_empty((grad.shape[-1], x.shape[-1]), dtype=torch.float32)


def _conv2d_output_shape(x_shape: torch.Size, w_shape: torch.Size, binding: str) -> tuple[int, int, int, int]:
    return (x_shape[0], w_shape[0], *parse_binding(binding).geometry.output_size(x_shape[2:], w_shape[2:]))


_known_conv2d_output_shape = functools.lru_cache(maxsize=4096)(_conv2d_output_shape)


def _conv2d_output_out(x: torch.Tensor, shape: tuple[int, int, int, int], binding: str) -> torch.Tensor:
    return torch.empty(shape, dtype=parse_binding(binding).output, device=x.device, memory_format=torch.channels_last)


def _in_layout_of(y: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
    """Channels-last ``y`` in the layout that ``F.conv2d`` would give: channels-last where an operand is, else contiguous."""
    for x in operands:
        if x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous():
            return y
    return y.contiguous()


def _conv2d_output(
    x: torch.Tensor, x_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, bias: torch.Tensor | None, binding: str
) -> torch.Tensor:
    out = _conv2d_output_out(x, _known_conv2d_output_shape(x.shape, w.shape, binding), binding)
    kernel_for(Op.CONV2D_OUTPUT, binding, (_shape(x), _shape(w)), x.device)(x, x_scale, w, w_scale, bias, out)
    return _in_layout_of(out, x, w)


def _conv2d_output_fake(
    x: torch.Tensor, x_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, bias: torch.Tensor | None, binding: str
) -> torch.Tensor:
    return _in_layout_of(_conv2d_output_out(x, _conv2d_output_shape(x.shape, w.shape, binding), binding), x, w)


def _conv2d_grad_input_out(grad: torch.Tensor, x_shape: Sequence[int], binding: str, dtype: torch.dtype | None) -> torch.Tensor:
    dtype = dtype or parse_binding(binding).grad_input
    return torch.empty(tuple(x_shape), dtype=dtype, device=grad.device, memory_format=torch.channels_last)


def _conv2d_grad_input(
    grad: torch.Tensor,
    w: torch.Tensor,
    scale: torch.Tensor,
    x_shape: Sequence[int],
    binding: str,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    kernel = kernel_for(Op.CONV2D_GRAD_INPUT, binding, (_shape(grad), _shape(w)), grad.device)
    make = getattr(kernel, "make_gradient", None)
    if make is not None:
        made = make(grad, w, scale, x_shape)
        if made.dtype is (dtype or parse_binding(binding).grad_input):
            return _in_layout_of(made.contiguous(memory_format=torch.channels_last), grad)
    out = _conv2d_grad_input_out(grad, x_shape, binding, dtype)
    kernel(grad, w, scale, out)
    return _in_layout_of(out, grad)


def _conv2d_grad_input_fake(
    grad: torch.Tensor,
    w: torch.Tensor,
    scale: torch.Tensor,
    x_shape: Sequence[int],
    binding: str,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    return _in_layout_of(_conv2d_grad_input_out(grad, x_shape, binding, dtype), grad)


def _conv2d_grad_weight(grad: torch.Tensor, x: torch.Tensor, x_scale: torch.Tensor, w: torch.Tensor, binding: str) -> torch.Tensor:
    out = torch.empty_like(w, dtype=torch.float32)
    kernel_for(Op.CONV2D_GRAD_WEIGHT, binding, (_shape(grad), _shape(x)), grad.device)(grad, x, x_scale, out)
    return out


def _conv2d_grad_weight_fake(
    grad: torch.Tensor, x: torch.Tensor, x_scale: torch.Tensor, w: torch.Tensor, binding: str
) -> torch.Tensor:
    return torch.empty_like(w, dtype=torch.float32)


for _name, _implementation, _fake in (
    ("linear_output", _linear_output, _linear_output_fake),
    ("linear_grad_input", _linear_grad_input, _linear_grad_input_fake),
    ("linear_grad_weight", _linear_grad_weight, _linear_grad_weight_fake),
    ("conv2d_output", _conv2d_output, _conv2d_output_fake),
    ("conv2d_grad_input", _conv2d_grad_input, _conv2d_grad_input_fake),
    ("conv2d_grad_weight", _conv2d_grad_weight, _conv2d_grad_weight_fake),
):
    _LIBRARY.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"qsync::{_name}", _fake, lib=_LIBRARY)

linear_output = eager_or_dispatched(_linear_output, torch.ops.qsync.linear_output.default)
linear_grad_input = eager_or_dispatched(_linear_grad_input, torch.ops.qsync.linear_grad_input.default)
linear_grad_weight = eager_or_dispatched(_linear_grad_weight, torch.ops.qsync.linear_grad_weight.default)
conv2d_output = eager_or_dispatched(_conv2d_output, torch.ops.qsync.conv2d_output.default)
conv2d_grad_input = eager_or_dispatched(_conv2d_grad_input, torch.ops.qsync.conv2d_grad_input.default)
conv2d_grad_weight = eager_or_dispatched(_conv2d_grad_weight, torch.ops.qsync.conv2d_grad_weight.default)
