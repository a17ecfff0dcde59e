"""Whole steps at other local batches than the job's."""

from types import SimpleNamespace

import attrs
import pytest
import torch
from torch import nn

from qsync_core.artifacts.files import from_bytes
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import Compiled, Profile
from qsync_core.ir.variant import Variant
from qsync_torch.job import Batch, Job
from qsync_torch.prepare.measuring import Bench
from qsync_torch.profiling import whole_step
from qsync_torch.profiling.bench import Efforts
from qsync_torch.profiling.profile import ProfileRequest, profile
from qsync_torch.timing import Effort, make_stopwatch
from qsync_torch.tracing.trace import trace

QUICK = Effort(min_repeats=1, max_repeats=1, budget_s=0.0, warmup=0)
BASE, RUNG = Variant.plain(Precision.FLOAT32), Variant.of(Precision.BFLOAT16)


def job_and_profile(compiles=None):
    """A net, and its profile with steps in the base precision and at a rung that takes no time."""
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    job = Job(
        "net", net, lambda step, size: Batch((torch.randn(size, 16),)), lambda out, _: out.square().mean(),
        lambda parameters: torch.optim.SGD(parameters, 0.1), 8, compiles=compiles,
    )  # fmt: skip
    dag = trace(job)
    found = profile(job, dag, ProfileRequest(ladder=(RUNG, BASE), efforts=Efforts(QUICK, QUICK, QUICK), with_collectives=False))
    return job, dag, attrs.evolve(found, steps=tuple(attrs.evolve(s, iteration_ns=1 + (s.variant != RUNG)) for s in found.steps))


def test_steps_of_another_batch_are_the_base_s_and_the_fastest_rung_s(monkeypatch):
    """A rung that fails there leaves the base's, and is told."""
    job, dag, at_once = job_and_profile()
    told, measured = [], whole_step.measure_step

    def steps(of, size=5):
        stopwatch = make_stopwatch(torch.device("cpu"))
        found = whole_step.measure_at(job, dag, of, (RUNG, BASE), stopwatch, QUICK, size, told.append)
        return [(one.batch_size, one.step.variant) for one in found]

    assert steps(at_once) == [(5, BASE), (5, RUNG)]
    assert steps(attrs.evolve(at_once, steps=())) == [(5, BASE)]

    def short_of_memory(runner, variant, *rest, **more):
        if variant == RUNG:
            raise torch.OutOfMemoryError("no memory is left")
        return measured(runner, variant, *rest, **more)

    monkeypatch.setattr(whole_step, "measure_step", short_of_memory)
    assert not told
    assert steps(at_once) == [(5, BASE)]
    assert told == ["a step of 5 samples in bfloat16 is not measured (OutOfMemoryError: no memory is left)"]


@pytest.mark.parametrize(
    ("ladder", "compiled"),
    [((RUNG, BASE), ["without a plan", "with a plan"]), ((BASE,), ["without a plan"])],
    ids=["infer", "train"],
)
def test_no_step_is_compiled_at_a_rung_that_no_plan_has(monkeypatch, ladder, compiled):
    """A group that was measured at the rungs before another one turned out to be the slower has its base alone on its ladder."""
    job, dag, at_once = job_and_profile(Compiled(backend="aot_eager"))
    made, seen = whole_step.compiled_model, []

    def counted(model, how, applied):
        seen.append("without a plan" if applied is None else "with a plan")
        return made(model, how, applied)

    monkeypatch.setattr(whole_step, "compiled_model", counted)
    folder = SimpleNamespace(parts={"profile a": SimpleNamespace(inputs={})}, load=lambda *_: at_once)
    board = SimpleNamespace(stage=lambda name: lambda done, total, what: None, note=None)
    bench = Bench(job, dag, torch.device("cpu"), SimpleNamespace(rank=0), folder, board)
    part = bench.profile_at(SimpleNamespace(name="a", ladder=ladder), 5)["profile a"]
    assert seen == compiled
    kept = from_bytes(part.data, Profile, name="it").batches
    assert [(one.batch_size, one.step.variant) for one in kept] == [(5, BASE), (5, RUNG)][: len(compiled)]
