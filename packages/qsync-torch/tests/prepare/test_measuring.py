"""What one rank measures for its group, where it cannot."""

import re
from types import SimpleNamespace

import attrs
import pytest
import torch
from torch import nn

from qsync_core.errors import JobError, QSyncError
from qsync_core.ir.profile import Compiled, Compiler
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


def test_a_rank_with_another_job_than_rank_0_measures_no_other_batches_beside_a_profile_that_is_kept():
    job, other = plain_job(), attrs.evolve(plain_job(), model=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2), nn.ReLU()))
    folder = SimpleNamespace(parts={"profile slow": None}, load=lambda *_: object())
    bench = Bench(other, trace(job), torch.device("cpu"), SimpleNamespace(rank=1), folder, Board())
    with pytest.raises(QSyncError, match="give this rank the job of rank 0"):
        bench.profile_at(SimpleNamespace(name="slow"), 3)


def test_groups_are_compared_by_compiled_steps_where_the_script_compiles_its_model(monkeypatch):
    job, ran = attrs.evolve(plain_job(), compiles=True), []

    def compiled(model, how, applied):
        def forward(x):
            ran.append(str(how))
            return model(x)

        wrapped = nn.Identity()
        wrapped.forward = forward
        return wrapped

    monkeypatch.setattr(whole_step, "compiled_model", compiled)
    bench = Bench(job, trace(job), torch.device("cpu"), SimpleNamespace(rank=0), None, Board())
    assert bench._step().value > 0
    assert len(ran) > 2
    assert set(ran) == {"torch.compile"}


def test_a_model_that_does_not_compile_is_refused_with_what_to_say(monkeypatch):
    def refuse(*_):
        raise RuntimeError("no C++ compiler was found\nand more")

    job = attrs.evolve(plain_job(), compiles=Compiled(Compiler.QSYNC))
    monkeypatch.setattr(whole_step, "compiled_model", refuse)
    bench = Bench(job, trace(job), torch.device("cpu"), SimpleNamespace(rank=0), None, Board())
    with pytest.raises(JobError) as error:
        bench._step()
    assert "step of plain, compiled by qsync.compile, fails" in str(error.value)
    assert "no C++ compiler was found" in str(error.value)
    assert "qsync.hybrid(..., compiles=False)" in str(error.value)
