"""The kernels of norms of rows and activations: operands checked and launches worked out once for each layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from torch import Tensor

from qsync_core.ir.chain import Activation
from qsync_core.ir.precision import Granularity, Rounding
from qsync_kernels_triton.config import ONE_READ, ProducerConfig
from qsync_kernels_triton.launching import Launch, Planned, as_bytes, refuse
from qsync_kernels_triton.producers.activation import absmax_of_activated, activate_rows, activation_gradient, round_activated
from qsync_kernels_triton.producers.functions import ACTIVATION_CODE
from qsync_kernels_triton.producers.layer_norm import normalize_rows, round_normalized
from qsync_kernels_triton.producers.layer_norm_gradient import layer_norm_gradient
from qsync_kernels_triton.producers.operands import (
    MOST_PARTIALS,
    copy_problems,
    cut_by_rows,
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

WIDEST = 1024
DENSE = torch.contiguous_format


def build_layer_norm_output(granularity: Granularity, rounding: Rounding, config: ProducerConfig) -> Callable[..., None]:
    """The kernel ``layer_norm.output`` of docs/design/fused-chains.md: one launch, two for one scale of the whole tensor.

    Inputs are (M, K) with any strides, outputs contiguous.  It runs on the current stream, and raises ``BackendError`` for operands
    of another type, size or layout.
    """
    planned = _norm_output("layer_norm.output", granularity, rounding, config)

    def layer_norm_output(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor | None, sum_out: Tensor | None,
        mean_out: Tensor, rstd_out: Tensor, out: Tensor | None, q_out: Tensor | None, scale_out: Tensor | None,
        stream_out: Tensor | None, x_q_out: Tensor | None, x_scale_out: Tensor | None, seed: int, x_seed: int, offset: int | Tensor,
    ) -> None:  # fmt: skip
        planned(x, weight, bias, eps, residual, sum_out, mean_out, rstd_out, out, q_out, scale_out, stream_out, x_q_out,
                x_scale_out, *random_streams(seed, x_seed, offset))  # fmt: skip

    return layer_norm_output


def build_rms_norm_output(granularity: Granularity, rounding: Rounding, config: ProducerConfig) -> Callable[..., None]:
    """The kernel ``rms_norm.output`` of docs/design/fused-chains.md; otherwise as :func:`build_layer_norm_output`."""
    planned = _norm_output("rms_norm.output", granularity, rounding, config)

    def rms_norm_output(
        x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None, sum_out: Tensor | None, rstd_out: Tensor,
        out: Tensor | None, q_out: Tensor | None, scale_out: Tensor | None, stream_out: Tensor | None, x_q_out: Tensor | None,
        x_scale_out: Tensor | None, seed: int, x_seed: int, offset: int | Tensor,
    ) -> None:  # fmt: skip
        planned(x, weight, None, eps, residual, sum_out, None, rstd_out, out, q_out, scale_out, stream_out, x_q_out, x_scale_out,
                *random_streams(seed, x_seed, offset))  # fmt: skip

    return rms_norm_output


def _norm_output(op: str, granularity: Granularity, rounding: Rounding, config: ProducerConfig) -> Planned:
    """Layer norm and RMS norm, which has neither a bias nor means."""
    centered = op == "layer_norm.output"

    def plan(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor | None, sum_: Tensor | None,
        mean: Tensor | None, rstd: Tensor, out: Tensor | None, q: Tensor | None, scale: Tensor | None, stream: Tensor | None,
        x_q: Tensor | None, x_scale: Tensor | None, offset: Tensor | None, *_: int,
    ) -> Callable[..., None]:  # fmt: skip
        refuse(op, output_problems(granularity, x, residual, sum_, out, q, scale, x_q, x_scale))
        refuse(op, vector_problems("weight bias", (weight, bias), x.shape[1]))
        refuse(op, vector_problems("mean_out rstd_out", (mean, rstd), x.shape[0]))
        refuse(op, stream_problems(offset, stream, x.device))
        if x.numel() == 0:
            return lambda *operands: fill(operands[10], operands[11], operands[13], operands[14], operands[-2:])
        given = {"WEIGHT": weight is not None, "BIAS": bias is not None, "RESIDUAL": residual is not None, "CENTERED": centered}
        # The second launch reads the sum that the first has kept, where it has.
        again = {name: value and (name != "RESIDUAL" or sum_ is None) for name, value in given.items()}
        first = normalize_rows, given | {"WRITE_SUM": sum_ is not None}
        launches = RowLaunches(x, out, q, x_q, offset, stream, granularity, rounding, config, first, (round_normalized, again))

        def run(
            x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor | None, sum_: Tensor | None,
            mean: Tensor | None, rstd: Tensor, out: Tensor | None, q: Tensor | None, scale: Tensor | None, stream: Tensor | None,
            x_q: Tensor | None, x_scale: Tensor | None, offset: Tensor | None, *words: int,
        ) -> None:  # fmt: skip
            x = x.contiguous()
            means = rstd if mean is None else mean
            vectors = [rstd if vector is None else vector.contiguous() for vector in (weight, bias)]
            tensors = (x, *vectors, x if residual is None else residual.contiguous())
            kept = x if sum_ is None else sum_
            again = (kept, *vectors, tensors[3], means, rstd)
            launches((*tensors, kept, means, rstd), again, (out, q, scale, x_q, x_scale, offset, stream), (eps,), words)

        return run

    return Planned(plan)


def build_activation_output(
    activation: Activation, granularity: Granularity, rounding: Rounding, config: ProducerConfig
) -> Callable[..., None]:
    """The kernel ``activation.output`` of docs/design/fused-chains.md; otherwise as :func:`build_layer_norm_output`."""

    def plan(
        x: Tensor,
        out: Tensor | None,
        q: Tensor | None,
        scale: Tensor | None,
        stream: Tensor | None,
        x_q: Tensor | None,
        x_scale: Tensor | None,
        offset: Tensor | None,
        *_: int,
    ) -> Callable[..., None]:
        refuse("activation.output", output_problems(granularity, x, None, None, out, q, scale, x_q, x_scale))
        refuse("activation.output", stream_problems(offset, stream, x.device))
        if x.numel() == 0:
            return lambda *operands: fill(operands[3], operands[4], operands[6], operands[7], operands[-2:])
        given = {"ACTIVATION": ACTIVATION_CODE[activation], "GATED": False}
        launches = RowLaunches(
            x, out, q, x_q, offset, stream, granularity, rounding, config,
            (activate_rows, given), (round_activated, given), (absmax_of_activated, given),
        )  # fmt: skip

        def run(
            x: Tensor, out: Tensor | None, q: Tensor | None, scale: Tensor | None, stream: Tensor | None, x_q: Tensor | None,
            x_scale: Tensor | None, offset: Tensor | None, *words: int,
        ) -> None:  # fmt: skip
            x = x.contiguous()
            launches((x, x, x, x), (x, x), (out, q, scale, x_q, x_scale, offset, stream), (0, 0), words)

        return run

    planned = Planned(plan)

    def activation_output(
        x: Tensor, out: Tensor | None, q_out: Tensor | None, scale_out: Tensor | None, stream_out: Tensor | None,
        x_q_out: Tensor | None, x_scale_out: Tensor | None, seed: int, x_seed: int, offset: int | Tensor,
    ) -> None:  # fmt: skip
        planned(x, out, q_out, scale_out, stream_out, x_q_out, x_scale_out,
                *random_streams(seed, x_seed, offset))  # fmt: skip

    return activation_output


def output_problems(
    granularity: Granularity, x: Tensor, residual: Tensor | None, sum_: Tensor | None, out: Tensor | None, q: Tensor | None,
    scale: Tensor | None, x_q: Tensor | None, x_scale: Tensor | None,
) -> Iterator[str]:  # fmt: skip
    """What is wrong with the operands of a forward kernel, each a sentence."""
    if x.ndim != 2:
        yield f"x must be a matrix, got shape {tuple(x.shape)}"
        return
    shape = tuple(x.shape)
    yield from matrix_problems("x residual sum_out out", (x, residual, sum_, out), shape)
    yield from vector_problems("scale_out", (scale,), 1 if granularity is Granularity.PER_TENSOR else shape[0])
    yield from vector_problems("x_scale_out", (x_scale,), shape[0])
    yield from copy_problems("q_out", q, scale, shape, "scale_out")
    yield from copy_problems("x_q_out", x_q, x_scale, shape, "x_scale_out")
    outputs = (sum_, out, q, scale, x_q, x_scale)
    yield from layout_problems("sum_out out q_out scale_out x_q_out x_scale_out", outputs, DENSE)


def fill(
    scale: Tensor | None, stream: Tensor | None, x_scale: Tensor | None, offset: Tensor | None, words: tuple[int, ...]
) -> None:
    """Scales and stream of a tensor without elements."""
    for vector in (scale, x_scale):
        if vector is not None:
            vector.fill_(1.0)
    begin_stream(stream, offset, words)


class RowLaunches:
    """One launch over rows that writes everything, and one more for the copy where the whole tensor has one scale.

    Both kernels take their own tensors, then results, sizes, numbers and words of seeds and offset.

    Args:
        first, second: the kernels, each with its own constants.
        maxima: the first one's place where it would write nothing but partial maxima; takes the tensors of the second.
    """

    def __init__(
        self, x: Tensor, out: Tensor | None, q: Tensor | None, x_q: Tensor | None, offset: Tensor | None, stream: Tensor | None,
        granularity: Granularity, rounding: Rounding, config: ProducerConfig, first: tuple[object, dict[str, Any]],
        second: tuple[object, dict[str, Any]], maxima: tuple[object, dict[str, Any]] | None = None,
    ) -> None:  # fmt: skip
        rows, length = x.shape
        cut = cut_by_rows(rows, length, ONE_READ, config)
        self._one_scale, self._maxima = q is not None and granularity is Granularity.PER_TENSOR, None
        scales = 0 if q is None else 2 if self._one_scale else 1
        form = {"FORMAT": 0 if q is None else FORMAT_CODE[q.dtype], "ROUNDING": ROUNDING_CODE[rounding]}
        form |= {"LIVE": offset is not None}
        x_form = {"WRITE_X": x_q is not None, "X_FORMAT": 0 if x_q is None else FORMAT_CODE[x_q.dtype]}
        written = {"HELD": cut.held, "WRITE_OUT": out is not None, "SCALES": scales}
        self._programs = programs_for(cut, config.apply, x.device, strips=1)
        if self._one_scale:
            self._programs = min(self._programs, MOST_PARTIALS)
        self._adds = stream is not None and not self._one_scale and self._programs > 1
        early = {"STREAM": 0 if stream is None or self._one_scale else 2 if self._adds else 1}
        constants = cut.constants | first[1] | written | x_form | form | cut.aligned | early
        self._first = Launch(first[0], constants, num_warps=cut.warps)
        if self._one_scale:
            free = cut_freely(rows, length, WIDEST, config)
            tiles, programs = free.tiles * free.strips, programs_for(free, config.apply, x.device, strips=1)
            if maxima is not None and out is None and x_q is None:
                self._maxima = Launch(maxima[0], free.constants | maxima[1], num_warps=free.warps)
                self._programs = min(tiles, programs * free.strips, MOST_PARTIALS)
            merged = {"PARTIALS": max(16, triton.next_power_of_2(self._programs))}
            merged |= {"STREAM": int(stream is not None)}
            self._second = Launch(second[0], free.constants | second[1] | merged | form | free.aligned, num_warps=free.warps)
            self._tiles = min(tiles, programs * free.strips) if config.apply else tiles
        self._sizes = (rows, length // cut.unit)

    def __call__(
        self, own: tuple[Tensor, ...], again: tuple[Tensor, ...], results: tuple[Tensor | None, ...], numbers: tuple[float, ...],
        words: tuple[int, ...],
    ) -> None:  # fmt: skip
        """Write all results that are not None; ``words`` are the low and high words of seed, x_seed and offset."""
        out, q, scale, x_q, x_scale, offset, stream = results
        x = own[0]
        if self._adds:
            begin_stream(stream, offset, words[4:])
        # Partial maxima, and behind them partial checksums.
        partial = torch.empty(2 * self._programs, dtype=torch.float32, device=x.device) if self._one_scale else scale
        copies = [x if copy is None else as_bytes(copy) for copy in (q, x_q)]
        scales = [x if vector is None else vector for vector in (partial, x_scale)]
        random = [x if tensor is None else tensor for tensor in (offset, stream)]
        if self._maxima is not None:
            self._maxima((self._programs, 1, 1), None, (*again, scales[0]), self._sizes)
        else:
            tensors = (*own, x if out is None else out, copies[0], scales[0], copies[1], scales[1], *random)
            self._first((self._programs, 1, 1), None, tensors, (*self._sizes, *numbers, *words))
        if self._one_scale:
            rounded = (*again, scales[0], copies[0], x if scale is None else scale, *random)
            self._second((self._tiles, 1, 1), None, rounded, (*self._sizes, self._programs, *words[:2], *words[4:]))


def build_layer_norm_grad_input(config: ProducerConfig) -> Callable[..., None]:
    """The kernel ``layer_norm.grad_input`` of docs/design/fused-chains.md.

    Inputs are (M, K) with any strides, outputs contiguous, or None where they are not wanted.  It runs on the current stream, and
    raises ``BackendError`` for operands of another type, size or layout.
    """
    return _norm_grad_input("layer_norm.grad_input", config)


def build_rms_norm_grad_input(config: ProducerConfig) -> Callable[..., None]:
    """The kernel ``rms_norm.grad_input`` of docs/design/fused-chains.md; otherwise as :func:`build_layer_norm_grad_input`."""
    planned = _norm_grad_input("rms_norm.grad_input", config)

    def rms_norm_grad_input(
        grad: Tensor, x: Tensor, x_scale: Tensor | None, rstd: Tensor, weight: Tensor | None, grad_input_out: Tensor | None,
        grad_weight_out: Tensor | None,
    ) -> None:  # fmt: skip
        planned(grad, x, x_scale, None, rstd, weight, grad_input_out, grad_weight_out, None)

    return rms_norm_grad_input


def _norm_grad_input(op: str, config: ProducerConfig) -> Planned:
    """Layer norm and RMS norm, which has neither means nor a bias."""
    centered = op == "layer_norm.grad_input"

    def plan(
        grad: Tensor, x: Tensor, x_scale: Tensor | None, mean: Tensor | None, rstd: Tensor, weight: Tensor | None,
        grad_input: Tensor | None, grad_weight: Tensor | None, grad_bias: Tensor | None,
    ) -> Callable[..., None]:  # fmt: skip
        refuse(op, gradient_problems(grad, x, x_scale, grad_input))
        refuse(op, vector_problems("mean rstd", (mean, rstd), x.shape[0]))
        vectors = (weight, grad_weight, grad_bias)
        refuse(op, vector_problems("weight grad_weight_out grad_bias_out", vectors, x.shape[1]))
        refuse(op, layout_problems("grad_weight_out grad_bias_out", (grad_weight, grad_bias), DENSE))
        if x.numel() == 0:
            return lambda *operands: _zero(*operands[7:])
        rows, length = x.shape
        cut = cut_by_rows(rows, length, ONE_READ, config)
        sums = grad_weight is not None or grad_bias is not None
        constants = {
            "HELD": cut.held,
            "WEIGHT": weight is not None,
            "EIGHT_BIT": x_scale is not None,
            "WRITE_INPUT": grad_input is not None,
            "WRITE_SUMS": sums,
            "CENTERED": centered,
        }
        launch = Launch(layer_norm_gradient, cut.constants | constants, num_warps=cut.warps)
        finish = Launch(finish_sums, {"ROWS": 128, "BLOCK": 16}, num_warps=4)
        programs = programs_for(cut, config.reduce, x.device, strips=1)
        sizes, unit = (rows, length // cut.unit), torch.empty if cut.held else torch.zeros

        def run(
            grad: Tensor, x: Tensor, x_scale: Tensor | None, mean: Tensor | None, rstd: Tensor, weight: Tensor | None,
            grad_input: Tensor | None, grad_weight: Tensor | None, grad_bias: Tensor | None,
        ) -> None:  # fmt: skip
            grad, x = grad.contiguous(), x.contiguous()
            rstd = rstd.contiguous()
            mean = rstd if mean is None else mean.contiguous()
            partial = unit(2 * (programs + 1) * length if sums else 1, dtype=torch.float32, device=x.device)
            vectors = [rstd if v is None else v.contiguous() for v in (x_scale, weight)]
            tensors = (grad, x, vectors[0], mean, rstd, vectors[1], grad if grad_input is None else grad_input, partial)
            launch((programs, 1, 1), None, tensors, sizes)
            if sums:
                _, spare, other = partial.split([2 * programs * length, length, length])
                totals = (spare if grad_weight is None else grad_weight, other if grad_bias is None else grad_bias)
                finish((triton.cdiv(length, 16), 2 if centered else 1, 1), None, (partial, *totals), (programs, length))

        return run

    return Planned(plan)


def build_activation_grad_input(activation: Activation, config: ProducerConfig) -> Callable[..., None]:
    """The kernel ``activation.grad_input`` of docs/design/fused-chains.md; otherwise as :func:`build_layer_norm_grad_input`."""

    def plan(grad: Tensor, x: Tensor, x_scale: Tensor | None, grad_input: Tensor) -> Callable[..., None]:
        refuse("activation.grad_input", gradient_problems(grad, x, x_scale, grad_input))
        if x.numel() == 0:
            return lambda *_: None
        rows, length = x.shape
        cut = cut_freely(rows, length, WIDEST, config)
        constants = {"ACTIVATION": ACTIVATION_CODE[activation], "EIGHT_BIT": x_scale is not None}
        launch = Launch(activation_gradient, cut.constants | constants, num_warps=cut.warps)
        tiles = cut.tiles * cut.strips
        wanted = programs_for(cut, config.apply, x.device, strips=1) * cut.strips
        programs, sizes = min(tiles, wanted), (rows, length // cut.unit)

        def run(grad: Tensor, x: Tensor, x_scale: Tensor | None, grad_input: Tensor) -> None:
            x = x.contiguous()
            scales = x if x_scale is None else x_scale.contiguous()
            launch((programs, 1, 1), None, (grad.contiguous(), x, scales, grad_input), sizes)

        return run

    return Planned(plan)


def gradient_problems(grad: Tensor, x: Tensor, x_scale: Tensor | None, grad_input: Tensor | None) -> Iterator[str]:
    """What is wrong with the operands of a backward kernel, each a sentence."""
    if x.ndim != 2:
        yield f"x must be a matrix, got shape {tuple(x.shape)}"
        return
    yield from matrix_problems("grad grad_input_out", (grad, grad_input), tuple(x.shape))
    yield from saved_problems(x, x_scale, x.shape[0])
    yield from layout_problems("grad_input_out", (grad_input,), DENSE)


def _zero(*gradients: Tensor | None) -> None:
    for gradient in gradients:
        if gradient is not None:
            gradient.fill_(0.0)
