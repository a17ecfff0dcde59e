"""Samples per second of training with unequal local batches, and proof that their weighted gradient is the whole batch's.

Before anything is timed the gradient is compared with that of one process with the whole batch, both in float64, without dropout
and with batch norms' statistics as they are stored.  Started by torchrun, one rank per entry of ``--batches``::

    torchrun --nproc-per-node=2 bench/dynamic_batch.py resnet50 --batches 85,43 --steps 30

Rank 0 prints one JSON object.  The exit status is 1, on every rank, where the gradient is another.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from qsync_torch import weight_gradients
from qsync_torch.job import Batch, Job
from qsync_torch.load_job import load_job

TOLERANCE = 1e-9
"""Largest distance of the gradients, of the norm: beyond what float64 rounds, far below a wrong weight's."""
WARM_UP = 5
DIFFERENT = 4
"""Batches that the steps go through in turn."""


def arguments() -> argparse.Namespace:
    """The command line; what does not fit the number of ranks is refused before they meet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job", help="A named model or file.py:function.")
    parser.add_argument("--batches", required=True, help="Local batch of every rank, in rank order: 85,43.")
    parser.add_argument("--steps", type=int, default=30, help="Steps of each repetition.")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--bucket-cap-mb", type=float, default=25.0)
    found = parser.parse_args()
    try:
        found.batches = [int(text) for text in found.batches.split(",")]
    except ValueError:
        parser.error(f"--batches: expected whole numbers with commas between, got {found.batches!r}")
    ranks = int(os.environ.get("WORLD_SIZE", "0"))
    if len(found.batches) != ranks:
        parser.error(
            f"--batches has {len(found.batches)} entries for {ranks or 'no'} ranks; start it by torchrun, one entry per rank"
        )
    if min(*found.batches, found.steps, found.repetitions) < 1:
        parser.error(f"batches, steps and repetitions must be at least 1, got {found.batches}, {found.steps}, {found.repetitions}")
    return found


def part(batch: Batch, start: int, size: int) -> Batch:
    """Some samples of a batch."""
    whole = batch.size

    def cut(leaf: Any) -> Any:
        ours = isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == whole
        return leaf[start : start + size] if ours else leaf

    return Batch(*pytree.tree_map(cut, (batch.args, batch.kwargs, batch.target)))


def in_float64(batch: Batch) -> Batch:
    """The same batch with its real numbers in float64."""

    def widen(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return Batch(*pytree.tree_map(widen, (batch.args, batch.kwargs, batch.target)))


def gradient_error(job: Job, device: torch.device, whole: Batch, local: Batch, bucket_cap_mb: float) -> float:
    """‖g − g_ref‖ / ‖g_ref‖ of the ranks' weighted gradient against one process with the whole batch, in float64.

    In float32 a convolution's algorithm may make more of a difference than a wrong weight (VGG16-BN on an H100: 0.002).
    """
    reference = job.copy_model().to(device).double().eval()
    ours = DistributedDataParallel(copy.deepcopy(reference), bucket_cap_mb=bucket_cap_mb)
    weight_gradients(ours)
    for model, batch in ((reference, in_float64(whole)), (ours, in_float64(local))):
        job.loss(model(*batch.args, **batch.kwargs), batch).backward()
    difference = norm = 0.0
    for name, parameter in reference.named_parameters():
        if parameter.grad is not None:
            difference += float((ours.module.get_parameter(name).grad - parameter.grad).square().sum())
            norm += float(parameter.grad.square().sum())
    return (difference / norm) ** 0.5


def measure(given: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """The error of the gradient, and samples per second in each repetition; every rank must call it, and all get the same."""
    rank, size, whole = dist.get_rank(), given.batches[dist.get_rank()], sum(given.batches)
    torch.manual_seed(0)
    job = load_job(given.job, batch_size=whole)
    local = [part(job.batch(step, whole), sum(given.batches[:rank]), size).to(device) for step in range(DIFFERENT)]
    error = of_all(gradient_error(job, device, job.batch(0, whole).to(device), local[0], given.bucket_cap_mb), device)
    if not error <= TOLERANCE:
        return {"error": error}
    model = DistributedDataParallel(job.model.to(device).train(), bucket_cap_mb=given.bucket_cap_mb)
    weight_gradients(model)
    optimizer = job.optimizer([p for p in model.parameters() if p.requires_grad])
    rates = []
    for repetition in range(given.repetitions + 1):
        steps = given.steps if repetition else WARM_UP
        synchronize(device)
        dist.barrier()
        start = time.perf_counter()
        for step in range(steps):
            job.compute_loss(local[step % DIFFERENT], model).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        synchronize(device)
        rates.append(whole * steps / of_all(time.perf_counter() - start, device))
    return {"error": error, "rates": rates[1:]}


def of_all(value: float, device: torch.device) -> float:
    """The largest of all ranks' values."""
    found = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def synchronize(device: torch.device) -> None:
    """Wait for what a GPU has yet to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> int:
    """Check, time, print; the exit status."""
    given = arguments()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, found = dist.get_rank(), measure(given, device)
    gc.collect()  # a wrapper that outlives its process group can abort the process, or keep it from ending
    dist.destroy_process_group()
    if "rates" not in found:
        print(
            f"rank {rank}: the weighted gradient of {given.job} is {found['error']:.2g} of its norm away from that of the whole "
            f"batch, more than {TOLERANCE:g}; is its loss a mean over samples?",
            file=sys.stderr,
        )
        return 1
    if rank == 0:
        result = {"job": given.job, "batches": given.batches, "gradient_error": found["error"]}
        print(json.dumps({**result, "samples_per_s": statistics.median(found["rates"]), "repetitions": found["rates"]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
