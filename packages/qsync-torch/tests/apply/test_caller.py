"""Messages about a plan speak of the call and the command that the script's author knows."""

from __future__ import annotations

import sys

import attrs
import pytest
import torch
from torch import nn

import qsync_torch
from qsync_core.errors import PlanError
from qsync_core.run_folder import RunFolder
from qsync_torch.caller import BY_HAND, Caller
from qsync_torch.capturing.hybrid import HYBRID

from .run_folders import make_run_folder, model


@pytest.fixture
def run(tmp_path, monkeypatch) -> RunFolder:
    monkeypatch.setenv("QSYNC_GROUP", "train")
    monkeypatch.setattr(sys, "argv", ["train.py"])
    return make_run_folder(tmp_path / "run", ("train",))


def refusal_of_hybrid(run: RunFolder, model: nn.Module, *inputs: torch.Tensor, **options: object) -> str:
    with pytest.raises(PlanError) as refused:
        qsync_torch.hybrid(model, None, None, [], run=run.path, **options).model(*inputs)
    return str(refused.value)


class TwoLinears(nn.Sequential):
    """A model of which the plan knows one part."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("other", "inputs", "said"),
    [
        (nn.Sequential(nn.ReLU(), nn.Linear(4, 4)), (), "Sequential has no linear or convolution 0, and the plan does not know 1"),
        (TwoLinears(), (torch.ones(2, 4),), "1 runs but the plan does not name it"),
    ],
)
def test_another_model_is_prepared_again(run, other, inputs, said):
    found = refusal_of_hybrid(run, other, *inputs)
    assert said in found
    assert found.endswith(f"; run 'python -m qsync prepare train.py -o {run.path}' again")


def test_under_torchrun_it_is_torchrun_s_command(run, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert f"'torchrun … -m qsync prepare train.py -o {run.path}'" in refusal_of_hybrid(run, TwoLinears(), torch.ones(2, 4))


def test_the_script_s_own_arguments_stand_behind_two_hyphens(run, monkeypatch):
    """Else the plan would be for the batches of the script's default arguments."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--batch-size", "16", "--data", "my data"])
    found = refusal_of_hybrid(run, TwoLinears(), torch.ones(2, 4))
    assert f"-m qsync prepare train.py -o {run.path} -- --batch-size 16 --data 'my data'' again" in found


def test_paths_with_spaces_are_quoted_as_a_shell_wants_them(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["my jobs/train.py"])
    caller = attrs.evolve(HYBRID, run=RunFolder(tmp_path / "a run"))
    assert caller.prepare == f"'python -m qsync prepare 'my jobs/train.py' -o '{tmp_path}/a run''"


def test_a_plan_for_a_job_without_autocast(run):
    with torch.autocast("cpu", torch.bfloat16):
        found = refusal_of_hybrid(run, model(), torch.ones(2, 4))
    again = f"run 'python -m qsync prepare train.py -o {run.path}' again for a job under autocast to bfloat16"
    assert found.endswith(f"leave autocast out, or {again} (qsync.hybrid(..., amp='bfloat16'))")


def test_calls_before_and_options_are_those_of_the_line(run):
    assert "call model.float() before qsync.hybrid, " in refusal_of_hybrid(run, model().half())
    applied = qsync_torch.hybrid(model(), None, None, [], run=run.path)
    with pytest.raises(PlanError, match=r"call qsync\.hybrid\(\.\.\., seed=7\), or"):
        applied.load_state_dict({"step": 1, "seed": 7})


def test_a_function_s_job_has_no_script_of_its_own(run):
    with pytest.raises(PlanError, match=r"run 'python -m qsync prepare JOB -o .*run' again"):
        qsync_torch.apply_(nn.Sequential(nn.ReLU()), run.path)


def test_options_as_each_call_takes_them():
    assert BY_HAND.with_option("seed=1") == "apply_(..., seed=1)"
    assert (
        Caller("HybridStrategy", None, "plan_options=dict({})").with_option("seed=1")
        == "HybridStrategy(..., plan_options=dict(seed=1))"
    )
