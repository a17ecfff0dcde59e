"""The casts around adjustable operators: of activations, weights and incoming gradients.

Random numbers follow from data (docs/decisions/counter-based-random-numbers.md).  Which ones the activation takes follows from the
offset and its bits; that is its *stream*, and the offset with which the weight and, in backward, the incoming gradient are
quantized: so all three differ from one micro-batch to the next.  Seeds only tell the three apart.

With G the incoming gradient (..., N), w_q (N, K) and x_q (M, K) the saved copies with scales s_w[n] and s_x, a product in int8
needs one scale for everything that it sums.  ``grad_input`` sums over the output channels n, along which the weight's scales lie,
so G is multiplied by them before it is quantized: s_g · g_q = G · s_w.  Then

* grad_input[m, k] = s_g · Σ_n g_q[m, n] · w_q[n, k], and
* grad_weight[n, k] = (s_g · s_x / s_w[n]) · Σ_m g_q[m, n] · x_q[m, k],

the same quantized copy in both.  Under a scale for each row of activation and gradient, s_x[m] and s_g[m], the second sum runs over
them, so the gradient has a second copy with the activation's scales in it, s'[n] · g'_q[m, n] = G[m, n] · s_w[n] · s_x[m], and

* grad_weight[n, k] = (s'[n] / s_w[n]) · Σ_m g'_q[m, n] · x_q[m, k]:

the activation has one copy for all products (docs/decisions/one-copy-of-an-activation.md).  Where the weight has one scale, or
``grad_input`` is computed in a float format, G is quantized as it is.  Stochastic rounding draws independently of the operands'
rounding, so both products stay unbiased.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from qsync_core.errors import NumericsError
from qsync_torch.aten.random_bits import Offset, as_kernels_take, stream_key
from qsync_torch.dtypes import LOW_FLOATS, PRECISION
from qsync_torch.kernels.binding import OperatorBinding
from qsync_torch.kernels.library_ops import as_images, quantize, quantize_transposed, rows
from qsync_torch.operators.cast_cache import CachedCast, CastCache, float_key
from qsync_torch.torch_internals import version_of

_QUANTIZED = frozenset({torch.float32, *LOW_FLOATS})
"""Formats that are quantized; a float operator takes 8-bit inputs too."""


class Operand(NamedTuple):
    """An operand in the compute format.

    Attributes:
        values: 8-bit; ``scale``: its scales.
        stream: one int64, which random numbers it took; empty where nothing reads that.
        transposed: a copy (K, M), where a backward product wants it.
    """

    values: torch.Tensor
    scale: torch.Tensor
    stream: torch.Tensor
    transposed: torch.Tensor | None = None

    @property
    def kept(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The copy that backward reads, as (M, K), and its scales."""
        return self.values if self.transposed is None else self.transposed.t(), self.scale


X, W, GRAD, KEPT, KEPT_FACTOR, AGAIN = range(1, 7)
"""Roles of what is quantized, as seeds: activation, weight, incoming gradient, what a producer keeps for backward: its input, and
what a gated unit multiplies with; and the copy of a result that backward writes again."""


class Seeds(NamedTuple):
    """Which random numbers an operator's stochastic rounding takes: a seed per operand, alike for all operators, and the offset of
    the activation, from whose stream the others follow.

    ``name`` is the operator's, for messages.
    """

    x: int = X
    w: int = W
    offset: Offset = 0
    grad: int = GRAD
    name: str = "an operator"


def seeds_of(seed: int, offset: Offset = 0) -> Seeds:
    """The seeds of the roles under one seed."""
    return Seeds(stream_key(seed, X), stream_key(seed, W), offset, stream_key(seed, GRAD))


def cast_input(
    x: torch.Tensor,
    binding: OperatorBinding,
    seeds: Seeds,
    cache: CastCache | None = None,
    *,
    grad_enabled: bool = True,
    straight: bool = False,
    inverse: torch.Tensor | None = None,
) -> Operand:
    """The activation quantized as the operator's steps say, shared through ``cache``.

    Not differentiable, and called where autograd does not record: the operator itself takes the gradient to the activation.

    Args:
        x: float32 or a 16-bit float.
        binding: how the operator runs.
        seeds: which random numbers the rounding takes.
        cache: where casts are shared.
        grad_enabled: whether a backward pass may follow, which reads the transposed copy of a GPU's operand.
        straight: as :func:`~qsync_torch.kernels.library_ops.is_plain` says of ``x``.
        inverse: of the factors of the channels; its copies are the operator's own.
    """
    if x.dtype not in _QUANTIZED:
        raise _refused(x, binding)
    transposed = grad_enabled and wants_transposed(x, binding)
    if cache is None or inverse is not None or not cache.applies_to(x):
        return _cast(x, binding, seeds, transposed, straight, inverse)
    entry = place_of_cast(x, binding, seeds, cache, transposed)
    operand: Operand | None = entry.value
    if operand is None:
        operand = entry.value = _cast(x, binding, seeds, transposed, straight)
    return operand


def place_of_cast(x: torch.Tensor, binding: OperatorBinding, seeds: Seeds, cache: CastCache, transposed: bool) -> CachedCast:
    """Where the copy of an activation is shared, with the transposed one or without."""
    return cache.find(x, (binding.x_transposed if transposed else binding.x).kind, _mark(seeds))


def _cast(
    x: torch.Tensor,
    binding: OperatorBinding,
    seeds: Seeds,
    transposed: bool,
    straight: bool,
    inverse: torch.Tensor | None = None,
) -> Operand:
    if not transposed or binding.by_column:
        # The channels that a multiplier counts are the last dimension of a matrix.
        q, scale, stream = quantize(x if inverse is None else rows(x), binding.x, seeds.x, seeds.offset, inverse, straight=straight)
        return Operand(q if inverse is None else q.view(x.shape), scale, stream, turned(q) if transposed else None)
    return Operand(*quantize_transposed(x, binding.x_transposed, seeds.x, seeds.offset, inverse, straight=straight))


def turned(q: torch.Tensor) -> torch.Tensor:
    """The 8-bit values of (..., K) as (K, M)."""
    return rows(q).t().contiguous()


def wants_transposed(x: torch.Tensor, binding: OperatorBinding) -> bool:
    """Whether a backward product reads the transposed copy; on a CPU products read operands in any layout."""
    return binding.wants_transposed and x.device.type == "cuda"


def _mark(seeds: Seeds) -> Hashable:
    """What tells random numbers apart: an offset on a device is advanced in place."""
    offset = seeds.offset
    return (seeds.x, id(offset), version_of(offset)) if isinstance(offset, torch.Tensor) else (seeds.x, offset)


def float_input(x: torch.Tensor, binding: OperatorBinding, cache: CastCache | None = None) -> torch.Tensor:
    """The activation in a float compute format; differentiable, its gradient is cast back once for all who share the cast."""
    dtype = binding.x_dtype
    if x.dtype is dtype:
        return x
    if x.dtype not in PRECISION:
        raise _refused(x, binding)
    if cache is None or (x.requires_grad and x.is_leaf) or not cache.applies_to(x):  # a leaf's cast keeps the leaf alive
        return x.to(dtype)
    entry = cache.find(x, float_key(x.dtype, dtype))
    cast: torch.Tensor | None = entry.value
    if cast is None:
        cast = entry.value = x.to(dtype)
    return cast


def _refused(x: torch.Tensor, binding: OperatorBinding) -> NumericsError:
    return NumericsError(
        f"an operator in {binding.variant.label} takes float32 or a 16-bit float, got {x.dtype}; cast its input first"
    )


def cast_weight(
    weight: torch.Tensor,
    binding: OperatorBinding,
    seed: int,
    stream: Offset,
    *,
    straight: bool = False,
    factor: torch.Tensor | None = None,
) -> Operand:
    """The float32 parameter, quantized; called where autograd does not record, like :func:`cast_input`.

    Args:
        weight: in any layout.
        binding: how the operator runs.
        seed: of the weights' rounding; stream: the activation's, so that a weight's error differs from one micro-batch to the next.
        straight: as :func:`~qsync_torch.kernels.library_ops.is_plain` says of ``weight``.
        factor: of each input channel, by which it is multiplied.
    """
    # Integer products read the rows of a matrix; the transpose of a (K, N) parameter is copied.
    dense = weight.contiguous() if binding.of_rows else weight
    return Operand(*quantize(dense, binding.w, seed, _offset(stream, straight), factor, straight=straight))


def _offset(stream: Offset, straight: bool) -> Offset:
    """A stream as the offset of what follows from it: its number, where a kernel is called right away."""
    return as_kernels_take(stream) if straight else stream


Needs = tuple[bool, bool, bool]
"""Whether activation, weight and bias want a gradient."""
Grads = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Gradients of activation, weight and bias; None where none is wanted."""


Copy = Any
"""A tensor, or None where no product reads it: needs and binding say which, before a product reads."""


class Gradient(NamedTuple):
    """An incoming gradient and its copies.

    Attributes:
        incoming: as autograd delivers it.
        wide: in the operator's float gradient format; None where no product reads one.
        quantized: 8-bit values, of a linear operator as (M, N); ``scale``: their one scale, or one a row; None where no product
            reads them.
        transposed: the 8-bit values as (N, M), where the product for the weight's gradient wants them so; ``column_scale``: their
            scales, where they have some of their own, because they are of the gradient times the activation's scales.
        channel_scale: the weight's scales, if the gradient was multiplied by them first.
    """

    incoming: torch.Tensor
    wide: Copy = None
    quantized: Copy = None
    scale: Copy = None
    transposed: Copy = None
    channel_scale: Copy = None
    column_scale: Copy = None

    def grad_input_scale(self, w_scale: torch.Tensor) -> torch.Tensor:
        """The scale, or one a row, of an 8-bit product with the weight."""
        scale: torch.Tensor = self.scale if self.channel_scale is not None else self.scale * w_scale
        return scale

    def grad_weight_scale(self, x_scale: torch.Tensor) -> torch.Tensor:
        """The scale, or one per output channel, of an 8-bit product with the activation."""
        scale: torch.Tensor = self.scale * x_scale if self.column_scale is None else self.column_scale
        return scale if self.channel_scale is None else scale / self.channel_scale

    def for_bias(self) -> torch.Tensor:
        """The copy whose sum is the bias's gradient: the float one where there is one."""
        return self.incoming if self.wide is None else self.wide


def cast_gradient(
    grad: torch.Tensor,
    x_scale: torch.Tensor | None,
    w_scale: torch.Tensor | None,
    binding: OperatorBinding,
    needs: Needs,
    seed: int,
    stream: Offset,
    straight: bool = False,
) -> Gradient:
    """Make the copies that the backward products of ``needs`` read.

    Args:
        grad: in the output's shape and format.
        x_scale: the activation's scales; needed for an 8-bit gradient of the weight only.
        w_scale: the weight's scales, one or one per output channel; needed for an 8-bit gradient of the activation only.
        binding: how the operator runs.
        needs: which gradients are wanted.
        seed: of the gradients' rounding; stream: the activation's, where an 8-bit copy is made.
        straight: as :func:`~qsync_torch.kernels.library_ops.is_plain` says of ``grad``.
    """
    need_x, need_w, _ = needs
    dtype = binding.grad_float if need_x else binding.grad_float_weight_only
    wide = grad if grad.dtype is dtype else None if dtype is None else grad.to(dtype)
    for_input, for_weight = need_x and binding.grad_input_quantized, need_w and binding.grad_weight_quantized
    if not for_input and not for_weight:
        return Gradient(grad, wide)
    multiplied = for_input and binding.steps.multiplied and w_scale is not None and w_scale.numel() > 1
    multiplier = w_scale if multiplied else None
    transpose = for_weight and (binding.by_column or wants_transposed(grad, binding))
    quantization = binding.grad[multiplier is not None][transpose]
    # The channels that the multiplier counts are the last dimension of a matrix, and dimension 1 of images.
    source, offset = rows(grad) if binding.of_rows else as_images(grad, binding), _offset(stream, straight)
    if transpose:
        by_row = x_scale if binding.by_column else None
        q, scale, _, transposed = quantize_transposed(source, quantization, seed, offset, multiplier, by_row, straight=straight)
        of_rows, of_columns = scale.split(list(source.shape)) if binding.by_column else (scale, None)
        return Gradient(grad, wide, q, of_rows, transposed, multiplier, of_columns)
    q, scale, _ = quantize(source, quantization, seed, offset, multiplier, straight=straight)
    return Gradient(grad, wide, q, scale, None, multiplier)
