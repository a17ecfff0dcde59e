"""Rows K10 and K10b: the tuned choice against the best of an exhaustive search, and how long tuning a model takes."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from qsync_core.ir.precision import Precision
from qsync_core.kernels.backend import Kernel, KernelBackend, KernelConfig, KernelRequest, Op
from qsync_core.tuning.search import Effort, tune
from qsync_core.tuning.store import TuningStore
from qsync_torch.benchmarking.contenders import build_side_by_side, calls_of
from qsync_torch.benchmarking.limited_backend import first_libraries
from qsync_torch.benchmarking.problems import Problem
from qsync_torch.benchmarking.race import race
from qsync_torch.benchmarking.shapes import product_of_rows as linear
from qsync_torch.devices import int8_rungs
from qsync_torch.kernels.operands import Arguments
from qsync_torch.kernels.selection import find_backends

from .bench import Bench, Row, ratio
from .job_kernels import JobKernels
from .rows_products import INT8, LARGE, SMALL

SHAPES = (*SMALL, linear(8192, 4096, 4096), LARGE)
_SHOWN = 5


def exhaustive_rows(bench: Bench, backend_name: str = "cutlass", budget_s: float = 72.0, libraries: int = 18) -> Iterator[Row]:
    """K10: for every shape, all configurations of ``libraries`` kernels, and what tuning chose among the backend's candidates."""
    (backend,) = find_backends((backend_name,))
    ratios, details, counts = [], [], []
    for shape in (linear(64, 64, 96),) if bench.quick else SHAPES:
        problem = Problem(Op.LINEAR_OUTPUT, shape, INT8)
        found = _search(bench, backend, problem, budget_s / len(SHAPES), libraries)
        if found is None:
            continue
        value, count, text = found
        ratios.append(value)
        counts.append(count)
        details.append(f"{shape.label}: {value:.3f} of {count}; {text}")
        bench.say(details[-1])
    if not ratios:
        raise RuntimeError("no shape could be searched")
    what = (
        f"{backend_name} linear.output, tuned choice over the best of an exhaustive search of {min(counts)} to {max(counts)} "
        f"configurations, worst of {len(ratios)} shapes"
    )
    yield bench.row("K10", what, max(ratios), "ratio", "≤ 1.03", "; ".join(details))


def duration_rows(bench: Bench) -> Iterator[Row]:
    """K10b: minutes to tune ResNet50's kernels from an empty record, with compiled kernels at hand."""
    half = Precision.FLOAT16
    ladder = int8_rungs(half)
    job, batch = ("resnet18:image=32,width=8,classes=10", 2) if bench.quick else ("resnet50:image=224,channels_last=true", 128)
    with tempfile.TemporaryDirectory() as folder:
        kernels = JobKernels(bench, job, batch, Path(folder) / "first.sqlite")
        begin = time.monotonic()
        kernels.build(ladder)
        kernels.tune(ladder, Effort())
        before_s = time.monotonic() - begin
        kernels.path = Path(folder) / "second.sqlite"
        found = kernels.tune(ladder, Effort())
    searches = sum(len(entry.records) for entry in found.requests)
    what = f"tuning ResNet50, batch {batch}, int8 with float32 and float16 output, compiled kernels at hand"
    spread = f"{len(found.requests)} kernels, {searches} searches; {before_s / 60:.1f} min the first time, with compiling"
    yield bench.row("K10b", what, found.seconds / 60, "min", "≤ 3", spread)


def every_config(backend: KernelBackend, request: KernelRequest, libraries: int) -> list[KernelConfig]:
    """Every valid configuration of the backend's first ``libraries`` kernels, run-time knobs included."""
    listed = backend.candidate_configs(request)
    if backend.name == "cutlass":
        from qsync_kernels_cutlass.architectures import architecture_of
        from qsync_kernels_cutlass.configs.candidates import all_valid
        from qsync_kernels_cutlass.configs.problem import problem_of

        arch = architecture_of(request.compute_capability)
        if arch is not None:
            listed = [*listed, *(KernelConfig(config.text) for config in all_valid(problem_of(request), arch))]
    return first_libraries(list(dict.fromkeys(listed)), libraries)


def _search(
    bench: Bench, backend: KernelBackend, problem: Problem, budget_s: float, libraries: int
) -> tuple[float, int, str] | None:
    request = problem.request(bench.device)
    if reasons := backend.unsupported_reasons(request):
        print(f"K10 {problem.label}: {'; '.join(reasons)}", file=sys.stderr)
        return None
    operands = problem.operands(bench.device)
    configs = every_config(backend, request, libraries)
    build_side_by_side([(backend, request, config) for config in configs])
    bench.say(f"{problem.label}: {len(configs)} configurations built")
    times: dict[str, float] = {}
    start = time.monotonic()
    for config in configs:
        try:
            thunks = calls_of(backend, request, config, operands)
            calls = bench.timer.warm_up(thunks)
            times[config.text] = min(bench.timer.sample_ns(thunks, calls) for _ in range(2))
        except Exception as error:  # a configuration that does not run is not the best
            print(f"K10 {problem.label} {config.text}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
        if time.monotonic() - start > budget_s:
            print(f"K10 {problem.label}: stopped after {budget_s:.0f} s, {len(times)} configurations", file=sys.stderr)
            break
    tuned = _tuned(bench, backend, request, operands)
    finalists = [tuned, *(text for text in sorted(times, key=times.__getitem__)[:_SHOWN] if text != tuned)]
    contenders = {text: calls_of(backend, request, KernelConfig(text), operands) for text in finalists}
    measured, _ = race(contenders, bench.device, rounds=21, timer=bench.timer)
    best = min(measured, key=lambda text: measured[text].median_ns)
    value = ratio(measured[tuned], measured[best])
    return value, len(times), f"tuned {tuned}, best {best} {measured[best].median_ns / 1e3:.1f} µs"


def _tuned(bench: Bench, backend: KernelBackend, request: KernelRequest, operands: Sequence[Arguments]) -> str:
    """What core's tuning chooses from the backend's candidates."""

    def measure(kernel: Kernel, _: KernelRequest, samples: int) -> int:
        thunks: tuple[Any, ...] = tuple(_bound(kernel, arguments) for arguments in operands)
        calls = bench.timer.warm_up(thunks)
        return round(statistics.median(bench.timer.sample_ns(thunks, calls) for _ in range(samples)))

    with tempfile.TemporaryDirectory() as folder:
        return tune(backend, request, measure, TuningStore(Path(folder) / "tuning.sqlite", "benchmark", {})).config


def _bound(kernel: Kernel, arguments: Arguments) -> Any:
    return lambda: kernel(*arguments)
