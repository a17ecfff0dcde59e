"""A script that honours local batches of different sizes: ``torchrun uneven_script.py RUN SAVED``.

``SAMPLE_S`` is what a step takes longer for each sample, in seconds, on a device that is slow.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import qsync_torch as qsync

BATCH, SAMPLES, EPOCHS = 16, 100, 2


class Delayed(nn.CrossEntropyLoss):
    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        time.sleep(len(input) * float(os.environ.get("SAMPLE_S", "0")))
        return super().forward(input, target)


def make() -> tuple[nn.Module, torch.optim.Optimizer, nn.Module, TensorDataset]:
    """Model, optimizer, loss and data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 3))
    x = torch.randn(SAMPLES, 12)
    return model, torch.optim.SGD(model.parameters(), lr=0.05), Delayed(), TensorDataset(x, x[:, :3].argmax(1))


def unweighted(run: str) -> None:
    """A compiled model whose script forgets to weight its gradients."""
    dist.init_process_group("gloo")
    model, optimizer, criterion, data = make()
    applied = qsync.hybrid(model, optimizer, criterion, DataLoader(data, batch_size=BATCH), run=run, compiles=True)
    ddp = DistributedDataParallel(torch.compile(model, backend="aot_eager"), **applied.ddp_options())
    x, y = next(iter(DataLoader(data, batch_sampler=applied.batch_sampler(data))))
    criterion(ddp(x), y).backward()


def main(run: str, saved: str) -> None:
    dist.init_process_group("gloo")
    model, optimizer, criterion, data = make()
    applied = qsync.hybrid(model, optimizer, criterion, DataLoader(data, batch_size=BATCH), run=run, compiles=False)
    loader = DataLoader(data, batch_sampler=applied.batch_sampler(data))
    ddp = DistributedDataParallel(model, **applied.ddp_options())
    applied.weight_gradients(ddp)
    sizes = []
    for epoch in range(EPOCHS):
        loader.batch_sampler.set_epoch(epoch)
        for x, y in loader:
            criterion(ddp(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            sizes.append(len(x))
    torch.save({"sizes": sizes, "model": model.state_dict()}, f"{saved}.{dist.get_rank()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    (main if len(sys.argv) > 2 else unweighted)(*sys.argv[1:])
