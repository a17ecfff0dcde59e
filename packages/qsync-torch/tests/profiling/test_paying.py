"""What is tried before a profile: repeated until it is known, with injected times."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator

import attrs
import pytest
from torch.utils.data import DataLoader

from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_torch.capturing.capture import capture
from qsync_torch.demo.workloads import load_workload, loss
from qsync_torch.profiling import paying
from qsync_torch.profiling.paying import MOST_REPEATS, REPEATS, Uncertain, compared_rungs, repeated
from qsync_torch.tracing.trace import trace


def tiny_job():
    workload = load_workload("resnet", tiny=True)
    return capture(workload.model, workload.optimizer, loss, DataLoader(workload.training, workload.batch_size))


INT8, BFLOAT16, FLOAT32 = (Variant.of(precision) for precision in (Precision.INT8, Precision.BFLOAT16, Precision.FLOAT32))


def test_a_median_has_two_standard_errors_by_its_quartiles():
    samples = [10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0, 17.0]
    lower, _, upper = statistics.quantiles(samples, n=4)
    found = Uncertain.median(samples)
    assert found.value == 13.5
    assert found.spread == pytest.approx(2 * 1.2533 * (upper - lower) / 1.349 / 8**0.5, rel=2e-3)
    assert Uncertain.median([1.0, 2.0, 5.0]) == Uncertain(2.0, 2.0)


@pytest.mark.parametrize(
    "times, taken",
    [
        (itertools.repeat(0.1), REPEATS),
        (itertools.cycle([0.1, 0.2]), MOST_REPEATS),
        (itertools.repeat(60.0), 3),
    ],
)
def test_steps_are_repeated_until_the_median_is_known_or_the_time_is_over(times: Iterator[float], taken: int) -> None:
    asked = []

    def sample() -> float:
        asked.append(next(times))
        return asked[-1]

    found = repeated(sample)
    assert found == Uncertain.median(asked)
    assert len(asked) == taken


def test_steps_of_which_a_few_were_disturbed_are_repeated_until_these_do_not_count() -> None:
    times = iter([0.1, 0.2, 0.1, 0.2, 0.1, 0.2, *[0.1] * 22])
    taken = []
    assert repeated(lambda: taken.append(next(times)) or taken[-1]) == Uncertain(0.1, 0.0)
    assert REPEATS < len(taken) < MOST_REPEATS


def timed(monkeypatch: pytest.MonkeyPatch, times: dict[Variant, Callable[[], float]]) -> dict[Variant, int]:
    counted = dict.fromkeys(times, 0)

    def runner(operator, variant, layouts):
        def run() -> float:
            counted[variant] += 1
            return times[variant]()

        return run

    monkeypatch.setattr(paying, "_runner", runner)
    monkeypatch.setattr(paying, "seconds_of", lambda run: run())
    return counted


def test_a_rung_that_may_be_on_either_side_of_float32_is_measured_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    dag = trace(tiny_job())
    noisy = itertools.cycle([0.103, 0.11, 0.12, 0.098, 0.13])
    counted = timed(monkeypatch, {INT8: lambda: 0.05, BFLOAT16: lambda: next(noisy), FLOAT32: lambda: 0.1})
    found = compared_rungs(dag, {})
    assert counted[BFLOAT16] > REPEATS + 1
    assert found[INT8] == Uncertain(0.5)
    assert found[BFLOAT16].value == pytest.approx(0.98)


def test_rungs_that_are_clearly_faster_or_slower_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    dag = trace(tiny_job())
    counted = timed(monkeypatch, {INT8: lambda: 0.05, BFLOAT16: lambda: 0.2, FLOAT32: lambda: 0.1})
    assert compared_rungs(dag, {}) == {INT8: Uncertain(0.5), BFLOAT16: Uncertain(2.0)}
    assert set(counted.values()) == {REPEATS + 1}


def test_a_first_run_that_took_long_says_nothing_of_a_rung(monkeypatch: pytest.MonkeyPatch) -> None:
    dag = trace(tiny_job())
    loading = itertools.chain([1.0], itertools.repeat(0.05))
    counted = timed(monkeypatch, {INT8: lambda: next(loading), BFLOAT16: lambda: 0.9, FLOAT32: lambda: 0.1})
    assert compared_rungs(dag, {}) == {INT8: Uncertain(0.5), BFLOAT16: Uncertain(9.0)}
    assert counted[BFLOAT16] == 2


def test_under_autocast_the_rungs_below_its_format_are_compared_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    dag = attrs.evolve(trace(tiny_job()), base=Precision.BFLOAT16)
    base = Variant.plain(Precision.BFLOAT16)
    under = INT8.under(Precision.BFLOAT16)
    counted = timed(monkeypatch, {under: lambda: 0.1, base: lambda: 0.2})
    assert compared_rungs(dag, {}) == {INT8: Uncertain(0.5)}
    assert set(counted.values()) == {REPEATS + 1}
