"""A model that does not fit on its device as the script has it: what is measured then, and what the planner makes of it."""

import attrs
import pytest
import torch
from torch import nn

from qsync_core.errors import JobError
from qsync_core.ir.variant import Variant
from qsync_planner.replayer.calibration import calibrated_model
from qsync_planner.replayer.cost_mapper import CostMapper
from qsync_planner.replayer.cost_model import CostModel
from qsync_planner.replayer.max_plus import sequence
from qsync_torch.job import Batch, Job
from qsync_torch.profiling import bench
from qsync_torch.profiling.bench import Efforts
from qsync_torch.profiling.profile import ProfileRequest, profile
from qsync_torch.profiling.whole_step import StepRunner
from qsync_torch.timing import Effort
from qsync_torch.tracing.trace import trace

ONCE = Effort(min_repeats=1, max_repeats=1, budget_s=0.0, warmup=0)
NF4, INT8, BASE = (Variant.named(name) for name in ("bfloat16@nf4", "bfloat16@int8-row", "bfloat16"))


def job_of() -> Job:
    torch.manual_seed(0)
    frozen = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).bfloat16().requires_grad_(False)
    model = nn.Sequential(nn.Linear(64, 64, dtype=torch.bfloat16), frozen)
    return Job(
        "short",
        model,
        lambda step, size: Batch((torch.ones(size, 64, dtype=torch.bfloat16),)),
        lambda output, batch: output.float().square().mean(),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
        4,
    )


def profiled(job, notes, ladder=(NF4, INT8, BASE)):
    asked = ProfileRequest(ladder=ladder, with_collectives=False, efforts=Efforts(ONCE, ONCE, ONCE))
    return profile(job, trace(job), asked, note=notes.append)


@pytest.fixture
def whole_model_does_not_fit(monkeypatch):
    start, places = StepRunner.start.__func__, []

    def fails_whole(cls, job, device, *args, apart=False, **options):
        if not apart:
            raise torch.OutOfMemoryError("CUDA out of memory")
        runner = start(cls, job, device, *args, apart=apart, **options)
        assert runner.apart == device
        move = runner.model.to
        monkeypatch.setattr(runner.model, "to", lambda place: places.append(str(place)) or move(place))
        return runner

    monkeypatch.setattr(StepRunner, "start", classmethod(fails_whole))
    return places


def test_steps_are_measured_with_stored_weights_and_the_model_waits_elsewhere_between_them(whole_model_does_not_fit):
    notes, job = [], job_of()
    found = profiled(job, notes)
    assert [step.variant for step in found.steps] == [NF4, INT8]
    assert any(
        note.startswith("short does not fit on this device as its script has it: whole steps are measured") for note in notes
    )
    assert found.optimizer_state_bytes > 0
    assert all(parameter.device.type == "cpu" for parameter in job.model.parameters())
    assert whole_model_does_not_fit == ["cpu", "cpu"] * 3, "there for two steps and a last look, and away again"


def test_the_planner_begins_from_a_step_that_was_measured(whole_model_does_not_fit):
    """Of operators as they were timed and steps of twice and three times their sum, it predicts the steps."""
    job = job_of()
    dag, found = trace(job), profiled(job, [])
    alone = CostModel(dag, found)
    steps = []
    for step, factor in zip(found.steps, (2, 3), strict=True):
        times = times_of(dag, alone, step.variant)
        forward, backward = (factor * (times[first] + times[first + 1]) for first in (0, 2))
        optimizer = found.optimizer_compute_ns + found.optimizer_dispatch_ns
        whole = {"iteration_ns": forward + backward + optimizer, "optimizer_compute_ns": 0, "optimizer_dispatch_ns": 0}
        phases = {"forward_compute_ns": forward, "backward_compute_ns": backward}
        steps.append(attrs.evolve(step, **whole, **phases, forward_dispatch_ns=0, backward_dispatch_ns=0))
    model = calibrated_model(dag, attrs.evolve(found, steps=tuple(steps)), BASE, lowers=True)
    for step in steps:
        wanted = step.forward_compute_ns + step.backward_compute_ns
        assert sum(times_of(dag, model, step.variant)) == pytest.approx(wanted, rel=1e-3)
    scaled = sum(times_of(dag, model, BASE)) / sum(times_of(dag, alone, BASE))
    assert 0.8 * 2 < scaled < 1.2 * 3  # as the steps are that were measured


def times_of(dag, model, variant):
    variants = {op.op_id: BASE if op.not_stored_as(variant.storage) else variant for op in dag.adjustable}
    mapper = CostMapper(dag, model, variants)
    forward, backward = sequence(mapper.forward), sequence(mapper.backward)
    return forward.dispatch_ns, forward.compute_ns, backward.dispatch_ns, backward.compute_ns


def test_a_step_at_the_base_alone_may_not_fit(monkeypatch):
    original, notes = bench.measure_step, []

    def measure(runner, variant, *rest):
        if variant == BASE:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(runner, variant, *rest)

    monkeypatch.setattr(bench, "measure_step", measure)
    assert [step.variant for step in profiled(job_of(), notes).steps] == [NF4, INT8]
    assert "a whole step in bfloat16 does not fit on this device, and is not measured" in notes
    with pytest.raises(JobError, match="a training step of short fails"):
        profiled(job_of(), [], ladder=(BASE,))


def test_where_no_step_fits_it_is_one_sentence(monkeypatch):
    def measure(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(bench, "measure_step", measure)
    with pytest.raises(JobError, match=r"no training step of short fits on this device, whichever of bfloat16@nf4, .*: take a"):
        profiled(job_of(), [])
