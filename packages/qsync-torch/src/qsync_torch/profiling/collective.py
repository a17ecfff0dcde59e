"""All-reduce costs: the real bucket sizes, measured in the current process group.

See docs/design/simulator.md#all-reduce-among-unequal-groups.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from qsync_core.ir.profile import CollectiveModel
from qsync_torch.profiling.linear_fit import fit_line

_SHARE_MATRIX = 192
"""Side of the matrix product that stands for compute: large enough to be bound by the cores, small enough to stay in cache."""
_CACHE_BYTES = 64 << 20
_SHARE_PRODUCTS = 60
"""Enough of them for several periods of a CPU quota."""


def measure_collective(bucket_bytes: Sequence[int], device: torch.device, *, repeats: int = 15) -> CollectiveModel | None:
    """Measure all-reduces of the given sizes on the default process group; every rank gets the slowest rank's times.

    Args:
        bucket_bytes: sizes of the gradient buckets in bytes; two more sizes are added where there are fewer than three distinct
            ones, so that a line can be fitted.
        device: where the gradients live.
        repeats: samples of each size.

    Returns:
        The fitted model, or None without a process group of at least two ranks or without buckets.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2 or not bucket_bytes:
        return None
    sizes = sorted(set(bucket_bytes))
    if len(sizes) < 3:
        sizes = sorted({*sizes, max(4, sizes[0] // 4), 2 * sizes[-1]})
    measured = tuple((size, _all_reduce_ns(size, device, repeats)) for size in sizes)
    line = fit_line(measured)
    share = _compute_share(max(bucket_bytes), repeats) if device.type == "cpu" else 0.0
    return CollectiveModel(
        world_size=dist.get_world_size(),
        backend=str(dist.get_backend()),
        alpha_ns=line.intercept,
        beta_ns_per_byte=line.slope,
        measured=measured,
        residuals_ns=_residuals(measured, line.intercept, line.slope),
        compute_share=share,
    )


def _residuals(measured: Sequence[tuple[int, int]], alpha: float, beta: float) -> tuple[int, ...]:
    return tuple(round(duration - (alpha + beta * size)) for size, duration in measured)


def _all_reduce_ns(nbytes: int, device: torch.device, repeats: int) -> int:
    """Median duration of one all-reduce, the slowest rank's."""
    tensor = torch.zeros(max(1, nbytes // 4), device=device)
    samples = []
    for index in range(repeats + 2):
        _leave_caches(device)
        if device.type == "cuda":
            dist.barrier(device_ids=[device.index or 0])
            torch.cuda.synchronize(device)
        else:
            dist.barrier()
        start = time.perf_counter_ns()
        dist.all_reduce(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if index >= 2:
            samples.append(time.perf_counter_ns() - start)
    return round(_maximum_over_ranks(statistics.median(samples), device))


def _leave_caches(device: torch.device) -> None:
    """On a CPU: push everything else out of the caches, as a backward pass between two all-reduces does."""
    if device.type == "cpu":
        torch.ones(_CACHE_BYTES // 4).add_(1)


def _compute_share(nbytes: int, repeats: int) -> float:
    """Share of a running all-reduce's time that its own threads take from compute on this rank's core.

    By CPU time: what the process uses while it only waits for the all-reduce, over what a computing process would have been given
    in that time (less than the time itself where the rank has a share of a core).
    """
    tensor = torch.zeros(max(1, nbytes // 4))
    a = torch.rand(_SHARE_MATRIX, _SHARE_MATRIX)
    shares = []
    for _ in range(repeats):
        dist.barrier()
        given = _core_share(lambda: [a @ a for _ in range(_SHARE_PRODUCTS)])
        _leave_caches(tensor.device)
        dist.barrier()
        taken = _core_share(lambda: dist.all_reduce(tensor))
        if given > 0:
            shares.append(taken / given)
    return min(1.0, statistics.median(shares)) if shares else 0.0


def _core_share(work: Callable[[], object]) -> float:
    """CPU time of this process, all threads, over elapsed time."""
    cpu, start = time.process_time_ns(), time.perf_counter_ns()
    work()
    return (time.process_time_ns() - cpu) / (time.perf_counter_ns() - start)


def _maximum_over_ranks(value: float, device: torch.device) -> float:
    tensor = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor.item())
