"""An ordinary DistributedDataParallel script with the one line that prepares it, and trains it hybrid: ``qsync.hybrid``.

Two commands, each on every machine::

    torchrun --nproc-per-node 2 -m qsync prepare hybrid_digits.py -o run
    torchrun --nproc-per-node 2 hybrid_digits.py

``python -m qsync prepare hybrid_digits.py`` and ``python hybrid_digits.py`` are the same with one process.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from digits_net import accuracy, load_data, make_model, make_optimizer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import qsync_torch as qsync


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="samples per rank and step")
    parser.add_argument("--checkpoint", help="written in the end")
    args = parser.parse_args()

    distributed = "RANK" in os.environ
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if distributed:
        dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank() if distributed else 0

    model = make_model().to(device)
    optimizer = make_optimizer(model.parameters())
    criterion = nn.CrossEntropyLoss()
    training, held_out = load_data()
    sampler = DistributedSampler(training, drop_last=True) if distributed else None
    loader = DataLoader(training, args.batch_size, sampler=sampler, shuffle=sampler is None, drop_last=True)

    applied = qsync.hybrid(model, optimizer, criterion, loader)  # the one line

    # What the plan says of communication; without it the job is right as well, and a warning says what it would be faster with.
    wrapped = DistributedDataParallel(model, **applied.ddp_options()) if distributed else model
    for epoch in range(args.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        wrapped.train()
        for x, y in loader:
            loss = criterion(wrapped(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}, held-out accuracy {accuracy(model, held_out):.1%}", flush=True)
    if rank == 0 and args.checkpoint:
        torch.save({"model": model.state_dict()}, args.checkpoint)
    if distributed:
        del wrapped  # before its process group
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
