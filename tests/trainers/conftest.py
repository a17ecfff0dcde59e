"""Plans and the parameters of the plain loops, made once."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).parent))

from digits_net import make_model
from launching import HERE, run_ranks
from plain_ddp import JOBS, Module, bert
from plans import plan_of

import forked
from qsync_core.artifacts.files import save
from qsync_core.ir.precision import Precision

forked.preload("accelerate", "lightning.pytorch", "transformers.trainer")

INT8, BFLOAT16 = Precision.INT8, Precision.BFLOAT16


@pytest.fixture
def own_process():
    """For trainers in this process: what they leave in it (variables of a job, process groups) is gone afterwards."""
    before = dict(os.environ)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def plans(tmp_path_factory) -> Path:
    """A folder of plans: int8, whose rounding is random, and bfloat16."""
    folder = tmp_path_factory.mktemp("plans")
    digits = {"conv2": INT8, "conv3": BFLOAT16}
    first = "bert.encoder.layer.0"
    tokens = {f"{first}.attention.self.query": INT8, f"{first}.intermediate.dense": INT8, f"{first}.output.dense": BFLOAT16}
    save(plan_of(bert(), tokens), folder / "bert.qsync")
    for scaled in (False, True):
        suffix = "-scaled" if scaled else ""
        save(plan_of(make_model(), digits, scaling=scaled), folder / f"digits{suffix}.qsync")
        inside = {f"net.{name}": precision for name, precision in digits.items()}
        save(plan_of(Module(), inside, scaling=scaled), folder / f"module{suffix}.qsync")
    return folder


@pytest.fixture(scope="session")
def plain(plans) -> dict[str, dict[str, torch.Tensor]]:
    """By job of ``plain_ddp.py``, the parameters and buffers that it ends with."""
    run_ranks(HERE / "plain_ddp.py", plans, [str(plans), *JOBS])
    return {name: torch.load(plans / f"{name}.pt", weights_only=True) for name in JOBS}
