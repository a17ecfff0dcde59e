"""Timelines as Chrome trace events, which Perfetto (ui.perfetto.dev) and chrome://tracing show.

Format: "Trace Event Format" of the Chromium project: complete events (``ph: X``) with ``ts`` and ``dur`` in microseconds, and
metadata events (``ph: M``) that name processes and threads.  A rank is a process, a stream a thread.
"""

from __future__ import annotations

from typing import Any

from qsync_core.ir.dfg import Resource
from qsync_core.ir.timeline import Timeline

_THREAD = {Resource.DISPATCH: 1, Resource.COMPUTE: 2, Resource.COMMUNICATION: 3}
_THREAD_NAME = ("", "CPU dispatch", "compute stream", "communication stream")


def to_perfetto(timeline: Timeline) -> dict[str, Any]:
    """The JSON object of a trace file; ``json.dump`` it.  Times in microseconds keep their nanosecond digits."""
    events: list[dict[str, Any]] = []
    for rank, group in sorted(timeline.rank_group.items()):
        events.append(_metadata("process_name", rank, 0, {"name": f"rank {rank} ({group}, {timeline.source})"}))
        events.append(_metadata("process_sort_index", rank, 0, {"sort_index": rank}))
    streams = sorted({(interval.rank, _THREAD[interval.resource]) for interval in timeline.intervals})
    events.extend(_metadata("thread_name", rank, thread, {"name": _THREAD_NAME[thread]}) for rank, thread in streams)
    for interval in timeline.intervals:
        arguments = {"phase": str(interval.phase)}
        if interval.op_id is not None:
            arguments["operator"] = str(interval.op_id)
        events.append(
            {
                "ph": "X",
                "name": interval.name,
                "cat": str(interval.phase),
                "pid": interval.rank,
                "tid": _THREAD[interval.resource],
                "ts": interval.start_ns / 1e3,
                "dur": interval.duration_ns / 1e3,
                "args": arguments,
            }
        )
    other = {"model": timeline.model, "source": timeline.source, "iteration_ns": timeline.iteration_ns}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def _metadata(name: str, process: int, thread: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": arguments}
