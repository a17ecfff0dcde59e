"""Timelines as Chrome trace events, which Perfetto (ui.perfetto.dev) and chrome://tracing show.

Format: "Trace Event Format" of the Chromium project: complete events (``ph: X``) with ``ts`` and ``dur`` in microseconds, and
metadata events (``ph: M``) that name processes and threads.  A rank is a process, a stream a thread; in a comparison predicted and
measured ranks are processes of their own.
"""

from __future__ import annotations

import statistics
from typing import Any

from qsync_core.ir.dfg import Resource
from qsync_core.ir.timeline import Timeline

_THREAD = {Resource.DISPATCH: 1, Resource.COMPUTE: 2, Resource.COMMUNICATION: 3}
_THREAD_NAME = ("", "CPU dispatch", "compute stream", "communication stream")


def to_perfetto(timeline: Timeline) -> dict[str, Any]:
    """The JSON object of a trace file; ``json.dump`` it.  Times in microseconds keep their nanosecond digits."""
    events: list[dict[str, Any]] = []
    for rank in sorted(timeline.rank_group):
        events += _process(timeline, rank, rank)
    for rank in sorted(timeline.rank_group):
        events += _events(timeline, rank, rank, 0)
    other = {"model": timeline.model, "source": timeline.source, "iteration_ns": timeline.iteration_ns}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def comparison_to_perfetto(predicted: Timeline, measured: Timeline) -> dict[str, Any]:
    """One trace of both: the prediction of each group, and below it the group's measured ranks.

    Measured ranks, whose clocks are not compared, are brought together at the ends of their collectives, and the prediction to
    where the first rank's device begins its step.
    """
    shifts = collective_shifts(measured)
    first = {group: rank for rank, group in sorted(measured.rank_group.items(), reverse=True)}
    common = [rank for rank, group in sorted(predicted.rank_group.items()) if group in first]
    ahead = 0
    if common:
        beside = first[predicted.rank_group[common[0]]]
        ahead = _device_begin(measured, beside) + shifts[beside] - _device_begin(predicted, common[0])
    shown = [
        (timeline, rank, ahead if timeline is predicted else shifts[rank])
        for group in dict.fromkeys([*predicted.rank_group.values(), *measured.rank_group.values()])
        for timeline in (predicted, measured)
        for rank, name in sorted(timeline.rank_group.items())
        if name == group
    ]
    # A trace's times are not negative.
    starts = [i.start_ns + shift for timeline, rank, shift in shown for i in timeline.intervals if i.rank == rank]
    zero = min(starts, default=0)
    events: list[dict[str, Any]] = []
    for process, (timeline, rank, _) in enumerate(shown):
        events += _process(timeline, rank, process, first.get(timeline.rank_group[rank]) if timeline is predicted else None)
    for process, (timeline, rank, shift) in enumerate(shown):
        events += _events(timeline, rank, process, shift - zero)
    periods = {"predicted_iteration_ns": predicted.iteration_ns, "measured_iteration_ns": measured.iteration_ns}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"model": measured.model, **periods}}


def _process(timeline: Timeline, rank: int, process: int, shown_as: int | None = None) -> list[dict[str, Any]]:
    """Names of a rank's process and of its streams; ``shown_as`` is the rank that a prediction stands for, where it has another."""
    streams = sorted({_THREAD[interval.resource] for interval in timeline.intervals if interval.rank == rank})
    name = rank if shown_as is None else shown_as
    return [
        _metadata("process_name", process, 0, {"name": f"rank {name} ({timeline.rank_group[rank]}, {timeline.source})"}),
        _metadata("process_sort_index", process, 0, {"sort_index": process}),
        *(_metadata("thread_name", process, thread, {"name": _THREAD_NAME[thread]}) for thread in streams),
    ]


def _events(timeline: Timeline, rank: int, process: int, shift_ns: int) -> list[dict[str, Any]]:
    events = []
    for interval in timeline.intervals:
        if interval.rank == rank:
            arguments = {"phase": str(interval.phase)}
            if interval.op_id is not None:
                arguments["operator"] = str(interval.op_id)
            events.append(
                {
                    "ph": "X",
                    "name": interval.name,
                    "cat": str(interval.phase),
                    "pid": process,
                    "tid": _THREAD[interval.resource],
                    "ts": (interval.start_ns + shift_ns) / 1e3,
                    "dur": interval.duration_ns / 1e3,
                    "args": arguments,
                }
            )
    return events


def collective_shifts(measured: Timeline) -> dict[int, int]:
    """What to add to each rank's times so that collectives, which end on all ranks at once, end together: the median over them."""
    ends = {rank: {key: one.end_ns for key, one in measured.collectives(rank)} for rank in sorted(measured.rank_group)}
    reference = next(iter(ends.values()), {})
    return {
        rank: round(statistics.median([reference[key] - mine[key] for key in mine if key in reference] or [0]))
        for rank, mine in ends.items()
    }


def _device_begin(timeline: Timeline, rank: int) -> int:
    starts = [i.start_ns for i in timeline.intervals if i.rank == rank and i.resource is Resource.COMPUTE]
    return min(starts, default=0)


def _metadata(name: str, process: int, thread: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": arguments}
