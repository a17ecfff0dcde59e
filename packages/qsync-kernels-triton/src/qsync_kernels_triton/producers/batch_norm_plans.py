"""The kernels ``batch_norm.output`` and ``batch_norm.grad_input``: checked and worked out once for each layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from torch import Tensor

from qsync_core.ir.chain import Activation
from qsync_core.ir.precision import Rounding
from qsync_kernels_triton.config import ProducerConfig
from qsync_kernels_triton.launching import Launch, Planned, as_bytes, refuse
from qsync_kernels_triton.producers.batch_norm import channel_coefficients, channel_statistics, normalize_positions
from qsync_kernels_triton.producers.batch_norm_gradient import apply_gradient, gradient_reach, reduce_gradient
from qsync_kernels_triton.producers.functions import ACTIVATION_CODE
from qsync_kernels_triton.producers.operands import (
    MOST_PARTIALS,
    SUM_STRIP,
    Cut,
    copy_problems,
    cut_freely,
    layout_problems,
    matrix_problems,
    programs_for,
    random_streams,
    saved_problems,
    vector_problems,
)
from qsync_kernels_triton.producers.sums import finish_sums
from qsync_kernels_triton.quantize.rounding import ROUNDING_CODE
from qsync_kernels_triton.quantize.single import FORMAT_CODE, begin_stream, stream_problems

_CHANNELS_LAST = torch.channels_last
_MERGED_CHANNELS = 8
"""Channels of a program that merges partial sums: a sector of memory, and as many programs as can be."""


def build_batch_norm_output(activation: Activation, rounding: Rounding, config: ProducerConfig) -> Callable[..., None]:
    """The kernel ``batch_norm.output`` of docs/design/fused-chains.md.

    ``x`` and ``residual`` are (B, C, H, W) in float32, float16 or bfloat16, copied where they are not channels-last; outputs are
    channels-last.  It runs on the current stream, and raises ``BackendError`` for operands of another type, size or layout.
    """
    code, rounding_code = ACTIVATION_CODE[activation], ROUNDING_CODE[rounding]

    def plan(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor | None, residual_absmax: Tensor | None,
        mean: Tensor, var: Tensor, out: Tensor | None, absmax: Tensor | None, q: Tensor | None, scale: Tensor | None,
        stream: Tensor | None, x_q: Tensor | None, x_scale: Tensor | None, open_: Tensor | None, offset: Tensor | None, *_: int,
    ) -> Callable[..., None]:  # fmt: skip
        shape = tuple(x.shape)
        refuse("batch_norm.output", _output_problems(x, weight, bias, residual, residual_absmax, mean, var, out, absmax, q, scale,
                                                     x_q, x_scale, open_))  # fmt: skip
        refuse("batch_norm.output", stream_problems(offset, stream, x.device))
        if x.numel() == 0:
            return _fill_for_no_positions
        optional = (weight, bias, residual, out, absmax, q, x_q, open_, offset, stream)
        return _Output(shape, x.device, optional, code, rounding_code, config)

    planned = Planned(plan)

    def batch_norm_output(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor | None, residual_absmax: Tensor | None,
        mean_out: Tensor, var_out: Tensor, out: Tensor | None, absmax_out: Tensor | None, q_out: Tensor | None,
        scale_out: Tensor | None, stream_out: Tensor | None, x_q_out: Tensor | None, x_scale_out: Tensor | None,
        open_out: Tensor | None, seed: int, x_seed: int, offset: int | Tensor,
    ) -> None:  # fmt: skip
        planned(x, weight, bias, eps, residual, residual_absmax, mean_out, var_out, out, absmax_out, q_out, scale_out, stream_out,
                x_q_out, x_scale_out, open_out, *random_streams(seed, x_seed, offset))  # fmt: skip

    return batch_norm_output


def _output_problems(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, residual_absmax: Tensor | None, mean: Tensor,
    var: Tensor, out: Tensor | None, absmax: Tensor | None, q: Tensor | None, scale: Tensor | None, x_q: Tensor | None,
    x_scale: Tensor | None, open_: Tensor | None,
) -> Iterator[str]:  # fmt: skip
    if x.ndim != 4:
        yield f"x must be (B, C, H, W), got shape {tuple(x.shape)}"
        return
    shape = tuple(x.shape)
    yield from matrix_problems("x residual out", (x, residual, out), shape)
    yield from vector_problems("weight bias mean_out var_out x_scale_out", (weight, bias, mean, var, x_scale), shape[1])
    yield from vector_problems("residual_absmax absmax_out scale_out", (residual_absmax, absmax, scale), 1)
    yield from copy_problems("q_out", q, scale, shape, "scale_out")
    yield from copy_problems("x_q_out", x_q, x_scale, shape, "x_scale_out")
    yield from layout_problems("out q_out x_q_out", (out, q, x_q), _CHANNELS_LAST)
    yield from layout_problems("mean_out var_out x_scale_out", (mean, var, x_scale), torch.contiguous_format)
    yield from _bits_problems("open_out", open_, shape)
    if residual is not None and residual_absmax is None and not (q is None and absmax is None):
        yield "residual_absmax is needed beside a residual where the result's range is"


def _bits_problems(name: str, bits: Tensor | None, shape: tuple[int, ...]) -> Iterator[str]:
    if bits is None:
        return
    wanted = (shape[0], *shape[2:], triton.cdiv(shape[1], 8))
    if bits.dtype is not torch.uint8 or bits.shape != wanted or not bits.is_contiguous():
        yield f"{name} must be contiguous uint8 of shape {wanted}, got {bits.dtype} {tuple(bits.shape)}"


def _fill_for_no_positions(*operands: Any) -> None:
    """Statistics, scales and stream of a tensor without elements."""
    for zero in (operands[6], operands[7], operands[9]):
        if zero is not None:
            zero.fill_(0.0)
    for one in (operands[11], operands[14]):
        if one is not None:
            one.fill_(1.0)
    begin_stream(operands[12], operands[16], operands[-2:])


class _Output:
    """Three launches for one shape."""

    def __init__(
        self, shape: tuple[int, ...], device: torch.device, operands: tuple[Tensor | None, ...], activation: int, rounding: int,
        config: ProducerConfig,
    ) -> None:  # fmt: skip
        weight, bias, residual, out, absmax, q, x_q, open_, offset, stream = operands
        positions, channels = shape[0] * shape[2] * shape[3], shape[1]
        reading, writing = _cuts(positions, channels, config)
        self._programs = min(programs_for(reading, config.reduce, device), MOST_PARTIALS)
        self._statistics = Launch(channel_statistics, reading.constants, num_warps=reading.warps)
        self._statistics_grid = (self._programs, reading.strips, 1)
        bounds = triton.cdiv(channels, _MERGED_CHANNELS)
        given = {"WEIGHT": weight is not None, "BIAS": bias is not None, "RESIDUAL": residual is not None, "ACTIVATION": activation}
        x_format = 0 if x_q is None else FORMAT_CODE[x_q.dtype]
        partials = max(16, triton.next_power_of_2(self._programs))
        merged = {"ROWS": reading.rows, "PARTIALS": partials, "BLOCK": _MERGED_CHANNELS}
        x_copy = {"WRITE_X": x_q is not None, "X_FORMAT": x_format}
        wanted = {"WRITE_ABSMAX": absmax is not None}
        self._coefficients = Launch(channel_coefficients, merged | given | wanted | x_copy, num_warps=4 if partials <= 256 else 8)
        self._coefficients_grid = (bounds, 1, 1)
        written = {
            "WRITE_OUT": out is not None,
            "WRITE_Q": q is not None,
            "WRITE_OPEN": open_ is not None,
            "FORMAT": 0 if q is None else FORMAT_CODE[q.dtype],
            "ROUNDING": rounding,
            "LIVE": offset is not None,
            "STREAM": int(stream is not None),
        }
        cut = writing.constants | {"BOUNDS": triton.next_power_of_2(bounds)} | writing.aligned
        constants = cut | given | wanted | written | x_copy
        self._normalize = Launch(normalize_positions, constants, num_warps=writing.warps)
        self._normalize_grid = (programs_for(writing, config.apply, device), writing.strips, 1)
        self._positions, self._channels, self._bounds = positions, channels, bounds
        self._units = channels // writing.unit
        self._partial_count = 6 * self._programs * channels
        self._writes = any(tensor is not None for tensor in (out, absmax, q, x_q, open_))

    def __call__(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor | None,
        residual_absmax: Tensor | None, mean: Tensor, var: Tensor, out: Tensor | None, absmax: Tensor | None, q: Tensor | None,
        scale: Tensor | None, stream: Tensor | None, x_q: Tensor | None, x_scale: Tensor | None, open_: Tensor | None,
        offset: Tensor | None, *words: int,
    ) -> None:  # fmt: skip
        """Write all outputs that are not None; ``words`` are the low and high words of seed, x_seed and offset."""
        x = x.contiguous(memory_format=_CHANNELS_LAST)
        # Partial sums, then the inverse scales of x̂, then bounds and checksums; each is written before it is read.
        scratch = torch.empty(self._partial_count + self._channels + 2 * self._bounds, dtype=torch.float32, device=x.device)
        partial, inverse, bound = scratch.split([self._partial_count, self._channels, 2 * self._bounds])
        self._statistics(self._statistics_grid, None, (x, partial), (self._positions, self._units))
        w, b = (scratch if vector is None else vector.contiguous() for vector in (weight, bias))
        reach = scratch if residual_absmax is None else residual_absmax
        x_scales, largest = inverse if x_scale is None else x_scale, bound if absmax is None else absmax
        self._coefficients(
            self._coefficients_grid, None, (partial, w, b, reach, mean, var, bound, largest, x_scales, inverse),
            (self._positions, self._channels, self._programs, eps),
        )  # fmt: skip
        if not self._writes:
            return
        shortcut = x if residual is None else residual.contiguous(memory_format=_CHANNELS_LAST)
        copies = (x if copy is None else as_bytes(copy) for copy in (q, x_q))
        q, x_q = copies
        tensors = (x, w, b, shortcut, mean, var, bound, x_scales, inverse, x if out is None else out,
                   largest, q, bound if scale is None else scale, x_q,
                   x if open_ is None else open_, *(bound if one is None else one for one in (offset, stream)))  # fmt: skip
        self._normalize(self._normalize_grid, None, tensors, (self._positions, self._units, self._bounds, eps, *words))


def _cuts(positions: int, channels: int, config: ProducerConfig) -> tuple[Cut, Cut]:
    """Cut positions and channels twice: for the kernels that sum over positions, and for those that write."""
    return cut_freely(positions, channels, SUM_STRIP, config), cut_freely(positions, channels, config.strip, config)


def build_batch_norm_grad_input(
    activation: Activation, rounding: Rounding, config: ProducerConfig, grad_sum: bool = False
) -> Callable[..., None]:
    """The kernel ``batch_norm.grad_input`` of docs/design/fused-chains.md, with and without a copy of the gradient.

    With ``grad_sum`` it takes ``other`` behind ``grad``.  Both and ``x`` are copied where they are not channels-last; outputs that
    are None are not written.  It runs on the current stream, and raises ``BackendError`` for operands of another type, size or
    layout.
    """

    def plan(
        grad: Tensor, other: Tensor | None, x: Tensor, x_scale: Tensor | None, mean: Tensor, var: Tensor, weight: Tensor | None,
        bias: Tensor | None, eps: float, open_: Tensor | None, grad_input: Tensor | None, grad_residual: Tensor | None,
        grad_weight: Tensor | None,
        grad_bias: Tensor | None, multiplier: Tensor | None, q: Tensor | None, scale: Tensor | None, offset: Tensor | None, *_: int,
    ) -> Callable[..., None]:  # fmt: skip
        gradients = (grad_input, grad_residual, grad_weight, grad_bias)
        problems = _gradient_problems(
            activation, grad, other, x, x_scale, mean, var, weight, bias, open_, *gradients, multiplier, q, scale
        )
        refuse("batch_norm.grad_input", problems)
        refuse("batch_norm.grad_input", stream_problems(offset, None, x.device))
        if x.numel() == 0:
            return _zero_gradients
        reads = 0 if activation is not Activation.RELU else 2 if open_ is None else 1
        optional = (weight, bias, x_scale, grad_input, grad_residual, multiplier, q, offset)
        written_early = other is not None and grad_residual is not None and grad_residual.dtype is grad.dtype
        return _Gradient(tuple(x.shape), x.device, reads, optional, rounding_code, config, other is not None, written_early)

    rounding_code = ROUNDING_CODE[rounding]
    planned = Planned(plan)

    def run(
        other: Tensor | None, grad: Tensor, x: Tensor, x_scale: Tensor | None, mean: Tensor, var: Tensor, weight: Tensor | None,
        bias: Tensor | None, eps: float, open: Tensor | None, grad_input_out: Tensor | None, grad_residual_out: Tensor | None,
        grad_weight_out: Tensor | None, grad_bias_out: Tensor | None, multiplier: Tensor | None = None,
        grad_q_out: Tensor | None = None, grad_scale_out: Tensor | None = None, seed: int = 0, offset: int | Tensor = 0,
    ) -> None:  # fmt: skip
        live, low, high, _, _, *words = random_streams(seed, 0, offset)
        planned(grad, other, x, x_scale, mean, var, weight, bias, eps, open, grad_input_out, grad_residual_out, grad_weight_out,
                grad_bias_out, multiplier, grad_q_out, grad_scale_out, live, low, high, *words)  # fmt: skip

    def batch_norm_grad_input(grad: Tensor, *operands: Any) -> None:
        run(None, grad, *operands)

    def batch_norm_grad_input_of_sum(grad: Tensor, other: Tensor, *operands: Any) -> None:
        run(other, grad, *operands)

    return batch_norm_grad_input_of_sum if grad_sum else batch_norm_grad_input


def _gradient_problems(
    activation: Activation, grad: Tensor, other: Tensor | None, x: Tensor, x_scale: Tensor | None, mean: Tensor, var: Tensor,
    weight: Tensor | None, bias: Tensor | None, open_: Tensor | None, grad_input: Tensor | None, grad_residual: Tensor | None,
    grad_weight: Tensor | None, grad_bias: Tensor | None, multiplier: Tensor | None, q: Tensor | None, scale: Tensor | None,
) -> Iterator[str]:  # fmt: skip
    if x.ndim != 4:
        yield f"x must be (B, C, H, W), got shape {tuple(x.shape)}"
        return
    shape = tuple(x.shape)
    yield from matrix_problems("grad other grad_input_out grad_residual_out", (grad, other, grad_input, grad_residual), shape)
    if other is not None and other.dtype is not grad.dtype:
        yield f"other must be {grad.dtype} like grad, got {other.dtype}"
    yield from saved_problems(x, x_scale, shape[1])
    vectors = (mean, var, weight, bias, grad_weight, grad_bias, multiplier)
    yield from vector_problems("mean var weight bias grad_weight_out grad_bias_out multiplier", vectors, shape[1])
    yield from copy_problems("grad_q_out", q, scale, shape, "grad_scale_out")
    if q is not None and q.dtype is not torch.int8:
        yield f"grad_q_out must be int8, got {q.dtype}"
    yield from layout_problems("grad_input_out grad_residual_out grad_q_out", (grad_input, grad_residual, q), _CHANNELS_LAST)
    yield from layout_problems("grad_weight_out grad_bias_out", (grad_weight, grad_bias), torch.contiguous_format)
    yield from _bits_problems("open", open_, shape)
    if activation is Activation.RELU and open_ is None and x_scale is not None:
        yield "open is needed where x̂ was kept in 8 bit, whose rounding may move z across 0"
    if activation is Activation.RELU and open_ is None and grad_residual is not None:
        yield "open is needed beside a residual, which z cannot be worked out again without"


def _zero_gradients(*operands: Tensor | None) -> None:
    for gradient in operands[12:14]:
        if gradient is not None:
            gradient.fill_(0.0)
    if (scale := operands[16]) is not None:
        scale.fill_(1.0)


class _Gradient:
    """Three launches for one shape: sums, their end, and what is written for each element; four where a copy needs its scale."""

    def __init__(
        self, shape: tuple[int, ...], device: torch.device, reads: int, optional: tuple[Tensor | None, ...], rounding: int,
        config: ProducerConfig, summed: bool, written_early: bool,
    ) -> None:  # fmt: skip
        """``summed``: of a gradient in two parts, whose h the first pass writes; ``written_early``: into that of the residual."""
        self._written_early = written_early
        self._positions, self._channels = shape[0] * shape[2] * shape[3], shape[1]
        reading, writing = _cuts(self._positions, self._channels, config)
        weight, bias, eight_bit, grad_input, grad_residual, multiplied, copied, live = (tensor is not None for tensor in optional)
        given = {"WEIGHT": weight, "BIAS": bias, "EIGHT_BIT": eight_bit}
        self._programs = programs_for(reading, config.reduce, device)
        first: dict[str, int] = {"OPEN": reads, "REACH": copied, "SUM": summed}
        self._reduce = Launch(reduce_gradient, reading.constants | given | first, num_warps=reading.warps)
        self._reduce_grid = (self._programs, reading.strips, 1)
        self._finish = Launch(finish_sums, {"ROWS": 128, "BLOCK": 16}, num_warps=4)
        self._finish_grid = (triton.cdiv(self._channels, 16), 2, 1)
        self._reaches, self._kinds = triton.cdiv(self._channels, 16) if copied else 0, 5 if copied else 2
        factors = {"WEIGHT": weight, "MULTIPLIER": multiplied}
        self._reach = Launch(gradient_reach, {"ROWS": 128, "BLOCK": 16} | factors, num_warps=4)
        written: dict[str, int] = {"WRITE_INPUT": grad_input, "WRITE_Q": copied, "MULTIPLIER": multiplied}
        written |= {"OPEN": 0 if summed else reads, "WRITE_RESIDUAL": grad_residual and not written_early}
        rounded = {"REACHES": triton.next_power_of_2(max(1, self._reaches)), "ROUNDING": rounding, "LIVE": live}
        constants = writing.constants | given | written | rounded | writing.aligned
        self._apply = Launch(apply_gradient, constants, num_warps=writing.warps)
        self._apply_grid = (programs_for(writing, config.apply, device), writing.strips, 1)
        self._units, self._writes = self._channels // reading.unit, grad_input or (grad_residual and not written_early) or copied

    def __call__(
        self, grad: Tensor, other: Tensor | None, x: Tensor, x_scale: Tensor | None, mean: Tensor, var: Tensor,
        weight: Tensor | None, bias: Tensor | None, eps: float, open_: Tensor | None, grad_input: Tensor | None,
        grad_residual: Tensor | None, grad_weight: Tensor | None, grad_bias: Tensor | None, multiplier: Tensor | None,
        q: Tensor | None, scale: Tensor | None,
        offset: Tensor | None, *words: int,
    ) -> None:  # fmt: skip
        """Write all outputs that are not None."""
        grad, x = grad.contiguous(memory_format=_CHANNELS_LAST), x.contiguous(memory_format=_CHANNELS_LAST)
        sizes = [self._kinds * self._programs * self._channels, self._channels, self._channels, 2 * self._reaches]
        scratch = torch.empty(sum(sizes), dtype=torch.float32, device=x.device)
        partial, total, product, reach = scratch.split(sizes)
        total, product = total if grad_bias is None else grad_bias, product if grad_weight is None else grad_weight
        vectors = [scratch if v is None else v.contiguous() for v in (x_scale, mean, var, weight, bias)]
        tensors = (x, *vectors, x if open_ is None else open_)
        numbers, h = (self._positions, self._units, eps), grad
        if other is not None:
            other = other.contiguous(memory_format=_CHANNELS_LAST)
            h = grad_residual if self._written_early and grad_residual is not None else torch.empty_like(grad)
        self._reduce(self._reduce_grid, None, (grad, *tensors, grad if other is None else other, h, partial), numbers)
        self._finish(self._finish_grid, None, (partial, total, product), (self._programs, self._channels))
        if not self._writes:
            return
        factors = scratch if multiplier is None else multiplier.contiguous()
        if q is not None:
            sums = (partial, total, product, vectors[2], vectors[3], factors, reach)
            self._reach((self._reaches, 1, 1), None, sums, (self._positions, self._channels, self._programs, eps))
        written = [grad if gradient is None else gradient for gradient in (grad_input, grad_residual, q)]
        written += [scratch if tensor is None else tensor for tensor in (scale, offset)]
        operands = (h, *tensors, total, product, factors, reach if q is not None else scratch, *written)
        self._apply(self._apply_grid, None, operands, (self._positions, self._units, self._reaches, eps, *words))
