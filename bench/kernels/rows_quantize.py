"""Rows K4 and K5: quantization with stochastic rounding against the memory floor, eager PyTorch and torch.compile."""

from __future__ import annotations

from collections.abc import Iterator

from qsync_torch.benchmarking.peaks import copy_calls
from qsync_torch.benchmarking.problems import quantization
from qsync_torch.benchmarking.race import Measured, race

from . import baselines
from .bench import Bench, Row, best_of, ratio, ratio_spread

SHAPES = {"K4": (512, 64, 56, 56), "K4b": (64, 64, 56, 56)}
_QUICK = {"K4": (4, 16, 14, 14), "K4b": (2, 16, 14, 14)}
_COPY = "copy"


def quantize_rows(bench: Bench) -> Iterator[Row]:
    """K4, K4b, K5, K5b."""
    for id_, shape in (_QUICK if bench.quick else SHAPES).items():
        problem = quantization(shape)
        operands = problem.operands(bench.device)
        runners = {runner.name: runner for runner in bench.accepting(problem, operands)}
        contenders = {name: runner.thunks for name, runner in runners.items()}
        contenders[_COPY] = copy_calls(bench.device)
        for name in baselines.baseline_names(problem.op):
            if id_ == "K4" and baselines.why_not(name, problem, bench.device) is None:
                contenders[name] = baselines.calls(name, problem, operands)
        measured, failures = race(contenders, bench.device, rounds=5 if bench.quick else 21, timer=bench.timer)
        bench.say(f"{problem.label}: " + "; ".join(f"{name} {found.median_ns / 1e3:.1f} µs" for name, found in measured.items()))
        for name, why in failures.items():
            bench.say(f"{problem.label}: {name}: {why}")
        best = best_of(measured, runners)
        who = f"{best} {runners[best].config}".strip()
        copy_rate = _copy_bytes(contenders[_COPY]) / measured[_COPY].median_ns
        floor_ns = problem.floor_bytes / copy_rate
        target = {"K4": "≥ 0.90", "K4b": "≥ 0.80"}[id_]
        what = f"quantize float32 {problem.shape_label} to int8 per tensor, stochastic: share of the 2-read-1-write floor ({who})"
        spread = (
            f"{measured[best].median_ns / 1e3:.1f} µs, floor {floor_ns / 1e3:.1f} µs at {copy_rate / 1e3:.2f} TB/s; "
            f"IQR/median {measured[best].spread:.3f}"
        )
        yield bench.row(id_, what, floor_ns / measured[best].median_ns, "fraction", target, spread)
        if id_ == "K4":
            yield from _over_pytorch(bench, measured, best, problem.shape_label)


def _over_pytorch(bench: Bench, measured: dict[str, Measured], best: str, shape: str) -> Iterator[Row]:
    own = measured[best]
    targets = {"eager": ("K5", "≥ 5.5"), "torch.compile": ("K5b", "≥ 2")}
    for name in ("eager", "torch.compile", "eager (absmax)", "torch.compile (absmax)"):
        if name in measured:
            id_, target = targets.get(name, (f"{targets[name.split(' ')[0]][0]}-absmax", "reported"))
            times = f"{measured[name].median_ns / 1e3:.1f} and {own.median_ns / 1e3:.1f} µs"
            formula = "range by abs and max" if name.endswith("(absmax)") else "range by min and max"
            who = "torch.compile" if name.startswith("torch.compile") else "eager PyTorch"
            what = f"quantize float32 {shape}, stochastic: {who}, {formula}, over {best}"
            spread = f"{ratio_spread(measured[name], own)}; {times}"
            yield bench.row(id_, what, ratio(measured[name], own), "×", target, spread)


def _copy_bytes(calls: tuple) -> int:
    """Bytes read plus bytes written by one copy."""
    return 2 * calls[0].args[0].nbytes
