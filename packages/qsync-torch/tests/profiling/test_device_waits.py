"""Steps that wait for their device, as PyTorch's debug mode reports them."""

import warnings

import attrs
import pytest
import torch
from torch import nn

from qsync_torch.job import Batch, Job
from qsync_torch.profiling.device_waits import waits_for_device
from qsync_torch.profiling.whole_step import StepRunner

CUDA = torch.device("cuda", 0)


@pytest.fixture
def modes(monkeypatch):
    """The debug modes that were set, in order, where there is no CUDA device."""
    found = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: found[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", found.append)
    return found


def test_a_step_that_waits_is_found_and_the_mode_is_set_back(modes):
    assert waits_for_device(lambda: warnings.warn("called a synchronizing CUDA operation", stacklevel=1), CUDA)
    assert modes == [0, "warn", 0]


def test_other_warnings_say_nothing(modes):
    assert not waits_for_device(lambda: warnings.warn("lr_scheduler.step() before optimizer.step()", stacklevel=1), CUDA)


def test_a_failing_step_is_raised_and_the_mode_set_back(modes):
    with pytest.raises(ZeroDivisionError):
        waits_for_device(lambda: 1 // 0, CUDA)
    assert modes[-1] == 0


def test_a_cpu_is_not_asked():
    assert not waits_for_device(lambda: 1 // 0, torch.device("cpu"))


@pytest.mark.parametrize("reads", [True, False])
def test_a_loop_that_reads_its_loss_is_measured_so_behind_its_backward_pass(monkeypatch, reads):
    def batch(step, size):
        return Batch((torch.ones(size, 3),))

    job = Job(
        "line", nn.Linear(3, 1), batch, lambda output, _: output.sum(), lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    )
    runner, seen = StepRunner.start(attrs.evolve(job, reads_loss=reads), torch.device("cpu")), []
    read = torch.Tensor.item
    monkeypatch.setattr(
        torch.Tensor, "item", lambda loss: (seen.append([p.grad is not None for p in runner.model.parameters()]), read(loss))[1]
    )
    runner.train_step(0)
    assert seen == [[True, True]] * reads
