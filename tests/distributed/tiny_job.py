"""A net that is prepared in seconds, and what can go wrong with a job; the environment says what does."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path

import torch
from torch import nn

from qsync_torch.job import Batch, Job

POLL_S = 0.05


class Delayed(torch.optim.SGD):
    """On a device that is slow."""

    def step(self, closure: None = None) -> None:
        time.sleep(float(os.environ.get("STEP_S", "0")))
        super().step(closure)


def make_job() -> Job:
    """``FAIL``: it raises.  ``WIDTH``: of another net.  ``BATCH``: of another size.  ``WAIT_FOR``: only once that file is there.
    ``MOST_BYTES``: of a file.  ``DIE_AT``: its batches end the process, as a power cut does, once that file is there.  ``STEP_S``:
    what a step takes longer.  ``LENGTH``: of a sample."""
    if os.environ.get("FAIL"):
        raise FileNotFoundError("there is no data set on this machine")
    while (awaited := os.environ.get("WAIT_FOR")) and not Path(awaited).exists():
        time.sleep(POLL_S)
    if limit := int(os.environ.get("MOST_BYTES", "0")):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    length = int(os.environ.get("LENGTH", "2"))
    width = int(os.environ.get("WIDTH", "8"))
    torch.manual_seed(0)

    def batch(step: int, size: int) -> Batch:
        if (dying := os.environ.get("DIE_AT")) and Path(dying).exists():
            os.kill(os.getpid(), signal.SIGKILL)
        generator = torch.Generator().manual_seed(step)
        return Batch((torch.randn(size, length, 6, generator=generator),), target=torch.arange(size) % 3)

    return Job(
        "tiny",
        nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3)),
        batch,
        lambda output, batch: nn.functional.cross_entropy(output.mean(1), batch.target),
        lambda parameters: Delayed(parameters, lr=0.1),
        batch_size=int(os.environ.get("BATCH", "4")),
    )
