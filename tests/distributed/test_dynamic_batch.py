"""Training with unequal local batches: the weighted gradient is the whole batch's, and what is not is refused on every rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import run_machines, run_ranks

pytestmark = pytest.mark.distributed

SCRIPT = str(Path(__file__).parents[2] / "bench" / "dynamic_batch.py")
TINY = "resnet18:image=16,small_stem=true,width=4,classes=5"
SHORT = ["--steps", "2", "--repetitions", "2"]
SUMMED = """
import torch
from qsync_torch.job import Batch, Job

def job():
    def batch(step, size):
        torch.manual_seed(step)
        return Batch((torch.randn(size, 5),), target=torch.randn(size, 2))

    def loss(output, batch):
        return (output - batch.target).square().sum()

    return Job("summed", torch.nn.Linear(5, 2), batch, loss, lambda parameters: torch.optim.SGD(parameters, lr=0.01))
"""


def test_unequal_batches_train_with_the_whole_batch_s_gradient():
    ended = run_ranks([[SCRIPT, TINY, "--batches", "7,3", *SHORT]] * 2, [{}, {}])
    assert [e.status for e in ended] == [0, 0], ended
    printed = json.loads(next(line for line in ended[0].output.splitlines() if line.startswith("{")))
    assert printed["batches"] == [7, 3]
    assert printed["gradient_error"] < 1e-12  # in float64; weights of 1 would be some 0.4 away
    assert len(printed["repetitions"]) == 2
    assert printed["samples_per_s"] > 0
    assert "samples_per_s" not in ended[1].output


def test_a_loss_that_is_no_mean_is_refused_on_every_rank(tmp_path):
    (tmp_path / "summed.py").write_text(SUMMED)
    ended = run_ranks([[SCRIPT, f"{tmp_path / 'summed.py'}:job", "--batches", "7,3", *SHORT]] * 2, [{}, {}])
    for rank, end in enumerate(ended):
        assert end.status == 1
        assert f"rank {rank}: the weighted gradient of " in end.output
        assert "away from that of the whole batch, more than 1e-09; is its loss a mean over samples?" in end.output


@pytest.mark.nightly
def test_batches_must_be_one_for_each_rank():
    for end in run_machines([[SCRIPT, TINY, "--batches", "7,3,2"]] * 2, [{}, {}]):
        assert end.status == 1  # torchrun's own; the script's is 2
        assert "--batches has 3 entries for 2 ranks; start it by torchrun, one entry per rank" in end.output
