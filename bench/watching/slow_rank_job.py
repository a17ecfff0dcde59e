"""The two ranks of the trials: ``torchrun --nproc-per-node 2 slow_rank_job.py OUTPUT``; rank 0 writes what was said of each."""

from __future__ import annotations

import itertools
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import qsync_torch as qsync

SLOWED = 0.3
HEALTHY, AFTER, TOLD = 45, 60, 4
"""Steps before a rank is slowed, and after; and the first of these in which nothing is told any more of steps before."""
PHASES = ("input", "forward", "backward", "communication", "received", "optimizer")
"""``received`` slows the communication too: a rank has what all others have, later."""


class Nap:
    """Sleeps where it is called, once it is told to."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, *args: Any) -> None:
        """Sleep."""
        if self.seconds:
            time.sleep(self.seconds)


class _Backward(torch.autograd.Function):
    """Naps in backward."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, nap: Nap) -> torch.Tensor:
        context.nap = nap
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        context.nap()
        return gradient, None


def network(kind: int) -> tuple[nn.Module, torch.Tensor]:
    """A model of one of two kinds, and a batch."""
    torch.manual_seed(0)
    if kind:
        layers = [part for _ in range(6) for part in (nn.Linear(768, 768), nn.LayerNorm(768), nn.GELU())]
        return nn.Sequential(*layers), torch.randn(256, 768)
    widths = (3, 32, 64, 64, 128)
    blocks = [
        part
        for a, b in itertools.pairwise(widths)
        for part in (nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.AvgPool2d(2))
    ]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(512, 10)), torch.randn(32, 3, 32, 32)


def trial(phase: str, slow: int, kind: int) -> dict[str, Any]:
    """Train, slow one rank down, and wait for a sentence."""
    nap, said = Nap(), list[tuple[int, str]]()
    model, batch = network(kind)
    wrapper = DistributedDataParallel(model, bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(model.parameters())
    _place(phase, nap, model, wrapper, optimizer)
    step = 0
    watch = qsync.watch(wrapper, say=lambda sentence: said.append((step, sentence)))
    times = []
    for step in range(HEALTHY + AFTER):
        if step == HEALTHY:
            nap.seconds = _injected_s(times[HEALTHY // 2 :]) if dist.get_rank() == slow else 0.0
        begin = time.perf_counter()
        if phase == "input":
            nap()
        wrapper(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - begin)
    watch.close()
    injected_ms = SLOWED * statistics.median(times[HEALTHY // 2 : HEALTHY]) * 1e3
    early = [sentence for at, sentence in said if at < HEALTHY + TOLD]
    late = [(at - HEALTHY + 1, sentence) for at, sentence in said if at >= HEALTHY + TOLD]
    expected = "communication" if phase == "received" else phase
    at, sentence = late[0] if late else (AFTER, "nothing")
    excess = re.search(r"([\d.]+) ms more than", sentence)
    return {
        "phase": phase,
        "rank": slow,
        "right": sentence.startswith(f"rank {slow} is slow in its {expected}:"),
        "steps": at,
        "said": sentence,
        "early": early,
        "injected_ms": injected_ms,
        "excess_ms": float(excess[1]) if excess else 0.0,
    }


def _injected_s(times: list[float]) -> float:
    return SLOWED * statistics.median(times)


def _place(
    phase: str, nap: Callable[..., None], model: nn.Module, wrapper: DistributedDataParallel, optimizer: torch.optim.Optimizer
) -> None:
    """Have the nap taken in a phase; input is the loop's own."""
    middle = model[len(list(model)) // 2]  # type: ignore[index, call-overload, arg-type]
    if phase == "forward":
        middle.register_forward_hook(lambda module, args, output: nap())
    elif phase == "backward":
        middle.register_forward_hook(lambda module, args, output: _Backward.apply(output, nap))
    elif phase == "optimizer":
        optimizer.register_step_pre_hook(lambda *_: nap())
    elif phase in ("communication", "received"):

        def hook(state, bucket):  # type: ignore[no-untyped-def]  # PyTorch reads annotations, which must not be texts
            if phase == "communication" and bucket.is_last():
                nap()
            sent = allreduce_hook(None, bucket)  # type: ignore[arg-type]
            return sent.then(lambda done: (nap(), done.value())[1]) if phase == "received" and bucket.is_last() else sent

        wrapper.register_comm_hook(None, hook)


def take_priority() -> None:
    """Run all threads before those of other programs, where the environment asks for it."""
    if os.environ.get("QSYNC_BENCH_PRIORITY"):
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setscheduler(int(thread.name), os.SCHED_RR, os.sched_param(5))


def main(output: Path) -> None:
    """Run all trials."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trial("input", 0, 0)  # pays for what comes first
    take_priority()
    found = [trial(phase, rank, (rank + number) % 2) for number, phase in enumerate(PHASES) for rank in range(2)]
    if dist.get_rank() == 0:
        output.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
