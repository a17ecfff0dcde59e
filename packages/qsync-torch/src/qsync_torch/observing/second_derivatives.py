"""Second derivatives of a model: where they come from for operators, and what is reported where a function has none.

PyTorch's own double backward is right, but for a convolution takes the gradient of the output for the filter of a convolution,
which on a GPU is ten times as slow; and a linear call is composed of views and transposes, each with derivatives of its own.
:func:`differentiable_product` runs the products of a forward and a backward pass once more instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

from qsync_core.geometry import Geometry
from qsync_core.ir.precision import Precision
from qsync_torch.kinds.products import bias_gradient, product, product_gradients
from qsync_torch.observing.collector import CollectorUnavailable

_REENTRANT = "use_reentrant=True"
_SIGNS = (_REENTRANT, "is not implemented", "differentiate twice", "once_differentiable", "double backward", "derivative for")


@contextmanager
def second_derivatives(job: str) -> Iterator[None]:
    """Surround passes that differentiate twice.  Attention runs unfused: fused kernels have no second derivative.

    Raises:
        CollectorUnavailable: naming the operation of ``job`` that has no second derivative.
    """
    try:
        with sdpa_kernel([SDPBackend.MATH]):
            yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if not any(sign in str(error) for sign in _SIGNS):
            raise
        said = str(error).splitlines()[0].rstrip(".")
        reason = "reentrant activation checkpointing; pass use_reentrant=False" if _REENTRANT in said else said
        raise CollectorUnavailable(f"{job} has an operation without a second derivative: {reason}") from error


@contextmanager
def products_as_coarse_as(base: Precision, device: torch.device) -> Iterator[None]:
    """A block in which float32 products on a GPU run in TF32, where the job's own products read no more bits than that.

    Many second backward passes over billions of weights are bound by these products; what TF32 rounds is below what the base rounds
    (docs/decisions/observing-under-amp.md).
    """
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    if device.type == "cuda" and base is not Precision.FLOAT32:
        matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def differentiable_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, geometry: Geometry) -> torch.Tensor:
    """:func:`~qsync_torch.kinds.products.product`, to be differentiated twice."""
    if weight.dim() > 2 and x.dim() != weight.dim():  # an image without a batch
        return product(x, weight, bias, geometry)
    output: torch.Tensor = _Product.apply(x, weight, bias, geometry)  # type: ignore[no-untyped-call]
    return output


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, geometry: Geometry) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.geometry = geometry
        return product(x, weight, bias, geometry)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        needed = ctx.needs_input_grad
        grad_x, grad_weight = _ProductBackward.apply(grad, x, weight, ctx.geometry, needed[0])  # type: ignore[no-untyped-call]
        grad_bias = bias_gradient(grad, ctx.geometry if weight.dim() > 2 else None) if needed[2] else None
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
        return product_gradients(grad, x, weight, geometry, by_x=needs_x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v_x: torch.Tensor | None, v_weight: torch.Tensor | None) -> Any:
        grad, x, weight = ctx.saved_tensors
        geometry: Geometry = ctx.geometry
        by_grad = by_x = by_weight = None
        if v_x is not None:
            # ⟨grad_x, v⟩ = ⟨g, product(v, w)⟩
            by_grad = product(v_x, weight, None, geometry)
            if ctx.needs_input_grad[2]:
                by_weight = product_gradients(grad, v_x, weight, geometry, by_x=False)[1]
        if v_weight is not None:
            # ⟨grad_w, v⟩ = ⟨g, product(x, v)⟩
            through_weight = product(x, v_weight, None, geometry)
            by_grad = through_weight if by_grad is None else by_grad.add_(through_weight)
            if ctx.needs_input_grad[1]:
                by_x = product_gradients(grad, x, v_weight, geometry, by_weight=False)[0]
        return by_grad, by_x, by_weight, None, None
