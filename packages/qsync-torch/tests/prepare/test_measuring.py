"""What one rank measures for its group, where it cannot."""

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from qsync_core.errors import JobError
from qsync_torch.job import Batch, Job
from qsync_torch.prepare.measuring import Bench


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
