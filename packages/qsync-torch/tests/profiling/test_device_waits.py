"""Steps that wait for their device, as PyTorch's debug mode reports them."""

import warnings

import pytest
import torch

from qsync_torch.profiling.device_waits import waits_for_device

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
