"""Which lower precisions save time on a CPU: the largest operator is tried in each of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from qsync_core.ir.dag import Operator, PrecisionDag
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_core.kernels.choice import KernelChoice
from qsync_torch.profiling.benchmark_case import make_case

CPU_LADDER = (Variant.of(Precision.INT8), Variant.of(Precision.BFLOAT16), Variant.of(Precision.FLOAT32))
"""Rungs that a group of CPUs could have, lowest first."""
PAYS_BELOW = 0.85
"""A rung pays if its time for the largest operator, casts included, is below this share of float32's."""
_HOPELESS = 5.0
"""A rung whose first run takes this many times float32's is not run again: first runs also compile, but not that long."""
REPEATS = 7
PROBING_S = 4.0
"""How long to time steps, and operators, at most."""


def rung_ratios(
    dag: PrecisionDag, layouts: Mapping[str, Tensor], rungs: Sequence[Variant] = CPU_LADDER[:-1]
) -> dict[Variant, float]:
    """Time of the largest operator at each rung over float32's, forward and backward with their casts."""
    operator = largest_operator(dag)
    runs = {variant: _runner(operator, variant, layouts) for variant in (CPU_LADDER[-1], *rungs)}
    first = {variant: seconds_of(run) for variant, run in runs.items()}
    best = {variant: seconds for variant, seconds in first.items() if seconds > _HOPELESS * first[CPU_LADDER[-1]]}
    # In turns, and the best of each: what else runs on this machine takes its time from some of them.
    tried: dict[Variant, list[float]] = {variant: [] for variant in runs if variant not in best}
    while min(map(len, tried.values())) < REPEATS and sum(map(sum, tried.values())) < PROBING_S:
        for variant, times in tried.items():
            times.append(seconds_of(runs[variant]))
    best |= {variant: min(times) for variant, times in tried.items()}
    return {rung: best[rung] / best[CPU_LADDER[-1]] for rung in rungs}


def largest_operator(dag: PrecisionDag) -> Operator:
    """The adjustable operator with the most operations."""
    return max(dag.adjustable, key=lambda operator: operator.flops)


def _runner(operator: Operator, variant: Variant, layouts: Mapping[str, Tensor]) -> Callable[[], None]:
    case = make_case(operator, variant, layouts, torch.device("cpu"), KernelChoice())

    def run() -> None:
        call = case.make_ready()
        output = call.run()
        if backward := call.backward_thunk(output, [torch.ones_like(output)]):
            backward()

    return run


def seconds_of(run: Callable[[], None]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
