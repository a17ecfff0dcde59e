"""A script that goes on with the groups that are there: the digits net under torchrun's elastic agent, from a run folder.

Start it on every machine in the same way (docs/coming-and-going.md), kill what you like, and start it again::

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    QSYNC_GROUP=infer torchrun --nnodes 1:2 --nproc-per-node 1 --max-restarts 100 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        elastic_digits.py run/
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from digits_net import accuracy, load_data, make_model, make_optimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import qsync_torch as qsync
from qsync_core.errors import QSyncError


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="the run folder, on every machine")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    parser.add_argument("--backend", help="of the process group; by default nccl on GPUs, else gloo")
    parser.add_argument("--losses", type=Path, help="append a line of JSON for every step of this rank")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    use_gpu = torch.cuda.is_available()
    backend = args.backend or ("nccl" if use_gpu else "gloo")
    dist.init_process_group(backend, pg_options=qsync.process_group_options(args.run) if backend == "nccl" else None)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_gpu else torch.device("cpu")
    if use_gpu:
        torch.cuda.set_device(device)

    model = make_model().to(device)
    began = time.perf_counter()
    applied = qsync.apply_(model, args.run, resize="keep-global")  # the plan of the groups that are there
    plan_s = time.perf_counter() - began
    ddp = DistributedDataParallel(model, **applied.ddp_options())
    applied.weight_gradients(ddp)  # by samples, since ranks may have different shares
    optimizer = make_optimizer(ddp.parameters())

    checkpoints = qsync.Checkpoints(args.checkpoints, applied)
    done = 0
    if found := checkpoints.load(device):
        model.load_state_dict(found.state["model"])
        optimizer.load_state_dict(found.state["optimizer"])
        done = found.step
    print(f"{applied.place}: plan in force in {plan_s:.3f} s, {dist.get_world_size()} ranks, step {done}", flush=True)

    training, held_out = load_data()
    sampler = applied.batch_sampler(training, drop_last=True)
    loader = DataLoader(training, batch_sampler=sampler)
    steps_per_epoch = len(training) // applied.global_batch  # the planned one, whatever groups are there
    while done < args.steps:
        epoch, step = divmod(done, steps_per_epoch)
        sampler.set_epoch(epoch, first_sample=step * applied.global_batch)
        ddp.train()
        for x, y in loader:
            loss = train_step(applied, ddp, optimizer, x.to(device), y.to(device))
            done += 1
            if args.losses:
                with args.losses.open("a") as log:
                    log.write(
                        json.dumps({"step": done, "place": applied.place, "loss": loss, "ranks": dist.get_world_size()}) + "\n"
                    )
            if done % args.save_every == 0 or done == args.steps:
                checkpoints.save(done, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            if done == args.steps:
                break
    print(f"{applied.place}: {done} steps, held-out accuracy {accuracy(model, held_out):.1%}", flush=True)
    dist.barrier()
    del ddp  # before its process group
    dist.destroy_process_group()


def train_step(applied, ddp, optimizer, x: torch.Tensor, y: torch.Tensor) -> float:
    """One step of this rank; its mean loss over the samples (N, 1, 8, 8) with labels (N,)."""
    total = 0.0
    for part in applied.micro_batches(ddp, len(x)):
        loss = cross_entropy(ddp(x[part.rows]), y[part.rows]) * part.weight
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total


if __name__ == "__main__":
    try:
        main()
    except QSyncError as error:
        sys.exit(f"error: {error}")
