"""The peak memory of a step on a CPU, when the optimizer runs in every measured step and when it has been watched once."""

from functools import partial

import pytest
import torch
from torch import nn

from qsync_core.ir.precision import Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_torch.job import Batch, Job
from qsync_torch.profiling import whole_step
from qsync_torch.profiling.memory import memory_rise
from qsync_torch.profiling.whole_step import StepRunner, measure_step
from qsync_torch.quantize import quantize
from qsync_torch.timing import Effort, make_stopwatch
from qsync_torch.tracing.trace import trace

CPU = torch.device("cpu")
QUICK = Effort(min_repeats=2, max_repeats=2, budget_s=0.0, warmup=0)
RUNGS = [Variant.plain(Precision.FLOAT32), Variant.of(Precision.INT8), Variant.of(Precision.BFLOAT16)]


@pytest.fixture(autouse=True)
def _buffers_for_rounding():
    """They are made once in a process and kept: the first measured step must not be the one to make them."""
    quantize(torch.randn(1 << 17), Precision.INT8, rounding=Rounding.STOCHASTIC)


class Counted(torch.optim.AdamW):
    """AdamW whose temporaries are as large as all weights, and that counts its steps."""

    def __init__(self, parameters):
        super().__init__(parameters, foreach=True)
        self.steps = 0

    def step(self, closure=None):
        self.steps += 1
        return super().step(closure)


def job_of(width, rows, optimizer):
    return Job(
        "two-layers",
        nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.Linear(width, 32)),
        lambda step, size: Batch((torch.randn(size, 32, generator=torch.Generator().manual_seed(step)),)),
        lambda output, batch: output.square().mean(),
        optimizer,
        rows,
    )


def peaks(job, monkeypatch, long_step_ns):
    """Peak bytes of every rung measured in turn, and the runner."""
    monkeypatch.setattr(whole_step, "_LONG_STEP_NS", long_step_ns)
    runner, dag, base, found = StepRunner.start(job, CPU), trace(job), None, []
    for rung in RUNGS:
        measured = measure_step(runner, rung, dag, make_stopwatch(CPU), QUICK, base)
        base = base or measured
        found.append(measured.peak_bytes)
    return found, runner


@pytest.mark.parametrize("optimizer", [Counted, partial(torch.optim.SGD, lr=0.1), partial(torch.optim.AdamW, fused=True)])
@pytest.mark.parametrize(("width", "rows"), [(512, 4), (16, 4096)], ids=["weights", "activations"])
def test_an_optimizer_watched_once_gives_the_peaks_of_one_that_always_runs(monkeypatch, optimizer, width, rows):
    job = job_of(width, rows, optimizer)
    always, _ = peaks(job, monkeypatch, 10**18)
    once, runner = peaks(job, monkeypatch, 0)
    assert once == always
    # The independent answer: a later step as it is, watched from outside.
    assert once[0] == runner.static_bytes + memory_rise(lambda: runner.train_step(0))[0]


def test_long_steps_run_their_optimizer_for_float32_alone(monkeypatch):
    _, runner = peaks(job_of(64, 8, Counted), monkeypatch, 0)
    assert runner.optimizer.steps == 1 + QUICK.max_repeats
    _, runner = peaks(job_of(64, 8, Counted), monkeypatch, 10**18)
    assert runner.optimizer.steps == len(RUNGS) * (1 + QUICK.max_repeats)


def test_a_resumed_measurement_watches_an_optimizer_that_it_has_not_seen(monkeypatch):
    """A killed run kept float32's measurement, so that a lower rung comes first."""
    job = job_of(512, 4, Counted)
    (_, int8, _), _ = peaks(job, monkeypatch, 0)
    runner, dag = StepRunner.start(job, CPU), trace(job)
    kept = measure_step(StepRunner.start(job, CPU), RUNGS[0], dag, make_stopwatch(CPU), QUICK)
    assert measure_step(runner, RUNGS[1], dag, make_stopwatch(CPU), QUICK, kept).peak_bytes == int8
    assert runner.optimizer.steps == 1
