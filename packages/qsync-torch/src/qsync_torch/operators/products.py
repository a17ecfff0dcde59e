"""An adjustable operator of any kind in any variant: its product and gradients, with the casts around them.

Float formats run PyTorch's function on cast operands and leave the gradient to autograd.  8-bit formats save their 8-bit copies
only and compute both gradients in the variant's gradient formats.  Weights have their output channels first (N, K; O, C / groups,
KH, KW), those of transposed convolutions too.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from qsync_core.ir.variant import Variant
from qsync_core.kernels.choice import KernelChoice
from qsync_torch.aten import float_products
from qsync_torch.aten.random_bits import Offset, as_kernels_take
from qsync_torch.kernels.binding import BOUND, OperatorBinding, operator_binding
from qsync_torch.kernels.library_ops import GRAD_INPUT, GRAD_WEIGHT, OUTPUT, is_plain
from qsync_torch.kernels.selection import DEFAULT_BACKEND
from qsync_torch.kinds.kind import OperatorKind
from qsync_torch.kinds.products import bias_gradient, operand_of
from qsync_torch.kinds.table import kind_with
from qsync_torch.operators.autograd import Saved, apply_of, keep_for_backward, no_forward_mode, run_backward
from qsync_torch.operators.cast_cache import CastCache
from qsync_torch.operators.casts import (
    Gradient,
    Grads,
    Needs,
    Operand,
    Seeds,
    cast_input,
    cast_weight,
    float_input,
    seeds_of,
    turned,
    wants_transposed,
)
from qsync_torch.operators.channel_factors import Factor


class QuantizedProduct(torch.autograd.Function):
    """Casts and product in one: autograd follows three tensors, and records nothing inside.

    Only the 8-bit copies are saved, never the float activation or weight.
    """

    jvp = staticmethod(no_forward_mode)

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        binding: OperatorBinding,
        seeds: Seeds,
        grad_enabled: bool,
        cache: CastCache | None = None,
        weight_copy: Operand | None = None,
        x_copy: Operand | None = None,
        inverse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The product of the 8-bit copies, which are made here unless they are given; ``inverse``: of their channels' factors."""
        need_x, need_w = ctx.needs_input_grad[:2]
        straight, of_rows = is_plain(x, weight), binding.of_rows
        if x_copy is None:
            x_copy = cast_input(x, binding, seeds, cache, grad_enabled=grad_enabled, straight=straight)
        if weight_copy is None:
            weight_copy = cast_weight(weight, binding, seeds.w, x_copy.stream, straight=straight)
        if x_copy.transposed is None and need_w and grad_enabled and wants_transposed(x_copy.values, binding):
            # A producer wrote the copy; readers of one share the transposed one too.
            x_copy = x_copy._replace(transposed=turned(x_copy.values))
        q_x, x_scale, stream, *_ = x_copy
        q_w, w_scale, *_ = weight_copy
        kept_x, kept_x_scale = x_copy.kept
        # A convolution's weight copy is needed for its shape alone when only the weight has a gradient.
        kept_w = q_w if need_x or (need_w and not of_rows) else None
        copies = (*((kept_x, kept_x_scale) if need_w else (None, None)), kept_w, w_scale if need_x else None)
        keep_for_backward(ctx, x, copies, stream, binding, seeds, inverse)
        return OUTPUT[of_rows](q_x, x_scale, q_w, w_scale, bias, binding, straight=straight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of activation, weight and bias."""
        return run_backward(ctx, grad, backward_products)


def forward_product(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor,
    w_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    binding: OperatorBinding,
) -> torch.Tensor:
    """The forward product alone, from operands already in the compute format; differentiable for float formats only."""
    if x_scale is not None and w_scale is not None:
        return OUTPUT[binding.of_rows](x, x_scale, weight, w_scale, bias, binding)
    y = float_products.product(x, weight, None if bias is None else bias.to(binding.bias_dtype), binding.called)
    return y if y.dtype is binding.output else y.to(binding.output)


def backward_products(
    gradient: Gradient, saved: Saved, binding: OperatorBinding, needs: Needs = (True, True, True), straight: bool = False
) -> Grads:
    """Both backward products of a quantized operator alone.

    The gradient of the activation comes in the variant's format, or in the activation's where the product is an 8-bit one; those of
    weight and bias come in float32.

    Args:
        gradient: of the result, with its copies; saved: those of activation and weight.
        binding: how the operator runs.
        needs: which gradients are wanted.
        straight: whether they skip the dispatcher.
    """
    grad_x = grad_w = grad_b = None
    of_rows = binding.of_rows
    if needs[0]:
        grad_input = GRAD_INPUT[of_rows]
        if binding.grad_input_quantized:
            scale = gradient.grad_input_scale(saved.w_scale)
            operands, dtype = (gradient.quantized, saved.w, scale), saved.x_dtype
        else:
            operands, dtype = (gradient.wide, saved.w, saved.w_scale), None
        grad_x = grad_input(*operands, saved.x_shape, binding, dtype, saved.inverse, straight=straight)
    if needs[1]:
        grad_weight, columns = GRAD_WEIGHT[of_rows], None if saved.inverse is None else saved.inverse.reciprocal()
        if binding.grad_weight_quantized:
            scale = gradient.grad_weight_scale(saved.x_scale)
            quantized = gradient.quantized if gradient.transposed is None else gradient.transposed.t()
            grad_w = grad_weight(quantized, saved.x, scale, saved.w, binding, columns, straight=straight)
        else:
            grad_w = grad_weight(gradient.wide, saved.x, saved.x_scale, saved.w, binding, columns, straight=straight)
    if needs[2]:
        grad_b = bias_gradient(gradient.for_bias(), binding.called, torch.float32)
    return grad_x, grad_w, grad_b


def run_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    binding: OperatorBinding,
    seeds: Seeds,
    cache: CastCache | None = None,
    factor: Factor | None = None,
) -> torch.Tensor:
    """A call with every cast of core's table; of images with or without a batch; ``factor``: of its channels, where it has some."""
    if not binding.of_rows and x.ndim != weight.ndim:
        if x.ndim == weight.ndim - 1:
            return run_product(x[None], weight, bias, binding, seeds, cache)[0]
        return kind_with(binding.called).function(x, operand_of(weight, binding.called), bias)  # which says what it takes
    if not binding.is_quantized:
        return forward_product(float_input(x, binding, cache), None, weight.to(binding.w_dtype), None, bias, binding)
    if factor is not None:
        return _factored_product(x, weight, bias, binding, seeds, factor)
    return apply_of(QuantizedProduct, binding, seeds)(x, weight, bias, binding, seeds, torch.is_grad_enabled(), cache)


def _factored_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, binding: OperatorBinding, seeds: Seeds, factor: Factor
) -> torch.Tensor:
    """The product of x / c and w · c, whose magnitudes are noted where a step may follow."""
    apply, grad_enabled, straight = apply_of(QuantizedProduct, binding, seeds), torch.is_grad_enabled(), is_plain(x, weight)
    with torch.no_grad():
        inverse = factor.values.reciprocal()  # a tensor of this call's: factors may change before its backward
        x_copy = cast_input(x, binding, seeds, grad_enabled=grad_enabled, straight=straight, inverse=inverse)
        weight_copy = cast_weight(weight, binding, seeds.w, x_copy.stream, straight=straight, factor=factor.values)
        if grad_enabled:
            factor.note(x, weight)
    return apply(x, weight, bias, binding, seeds, grad_enabled, None, weight_copy, x_copy, inverse)


def lowered(
    kind: OperatorKind,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    variant: Variant,
    *,
    backend: str = DEFAULT_BACKEND,
    config: str = "",
    seed: int = 0,
    offset: int = 0,
    cache: CastCache | None = None,
    factor: Factor | None = None,
    **settings: Any,
) -> torch.Tensor:
    """Run a kind's function in a variant, forward and backward (docs/design/precision-semantics.md#casts).

    Args:
        kind: which function.
        x: float32 or a 16-bit float, as that function takes it.
        weight: float32, as that function takes it; its gradient is float32.
        bias: float32, or None.
        variant: how it runs.
        backend, config: whose kernels, as plans store it (:mod:`qsync_core.kernels.choice`).
        seed, offset: of the stochastic rounding.
        cache: where casts of ``x`` are shared.
        factor: of the input channels, under a variant with such factors; 1 by default.
        settings: stride, padding, dilation and groups of a convolution.

    Returns:
        The result in ``variant.output``, channels-last where ``x`` is.

    Raises:
        BackendError: when the backend refuses the variant or the shapes, with its reasons.
        RuntimeError: where operands do not fit each other, as the function does.
        NumericsError: when a tensor to be quantized holds NaN or infinity (CPU only).
    """
    geometry = None
    if kind.prepare is not None:
        spelling = kind.spellings[kind.function]
        read = spelling.read((x, weight, bias), settings, weight)
        assert read is not None
        x, geometry = kind.prepare(x, weight, read[2])
    binding = operator_binding(variant, KernelChoice.parse(backend, config), geometry)
    return run_product(x, operand_of(weight, geometry), bias, binding, seeds_of(seed, offset), cache, factor)


# A lowered operator as one node of a compiled graph.  ``torch.compile`` puts an autograd function in its graph as two bodies; this
# node can be read, and given an activation's 8-bit copy that another made (:mod:`qsync_torch.compiling`).  It is composite: a
# compiler that has read the graph runs :class:`QuantizedProduct`, whose casts and products become nodes.


def offset_of(offset: torch.Tensor, x: torch.Tensor) -> Offset:
    """The number in the tensor where a kernel is called right away, and no device has to be waited for."""
    return as_kernels_take(offset) if is_plain(x) else offset


def _run_node(
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
    factor: torch.Tensor | None = None,
    x_largest: torch.Tensor | None = None,
    w_largest: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run an operator, or where it is given the activation's copy, its autograd function alone."""
    binding = cast(OperatorBinding, BOUND[key])
    seeds = Seeds(x_seed, w_seed, offset_of(offset, x), grad_seed)
    if q is None or scale is None or stream is None:
        factors = None
        if factor is not None and x_largest is not None and w_largest is not None:
            factors = Factor(factor, x_largest, w_largest)
        return run_product(x, weight, bias, binding, seeds, factor=factors)
    x_copy = Operand(q, scale, stream)
    return apply_of(QuantizedProduct, binding, seeds)(x, weight, bias, binding, seeds, torch.is_grad_enabled(), None, None, x_copy)


_LIBRARY = torch.library.Library("qsync", "FRAGMENT")
_LIBRARY.define(
    "lowered(Tensor x, Tensor weight, Tensor? bias, str binding, SymInt x_seed, SymInt w_seed, SymInt grad_seed, Tensor offset, "
    "Tensor? q=None, Tensor? scale=None, Tensor? stream=None, Tensor? factor=None, Tensor? x_largest=None, Tensor? w_largest=None) "
    "-> Tensor"
)
_LIBRARY.impl("lowered", _run_node, "CompositeImplicitAutograd")
_LIBRARY.define("offset_of_step(Tensor offset) -> ()")
_LIBRARY.impl("offset_of_step", lambda offset: None, "CompositeImplicitAutograd")


def lowered_node(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    binding: OperatorBinding,
    seeds: Seeds,
    factor: Factor | None = None,
) -> torch.Tensor:
    """:func:`run_product` in 8 bit while a compiler traces."""
    op = torch.ops.qsync.lowered.default
    more = () if factor is None else (None, None, None, *factor)
    return cast(torch.Tensor, op(x, weight, bias, binding.key, seeds.x, seeds.w, seeds.grad, seeds.offset, *more))


LOWERED = torch.ops.qsync.lowered.default
"""What stands in a graph for an 8-bit operator of a plan."""
OFFSET_OF_STEP = torch.ops.qsync.offset_of_step.default
"""Names, in a graph, the offset of this step's random numbers, for chains in a graph without 8-bit operators; it does nothing."""
