"""The predicted Timeline: when every node of one steady step runs, one rank shown per group.

The step is shown from the moment at which the first group's device begins it.  A CPU that runs ahead dispatches a later step
meanwhile; its dispatch is drawn from the start of the picture.
"""

from __future__ import annotations

from collections.abc import Mapping

from qsync_core.ir.dfg import DfgNode, GlobalDfg, Resource
from qsync_core.ir.timeline import Interval, Timeline
from qsync_planner.replayer.simulator import Step

_SETTLE_STEPS = 64
"""Steps simulated at most until compute and communication repeat with the period; two or three are usual."""


def predicted_timeline(model: str, dfg: GlobalDfg, iteration_ns: int, peak_bytes: Mapping[str, int]) -> Timeline:
    """Intervals of one steady step of a job.

    Args:
        model: a name for people.
        dfg: the job.
        iteration_ns: its period.
        peak_bytes: predicted peak memory per group.
    """
    seen: list[tuple[int, DfgNode, int, int]] = []
    step = Step(dfg, max, lambda moment, duration: moment + duration, lambda *node: seen.append(node))
    state = [0] * step.resources
    ahead = _run_ahead(dfg, step, state, iteration_ns)
    for _ in range(_SETTLE_STEPS):
        before = state
        seen.clear()
        state = step.run(before)
        settled = {i for i in range(step.resources) if i not in ahead}
        if all(state[i] - before[i] == iteration_ns for i in settled):
            break
    return Timeline(
        source="predicted",
        model=model,
        iteration_ns=iteration_ns,
        rank_group={rank: group.group for rank, group in enumerate(dfg.groups)},
        intervals=_intervals(seen),
        peak_bytes=peak_bytes,
    )


def _run_ahead(dfg: GlobalDfg, step: Step[int], state: list[int], iteration_ns: int) -> set[int]:
    """Put CPUs that have time to spare far ahead; returns the positions of their resources in the state."""
    ahead = set()
    for g, group in enumerate(dfg.groups):
        busy = sum(node.duration_ns for node in group.nodes if node.resource is Resource.DISPATCH)
        if not group.synchronous and not group.sync_per_step and busy < iteration_ns:
            state[step.dispatch[g]] = -(iteration_ns * (_SETTLE_STEPS + 2))
            ahead.add(step.dispatch[g])
    return ahead


def _intervals(seen: list[tuple[int, DfgNode, int, int]]) -> tuple[Interval, ...]:
    """Nodes as intervals: device and communication times from the first of them, dispatch from each CPU's first."""
    device = [start for _, node, start, _ in seen if node.resource is not Resource.DISPATCH]
    origin = min(device, default=0)
    intervals = []
    for g in sorted({rank for rank, *_ in seen}):
        own = [(node, start, duration) for rank, node, start, duration in seen if rank == g]
        dispatch = [start for node, start, _ in own if node.resource is Resource.DISPATCH]
        first = min(dispatch, default=origin)
        for node, start, duration in own:
            zero = first if node.resource is Resource.DISPATCH else origin
            intervals.append(Interval(node.name, node.op_id, node.phase, node.resource, g, start - zero, duration))
    return tuple(sorted(intervals, key=lambda i: (i.rank, i.resource, i.start_ns)))
