"""What else PyTorch has for a problem, beside its 16-bit products: torch._int_mm, torch.compile, and torchao where installed.

A baseline computes the problem's product in its own format, or what comes nearest to it; ``BASELINES`` says what it leaves out.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.kernels.backend import Op
from qsync_torch.benchmarking.contenders import Contender, in_16_bit
from qsync_torch.benchmarking.problems import Problem
from qsync_torch.benchmarking.race import Thunk
from qsync_torch.benchmarking.results import BASELINES as SIXTEEN_BIT
from qsync_torch.kernels.operands import Arguments as Operands

BASELINES = {
    "torch._int_mm": "PyTorch's int8 product alone: int32 out, no dequantization; the weight as nn.Linear holds it",
    "torch._int_mm (K, N)": "the same with the weight stored transposed",
    "float16": "cuBLAS or cuDNN (on a CPU oneDNN) in float16 on float16 operands",
    "bfloat16": "the same in bfloat16",
    "eager": "the formulas as eager PyTorch operations; a quantization takes the range by min and max",
    "torch.compile": "the same compiled by torch.compile",
    "eager (absmax)": "a quantization that takes the range by abs and max",
    "torch.compile (absmax)": "the same compiled by torch.compile",
    "torchao": "torchao's scaled int8 product",
}
"""Names of the baselines and what they are."""


def baseline_names(op: str) -> tuple[str, ...]:
    """Baselines that an operator has, whether or not they run here."""
    if op == Op.QUANTIZE:
        return ("eager", "torch.compile", "eager (absmax)", "torch.compile (absmax)")
    if op == Op.LINEAR_OUTPUT:
        return ("torch._int_mm", *SIXTEEN_BIT, "torch.compile", "torchao")
    return SIXTEEN_BIT


def why_not(name: str, problem: Problem, device: torch.device) -> str | None:
    """Why a baseline cannot run a problem here; None when it can be tried."""
    int8 = str(problem.variant.compute) == "int8"
    if name == "torchao" and importlib.util.find_spec("torchao") is None:
        return "torchao is not installed"
    if name.startswith(("torch._int_mm", "torch.compile", "torchao")) and not int8:
        return f"{name} is compared for int8 only"
    if name == "torchao" and device.type != "cuda":
        return "torchao's product is a Triton kernel and needs a CUDA device"
    if problem.op == Op.QUANTIZE and problem.flags:
        return f"{name} is compared for plain quantization only"
    if name.startswith("torch.compile") and device.type == "cpu" and importlib.util.find_spec("triton") is None:
        return "torch.compile is compared on CUDA devices"
    return None


def contender(name: str, problem: Problem, operands: list[Operands], device: torch.device) -> Contender:
    """The baseline, ready to be timed on these operands; 16-bit products on operands of their own."""
    if name in SIXTEEN_BIT:
        return in_16_bit(problem, Precision(name), device)
    return Contender(name, "", calls(name, problem, operands), problem, operands[0])


def calls(name: str, problem: Problem, operands: list[Operands]) -> tuple[Thunk, ...]:
    """The baseline's calls, one per set of operands."""
    if problem.op == Op.QUANTIZE:
        v = problem.variant
        formulas = quantize_by_absmax if name.endswith("(absmax)") else quantize_by_min_and_max
        function = _compiled(formulas) if name.startswith("torch.compile") else formulas
        return tuple(functools.partial(function, arguments[0], v.x_granularity, v.rounding) for arguments in operands)
    makers: dict[str, Callable[[Operands], Thunk]] = {
        "torch._int_mm": _int_mm,
        "torch._int_mm (K, N)": _int_mm_transposed,
        "torch.compile": _compiled_linear,
        "torchao": _torchao,
    }
    return tuple(makers[name](arguments) for arguments in operands)


def _int_mm(operands: Operands) -> Thunk:
    x, _, w, *_ = operands
    out = torch.empty(x.shape[0], w.shape[0], dtype=torch.int32, device=x.device)
    return functools.partial(torch._int_mm, x, w.t(), out=out)


def _int_mm_transposed(operands: Operands) -> Thunk:
    x, _, w, *_ = operands
    out = torch.empty(x.shape[0], w.shape[0], dtype=torch.int32, device=x.device)
    return functools.partial(torch._int_mm, x, w.t().contiguous(), out=out)


def _dequantized_linear(
    x: torch.Tensor, x_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    return (torch._int_mm(x, w.t()) * (x_scale * w_scale) + bias).to(torch.bfloat16)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def _compiled_linear(operands: Operands) -> Thunk:
    return functools.partial(_compiled(_dequantized_linear), *operands[:5])


def _torchao(operands: Operands) -> Thunk:
    from torchao.prototype.quantized_training.int8_mm import scaled_int8_mm

    x, x_scale, w, w_scale, *_ = operands
    return functools.partial(scaled_int8_mm, x, w.t(), x_scale.expand(x.shape[0]).contiguous(), w_scale)


def quantize_by_min_and_max(x: torch.Tensor, granularity: Granularity, rounding: Rounding) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric quantization to int8 as one would write it in PyTorch: min, max, scale, random numbers, floor, clamp, cast."""
    dims = _reduced(x, granularity)
    if dims is None:
        low, high = x.min(), x.max()
    else:
        low, high = x.amin(dims, keepdim=True), x.amax(dims, keepdim=True)
    return _rounded(x, torch.maximum(-low, high), rounding)


def quantize_by_absmax(x: torch.Tensor, granularity: Granularity, rounding: Rounding) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with the range by abs and max."""
    dims = _reduced(x, granularity)
    return _rounded(x, x.abs().max() if dims is None else x.abs().amax(dims, keepdim=True), rounding)


def _reduced(x: torch.Tensor, granularity: Granularity) -> tuple[int, ...] | None:
    if granularity is Granularity.PER_TENSOR:
        return None
    return tuple(range(1, x.ndim)) if granularity is Granularity.PER_CHANNEL else (-1,)


def _rounded(x: torch.Tensor, absmax: torch.Tensor, rounding: Rounding) -> tuple[torch.Tensor, torch.Tensor]:
    scale = absmax / 127.0
    y = x / scale
    if rounding is Rounding.STOCHASTIC:
        y = y + torch.rand_like(y)
    y = y.round() if rounding is Rounding.NEAREST else y.floor()
    return y.clamp(-127.0, 127.0).to(torch.int8), scale
