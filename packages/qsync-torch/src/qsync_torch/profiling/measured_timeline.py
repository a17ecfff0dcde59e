"""The measured Timeline: real training steps, alone or in a process group, as intervals per rank with the graph's operators."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.distributed as dist

from qsync_core.artifacts.files import from_bytes, to_bytes
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.timeline import Interval, Timeline
from qsync_torch.profiling.operator_spans import spans_of
from qsync_torch.profiling.recorded_step import marked_operators, record_step

_RECORDED = 2
"""Steps run under the profiler; the last is kept, the first pays for what the profiler sets up."""


def measured_timeline(
    model: torch.nn.Module,
    dag: PrecisionDag,
    train_step: Callable[[], Any],
    *,
    group: str,
    device: torch.device | str = "cpu",
    steps: int = 10,
    peak_bytes: int = 0,
) -> Timeline:
    """Run real steps and record one.  In an initialised process group all ranks must call this; each gets the whole timeline.

    Args:
        model: the model whose modules the graph names: not its DistributedDataParallel wrapper.  A plan may be applied to it.
        dag: its graph.
        train_step: one whole step: forward, backward, optimizer.
        group: name of this rank's device group.
        device: where it runs.
        steps: steps timed without the profiler, for ``iteration_ns``.
        peak_bytes: this rank's measured peak memory, 0 where it was not measured.
    """
    device = torch.device(device)
    period = _period_ns(train_step, steps, device)
    for _ in range(_RECORDED):
        _wait_for_all(device)
        events = record_step(model, dag, train_step, device)
    spans = spans_of(events, dag, marked_operators(model, dag))
    zero = min((span.start_ns for span in spans), default=0)
    rank = dist.get_rank() if _in_group() else 0
    intervals = tuple(
        Interval(span.name, span.op_id, span.phase, span.resource, rank, span.start_ns - zero, span.end_ns - span.start_ns)
        for span in spans
    )
    mine = Timeline("measured", dag.model, period, {rank: group}, intervals, {group: peak_bytes} if peak_bytes else {})
    return merge_timelines(_gather(mine, device)) if _in_group() else mine


def merge_timelines(timelines: list[Timeline]) -> Timeline:
    """One timeline of several ranks' own; the slowest rank's period is the job's.

    The ranks' clocks are not compared: each rank's times count from its own first event after a barrier.
    """
    peaks: dict[str, int] = {}
    for timeline in timelines:
        for group, peak in timeline.peak_bytes.items():
            peaks[group] = max(peak, peaks.get(group, 0))
    intervals = [interval for timeline in timelines for interval in timeline.intervals]
    return attrs.evolve(
        timelines[0],
        iteration_ns=max(timeline.iteration_ns for timeline in timelines),
        rank_group={rank: group for timeline in timelines for rank, group in timeline.rank_group.items()},
        intervals=tuple(sorted(intervals, key=lambda i: (i.rank, i.resource, i.start_ns))),
        peak_bytes=peaks,
    )


def _in_group() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _wait_for_all(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if _in_group():
        dist.barrier()


def _period_ns(train_step: Callable[[], Any], steps: int, device: torch.device) -> int:
    """Mean time of steps run back to back."""
    train_step()
    _wait_for_all(device)
    start = time.perf_counter_ns()
    for _ in range(steps):
        train_step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter_ns() - start) // steps


def _gather(mine: Timeline, device: torch.device) -> list[Timeline]:
    """Every rank's timeline, exchanged as artifact bytes."""
    place = device if dist.get_backend() == "nccl" else torch.device("cpu")
    data = torch.frombuffer(bytearray(to_bytes(mine)), dtype=torch.uint8).to(place)
    sizes = [torch.zeros(1, dtype=torch.int64, device=place) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([data.numel()], device=place))
    room = max(int(size) for size in sizes)
    padded = torch.zeros(room, dtype=torch.uint8, device=place)
    padded[: data.numel()] = data
    everyone = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(everyone, padded)
    pairs = zip(everyone, sizes, strict=True)
    return [from_bytes(bytes(tensor[: int(size)].cpu().numpy().tobytes()), Timeline) for tensor, size in pairs]
