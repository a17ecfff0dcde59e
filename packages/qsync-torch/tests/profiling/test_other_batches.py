"""Whole steps at other local batches than the job's."""

import attrs
import torch
from torch import nn

from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_torch.job import Batch, Job
from qsync_torch.profiling import whole_step
from qsync_torch.profiling.bench import Efforts
from qsync_torch.profiling.profile import ProfileRequest, profile
from qsync_torch.timing import Effort, make_stopwatch
from qsync_torch.tracing.trace import trace

QUICK = Effort(min_repeats=1, max_repeats=1, budget_s=0.0, warmup=0)


def test_steps_of_another_batch_are_the_base_s_and_the_fastest_rung_s(monkeypatch):
    """A rung that fails there leaves the base's, and is told."""
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    job = Job(
        "net", net, lambda step, size: Batch((torch.randn(size, 16),)), lambda out, _: out.square().mean(),
        lambda parameters: torch.optim.SGD(parameters, 0.1), 8,
    )  # fmt: skip
    dag, rung = trace(job), Variant.of(Precision.BFLOAT16)
    base = Variant.plain(Precision.FLOAT32)
    found = profile(job, dag, ProfileRequest(ladder=(rung, base), efforts=Efforts(QUICK, QUICK, QUICK), with_collectives=False))
    at_once = attrs.evolve(found, steps=tuple(attrs.evolve(s, iteration_ns=1) if s.variant == rung else s for s in found.steps))
    told, measured = [], whole_step.measure_step

    def steps(of, size=5):
        stopwatch = make_stopwatch(torch.device("cpu"))
        return [
            (one.batch_size, one.step.variant) for one in whole_step.measure_at(job, dag, of, stopwatch, QUICK, size, told.append)
        ]

    assert steps(at_once) == [(5, base), (5, rung)]
    assert steps(attrs.evolve(found, steps=())) == [(5, base)]

    def short_of_memory(runner, variant, *rest, **more):
        if variant == rung:
            raise torch.OutOfMemoryError("no memory is left")
        return measured(runner, variant, *rest, **more)

    monkeypatch.setattr(whole_step, "measure_step", short_of_memory)
    assert not told
    assert steps(at_once) == [(5, base)]
    assert told == ["a step of 5 samples in bfloat16 is not measured (OutOfMemoryError: no memory is left)"]
