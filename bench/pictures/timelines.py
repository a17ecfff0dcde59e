"""The paper's Fig. 6: what both ranks do in a step, under uniform precision and under QSync's plan."""

from __future__ import annotations

from collections import Counter

import attrs

from qsync_core.artifacts.perfetto import collective_shifts
from qsync_core.ir.dfg import Resource
from qsync_core.ir.timeline import Timeline
from qsync_planner.allocator import Inputs, Request, allocate
from qsync_planner.replayer.replay import plan_variants
from qsync_planner.step_parts import transfers

from .stored import read_job
from .svg_picture import WIDTH, Picture

LEFT, RIGHT = 170, 70


def planned_timelines(name: str) -> tuple[Timeline, Timeline]:
    """Predicted timelines of a stored model under uniform precision and under QSync's plan."""
    replayer, sensitivity = read_job(name)
    plans = [
        allocate(Inputs(replayer.dag, replayer.cluster, replayer.profiles, sensitivity), Request(solver))
        for solver in ("uniform", "greedy")
    ]
    one, other = (replayer.timeline(plan_variants(plan, replayer.cluster)) for plan in plans)
    return one, other


@attrs.frozen
class Stretch:
    """Neighbouring intervals of one kind as one, in nanoseconds."""

    css: str
    start: int
    end: int


def stretches(timeline: Timeline, rank: int, resource: Resource, gap: int) -> list[Stretch]:
    """A lane of the picture: what lies closer together than the gap is one."""
    shortest = transfers(timeline)
    pieces: list[Stretch] = []
    seen: Counter[str] = Counter()
    for interval in sorted(timeline.intervals, key=lambda interval: interval.start_ns):
        if (interval.rank, interval.resource) != (rank, resource):
            continue
        css, start = str(interval.phase), interval.start_ns
        if resource is Resource.COMMUNICATION:
            # The rank that comes last to a collective does not wait in it.
            transfer = shortest[interval.name, seen[interval.name]]
            seen[interval.name] += 1
            if interval.duration_ns > transfer:
                pieces.append(Stretch("waiting", start, interval.end_ns - transfer))
            css, start = "transfer", interval.end_ns - transfer
        if pieces and pieces[-1].css == css and start - pieces[-1].end <= gap:
            pieces[-1] = attrs.evolve(pieces[-1], end=interval.end_ns)
        elif interval.duration_ns:
            pieces.append(Stretch(css, start, interval.end_ns))
    return pieces


def aligned(timeline: Timeline) -> Timeline:
    """The ranks brought together at the ends of their collectives, the first device's beginning at 0."""
    shifts = dict.fromkeys(timeline.rank_group, 0) if timeline.source == "predicted" else collective_shifts(timeline)
    device = [i for i in timeline.intervals if i.resource is not Resource.DISPATCH]
    zero = min((i.start_ns + shifts[i.rank] for i in device), default=0)
    return attrs.evolve(timeline, intervals=tuple(attrs.evolve(i, start_ns=i.start_ns + shifts[i.rank] - zero) for i in device))


def draw_timelines(title: str, uniform: Timeline, qsync: Timeline) -> str:
    """Fig. 6: what both ranks do in a step, uniform above and QSync below, on one scale of time."""
    picture = Picture(
        f"One step of {title}: uniform precision against QSync",
        "What a rank of each group computes and communicates, and where it waits for the other",
    )
    phases = [("forward", "forward"), ("backward", "backward"), ("optimizer", "optimizer")]
    picture.legend([*phases, ("transfer", "collective: transfer"), ("waiting", "collective: waits for the other rank")])
    uniform, qsync = aligned(uniform), aligned(qsync)
    span = max(i.end_ns for timeline in (uniform, qsync) for i in timeline.intervals)
    for name, timeline in (("uniform precision", uniform), ("QSync", qsync)):
        picture.y += 24
        picture.text(16, picture.y, f"{name}, {timeline.source}: {timeline.iteration_ns / 1e6:.1f} ms a step", "ink head")
        picture.y += 8
        top = picture.y
        lanes = sorted({(i.rank, i.resource) for i in timeline.intervals}, key=_lane)
        picture.scale(LEFT, WIDTH - RIGHT, span / 1e6, "ms", top, top + 24 * len(lanes))
        for rank, resource in lanes:
            what = "computes" if resource is Resource.COMPUTE else "communicates"
            picture.text(LEFT - 8, picture.y + 15, f"{timeline.rank_group[rank]} {what}", "ink", "end")
            picture.box(LEFT, picture.y + 2, WIDTH - RIGHT - LEFT, 20, "lane")
            for piece in stretches(timeline, rank, resource, span // 1500):
                x = LEFT + piece.start / span * (WIDTH - RIGHT - LEFT)
                length = (piece.end - piece.start) / span * (WIDTH - RIGHT - LEFT)
                picture.box(x, picture.y + 2, length, 20, piece.css, f"{piece.css}: {(piece.end - piece.start) / 1e6:.2f} ms")
            picture.y += 24
        picture.y += 18
    return picture.render("Predicted timelines are of qsync replay, measured ones of a recorded step.")


def _lane(lane: tuple[int, Resource]) -> tuple[int, bool]:
    return lane[0], lane[1] is Resource.COMMUNICATION
