"""All-reduce costs: the real bucket sizes, measured in the current process group.

See docs/design/simulator.md#all-reduce-among-unequal-groups.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import attrs
import torch
import torch.distributed as dist

from qsync_core.ir.profile import CollectiveModel
from qsync_torch.distributed.process_group import rank_count
from qsync_torch.profiling.linear_fit import fit_line
from qsync_torch.torch_internals import occupy_stream

_SHARE_MATRIX = 192
"""Side of the matrix product that stands for compute: large enough to be bound by the cores, small enough to stay in cache."""
_CACHE_BYTES = 64 << 20
_SHARE_PRODUCTS = 60
"""Enough of them for several periods of a CPU quota."""
_WARMUP = 2
_SPIN_CYCLES = 4_000_000
"""About 2 ms on today's GPUs: longer than the CPU takes to issue a collective."""


def measure_collective(
    bucket_bytes: Sequence[int], device: torch.device, *, repeats: int = 15, group: dist.ProcessGroup | None = None
) -> CollectiveModel | None:
    """Measure all-reduces of the given sizes over the ranks of a group; every rank gets the slowest rank's times.

    Args:
        bucket_bytes: sizes of the gradient buckets in bytes; two more sizes are added where there are fewer than three distinct
            ones, so that a line can be fitted.
        repeats: samples of each size.
        group: a process group, all ranks by default.

    Returns:
        The fitted model, or None without a process group of at least two ranks or without buckets.
    """
    if rank_count(group) < 2 or not bucket_bytes:
        return None
    sizes = sorted(set(bucket_bytes))
    if len(sizes) < 3:
        sizes = sorted({*sizes, max(4, sizes[0] // 4), 2 * sizes[-1]})
    measured = tuple((size, _all_reduce_ns(size, device, repeats, group)) for size in sizes)
    line = fit_line(measured)
    share = _compute_share(max(bucket_bytes), repeats, group) if device.type == "cpu" else 0.0
    return CollectiveModel(
        world_size=dist.get_world_size(group),
        backend=str(dist.get_backend(group)),
        alpha_ns=line.intercept,
        beta_ns_per_byte=line.slope,
        measured=measured,
        residuals_ns=_residuals(measured, line.intercept, line.slope),
        compute_share=share,
    )


def _residuals(measured: Sequence[tuple[int, int]], alpha: float, beta: float) -> tuple[int, ...]:
    return tuple(round(duration - (alpha + beta * size)) for size, duration in measured)


def _all_reduce_ns(nbytes: int, device: torch.device, repeats: int, group: dist.ProcessGroup | None) -> int:
    tensor = torch.zeros(max(1, nbytes // 4), dtype=torch.float32, device=device)
    return collective_ns(lambda: dist.all_reduce(tensor, group=group), device, repeats, group)


def longer(model: CollectiveModel, factor: float) -> CollectiveModel:
    """All-reduces that take a multiple of the time."""
    measured = tuple((size, round(duration * factor)) for size, duration in model.measured)
    alpha, beta = model.alpha_ns * factor, model.beta_ns_per_byte * factor
    return attrs.evolve(
        model, alpha_ns=alpha, beta_ns_per_byte=beta, measured=measured, residuals_ns=_residuals(measured, alpha, beta)
    )


def collective_ns(call: Callable[[], object], device: torch.device, repeats: int, group: dist.ProcessGroup | None = None) -> int:
    """Median duration of a collective that all ranks start together, the slowest rank's.

    On a CUDA device it is the time between two events on the current stream.  A small all-reduce goes before the first one, after
    which all ranks are level, and a spin before that, so that the device does not wait for the CPU in between.
    """
    sample = _cuda_samples if device.type == "cuda" else _cpu_samples
    return round(maximum_over_ranks(statistics.median(sample(call, device, repeats + _WARMUP, group)[_WARMUP:]), device, group))


def _cuda_samples(call: Callable[[], object], device: torch.device, repeats: int, group: dist.ProcessGroup | None) -> list[float]:
    flag = torch.zeros(1, dtype=torch.float32, device=device)
    events = []
    with torch.cuda.device(device):
        for _ in range(repeats):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            occupy_stream(_SPIN_CYCLES)
            dist.all_reduce(flag, group=group)
            begin.record()
            call()
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1e6 for begin, end in events]


def _cpu_samples(call: Callable[[], object], device: torch.device, repeats: int, group: dist.ProcessGroup | None) -> list[float]:
    samples, others = [], _as_large_as_caches()
    for _ in range(repeats):
        others.add_(1)
        dist.barrier(group)
        start = time.perf_counter_ns()
        call()
        samples.append(float(time.perf_counter_ns() - start))
    return samples


def _as_large_as_caches() -> torch.Tensor:
    """Make what pushes everything else out of a CPU's caches when it is used, as a backward pass between two all-reduces does."""
    return torch.ones(_CACHE_BYTES // 4, dtype=torch.float32)


def _compute_share(nbytes: int, repeats: int, group: dist.ProcessGroup | None) -> float:
    """Share of a running all-reduce's time that its own threads take from compute on this rank's core.

    By CPU time: what the process uses while it only waits for the all-reduce, over what a computing process would have been given
    in that time (less than the time itself where the rank has a share of a core).
    """
    tensor = torch.zeros(max(1, nbytes // 4), dtype=torch.float32)
    a = torch.rand(_SHARE_MATRIX, _SHARE_MATRIX, dtype=torch.float32)
    shares, others = [], _as_large_as_caches()
    for _ in range(repeats):
        dist.barrier(group)
        given = _core_share(lambda: [a @ a for _ in range(_SHARE_PRODUCTS)])
        others.add_(1)
        dist.barrier(group)
        taken = _core_share(lambda: dist.all_reduce(tensor, group=group))
        if given > 0:
            shares.append(taken / given)
    return min(1.0, statistics.median(shares)) if shares else 0.0


def _core_share(work: Callable[[], object]) -> float:
    """CPU time of this process, all threads, over elapsed time."""
    cpu, start = time.process_time_ns(), time.perf_counter_ns()
    work()
    return (time.process_time_ns() - cpu) / (time.perf_counter_ns() - start)


def maximum_over_ranks(value: float, device: torch.device, group: dist.ProcessGroup | None = None) -> float:
    """The greatest of the ranks' values; by an all-reduce, after which they are level."""
    tensor = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return float(tensor.item())
