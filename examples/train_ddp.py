"""An ordinary DistributedDataParallel script.  QSync is one line: ``qsync.apply_(model, plan)``.

Start it with torchrun, on every machine with the group it belongs to (see README.md beside this file)::

    QSYNC_GROUP=train torchrun --nnodes 2 --node-rank 0 --master-addr HOST --nproc-per-node 1 train_ddp.py --plan plan.qsync

Without ``--plan`` it is plain data-parallel training.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from digits_net import accuracy, load_data, make_model, make_optimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import qsync_torch as qsync
from qsync_core.artifacts.files import load
from qsync_core.errors import QSyncError
from qsync_core.ir.plan import PrecisionPlan


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", type=Path, help="plan made by 'qsync plan'; the same file on all ranks")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="samples per rank and step")
    parser.add_argument("--checkpoint", type=Path, help="written after every epoch, and resumed from where it exists")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    plan = load(args.plan, PrecisionPlan) if args.plan else None
    options = qsync.process_group_options(plan) if plan else None  # NCCL's CTAs, where the plan chooses them
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", pg_options=options)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)

    model = make_model().to(device)
    # The one added line; with a plan for every run and no float16 in it, `qsync.apply_(model, "plan.qsync")` is all there is.
    applied = qsync.apply_(model, plan) if plan else None
    ddp = DistributedDataParallel(model, **(applied.ddp_options() if applied else {}))  # buckets and buffers, likewise
    optimizer = make_optimizer(ddp.parameters())

    # Only plans with float16 gradients need these: the same scale on all ranks, and all skip the same steps.
    scale_loss = plan is not None and any(group.needs_loss_scaling for group in plan.groups)
    scaler = qsync.InStepGradScaler(device.type, enabled=scale_loss)

    first_epoch = step = 0
    if args.checkpoint and args.checkpoint.exists():
        state = torch.load(args.checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scaler.load_state_dict(state["scaler"])
        first_epoch, step = state["epoch"], state["step"]
        if applied:
            applied.step = step  # stochastic rounding goes on with fresh random numbers

    training, held_out = load_data()
    sampler = DistributedSampler(training, drop_last=True)
    loader = DataLoader(training, args.batch_size, sampler=sampler, drop_last=True)
    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        ddp.train()
        for x, y in loader:
            loss = cross_entropy(ddp(x.to(device)), y.to(device))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            step += 1
        if dist.get_rank() == 0:
            group = applied.group if applied else "no plan"
            print(f"epoch {epoch}: {group}, loss {loss.item():.4f}, held-out accuracy {accuracy(model, held_out):.1%}", flush=True)
            if args.checkpoint:
                save_checkpoint(args.checkpoint, model, optimizer, scaler, epoch + 1, step)
        dist.barrier()
    del ddp  # before its process group
    dist.destroy_process_group()


def save_checkpoint(path: Path, model, optimizer, scaler, epoch: int, step: int) -> None:
    """Write whole or not at all; the model's state is that of plain PyTorch, with or without a plan."""
    temporary = path.with_suffix(".tmp")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
    torch.save(state | {"epoch": epoch, "step": step}, temporary)
    temporary.replace(path)


if __name__ == "__main__":
    try:
        main()
    except QSyncError as error:
        sys.exit(f"error: {error}")
