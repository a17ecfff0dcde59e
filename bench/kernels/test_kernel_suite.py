"""The suite: a benchmark for every problem of the chosen shape sets and every contender.

    pytest bench/kernels --set bert-base --op linear --out OUT --compare stored.json

What measures is the code of ``qsync bench``.  pytest-benchmark shows and stores the device's time of one call; ``--out`` writes our
own JSON and the command's page.
"""

from __future__ import annotations

import pytest

from kernels.conftest import CLOCK

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
    row = session.note(problem, runner, samples)
    error = {} if row.error is None else {"error": row.error}
    benchmark.extra_info.update(
        {"config": row.config, row.unit: round(row.tflops, 2), "share": round(row.share, 4), "bound": row.bound, **error}
    )
    assert not row.is_wrong, f"its relative error is {row.error}, and {row.allowed} is what its formats explain"
