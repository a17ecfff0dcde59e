"""Quantization of a float tensor to int8 or float8_e4m3fn: its range, the scale, the rounded values.

Symmetric: ``scale = absmax / 127`` (int8) or ``absmax / 448`` (float8_e4m3fn), ``q = round(x / scale)``
(docs/design/precision-semantics.md#quantization); a scale is at least 2**-126 (magnitudes below 1e-36 would have less); that of
zeros is :attr:`~qsync_core.ir.precision.Granularity.scale_of_zeros`.  Groups: the whole tensor, one per entry of dimension 0
(output channels of a weight), or one per row of the flattened 2-d activation.

Affine (int8 with ``symmetric=False``): ``x = scale * (q - zero_point)`` with q in -128..127.  The range is that of the group's
values and 0, so that 0 is exact, with which convolutions pad.  ``scale = (max - min) / 255`` where one of the two is 0, as behind a
ReLU, else ``/ 254``: then both integers next to any quotient are at hand, nothing is clipped, and stochastic rounding is unbiased.
``zero_point = -128 + ceil(-min / scale)``.  The vector of scales holds both: the scales first, then as many zero points.

The backend's kernel, which :func:`build_quantize` returns: ``kernel(x, q_out, scale_out, stream_out, seed, offset,
multiplier=None, transposed_out=None, row_multiplier=None, maxima=None)``.  Under a scale for each row, the transposed copy has one
for each of its own rows, the columns of ``x``: they lie behind the others in ``scale_out``.  That copy alone is of ``x`` times
``row_multiplier`` too, one factor for each row of ``x``, in float32.  ``maxima`` are what :func:`write_maxima` writes: the kernel
that made ``x`` has found them.

Memory layout is kept: a channels-last activation gives a channels-last copy.  Random numbers are counted in memory order, in the
stream that follows from the offset and the bits of ``x`` (:func:`~qsync_torch.aten.random_bits.stream_of`).

NaN and infinity: on a CPU quantizing such a tensor raises :class:`~qsync_core.errors.NumericsError`.  On CUDA that test would
make the CPU wait for the device at every operator, so there the scale becomes NaN or infinity and with it every output of the
operator: the loss shows it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from qsync_core.errors import BackendError, NumericsError
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_core.kernels.requests import quantization_variant
from qsync_torch.aten.random_bits import Offset, checksum, random_thresholds, stream_of, write_stream

LARGEST = {Precision.INT8: 127.0, Precision.FLOAT8_E4M3FN: 448.0}
"""The value that the largest magnitude of a group is mapped to."""
_SMALLEST = 2.0**-126
"""The smallest scale: a smaller one has no finite inverse in float32."""
_BLOCK = 1 << 16
"""Elements per thread that a CPU rounds at a time, so that intermediate results stay in the second-level cache."""
_JUST_BELOW_ONE = 1.0 - 2.0**-22
"""Keeps x / scale within 127 when it is computed as a product with the rounded inverse of the scale."""
CENTRE = 0.5 + 2.0**-9
"""Brings a threshold over 256, from [-0.5 - 2**-9, 0.5 - 2**-9), to [0, 1)."""


def build_quantize(variant: Variant) -> Callable[..., None]:
    """Quantization of one tensor to ``variant``'s compute format, with the scales and zero points of its activation."""
    write_copy = build_copy(variant)

    def kernel(
        x: torch.Tensor,
        q_out: torch.Tensor,
        scale_out: torch.Tensor,
        stream_out: torch.Tensor | None,
        seed: int,
        offset: Offset,
        multiplier: torch.Tensor | None = None,
        transposed_out: torch.Tensor | None = None,
        row_multiplier: torch.Tensor | None = None,
        maxima: torch.Tensor | None = None,
    ) -> None:
        by_column = transposed_out is not None and variant.x_granularity is Granularity.PER_ROW
        if row_multiplier is not None and not by_column:
            raise BackendError(
                "backend aten cannot run quantize: a row_multiplier goes with a scale per row and a transposed_out, and here is a "
                f"scale per {variant.x_granularity} and {'no' if transposed_out is None else 'a'} transposed_out"
            )
        if quantizable(x, variant.x_granularity) is not x:
            raise BackendError(
                f"backend aten cannot quantize a tensor of shape {tuple(x.shape)} and strides {x.stride()} with a scale per "
                f"{variant.x_granularity}: what shares a scale must lie together in memory; pass x.contiguous()"
            )
        if maxima is not None and (
            variant.x_granularity is not Granularity.PER_TENSOR or not variant.symmetric
            or maxima.dtype is not torch.float32 or maxima.ndim != 2 or len(maxima) != 2 or not maxima.numel()
        ):  # fmt: skip
            raise BackendError(
                "backend aten cannot run quantize: maxima are float32 (2, P) of a whole tensor without a zero point, and here are "
                f"{maxima.dtype} {tuple(maxima.shape)} with a scale per {variant.x_granularity}"
            )
        stream = stream_of(offset, x, None if maxima is None else _checksum_in(maxima))
        if stream_out is not None:
            write_stream(stream, stream_out)
        values = x if multiplier is None else multiplied(x, multiplier)
        if transposed_out is None:
            write_copy(values, q_out, scale_out, seed, stream, maxima)
        elif not by_column:
            write_copy(values, q_out, scale_out, seed, stream, maxima)
            transposed_out.copy_(q_out.t())
        else:
            of_rows, of_columns = scale_out.split(list(x.shape))
            write_copy(values, q_out, of_rows, seed, stream)
            columns = values.t().contiguous()
            if row_multiplier is not None:
                columns = multiplied(columns, row_multiplier)
            write_copy(columns, transposed_out, of_columns, seed, stream)

    return kernel


def write_maxima(x: torch.Tensor, multiplier: torch.Tensor | None, out: torch.Tensor) -> None:
    """Write what a quantization of ``x`` times ``multiplier`` under one scale reads it for first.

    Args:
        out: float32 (2, P): numbers of which the largest is the largest magnitude, and below them the bits of int32 numbers whose
            sum, which wraps around, is the checksum of ``x``.
    """
    out.zero_()
    if x.numel():
        values = x if multiplier is None else multiplied(x, multiplier)
        out[0, 0] = torch.linalg.vector_norm(values, math.inf, dtype=torch.float32)
        out.view(torch.int32)[1, 0] = checksum(x)


def _checksum_in(maxima: torch.Tensor) -> torch.Tensor:
    return maxima.view(torch.int32)[1].sum(dtype=torch.int32)


def build_copy(variant: Variant) -> Callable[..., None]:
    """Quantization of one tensor with the random numbers of a given stream.

    ``write_copy(x, q_out, scale_out, seed, stream, maxima=None)``, with those of :func:`write_maxima`.
    """
    precision, granularity, rounding = variant.compute, variant.x_granularity, variant.rounding
    symmetric, find = variant.symmetric, find_scale if variant.symmetric else find_affine_scale

    def write_copy(
        x: torch.Tensor,
        q_out: torch.Tensor,
        scale_out: torch.Tensor,
        seed: int,
        stream: Offset,
        maxima: torch.Tensor | None = None,
    ) -> None:
        if maxima is None or not x.numel():
            find(x, precision, granularity, scale_out)
        else:
            write_scale(maxima[0].amax().view(1), precision, scale_out, granularity.scale_of_zeros)
        require_finite(x, scale_out, precision)
        write_rounded(x, scale_out, precision, granularity, rounding, seed, stream, q_out, symmetric)

    return write_copy


def build_results(variant: Variant) -> Callable[..., None]:
    """Make what writes all that a producer has computed: ``write(x, r, kept, *results)``.

    ``x`` has the bits that the random numbers follow from; the result ``r`` is written as it is and in 8 bit, and each of ``kept``
    in the format that the variant saves, with a scale a row.  ``results`` are the last arguments of a producer: ``out``, ``q_out``,
    ``scale_out`` and ``stream_out``; a copy and its scales of each that is kept; a seed of the result's copy and of each kept one;
    the offset.  A tensor is None where it is not wanted.
    """
    write_copy = build_copy(variant)
    write_saved = build_copy(quantization_variant(variant.saved, Granularity.PER_ROW, variant.rounding))

    def write(x: torch.Tensor, r: torch.Tensor, kept: Sequence[torch.Tensor], *results: Any) -> None:
        out, q_out, scale_out, stream_out, *copies, offset = results
        if out is not None:
            out.copy_(r)
        stream = stream_of(offset, x)
        tensors, (seed, *seeds) = copies[: 2 * len(kept)], copies[2 * len(kept) :]
        if q_out is not None:
            write_copy(r, q_out, scale_out, seed, stream)
        if stream_out is not None:
            write_stream(stream, stream_out)
        for values, kept_out, kept_scale_out, kept_seed in zip(kept, tensors[::2], tensors[1::2], seeds, strict=True):
            if kept_out is not None:
                write_saved(values, kept_out, kept_scale_out, kept_seed, stream)

    return write


def multiplied(x: torch.Tensor, multiplier: torch.Tensor) -> torch.Tensor:
    """``x`` times one factor per channel, in float32, in the layout of ``x``.

    Channels are the last dimension of a matrix and dimension 1 of (B, C, H, W).
    """
    factors = multiplier.view(1, -1, *(1,) * (x.ndim - 2)) if x.ndim > 2 else multiplier
    product = torch.empty_like(x, dtype=torch.float32)
    return torch.mul(x, factors, out=product)


def require_finite(x: torch.Tensor, scale: torch.Tensor, precision: Precision) -> None:
    """Refuse, on a CPU, a tensor whose scales say that it holds NaN or infinity.

    Raises:
        NumericsError: with its shape, and what to look for.
    """
    if x.device.type == "cpu" and x.numel() and not _all_finite(scale):
        raise NumericsError(
            f"a tensor of shape {tuple(x.shape)} to be quantized to {precision} holds NaN or infinite values; "
            "look for them in the batch, for a diverging loss or a too large learning rate, or keep this operator in a float format"
        )


def write_rounded(
    x: torch.Tensor,
    scale: torch.Tensor,
    precision: Precision,
    granularity: Granularity,
    rounding: Rounding,
    seed: int,
    stream: Offset,
    q_out: torch.Tensor,
    symmetric: bool = True,
) -> None:
    """Write ``x / scale``, rounded, into ``q_out`` of the same layout (see :func:`quantizable`).

    Args:
        x: to be quantized.
        scale: float32, one for each group; no magnitude of the group is larger than 127 (int8) or 448 of it.
        precision, granularity, rounding: of the copy.
        seed, stream: which random numbers; element i in memory order takes number i.
        q_out: written.
        symmetric: else ``scale`` also holds the zero points of :func:`find_affine_scale`, which are added.
    """
    groups, q_groups = _grouped(x, granularity), _grouped(q_out, granularity)
    zero_point = None
    if not symmetric:
        scale, zero_point = affine_parts(scale)
    if x.device.type == "cpu" and precision is Precision.INT8:
        _round_int8_cpu(groups, scale, q_groups, rounding, seed, stream, zero_point)
    elif x.numel():
        draws = _uniform(groups, seed, stream) if rounding is Rounding.STOCHASTIC else None
        if zero_point is not None:
            y = _rounded(groups.to(torch.float32), scale[:, None], rounding, draws).add_(zero_point[:, None])
            q_groups.copy_(y.clamp_(-128.0, 127.0))
            return
        round_ = _round_float8 if precision is Precision.FLOAT8_E4M3FN else _round_int8
        q_groups.copy_(round_(groups, scale[:, None], rounding, draws))


def _all_finite(scale: torch.Tensor) -> bool:
    return math.isfinite(float(scale)) if scale.numel() == 1 else bool(torch.isfinite(scale).all())


def quantizable(x: torch.Tensor, granularity: Granularity) -> torch.Tensor:
    """``x`` itself where its memory can be taken group by group, else a contiguous copy."""
    if x.is_contiguous():
        return x
    if x.ndim == 4 and granularity is not Granularity.PER_ROW and x.is_contiguous(memory_format=torch.channels_last):
        return x
    if granularity is Granularity.PER_TENSOR:
        return x if _is_dense(x) else x.contiguous()
    if granularity is Granularity.PER_CHANNEL:
        outermost = x.ndim > 0 and _is_dense(x) and (x.shape[0] == 1 or x.stride(0) == x.numel() // max(x.shape[0], 1))
        return x if outermost else x.contiguous()
    return x.contiguous()


def _is_dense(x: torch.Tensor) -> bool:
    """True where the elements fill one block of memory without gaps, in any order of dimensions."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense(x))


def _grouped(x: torch.Tensor, granularity: Granularity) -> torch.Tensor:
    """A (groups, elements) view in memory order."""
    groups = granularity.scale_count(x.shape)
    return x.as_strided((groups, x.numel() // max(groups, 1)), (x.numel() // max(groups, 1), 1))


def find_scale(x: torch.Tensor, precision: Precision, granularity: Granularity, out: torch.Tensor) -> None:
    """Write the symmetric scales of ``x`` (see :func:`quantizable`) into ``out``; NaN and infinity stay what they are.

    A group that is too small for its own scale takes the smallest one and not 1: the floor of a tiny negative quotient is -1, which
    times 1 would be a gradient out of nothing.
    """
    if x.numel() == 0:
        out.fill_(1.0)
        return
    groups, of_zeros = _grouped(x, granularity), granularity.scale_of_zeros
    if groups.shape[0] == 1 and groups.device.type == "cpu":
        low, high = torch.aminmax(groups)
        # NaN is not the larger of anything, so it is kept by asking whether the other is larger.
        absmax = -float(low) if -float(low) > float(high) else float(high)
        # NaN is not the smaller of anything.
        out.fill_(of_zeros if absmax == 0 else max(absmax / LARGEST[precision], _SMALLEST))
        return
    if groups.device.type == "cuda":
        torch.linalg.vector_norm(groups, math.inf, dim=1, dtype=torch.float32, out=out)
    else:
        # Two reductions along a dimension are several times faster on a CPU than one ``aminmax`` along it.
        out.copy_(torch.maximum(groups.amin(1).neg(), groups.amax(1)))
    write_scale(out, precision, out, of_zeros)


def write_scale(absmax: torch.Tensor, precision: Precision, out: torch.Tensor, of_zeros: float = 1.0) -> None:
    """Write the scales of groups with these largest magnitudes (float32) into ``out``, which may be ``absmax`` itself."""
    zeros = absmax == 0
    torch.div(absmax, LARGEST[precision], out=out).clamp_(min=_SMALLEST).masked_fill_(zeros, of_zeros)


def affine_scale(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Scales of groups whose values are in these ranges, of which 0 is a part; NaN and infinity stay what they are."""
    levels = torch.where((low == 0) | (high == 0), 255.0, 254.0)
    return (high / levels - low / levels).clamp_(min=_SMALLEST).masked_fill_((low == 0) & (high == 0), 1.0)


def affine_parts(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points, float32 whole numbers, of the vector that holds both."""
    scales, zero_points = scale.chunk(2)
    return scales, zero_points


def find_affine_scale(x: torch.Tensor, precision: Precision, granularity: Granularity, out: torch.Tensor) -> None:
    """Write the affine scales and zero points of ``x`` (see :func:`quantizable`) into ``out``."""
    scale, zero_point = affine_parts(out)
    if x.numel() == 0:
        scale.fill_(1.0)
        zero_point.fill_(0.0)
        return
    groups = _grouped(x, granularity)
    low, high = torch.aminmax(groups) if groups.shape[0] == 1 else (groups.amin(1), groups.amax(1))
    low, high = low.to(torch.float32).clamp(max=0.0), high.to(torch.float32).clamp(min=0.0)
    scale.copy_(affine_scale(low, high))
    zero_point.copy_((-low / scale).ceil_().sub_(128.0).clamp_(max=127.0))


def scale_view(scale: torch.Tensor, ndim: int, granularity: Granularity, shape: torch.Size) -> torch.Tensor:
    """The scales shaped so that they broadcast against the tensor they belong to."""
    if granularity is Granularity.PER_TENSOR:
        return scale
    if granularity is Granularity.PER_CHANNEL:
        return scale.view(-1, *(1,) * (ndim - 1))
    return scale.view(*shape[:-1], 1)


def less_zero_point(q: torch.Tensor, zero_point: torch.Tensor, granularity: Granularity) -> torch.Tensor:
    """``q - zero_point`` in float32: whole numbers within ±255."""
    return q.to(torch.float32).sub_(scale_view(zero_point, q.ndim, granularity, q.shape))


def dequantize(
    q: torch.Tensor, scale: torch.Tensor, granularity: Granularity, dtype: torch.dtype, *, symmetric: bool = True
) -> torch.Tensor:
    """``scale * q``, or ``scale * (q - zero_point)``, in ``dtype``; the product is computed in float32."""
    if not symmetric:
        scale, zero_point = affine_parts(scale)
        return less_zero_point(q, zero_point, granularity).mul_(scale_view(scale, q.ndim, granularity, q.shape)).to(dtype)
    if q.device.type == "cuda" and q.dtype is torch.int8 and dtype is not torch.float64:
        # One kernel reads the integers and writes the format that is wanted.
        return torch.mul(q, scale_view(scale, q.ndim, granularity, q.shape), out=torch.empty_like(q, dtype=dtype))
    value = q.to(torch.float32).mul_(scale_view(scale, q.ndim, granularity, q.shape))
    return value.to(dtype)


class _Scratch(threading.local):
    """Float32 buffers kept between calls: fresh memory of this size costs more in page faults than the rounding."""

    def __init__(self) -> None:
        self.buffers = torch.empty(0)

    @torch.inference_mode(False)  # memory made in inference mode could not be written to in training
    def of(self, numel: int) -> torch.Tensor:
        """(2, at least numel + 1)."""
        if self.buffers.numel() < 2 * (numel + 1):
            self.buffers = torch.empty(2, numel + 1, dtype=torch.float32)
        return self.buffers


_SCRATCH = _Scratch()


def _round_int8_cpu(
    groups: torch.Tensor,
    scale: torch.Tensor,
    q_groups: torch.Tensor,
    rounding: Rounding,
    seed: int,
    stream: Offset,
    zero_point: torch.Tensor | None = None,
) -> None:
    """Round (groups, elements) with one scale a group into ``q_groups``, block by block, so that blocks stay in the cache.

    Stochastic: floor(x / scale + u) with u the draw in [0, 1).  No integer is raised: u is at most 1 - 2**-16 and a sum below 256
    is exact to 2**-16.  Element i of the tensor takes draw i.
    """
    rows, columns = groups.shape
    block = _BLOCK * torch.get_num_threads()
    buffers = _SCRATCH.of(min(rows * columns, max(block, 1)))
    single = rows == 1
    centre = torch.tensor(CENTRE, dtype=torch.float32)
    inverse = scale.reciprocal().mul_(_JUST_BELOW_ONE)
    for row, column in _blocks(rows, columns, block):
        part, target = groups[row, column], q_groups[row, column]
        if rounding is Rounding.STOCHASTIC:
            position = row.start * columns + column.start
            y = random_thresholds(part.numel(), seed, stream, position, buffers=buffers).view(part.shape)
            torch.add(centre, y, alpha=1.0 / 256.0, out=y)
            if zero_point is not None:
                y.add_(buffers[0, : part.numel()].view(part.shape).copy_(part).div_(scale[row, None]))
            elif single:
                y.add_(part, alpha=float(inverse))
            else:
                y.addcmul_(part.to(torch.float32), inverse[row, None])
            y.floor_()
        else:
            y = buffers[1, : part.numel()].view(part.shape)
            torch.div(part if part.dtype is torch.float32 else y.copy_(part), scale if single else scale[row, None], out=y)
            y = y.round_() if rounding is Rounding.NEAREST else y.floor_()
        if zero_point is not None:
            y.add_(zero_point[row, None]).clamp_(-128.0, 127.0)
        elif rounding is Rounding.FLOOR:
            y.clamp_(min=-127.0)
        target.copy_(y)


def _blocks(rows: int, columns: int, block: int) -> Iterator[tuple[slice, slice]]:
    """Whole rows where several fit into a block, else pieces of one row."""
    step = max(1, block // max(columns, 1))
    for first in range(0, rows, step):
        for start in range(0, columns, block):
            yield slice(first, min(first + step, rows)), slice(start, min(start + block, columns))


def _round_int8(groups: torch.Tensor, scale: torch.Tensor, rounding: Rounding, draws: torch.Tensor | None) -> torch.Tensor:
    """Whole numbers within 127, in float32; ``draws`` in [0, 1) for stochastic rounding are overwritten."""
    return _rounded(groups, scale, rounding, draws).clamp_(-127.0, 127.0)


def _rounded(groups: torch.Tensor, scale: torch.Tensor, rounding: Rounding, draws: torch.Tensor | None) -> torch.Tensor:
    y = torch.div(groups, scale) if draws is None else draws.addcdiv_(groups.to(torch.float32), scale)
    return y.round_() if rounding is Rounding.NEAREST else y.floor_()


def _round_float8(groups: torch.Tensor, scale: torch.Tensor, rounding: Rounding, draws: torch.Tensor | None) -> torch.Tensor:
    """Round to a multiple of the spacing that float8_e4m3fn has around each value (2**-9 among the subnormals)."""
    y = torch.div(groups, scale).to(torch.float32)
    exponent = torch.frexp(y).exponent - 1
    spacing = torch.ldexp(torch.ones_like(y), exponent.clamp_(min=Precision.FLOAT8_E4M3FN.min_exponent) - 3)
    y = y / spacing
    if draws is not None:
        y = y + draws
    y = y.round() if rounding is Rounding.NEAREST else y.floor()
    return y.mul(spacing).clamp(-LARGEST[Precision.FLOAT8_E4M3FN], LARGEST[Precision.FLOAT8_E4M3FN])


def _uniform(groups: torch.Tensor, seed: int, stream: Offset) -> torch.Tensor:
    """Float32 draws in [0, 1), multiples of 2**-16, one for each element."""
    draws = random_thresholds(groups.numel(), seed, stream, device=groups.device).mul_(1.0 / 256.0).add_(CENTRE)
    return draws.view_as(groups)
