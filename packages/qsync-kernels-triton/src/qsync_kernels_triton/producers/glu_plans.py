"""The kernels of gated linear units: operands checked and launches worked out once for each layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from qsync_core.ir.chain import Activation
from qsync_core.ir.precision import Granularity, Rounding
from qsync_kernels_triton.config import ProducerConfig
from qsync_kernels_triton.launching import Launch, Planned, as_bytes, refuse, signed_words
from qsync_kernels_triton.producers.activation import absmax_of_activated, activate_rows, glu_gradient, round_activated
from qsync_kernels_triton.producers.functions import ACTIVATION_CODE
from qsync_kernels_triton.producers.operands import (
    copy_problems,
    cut_freely,
    layout_problems,
    matrix_problems,
    maxima_problems,
    programs_for,
    random_streams,
    saved_problems,
    vector_problems,
)
from qsync_kernels_triton.producers.row_plans import DENSE, WIDEST, RowLaunches, fill, gradient_problems, output_problems
from qsync_kernels_triton.quantize.rounding import COLUMNS, ROUNDING_CODE
from qsync_kernels_triton.quantize.single import FORMAT_CODE, stream_problems


def build_glu_output(
    activation: Activation, granularity: Granularity, rounding: Rounding, config: ProducerConfig
) -> Callable[..., None]:
    """The kernel ``glu.output`` of docs/design/fused-chains.md: one launch, two for one scale of the whole tensor.

    Inputs are (M, K) with any strides, outputs contiguous.  It runs on the current stream, and raises ``BackendError`` for operands
    of another type, size or layout.
    """

    def plan(
        x: Tensor, factor: Tensor, out: Tensor | None, q: Tensor | None, scale: Tensor | None, stream: Tensor | None,
        x_q: Tensor | None, x_scale: Tensor | None, factor_q: Tensor | None, factor_scale: Tensor | None,
        factor_low: int, factor_high: int, offset: Tensor | None, *_: int,
    ) -> Callable[..., None]:  # fmt: skip
        refuse("glu.output", output_problems(granularity, x, None, None, out, q, scale, x_q, x_scale))
        refuse("glu.output", matrix_problems("factor", (factor,), tuple(x.shape)))
        refuse("glu.output", copy_problems("factor_q_out", factor_q, factor_scale, tuple(x.shape), "factor_scale_out"))
        refuse("glu.output", vector_problems("factor_scale_out", (factor_scale,), x.shape[0]))
        refuse("glu.output", layout_problems("factor_q_out factor_scale_out", (factor_q, factor_scale), DENSE))
        refuse("glu.output", stream_problems(offset, stream, x.device))
        if (x_q is None) != (factor_q is None):
            refuse("glu.output", ["x_q_out and factor_q_out come together, and one of them is None"])
        if x.numel() == 0:
            return _fill_empty
        given = {"ACTIVATION": ACTIVATION_CODE[activation], "GATED": True}
        launches = RowLaunches(
            x, out, q, x_q, offset, stream, granularity, rounding, config,
            (activate_rows, given), (round_activated, given), (absmax_of_activated, given),
        )  # fmt: skip

        def run(
            x: Tensor, factor: Tensor, out: Tensor | None, q: Tensor | None, scale: Tensor | None, stream: Tensor | None,
            x_q: Tensor | None, x_scale: Tensor | None, factor_q: Tensor | None, factor_scale: Tensor | None,
            factor_low: int, factor_high: int, offset: Tensor | None, *words: int,
        ) -> None:  # fmt: skip
            x, factor = x.contiguous(), factor.contiguous()
            copies = x if factor_q is None else as_bytes(factor_q), x if factor_scale is None else factor_scale
            results = (out, q, scale, x_q, x_scale, offset, stream)
            launches((x, factor, *copies), (x, factor), results, (factor_low, factor_high), words)

        return run

    planned = Planned(plan)

    def glu_output(
        x: Tensor, factor: Tensor, out: Tensor | None, q_out: Tensor | None, scale_out: Tensor | None, stream_out: Tensor | None,
        x_q_out: Tensor | None, x_scale_out: Tensor | None, factor_q_out: Tensor | None, factor_scale_out: Tensor | None,
        seed: int, x_seed: int, factor_seed: int, offset: int | Tensor,
    ) -> None:  # fmt: skip
        planned(x, factor, out, q_out, scale_out, stream_out, x_q_out, x_scale_out, factor_q_out, factor_scale_out,
                *signed_words(factor_seed), *random_streams(seed, x_seed, offset))  # fmt: skip

    return glu_output


def _fill_empty(
    x: Tensor, factor: Tensor, out: Tensor | None, q: Tensor | None, scale: Tensor | None, stream: Tensor | None,
    x_q: Tensor | None, x_scale: Tensor | None, factor_q: Tensor | None, factor_scale: Tensor | None,
    factor_low: int, factor_high: int, offset: Tensor | None, *words: int,
) -> None:  # fmt: skip
    """Scales and stream of tensors without elements."""
    fill(factor_scale, None, None, None, words[-2:])
    fill(scale, stream, x_scale, offset, words[-2:])


def build_glu_grad_input(
    activation: Activation, granularity: Granularity, rounding: Rounding, config: ProducerConfig
) -> Callable[..., None]:
    """The kernel ``glu.grad_input`` of docs/design/fused-chains.md; what is not wanted is None.

    Granularity and rounding are those of the copy that is written again.
    """

    def plan(
        grad: Tensor, x: Tensor, x_scale: Tensor | None, factor: Tensor, factor_scale: Tensor | None, grad_input: Tensor | None,
        grad_factor: Tensor | None, scale: Tensor | None, q: Tensor | None, multiplier: Tensor | None, maxima: Tensor | None,
        factor_multiplier: Tensor | None, factor_maxima: Tensor | None, offset: Tensor | None, *_: int,
    ) -> Callable[..., None]:  # fmt: skip
        refuse("glu.grad_input", gradient_problems(grad, x, x_scale, grad_input))
        refuse("glu.grad_input", saved_problems(factor, factor_scale, x.shape[0]))
        refuse("glu.grad_input", matrix_problems("grad_factor_out", (grad_factor,), tuple(x.shape)))
        refuse("glu.grad_input", copy_problems("q_out", q, scale, tuple(x.shape), "scale"))
        refuse("glu.grad_input", vector_problems("scale", (scale,), 1 if granularity is Granularity.PER_TENSOR else x.shape[0]))
        refuse("glu.grad_input", layout_problems("grad_factor_out q_out", (grad_factor, q), DENSE))
        refuse("glu.grad_input", maxima_problems("maxima_out", maxima, grad_input, multiplier, x.shape[1]))
        refuse("glu.grad_input", maxima_problems("factor_maxima_out", factor_maxima, grad_factor, factor_multiplier, x.shape[1]))
        if factor.shape != x.shape or (factor_scale is None) != (x_scale is None):
            said = f"got {x.dtype} {tuple(x.shape)} and {factor.dtype} {tuple(factor.shape)}"
            refuse("glu.grad_input", [f"x and factor are kept alike, {said}"])
        if x.numel() == 0:
            return _no_maxima
        rows, length = x.shape
        cut = cut_freely(rows, length, WIDEST, config)
        constants = {"ACTIVATION": ACTIVATION_CODE[activation], "EIGHT_BIT": x_scale is not None}
        constants |= {"WRITE_INPUT": grad_input is not None, "WRITE_FACTOR": grad_factor is not None}
        constants |= {"SCALES": 0 if q is None else 2 if granularity is Granularity.PER_TENSOR else 1, "LIVE": offset is not None}
        constants |= {"FORMAT": 0 if q is None else FORMAT_CODE[q.dtype], "ROUNDING": ROUNDING_CODE[rounding]}
        constants |= {"MAXIMA": _maxima_code(maxima, multiplier), "FACTOR_MAXIMA": _maxima_code(factor_maxima, factor_multiplier)}
        launch = Launch(glu_gradient, cut.constants | constants | cut.aligned, num_warps=cut.warps)
        wanted = programs_for(cut, config.apply, x.device, strips=1) * cut.strips
        programs, sizes = min(cut.tiles * cut.strips, wanted), (rows, length // cut.unit)
        found = [tensor for tensor in (maxima, factor_maxima) if tensor is not None]
        partials = min((tensor.shape[1] for tensor in found), default=0)
        if found:
            if cut.strips > partials or found[0].shape != found[-1].shape:
                said = ", ".join(str(tuple(tensor.shape)) for tensor in found)
                least = f"(2, P), both alike, P at least {cut.strips}"
                refuse("glu.grad_input", [f"maxima of {length} columns are {least}, got {said}"])
            programs = cut.strips * max(1, min(programs, partials) // cut.strips)

        def run(
            grad: Tensor, x: Tensor, x_scale: Tensor | None, factor: Tensor, factor_scale: Tensor | None,
            grad_input: Tensor | None, grad_factor: Tensor | None, scale: Tensor | None, q: Tensor | None,
            multiplier: Tensor | None, maxima: Tensor | None, factor_multiplier: Tensor | None, factor_maxima: Tensor | None,
            offset: Tensor | None, *words: int,
        ) -> None:  # fmt: skip
            grad, x, factor = grad.contiguous(), x.contiguous(), factor.contiguous()
            scales = [grad if one is None else one.contiguous() for one in (x_scale, factor_scale, scale)]
            written = [grad if tensor is None else tensor for tensor in (grad_input, grad_factor)]
            copy = grad if q is None else as_bytes(q), grad if offset is None else offset
            partial = [scales[0] if one is None else one for one in (maxima, factor_maxima, multiplier, factor_multiplier)]
            tensors = (grad, x, scales[0], factor, scales[1], *written, scales[2], *copy, *partial)
            launch((programs, 1, 1), None, tensors, (partials, *sizes, *words[:2], *words[4:]))

        return run

    planned = Planned(plan)

    def glu_grad_input(
        grad: Tensor, x: Tensor, x_scale: Tensor | None, factor: Tensor, factor_scale: Tensor | None, grad_input_out: Tensor | None,
        grad_factor_out: Tensor | None, scale: Tensor | None = None, q_out: Tensor | None = None, seed: int = 0,
        offset: int | Tensor = 0, *, multiplier: Tensor | None = None, maxima_out: Tensor | None = None,
        factor_multiplier: Tensor | None = None, factor_maxima_out: Tensor | None = None,
    ) -> None:  # fmt: skip
        planned(grad, x, x_scale, factor, factor_scale, grad_input_out, grad_factor_out, scale, q_out, multiplier, maxima_out,
                factor_multiplier, factor_maxima_out, *random_streams(seed, 0, offset))  # fmt: skip

    return glu_grad_input


def _maxima_code(maxima: Tensor | None, multiplier: Tensor | None) -> int:
    """0: none are wanted; of a gradient times its columns' factors, or as it is."""
    return 0 if maxima is None else 1 if multiplier is None else COLUMNS.value


def _no_maxima(*operands: Any) -> None:
    """Fill the maxima of gradients without elements."""
    for maxima in (operands[10], operands[12]):
        if maxima is not None:
            maxima.zero_()
