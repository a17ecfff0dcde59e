"""Rows K1, K2 and K3: int8 linear operators against torch._int_mm, and a linear training step against bf16 cuBLAS."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator

import attrs
import torch

from qsync_core.ir.precision import Granularity, Precision
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import KernelRequest, Op
from qsync_core.kernels.choice import QUANTIZE_GRADIENT, QUANTIZE_WEIGHT
from qsync_torch.benchmarking.contenders import compile_ahead
from qsync_torch.benchmarking.problems import Problem, quantization
from qsync_torch.benchmarking.race import Measured, Thunk, race
from qsync_torch.benchmarking.shapes import ProductShape
from qsync_torch.benchmarking.shapes import product_of_rows as linear

from .bench import Bench, Row, best_of, geometric_mean, ratio, ratio_spread

INT8 = Variant.of(Precision.INT8)
LARGE = linear(8192, 8192, 8192)
SMALL = (linear(4608, 768, 768), linear(4608, 768, 3072), linear(4608, 3072, 768), linear(8192, 1024, 4096))
STEPS = {"K3": LARGE, "K3b": linear(8192, 4096, 4096)}
_QUICK = linear(64, 64, 96)
_INT_MM, _INT_MM_KN = "torch._int_mm", "torch._int_mm (K, N)"
_PYTORCH = (_INT_MM, _INT_MM_KN, "bfloat16", "float16")
_BACKWARD = {
    "bfloat16 backward": (Precision.BFLOAT16, Precision.BFLOAT16),
    "int8 grad_input, bfloat16 grad_weight": (Precision.INT8, Precision.BFLOAT16),
    "bfloat16 grad_input, int8 grad_weight": (Precision.BFLOAT16, Precision.INT8),
    "int8 backward": (Precision.INT8, Precision.INT8),
}


def requests(bench: Bench, group: str) -> list[KernelRequest]:
    """What K1, K2 or K3 asks backends for, so that everything can be compiled at once."""
    if group == "K1":
        problems = [Problem(Op.LINEAR_OUTPUT, LARGE, INT8)]
    elif group == "K2":
        problems = [Problem(Op.LINEAR_OUTPUT, shape, INT8) for shape in SMALL]
    else:
        problems = [
            problem
            for shape in STEPS.values()
            for formats in _BACKWARD.values()
            for problem in _roles(shape, _step_variant(*formats), torch.bfloat16).values()
        ]
    return [problem.request(bench.device) for problem in problems]


def _step_variant(grad_input: Precision, grad_weight: Precision) -> Variant:
    return attrs.evolve(INT8, grad_input=grad_input, grad_weight=grad_weight)


def product_rows(bench: Bench) -> Iterator[Row]:
    """K1, K1b; the same against the other layout of the weight and on bell-shaped operands."""
    shape = _QUICK if bench.quick else LARGE
    flops = _flops(shape)
    for id_, bell_shaped in (("K1", False), ("K1-bell", True)):
        problem = Problem(Op.LINEAR_OUTPUT, shape, INT8, bell_shaped=bell_shaped)
        compile_ahead(bench.backends, [problem.request(bench.device)])
        measured, used = bench.race_problem(problem, _PYTORCH, rounds=21)
        best = best_of(measured, used)
        own, who = measured[best], f"{best} {used[best]}".strip()
        values = "bell-shaped values" if bell_shaped else "uniform values"
        what = f"int8 linear.output {shape.label}, per tensor × per channel, bias, to bfloat16, {values}"
        others = _others(measured, flops)
        for name, suffix in ((_INT_MM, ""), (_INT_MM_KN, "-KN")):
            if name not in measured:
                continue
            target = "≥ 2.0" if id_ + suffix == "K1" else "reported"
            value, spread = ratio(measured[name], own), ratio_spread(measured[name], own)
            yield bench.row(id_ + suffix, f"{what}, over {name} alone ({who})", value, "×", target, spread)
        rate = "K1b" if not bell_shaped else "K1b-bell"
        target = "reported" if bell_shaped else "≥ 1400"
        yield bench.row(rate, f"{what} ({who})", flops / own.median_ns / 1e3, "TOP/s", target, others)


def small_product_rows(bench: Bench) -> Iterator[Row]:
    """K2, K2b."""
    shapes = (_QUICK,) if bench.quick else SMALL
    problems = [Problem(Op.LINEAR_OUTPUT, shape, INT8) for shape in shapes]
    compile_ahead(bench.backends, [problem.request(bench.device) for problem in problems])
    ratios, details = [], []
    for shape in shapes:
        measured, used = _race(bench, shape)
        best = best_of(measured, used)
        ratios.append(ratio(measured[_INT_MM], measured[best]))
        others = _others(measured, _flops(shape))
        details.append(f"{shape.label} {ratios[-1]:.2f} ({best} {used[best]}; {others})")
        bench.say(details[-1])
    what = f"int8 linear.output to bfloat16 over {_INT_MM} alone, four smaller shapes"
    yield bench.row("K2", f"{what}: smallest", min(ratios), "×", "≥ 1.35", "; ".join(details))
    each = ", ".join(f"{value:.2f}" for value in ratios)
    yield bench.row("K2b", f"{what}: geometric mean", geometric_mean(ratios), "×", "≥ 1.6", each)


def _flops(shape: ProductShape) -> int:
    return Problem(Op.LINEAR_OUTPUT, shape, INT8).flops


def _race(bench: Bench, shape: ProductShape) -> tuple[dict[str, Measured], dict[str, str]]:
    problem = Problem(Op.LINEAR_OUTPUT, shape, INT8)
    return bench.race_problem(problem, _PYTORCH, rounds=21)


def _others(measured: dict[str, Measured], flops: int) -> str:
    return ", ".join(f"{name} {flops / found.median_ns / 1e3:.0f} TOP/s" for name, found in measured.items())


def step_rows(bench: Bench) -> Iterator[Row]:
    """K3, K3b, and the same where both sides start from float32 parameters."""
    for id_, shape in STEPS.items():
        yield from _step_rows(bench, id_, _QUICK if bench.quick else shape)


def _step_rows(bench: Bench, id_: str, shape: ProductShape) -> Iterator[Row]:
    target = {"K3": "≥ 1.30", "K3b": "≥ 1.15"}[id_]
    for parameter, suffix in ((torch.bfloat16, ""), (torch.float32, "-float32-weight")):
        contenders: dict[str, tuple[Thunk, ...]] = {}
        operands = [_step_operands(bench, shape, parameter) for _ in range(2)]
        contenders["bf16"] = tuple(functools.partial(_plain_step, *arguments) for arguments in operands)
        choices: dict[str, str] = {}
        for name, formats in _BACKWARD.items():
            variant = _step_variant(*formats)
            try:
                choices[name] = bench.choose(_roles(shape, variant, parameter)).config
            except RuntimeError as error:
                print(f"{id_}: {name}: {error}", file=sys.stderr)
                continue
            choices[f"{name}, first candidates"] = ""
            for key in (name, f"{name}, first candidates"):
                contenders[key] = tuple(
                    functools.partial(_step, *arguments, variant, _chain(bench), choices[key]) for arguments in operands
                )
        measured, failures = race(contenders, bench.device, rounds=5 if bench.quick else 15, timer=bench.timer)
        for name, why in failures.items():
            print(f"{id_}: {name}: {why}", file=sys.stderr)
        best = best_of(measured, choices)
        every = ", ".join(f"{name} {found.median_ns / 1e6:.3f} ms" for name, found in measured.items())
        source = "bfloat16 operands on both sides" if not suffix else "float32 parameter on both sides, cast or quantized"
        who = f"{best}: {choices[best] or _chain(bench)}"
        what = f"linear training step {shape.label} with quantization over bf16 cuBLAS, {source}; {who}"
        spread = f"{ratio_spread(measured['bf16'], measured[best])}; {every}"
        value = ratio(measured["bf16"], measured[best])
        yield bench.row(id_ + suffix, what, value, "×", target if not suffix else "reported", spread)


def _chain(bench: Bench) -> str:
    first = [name for name in ("cutlass", "triton") if name in bench.backends.by_name]
    rest = [name for name in bench.backends.by_name if name not in (*first, "aten")]
    return "+".join([*first, *rest, "aten"])


def _roles(shape: ProductShape, variant: Variant, parameter: torch.dtype) -> dict[str, Problem]:
    """What a step asks backends for."""
    bf16 = Precision.BFLOAT16
    roles = {
        Op.LINEAR_OUTPUT: Problem(Op.LINEAR_OUTPUT, shape, variant),
        Op.LINEAR_GRAD_INPUT: Problem(Op.LINEAR_GRAD_INPUT, shape, variant),
        Op.LINEAR_GRAD_WEIGHT: Problem(Op.LINEAR_GRAD_WEIGHT, shape, variant),
        Op.QUANTIZE: quantization(shape.call.x, source=bf16),
        QUANTIZE_WEIGHT: quantization(
            shape.call.w, Granularity.PER_CHANNEL, source=bf16 if parameter is torch.bfloat16 else Precision.FLOAT32
        ),
    }
    if variant.grad_input.needs_scale or variant.grad_weight.needs_scale:
        roles[QUANTIZE_GRADIENT] = quantization(shape.call.y, source=bf16, flags=("multiplier",))
    return roles


def _step_operands(bench: Bench, shape: ProductShape, parameter: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    def draw(*size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(size, device=bench.device).to(dtype)

    x = draw(*shape.call.x, dtype=torch.bfloat16).requires_grad_()
    w = draw(*shape.call.w, dtype=parameter).requires_grad_()
    return x, w, draw(*shape.call.y, dtype=torch.bfloat16)


def _plain_step(x: torch.Tensor, w: torch.Tensor, grad: torch.Tensor) -> None:
    y = torch.nn.functional.linear(x, w.to(x.dtype))
    torch.autograd.grad(y, (x, w), grad)


def _step(x: torch.Tensor, w: torch.Tensor, grad: torch.Tensor, variant: Variant, backend: str, config: str) -> None:
    from qsync_torch.operators import linear

    y = linear(x, w, None, variant, backend=backend, config=config, seed=1)
    torch.autograd.grad(y, (x, w), grad)
