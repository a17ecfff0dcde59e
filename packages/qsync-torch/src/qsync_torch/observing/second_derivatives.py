"""What can be differentiated twice, and how an error says that something can not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

from qsync_core.ir.op_id import OpId
from qsync_torch.observing.collector import CollectorUnavailable, Geometry

_SIGNS = ("is not implemented", "differentiate twice", "once_differentiable", "double backward", "derivative for")


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """Attention by plain products inside: fused kernels give the same values and have no second derivative."""
    with sdpa_kernel([SDPBackend.MATH]):
        yield


def no_second_derivative(error: BaseException) -> str:
    """What lacks a second derivative, where that is what an error says; "" for any other error."""
    text = str(error).splitlines()[0] if str(error) else ""
    return text if any(sign in str(error) for sign in _SIGNS) else ""


def refuse_checkpointing(op_id: OpId) -> None:
    """For collectors that change what an operator reads: the second run of its forward would not come by them.

    Raises:
        CollectorUnavailable: inside activation checkpointing.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        raise CollectorUnavailable(
            f"operator {op_id} runs under activation checkpointing or other saved-tensor hooks, and would be seen twice; observe "
            "the model without them"
        )


# ---- merged from qsync_torch.observing.second_derivatives
# linear and conv2d whose second derivatives are the products of a forward and a backward pass once more.
#
# PyTorch's own double backward is right, but for a convolution takes the gradient of the output for the filter of a convolution,
# which on a GPU is ten times as slow; and a linear call is composed of views and transposes, each with derivatives of its own.


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, geometry: Geometry) -> torch.Tensor:
    """``geometry.product(x, weight, bias)``, to be differentiated twice."""
    if weight.dim() == 4 and x.dim() != 4:  # an image without a batch
        return geometry.product(x, weight, bias)
    output: torch.Tensor = _Product.apply(x, weight, bias, geometry)  # type: ignore[no-untyped-call]
    return output


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, geometry: Geometry) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.geometry = geometry
        return geometry.product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        needed = ctx.needs_input_grad
        grad_x, grad_weight = _ProductBackward.apply(grad, x, weight, ctx.geometry, needed[0])  # type: ignore[no-untyped-call]
        others = (0, 2, 3) if weight.dim() == 4 else tuple(range(grad.dim() - 1))
        grad_bias = None
        if needed[2]:
            grad_bias = grad.sum(dim=others) if others else grad
        return grad_x, grad_weight, grad_bias, None


class _ProductBackward(torch.autograd.Function):
    """Both gradients of a product, as functions of its output's gradient g and of its operands."""

    @staticmethod
    def forward(
        ctx: Any, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, geometry: Geometry, needs_x: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        ctx.save_for_backward(grad, x, weight)
        ctx.geometry = geometry
        ctx.set_materialize_grads(False)
        if weight.dim() == 4:
            return _convolution_gradients(grad, x, weight, geometry, (needs_x, True))
        return _input_gradient(grad, x, weight, geometry) if needs_x else None, _weight_gradient(grad, x, weight, geometry)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, v_x: torch.Tensor | None, v_weight: torch.Tensor | None) -> Any:
        grad, x, weight = ctx.saved_tensors
        g: Geometry = ctx.geometry
        by_grad = by_x = by_weight = None
        if v_x is not None:
            # ⟨grad_x, v⟩ = ⟨g, product(v, w)⟩
            by_grad = g.product(v_x, weight, None)
            if ctx.needs_input_grad[2]:
                by_weight = _weight_gradient(grad, v_x, weight, g)
        if v_weight is not None:
            # ⟨grad_w, v⟩ = ⟨g, product(x, v)⟩
            through_weight = g.product(x, v_weight, None)
            by_grad = through_weight if by_grad is None else by_grad.add_(through_weight)
            if ctx.needs_input_grad[1]:
                by_x = _input_gradient(grad, x, v_weight, g)
        return by_grad, by_x, by_weight, None, None


def _input_gradient(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    if weight.dim() == 2:
        return grad @ weight
    grad_x: torch.Tensor = _convolution_gradients(grad, x, weight, geometry, (True, False))[0]
    return grad_x


def _weight_gradient(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    if weight.dim() == 2:
        return grad.reshape(-1, grad.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
    grad_weight: torch.Tensor = _convolution_gradients(grad, x, weight, geometry, (False, True))[1]
    return grad_weight


def _convolution_gradients(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, g: Geometry, wanted: tuple[bool, bool]
) -> tuple[Any, Any]:
    grad_x, grad_weight, _ = torch.ops.aten.convolution_backward(
        grad, x, weight, None, g.stride, g.padding, g.dilation, False, [0, 0], g.groups, [*wanted, False]
    )
    return grad_x, grad_weight
