"""``examples/train_ddp.py`` on two gloo workers; the longest run is started as its README says."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from launching import EXAMPLES, train

from processes import Ended
from qsync_core.ir.precision import Precision

pytestmark = pytest.mark.distributed(seconds=30)


@pytest.fixture(scope="module")
def trained(make_plan, tmp_path_factory) -> Callable[[int], tuple[list[Ended], Path]]:
    """By the number of epochs: both ranks under the plan, and the checkpoint with which they ended; each trained once."""

    @cache
    def run(epochs: int) -> tuple[list[Ended], Path]:
        checkpoint = tmp_path_factory.mktemp("trained") / "checkpoint.pt"
        options = ["--epochs", str(epochs), "--checkpoint", str(checkpoint)]
        ended = train([make_plan()] * 2, *options, torchrun=epochs == 3)
        assert [e.status for e in ended] == [0, 0], ended
        return ended, checkpoint

    return run


def test_two_groups_train_under_one_plan_and_the_checkpoint_loads_without_qsync(trained):
    ended, checkpoint = trained(3)
    said = re.findall(r"epoch (\d): (\w+), loss ([\d.]+), held-out accuracy ([\d.]+)%", ended[0].output)
    assert [(epoch, group) for epoch, group, _, _ in said] == [("0", "train"), ("1", "train"), ("2", "train")]
    assert float(said[-1][3]) > 90

    # Plain PyTorch in a process in which QSync cannot be imported.
    blocked = "import runpy, sys; sys.modules |= {'qsync_core': None, 'qsync_torch': None}; sys.argv = sys.argv[1:]; "
    command = [sys.executable, "-c", blocked + "runpy.run_path(sys.argv[0], run_name='__main__')", "evaluate.py", str(checkpoint)]
    done = subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"held-out accuracy {said[-1][3]}%"


def test_the_plan_changes_what_the_infer_rank_computes_and_nothing_else(make_plan, trained, tmp_path):
    """Without a plan, and with one that lowers nothing, training is the same to the last bit; with int8 it is not."""
    states = {"mixed": torch.load(trained(1)[1], weights_only=True)["model"]}
    for name, plan in (("none", None), ("float32", make_plan({}, "float32"))):
        path = tmp_path / f"{name}.pt"
        ended = train([plan] * 2, "--epochs", "1", "--checkpoint", str(path))
        assert [e.status for e in ended] == [0, 0], ended
        states[name] = torch.load(path, weights_only=True)["model"]
    plain = runpy.run_path(str(EXAMPLES / "digits_net.py"))["make_model"]().state_dict()
    for name, state in states.items():
        assert {key: (value.shape, value.dtype) for key, value in state.items()} == {
            key: (value.shape, value.dtype) for key, value in plain.items()
        }, name
    assert all(torch.equal(states["none"][key], states["float32"][key]) for key in plain)
    assert not torch.equal(states["none"]["conv2.weight"], states["mixed"]["conv2.weight"])


def test_a_resumed_run_ends_like_an_uninterrupted_one(make_plan, trained, tmp_path):
    """Bit for bit: weights, BatchNorm statistics, momentum, and the random numbers of stochastic rounding."""
    parts = shutil.copy(trained(1)[1], tmp_path / "parts.pt")
    ended = train([make_plan()] * 2, "--epochs", "3", "--checkpoint", str(parts))
    assert [e.status for e in ended] == [0, 0], ended
    assert "epoch 0" not in ended[0].output
    a, b = torch.load(trained(3)[1], weights_only=True), torch.load(parts, weights_only=True)
    assert a["step"] == b["step"] > 0
    for key in a["model"]:
        assert torch.equal(a["model"][key], b["model"][key]), key
    for key, entry in a["optimizer"]["state"].items():
        assert torch.equal(entry["momentum_buffer"], b["optimizer"]["state"][key]["momentum_buffer"]), key


def test_float16_gradients_scale_the_loss_on_both_ranks(make_plan, tmp_path):
    checkpoint = tmp_path / "checkpoint.pt"
    plan = make_plan({"fc": Precision.FLOAT16}, "float16")
    ended = train([plan] * 2, "--epochs", "1", "--checkpoint", str(checkpoint))
    assert [e.status for e in ended] == [0, 0], ended
    assert torch.load(checkpoint, weights_only=True)["scaler"]["scale"] > 1
