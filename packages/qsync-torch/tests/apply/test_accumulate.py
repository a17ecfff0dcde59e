"""``hybrid(..., accumulate=k)``: what is captured and refused, and training under a plan of such a job."""

from __future__ import annotations

import itertools
import warnings

import attrs
import pytest
import torch
from torch import nn

import qsync_torch
from qsync_core.artifacts.files import save
from qsync_core.errors import JobError, QSyncError
from qsync_torch.apply import step_times
from qsync_torch.capturing.capture import capture
from qsync_torch.job import check_same_model
from qsync_torch.tracing.trace import trace

from .run_folders import model, plan_for

BATCH, STEPS, MICRO_BATCHES = 6, 3, 4


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """A plan in bfloat16 for steps of four micro-batches."""
    monkeypatch.setenv("QSYNC_GROUP", "infer")
    path = tmp_path / "plan.qsync"
    save(attrs.evolve(plan_for(("infer",)), accumulate=MICRO_BATCHES), path)
    return path


def line(network: nn.Module, accumulate: object = 1, **options: object):
    return qsync_torch.hybrid(network, None, None, [], accumulate=accumulate, **options)


def gradients(network: nn.Module) -> list[torch.Tensor]:
    """Of every step of a loop that accumulates, in which no weight changes."""
    samples = torch.randn(STEPS, MICRO_BATCHES, BATCH, 4, generator=torch.Generator().manual_seed(1))
    found = []
    for step in samples:
        network.zero_grad()
        for micro_batch in step:
            (network(micro_batch).square().mean() / MICRO_BATCHES).backward()
        found += [parameter.grad.clone() for parameter in network.parameters()]
    return found


def test_training_under_a_plan_accumulates_as_without_one(plan):
    torch.manual_seed(0)
    plain, planned = model(), model()
    planned.load_state_dict(plain.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        applied = line(planned, MICRO_BATCHES, run=plan)
    seen = []
    applied.each_step(seen.append)
    for with_plan, without in zip(gradients(planned), gradients(plain), strict=True):
        error = (with_plan - without).norm() / without.norm()
        assert 0 < error < 4 * 2**-8  # of an output, of its gradient and of the two operands, each rounded to bfloat16
    applied.remove()
    assert len(seen) == STEPS - 1  # the first pass only starts the clock, so that the last step's window stays open


def test_a_step_is_timed_over_as_many_backward_passes_as_the_plan_has(plan, monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(step_times, "now", lambda device: next(clock))  # two moments in each backward pass, one apart
    network = model()
    applied, told = line(network, MICRO_BATCHES, run=plan), []
    applied.each_step(told.append)
    gradients(network)
    applied.remove()
    assert [(step.duration_ns, step.wait_ns) for step in told] == [(2 * MICRO_BATCHES, MICRO_BATCHES)] * (STEPS - 1)


def test_a_loop_of_other_micro_batches_than_planned_is_told(plan):
    with pytest.warns(UserWarning, match=r"over 2 micro-batches in an optimizer step, and the plan was made for 4: .* again"):
        line(model(), 2, run=plan)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "2", None])
def test_what_is_no_number_of_micro_batches_is_refused(plan, wrong):
    said = rf"^accumulate of Sequential is how many micro-batches .*, an integer from 1 to 65536, got {wrong!r}$"
    network = model()
    with pytest.raises(JobError, match=said):
        line(network, wrong, run=plan)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    with pytest.raises(JobError, match=said):
        capture(network, optimizer, nn.MSELoss(), [(torch.ones(2, 4), torch.ones(2, 4))], accumulate=wrong)


def test_a_captured_job_and_its_graph_have_it():
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    job = capture(network, optimizer, nn.MSELoss(), [(torch.ones(2, 4), torch.ones(2, 4))], accumulate=3)
    graph = trace(job)
    assert (job.accumulate, graph.accumulate, graph.batch_size) == (3, 3, 2)
    check_same_model(job, graph)
    with pytest.raises(
        QSyncError, match=r"accumulates 3 micro-batches in an optimizer step, and Sequential accumulates 1; run 'qs"
    ):
        check_same_model(attrs.evolve(job, accumulate=1), graph)
