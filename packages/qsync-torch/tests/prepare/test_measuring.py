"""What one rank measures for its group, where it cannot."""

import re
from types import SimpleNamespace

import attrs
import pytest
import torch
from torch import nn

from qsync_core.errors import JobError
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import StepMeasurement
from qsync_core.ir.variant import Variant
from qsync_torch.job import Batch, Job
from qsync_torch.prepare.measuring import Bench
from qsync_torch.profiling import whole_step
from qsync_torch.tracing.trace import trace


class Waiting(nn.Linear):
    def forward(self, x):
        raise RuntimeError("[buffer.cc:78] Timed out waiting 300000ms for recv operation to complete")


def test_a_step_that_waits_in_vain_for_other_ranks_is_named_with_its_line_and_what_to_do():
    job = Job(
        "waiting",
        Waiting(4, 4),
        lambda step, size: Batch((torch.randn(size, 4),)),
        lambda output, batch: output.sum(),
        lambda parameters: torch.optim.SGD(parameters, 0.1),
        2,
    )
    bench = Bench(job, None, torch.device("cpu"), SimpleNamespace(rank=3), None, None)
    with pytest.raises(JobError) as error:
        bench._step()
    said = r"step of waiting on rank 3, which is measured alone, fails because of .*test_measuring\.py:\d+ .*Timed out waiting"
    assert re.search(said, str(error.value))
    assert "dist.barrier" in str(error.value)


def plain_job():
    return Job(
        "plain",
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)),
        lambda step, size: Batch((torch.randn(size, 4),)),
        lambda output, batch: output.square().mean(),
        lambda parameters: torch.optim.SGD(parameters, 0.1),
        2,
    )


class Board:
    def stage(self, name):
        return lambda done, total, what: None


def test_predictions_of_a_compiled_script_are_off_by_the_measured_factor(monkeypatch):
    """The compiler is a stand-in that counts; the measured time is put in its place."""
    job, calls = plain_job(), []
    dag = trace(job)

    class Compiled(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, x):
            calls.append(self.training)
            return self.model(x)

    measured = whole_step.measure_step

    def measure_step(*arguments):
        return attrs.evolve(measured(*arguments), iteration_ns=2_500_000)

    monkeypatch.setattr(torch, "compile", Compiled)
    monkeypatch.setattr(whole_step, "measure_step", measure_step)
    bench = Bench(job, dag, torch.device("cpu"), SimpleNamespace(rank=0), None, Board())
    for eager_ns, said in ((4_000_000, "they are 60% more"), (2_000_000, "they are 20% less")):
        told = bench._compiled("infer", StepMeasurement(Variant.plain(Precision.FLOAT32), eager_ns, 0, 0, 0, 0, 0, 0, 0))
        assert "a step of infer in float32 takes 2.50 ms here" in told
        assert said in told
    assert len(calls) > 4
    assert all(calls)


def test_a_model_that_does_not_compile_says_why_predictions_are_unchecked(monkeypatch):
    def refuse(model):
        raise RuntimeError("no C++ compiler was found\nand more")

    job = plain_job()
    monkeypatch.setattr(torch, "compile", refuse)
    bench = Bench(job, trace(job), torch.device("cpu"), SimpleNamespace(rank=0), None, Board())
    told = bench._compiled("infer", None)
    assert "its step fails once compiled (RuntimeError: no C++ compiler was found), and they are of the eager step" in told
