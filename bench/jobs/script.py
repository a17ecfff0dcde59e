"""The script that jobs prepare and train, in the environment of torchrun: a plain loop.

``MODEL``, ``SIZE``: which (``models.py``); ``AMP``: the format of its autocast, empty for float32 without TF32; ``COMPILED``: 1
where the model is compiled; ``RUN``: the run folder; ``BACKEND``: of the process group, NCCL or gloo by default; ``STEPS``;
``MODES``: ways to train, one after the other, each from the same weights: ``plan`` (the one line of QSync's README), ``full``
(without it), ``alone`` (the same, by the first ``FIRST`` ranks), or the path of a plan.

Rank 0 ends each with a line ``STEP {…}``: the mode, the seconds it took, the median step and its quartiles, every rank's median
step without communication, what the CPU alone takes to issue one, and the peak of memory.  Steps follow each other as in training:
on a GPU events say when each ends, and no step waits for the device.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import qsync_torch as qsync

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from jobs.models import Task

AMP = os.environ.get("AMP") or None
COMPILED = os.environ.get("COMPILED") == "1"
SIZE = os.environ.get("SIZE", "full")
WARMUP = 8
"""Steps before those that are timed; DistributedDataParallel makes its buckets anew in the second."""
LOCAL_WARMUP, LOCAL_STEPS = 2, 8
"""Steps of a rank for itself, without communication."""


def train_step(loss_of: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer) -> torch.Tensor | float:
    """One step of the loop, and its loss, which is not waited for."""
    loss = loss_of()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def main(one_step: Callable[[Callable[[], torch.Tensor], torch.optim.Optimizer], torch.Tensor | float] = train_step) -> None:
    """Train for some steps in each way."""
    cuda = torch.cuda.is_available() and SIZE != "small"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        if AMP is None:
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    else:
        torch.set_num_threads(1)
    dist.init_process_group(os.environ.get("BACKEND") or ("nccl" if cuda else "gloo"))
    task = Task.make(os.environ["MODEL"], SIZE)
    count = int(os.environ.get("FIRST", "1"))
    first = dist.new_group(range(count))
    for mode in os.environ.get("MODES", "plan").split():
        if mode != "alone":
            train(task, mode, device, None, one_step)
        elif dist.get_rank() < count:
            train(task, "full", device, first, one_step, name=mode)
        dist.barrier()
    dist.destroy_process_group()


def train(
    task: Task, mode: str, device: torch.device, group: dist.ProcessGroup | None, one_step: Callable[..., Any], name: str = ""
) -> None:
    """Some steps in one way, by the ranks of a group."""
    began = time.monotonic()
    batch, cuda = task.batch, device.type == "cuda"
    torch.compiler.reset()
    gc.collect()  # the model of the way before, with what its hooks hold
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model = copy.deepcopy(task.model).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = DataLoader(task.data, batch, shuffle=True, drop_last=True)
    applied: Any = None
    if mode == "plan":
        applied = qsync.hybrid(model, optimizer, task.loss_fn, loader, run=os.environ["RUN"], amp=AMP, compiles=COMPILED)
    elif mode != "full":
        applied = qsync.apply_(model, mode)
    if applied is not None and applied.local_batch != batch:
        batch = applied.local_batch
        loader = DataLoader(task.data * (1 + batch // len(task.data)), batch, shuffle=True, drop_last=True)
    inside = model
    if COMPILED:
        inside = qsync.compile(applied) if applied is not None else torch.compile(model)
    options = applied.ddp_options() if applied is not None else {}
    ddp = DistributedDataParallel(inside, process_group=group, **options)
    uneven = applied is not None and len(set(applied.batch_sizes)) > 1
    if uneven:
        applied.weight_gradients(ddp)
    batches = [_moved(b, device) for _, b in zip(range(4), loader, strict=False)]

    def loss_of(number: int) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16) if AMP else contextlib.nullcontext():
            return task.call(called, batches[number % len(batches)])

    def step(number: int) -> None:
        losses.append(one_step(partial(loss_of, number), optimizer))

    called: torch.nn.Module = ddp
    losses: list[torch.Tensor | float] = []
    late = sorted(_timed(step, int(os.environ.get("STEPS", "28")), cuda)[WARMUP:])
    loss = float(losses[-1])
    called = inside if uneven else ddp  # whose weighting meets in every step
    with contextlib.nullcontext() if uneven else ddp.no_sync():
        local_ms = statistics.median(_timed(step, LOCAL_WARMUP + LOCAL_STEPS, cuda)[LOCAL_WARMUP:])
        here = {"batch": batch, "local_ms": local_ms, "host_ms": _host_ms(step) if cuda else None}
    here["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
    ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(ranks, here, group=group)
    if dist.get_rank() == 0:
        quartiles = [late[len(late) // 4], late[3 * len(late) // 4]]
        found = {"ms": statistics.median(late), "quartiles": quartiles, "loss": loss}
        found |= {"samples": sum(rank["batch"] for rank in ranks), "seconds": round(time.monotonic() - began, 1)}
        found |= {key: [rank[key] for rank in ranks] for key in ("batch", "local_ms", "host_ms", "peak_gib")}
        print("STEP " + json.dumps({"mode": name or mode, **found}), flush=True)


def _timed(step: Callable[[int], None], count: int, cuda: bool) -> list[float]:
    """Milliseconds from the end of each step to that of the next, back to back."""

    def now() -> Any:
        if not cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    ends = [now()]
    for number in range(count):
        step(number)
        ends.append(now())
    if not cuda:
        return [1e3 * (after - before) for before, after in itertools.pairwise(ends)]
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in itertools.pairwise(ends)]


def _host_ms(step: Callable[[int], None]) -> float:
    """What the CPU takes to issue a step: the median, each begun when the device has nothing to do."""
    found = []
    for number in range(LOCAL_STEPS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step(number)
        found.append(1e3 * (time.perf_counter() - began))
    return statistics.median(found)


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, dict):
        return {name: tensor.to(device) for name, tensor in batch.items()}
    return [tensor.to(device) for tensor in batch]


if __name__ == "__main__":
    main()
