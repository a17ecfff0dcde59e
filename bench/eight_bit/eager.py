"""Row P5: int8 in plain eager DistributedDataParallel over AMP, one rank, whose hooks and buckets are those of any number."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import qsync_torch as qsync
from eight_bit.in_turns import take_turns
from eight_bit.steps import BLOCKS, INT8, ROWS, ratio
from kernels.bench import Bench, Row
from qsync_core.ir.precision import Precision
from qsync_torch.load_job import load_job
from steps.jobs import BERT, RESNET, StepJob

STEPS = 10
"""Of a turn."""
BOUND = 1.20


@attrs.frozen
class Way:
    """AMP, or int8 with bfloat16 between the operators.

    Attributes:
        variant: of linear operators; convolutions are in int8 forward; empty for AMP.
        replays: whether calls are run again by the extension in C++.
    """

    name: str
    variant: str = ""
    replays: bool = True


AMP = Way("AMP bfloat16")
_FORWARD = "int8>bfloat16"
WAYS = (
    AMP,
    Way("int8", _FORWARD),
    Way("int8, a scale a row", INT8.format(gradients="gi=bfloat16;gw=bfloat16", x="row")),
    Way("int8, all three products", ROWS),
    Way("int8, all in Python", _FORWARD, replays=False),
)


def stepped(job: StepJob, way: Way, bench: Bench) -> Callable[[], None]:
    """What trains one step, in this process alone."""
    os.environ["QSYNC_REPLAY"] = str(int(way.replays))
    cuda = bench.device.type == "cuda"
    dist.init_process_group("nccl" if cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    text, size = job.sized(bench)
    torch.manual_seed(0)
    loaded = load_job(text, size)
    model = loaded.model.to(bench.device).train()
    if way.variant:
        linears = {f"{name}#0": way.variant for name, part in model.named_modules() if isinstance(part, nn.Linear)}
        convolutions = {f"{name}#0": _FORWARD for name, part in model.named_modules() if isinstance(part, nn.Conv2d)}
        qsync.apply_(model, linears | convolutions, base=Precision.BFLOAT16)
    optimizer = loaded.optimizer(model.parameters())
    for group in optimizer.param_groups:
        group["lr"] = 1e-5
    wrapped = DistributedDataParallel(model, device_ids=[bench.device.index] if cuda else None, gradient_as_bucket_view=True)
    batch = loaded.batch(0, size).to(bench.device)

    def step() -> None:
        with torch.autocast(bench.device.type, torch.bfloat16):
            loss = loaded.compute_loss(batch, wrapped)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def rows(bench: Bench, words: str = "") -> Iterator[Row]:
    """The fastest way in int8 over AMP, of each model; and what replays save."""
    wanted = [word for word in words.split("|") if word]
    ways = [way for way in WAYS if way == AMP or not wanted or way.name in wanted]
    for job in (RESNET, BERT):
        made = {way.name: (stepped, (job, way, bench)) for way in ways}
        found = take_turns(made, blocks=BLOCKS, steps=2 if bench.quick else STEPS, say=bench.say)
        ours = [way.name for way in ways if way.variant and way.name in found]
        fastest = min(ours, key=lambda name: found[name].ms)
        value, spread = ratio(found[fastest], found[AMP.name])
        told = "; ".join(f"{name} {turns.ms:.1f} ms, {turns.peak:.2f} GiB" for name, turns in found.items())
        what = f"{job.title}, whole step in eager DistributedDataParallel: {fastest} over {AMP.name}"
        yield bench.row(f"P5-{job.name}", what, value, "ratio", f"≤ {BOUND:.2f}", f"{spread}; {told}")
