"""The suite: a benchmark for every problem of the chosen shape sets and every contender.

    pytest bench/kernels --set bert-base --op linear --out OUT --compare stored.json

pytest-benchmark shows and stores the device's time of one call; ``--out`` writes our own JSON, page and drawings.
"""

from __future__ import annotations

import pytest

from kernels.conftest import CLOCK
from kernels.suite_file import Row

pytest.importorskip("pytest_benchmark", reason="the suite needs pytest-benchmark")


@pytest.mark.benchmark(timer=CLOCK)
def test_kernel(problem, contender, session, benchmark, pytestconfig):
    """Time of one call."""
    benchmark.group = f"{problem.set_name}: {problem.label}"
    try:
        runner = session.contender(problem, contender)
        calls = session.timer.warm_up(runner.thunks)
    except Exception as error:
        session.fail(problem, contender, error)
        raise
    samples: list[float] = []

    def sample() -> None:
        samples.append(session.timer.sample_ns(runner.thunks, calls))
        CLOCK.seconds += samples[-1] * 1e-9

    benchmark.pedantic(sample, rounds=pytestconfig.getoption("--rounds"), warmup_rounds=0)
    row = row_of(problem, runner, samples, session.peaks())
    session.rows.append(row)
    benchmark.extra_info.update(
        {"config": row.config, row.unit: round(row.tflops, 2), "share": round(row.share, 4), "bound": row.bound}
    )
    assert row.median_ns > 0


def row_of(problem, runner, samples, peaks) -> Row:
    """The figures of one measurement."""
    from kernels.timing import Measured

    measured = Measured(tuple(samples))
    arithmetic = runner.name if runner.name in ("float16", "bfloat16") else str(problem.arithmetic)
    share, bound = peaks.share(problem.flops, problem.floor_bytes, arithmetic, measured.median_ns)
    rate = problem.flops / measured.median_ns / 1e3 if problem.flops else problem.floor_bytes / measured.median_ns
    return Row(
        set_name=problem.set_name,
        op=problem.op,
        formats=problem.format_label,
        shape=problem.shape_label,
        count=1 if isinstance(problem.shape, tuple) else problem.shape.count,
        contender=runner.name,
        config=runner.config,
        median_ns=measured.median_ns,
        spread=measured.spread,
        samples=len(samples),
        tflops=rate,
        unit="TFLOP/s" if problem.flops else "GB/s",
        share=share,
        bound=bound,
    )
