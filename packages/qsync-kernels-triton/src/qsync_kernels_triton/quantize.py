"""Quantization of a float tensor to int8 or float8: its largest magnitude, the scale, the rounded values.

Symmetric: ``scale = absmax / 127`` (int8), ``/ 448`` (float8_e4m3fn) or ``/ 57344`` (float8_e5m2), 1 where that is below 2**-126,
``q = round(x / scale)``.  A group of elements that shares one scale is a *row*: the whole tensor, or what follows dimension 0
(an output channel), or the last dimension.  A row with NaN or infinity gets an infinite scale, so that the damage shows; the
integers beside it mean nothing.

Importing this module imports torch and triton (never CUDA itself); :mod:`qsync_kernels_triton.backend` does it inside ``build``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from qsync_core.errors import BackendError
from qsync_core.ir.precision import Granularity, Rounding
from qsync_kernels_triton import quantize_plan
from qsync_kernels_triton.config import QuantizeConfig
from qsync_kernels_triton.launching import signed_words
from qsync_kernels_triton.quantize_plan import FORMAT_CODE, Problem, TwicePlan
from qsync_kernels_triton.rounding import ROUNDING_CODE
from qsync_kernels_triton.transpose import transpose_bytes

SOURCES = (torch.float32, torch.float16, torch.bfloat16)


def scale_count(shape: tuple[int, ...], granularity: Granularity) -> int:
    """How many scales a tensor of that shape has."""
    if granularity is Granularity.PER_TENSOR:
        return 1
    if granularity is Granularity.PER_CHANNEL:
        return shape[0] if shape else 1
    numel = 1
    for size in shape[:-1]:
        numel *= size
    return numel


class Quantize:
    """The kernel ``quantize(x, q_out, scale_out, seed, offset, multiplier=None, transposed_out=None)``.

    ``x`` is a float32, float16 or bfloat16 tensor that fills its memory without gaps (channels-last does) and whose rows lie one
    after another; ``q_out`` int8, float8_e4m3fn or float8_e5m2 of the same shape and strides; ``scale_out`` float32 with
    :func:`scale_count` elements; ``seed`` and ``offset`` integers in 0..2**63-1.

    ``multiplier`` (float32, one element per channel: the last dimension of a matrix, dimension 1 of a 4-d tensor) is multiplied
    into ``x`` in float32 first.  ``transposed_out`` receives the transpose of a matrix's result, contiguous.

    Runs on the current stream, and on the device of ``x``.

    Raises:
        BackendError: from the call, when an operand does not have the agreed type or size.
    """

    def __init__(self, granularity: Granularity, rounding: Rounding, config: QuantizeConfig) -> None:
        self._granularity, self._rounding, self._config = granularity, ROUNDING_CODE[rounding], config
        self._plans: dict[Any, Any] = {}

    def __call__(
        self,
        x: torch.Tensor,
        q_out: torch.Tensor,
        scale_out: torch.Tensor,
        seed: int,
        offset: int,
        multiplier: torch.Tensor | None = None,
        transposed_out: torch.Tensor | None = None,
    ) -> None:
        """Write ``q_out`` and ``scale_out``."""
        key = (signature(x), signature(q_out), scale_out.dtype, scale_out.shape, signature(multiplier), signature(transposed_out))
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._plan(x, q_out, scale_out, multiplier, transposed_out)
        words = (*signed_words(seed), *signed_words(offset))
        if x.device.type == "cuda" and x.device.index != torch.cuda.current_device():
            with torch.cuda.device(x.device):
                plan(x, q_out, scale_out, words, multiplier, transposed_out)
        else:
            plan(x, q_out, scale_out, words, multiplier, transposed_out)

    def _plan(
        self,
        x: torch.Tensor,
        q_out: torch.Tensor,
        scale_out: torch.Tensor,
        multiplier: torch.Tensor | None,
        transposed_out: torch.Tensor | None,
    ) -> Callable[..., None]:
        """What a call with operands like these does; refuses operands of another type or size."""
        rows = scale_count(tuple(x.shape), self._granularity)
        check_operands(x, q_out, scale_out, self._granularity, rows)
        if multiplier is not None or transposed_out is not None:
            _check_extras(x, q_out, multiplier, transposed_out)
        if x.numel() == 0:
            return lambda x, q, scale, *_: scale.fill_(1.0)
        problem = Problem(x, rows, q_out.dtype, self._rounding, multiplier)
        if transposed_out is not None and rows == 1:
            twice = TwicePlan(problem, self._config, (x.shape[0], x.shape[1]))
            return lambda x, q, scale, words, multiplier, transposed: twice(
                x, q.view(torch.int8), transposed.view(torch.int8), scale, words, multiplier
            )
        plan = quantize_plan.plan_for(problem, self._config)
        if transposed_out is None and q_out.dtype is torch.int8:
            return lambda x, q, scale, words, multiplier, _: plan(x, q, scale, words, multiplier)

        def with_views(x: Any, q: Any, scale: Any, words: Any, multiplier: Any, transposed: Any) -> None:
            plan(x, q.view(torch.int8), scale, words, multiplier)
            if transposed is not None:
                transpose_bytes(q, transposed)

        return with_views


def signature(x: torch.Tensor | None) -> Any:
    """All of a tensor that decides how it is treated, except its address."""
    return None if x is None else (x.dtype, x.shape, x.stride(), x.device)


def build_quantize(granularity: Granularity, rounding: Rounding, config: QuantizeConfig) -> Quantize:
    """The kernel described at :class:`Quantize`."""
    return Quantize(granularity, rounding, config)


def _rows_follow_each_other(x: torch.Tensor, granularity: Granularity) -> bool:
    """Whether memory can be taken row by row without gaps."""
    if x.is_contiguous():
        return True
    if granularity is Granularity.PER_ROW or not torch.ops.aten.is_non_overlapping_and_dense(x):
        return False
    return granularity is Granularity.PER_TENSOR or x.shape[0] <= 1 or x.stride(0) == x.numel() // x.shape[0]


def check_operands(x: torch.Tensor, q_out: torch.Tensor, scale_out: torch.Tensor, granularity: Granularity, rows: int) -> None:
    """Refuse operands of another type or size than the kernels take.

    Raises:
        BackendError: naming each of them.
    """
    problems = []
    if x.dtype not in SOURCES:
        problems.append(f"x must be float32, float16 or bfloat16, got {x.dtype}")
    if not _rows_follow_each_other(x, granularity):
        problems.append(f"x must be dense, one {granularity} after another, got shape {tuple(x.shape)} with strides {x.stride()}")
    if q_out.dtype not in FORMAT_CODE or q_out.shape != x.shape or q_out.stride() != x.stride():
        problems.append(
            f"q_out must be int8, float8_e4m3fn or float8_e5m2 of shape {tuple(x.shape)} and x's strides, "
            f"got {q_out.dtype} {tuple(q_out.shape)}"
        )
    if scale_out.dtype is not torch.float32 or scale_out.numel() != rows or not scale_out.is_contiguous():
        problems.append(f"scale_out must be {rows} contiguous float32, got {scale_out.dtype} {tuple(scale_out.shape)}")
    if problems:
        raise BackendError("backend triton can not quantize: " + "; ".join(problems))


def _check_extras(
    x: torch.Tensor, q_out: torch.Tensor, multiplier: torch.Tensor | None, transposed_out: torch.Tensor | None
) -> None:
    problems = []
    if multiplier is not None:
        if x.ndim not in (2, 4):
            problems.append(f"a multiplier goes with a 2-d or 4-d tensor, and x has shape {tuple(x.shape)}")
        else:
            channels = x.shape[-1] if x.ndim == 2 else x.shape[1]
            if multiplier.dtype is not torch.float32 or multiplier.shape != (channels,) or not multiplier.is_contiguous():
                found = f"{multiplier.dtype} {tuple(multiplier.shape)}"
                problems.append(f"multiplier must be {channels} contiguous float32, one for each channel of x, got {found}")
            if x.ndim == 2 and not x.is_contiguous():
                problems.append(f"a matrix with a multiplier must be contiguous, and x has strides {x.stride()}")
    if transposed_out is not None:
        wanted = (x.shape[-1], x.shape[0])
        if x.ndim != 2 or not x.is_contiguous():
            problems.append(f"a transposed result needs a contiguous matrix, got shape {tuple(x.shape)} with strides {x.stride()}")
        elif transposed_out.shape != wanted or transposed_out.dtype is not q_out.dtype or not transposed_out.is_contiguous():
            found = f"{transposed_out.dtype} {tuple(transposed_out.shape)}"
            problems.append(f"transposed_out must be {q_out.dtype} of shape {wanted}, contiguous, got {found}")
    if problems:
        raise BackendError("backend triton can not quantize: " + "; ".join(problems))
