"""The charts of a report, each from finished artifacts: where a step's time goes, precisions, sensitivities, memory, timelines."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from qsync_core.artifacts.perfetto import comparison_to_perfetto, to_perfetto
from qsync_core.ir.dag import Operator, PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import GroupPlan, PrecisionPlan
from qsync_core.ir.precision import Precision
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.timeline import Timeline
from qsync_core.units import format_bytes, format_estimate, format_ns
from qsync_planner.reporting.marks import (
    DOWN,
    OWN_COLOUR,
    Bar,
    Piece,
    Rows,
    Spec,
    bars_chart,
    chart,
    colour,
    precision_keys,
    size_unit,
    time_unit,
    tooltips,
)
from qsync_planner.reporting.page import Figure, Key
from qsync_planner.reporting.ways_to_run import WayToRun

_PARTS = {
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "communication": "all-reduce that nothing hides",
    "waiting": "idle, waiting for other ranks",
    "idle": "idle, waiting for its CPU",
}
"""The parts of a step (:class:`qsync_planner.step_parts.StepParts`), with waiting taken out of communication."""
_HATCHED = "url(#hatched)"
_MOST_OPERATORS = 60
"""Rows of the sensitivity chart."""
_MOST_CELLS = 16
"""Operators of one layer side by side; longer layers take several rows."""
_SHORTEST = 1 / 1500
"""Part of a timeline below which neighbours of one kind are drawn as one piece."""


def steps_figure(ways: Sequence[WayToRun], counts: Mapping[str, int]) -> Figure:
    """One rank's step of every group, under each way to run the job; ``counts`` are ranks by group."""
    unit = time_unit(max((way.iteration_ns for way in ways), default=0))
    blocks = []
    for way in ways:
        title = f"{way.title}: {format_ns(way.iteration_ns)}, {way.samples_per_second:,.1f} samples/s"
        bars = []
        for group, parts in way.parts.items():
            waits = way.waiting_ns.get(group, 0)
            durations = {name: getattr(parts, name, waits) for name in _PARTS}
            durations["communication"] -= waits
            recording = -parts.recording  # what a profiler added is part of the phases; they are shortened alike
            shrink = 1 - recording / max(1, sum(durations.values()))
            ends = list(itertools.accumulate(duration * shrink for duration in durations.values()))
            pieces = [
                Piece(
                    unit.of(end - durations[name] * shrink),
                    unit.of(end),
                    _HATCHED if name in ("waiting", "idle") else colour(name),
                    {
                        "what": what,
                        "time": format_ns(durations[name] * shrink),
                        "of the step": _share(durations[name] * shrink, way),
                    },
                )
                for (name, what), end in zip(_PARTS.items(), ends, strict=True)
                if durations[name]
            ]
            ranks = counts.get(group, 1)
            bars.append(Bar(group, pieces, f"each of {ranks} ranks" if ranks > 1 else ""))
        blocks.append(Rows(f"{title}; {way.note}" if way.note else title, bars))
    legend = [Key(colour(name), _PARTS[name]) for name in ("forward", "backward", "optimizer", "communication")]
    legend.append(Key("var(--soft)", "idle", "hatched"))
    says = "; ".join(f"{way.title}: {format_ns(way.iteration_ns)} a step" for way in ways)
    return Figure(bars_chart(blocks, f"time in a step ({unit.name})"), f"Where a step's time goes. {says}.", legend)


def _share(duration: float, way: WayToRun) -> str:
    return f"{duration / way.iteration_ns:.0%}" if way.iteration_ns else ""


def layer_of(op_id: OpId) -> str:
    """The layer that an operator belongs to: up to the last number above it (``layer1.0``), else its parent, else itself."""
    parents = op_id.fqn.split(".")[:-1]
    numbered = [place for place, name in enumerate(parents) if name.isdecimal()]
    return ".".join(parents[: numbered[-1] + 1] if numbered else parents) or op_id.fqn


def layers(operators: Sequence[Operator]) -> list[tuple[str, list[Operator]]]:
    """Operators by layer, in the order in which data meets them; long layers are cut into rows of equal length."""
    found: dict[str, list[Operator]] = {}
    for operator in sorted(operators, key=lambda operator: operator.depth):
        found.setdefault(layer_of(operator.op_id), []).append(operator)
    rows = []
    for name, members in found.items():
        length = math.ceil(len(members) / math.ceil(len(members) / _MOST_CELLS))
        rows += [(name, members[start : start + length]) for start in range(0, len(members), length)]
    return rows


def precisions_figure(dag: PrecisionDag, plan: PrecisionPlan) -> Figure:
    """A cell for every operator: a row is a layer, a column of cells a group."""
    rows = layers([operator for operator in dag.adjustable if operator.op_id in plan.operator_ids])
    widest = max((len(members) for _, members in rows), default=1)
    height, top, lane = 16, 22, 1 / max(1, len(plan.groups))
    cells, names = [], []
    shown: set[Precision] = set()
    for column, group in enumerate(plan.groups):
        names.append({"x": column * lane, "y": 12, "text": group.group, "weight": "bold"})
        for line, (_, members) in enumerate(rows):
            for place, operator in enumerate(members):
                assignment = group.assignments[operator.op_id]
                shown.add(assignment.variant.compute)
                begin = column * lane + place / widest * lane * 0.94
                cells.append(
                    {
                        "x": round(begin, 5),
                        "x2": round(begin + lane * 0.94 / widest, 5),
                        "y": top + line * height,
                        "y2": top + line * height + height - 2,
                        "colour": colour(str(assignment.variant.compute)),
                        "Operator": str(operator.op_id),
                        "Group": group.group,
                        "Runs as": assignment.variant.label,
                        "Kernel": assignment.backend,
                        "Because": assignment.reason,
                        "Forward": f"{operator.flops / 1e6:,.0f} Mflop",
                    }
                )
    previous = [""] + [name for name, _ in rows]
    labels = [
        {"y": top + line * height + height / 2 - 1, "text": name} for line, (name, _) in enumerate(rows) if name != previous[line]
    ]
    across = {"field": "x", "type": "quantitative", "scale": {"domain": [0, 1], "nice": False}, "axis": None}
    spec = chart(
        [
            {
                "data": {"values": cells},
                "mark": {"type": "rect", "stroke": "var(--paper)", "strokeWidth": 1},
                "encoding": {
                    "x": across,
                    "x2": {"field": "x2"},
                    "y": DOWN,
                    "y2": {"field": "y2"},
                    "fill": OWN_COLOUR,
                    "tooltip": tooltips(cells),
                },
            },
            {
                "data": {"values": names},
                "mark": {
                    "type": "text",
                    "align": "left",
                    "fontWeight": "bold",
                    "fontSize": 12,
                    "limit": {"expr": f"width * {lane:.4f}"},
                },
                "encoding": {"x": across, "y": DOWN, "text": {"field": "text"}},
            },
            _labels(labels),
        ],
        top + len(rows) * height,
        padding={"left": _label_px(labels), "right": 2, "top": 2, "bottom": 2},
    )
    lowered = ", ".join(f"{group.group}: {_lowered(group)} of {len(group.assignments)} operators" for group in plan.groups)
    return Figure(
        spec,
        f"The precision of every operator by layer and group. Below {plan.base} run of {lowered}.",
        precision_keys(shown),
        "A row is a layer, from the input above to the loss below; a cell is a linear or convolution operator. Point at one for "
        "its name, and the reason for its precision.",
    )


_CHARACTER_PX = 6.2
"""The width of a label's character, on average."""
_NAME = 26
"""Characters of a label, at most."""


def _label_px(labels: Sequence[Mapping[str, Any]]) -> int:
    """The room that names on the left need."""
    return 12 + round(_CHARACTER_PX * max(len(shorten(label["text"])) for label in labels))


def _labels(labels: Sequence[Mapping[str, Any]]) -> Spec:
    """Names on the left of a chart, in its padding."""
    mark: Spec = {"type": "text", "align": "right", "baseline": "middle", "x": -6, "limit": _label_px(labels) - 8}
    mark |= {"color": "var(--soft)", "fontSize": 11}
    shortened = [{**label, "text": shorten(label["text"])} for label in labels]
    return {"data": {"values": shortened}, "mark": mark, "encoding": {"y": DOWN, "text": {"field": "text"}}}


def shorten(name: str) -> str:
    """A long name of an operator or a layer from its layer's number on, or its end, which says more than its beginning."""
    if len(name) <= _NAME:
        return name
    layer = layer_of(OpId.parse(name))  # a module that runs again has the number of its call
    short = name[layer.rfind(".") + 1 :] if layer.rpartition(".")[2].isdecimal() else name
    return f"…{short}" if len(short) < _NAME else f"…{short[1 - _NAME :]}"


def _lowered(group: GroupPlan) -> int:
    return sum(assignment.variant.compute is not group.base for assignment in group.assignments.values())


def sensitivity_figure(sensitivity: Sensitivity, plan: PrecisionPlan) -> Figure | None:
    """Ω of the most sensitive operators: a dot for each precision, filled where a group runs in it; None where all are 0."""
    ranked = sorted(((max(by.values(), default=0.0), op_id) for op_id, by in sensitivity.omega.items()), reverse=True)
    known = set(plan.operator_ids)
    ranked = [(omega, op_id) for omega, op_id in ranked if omega > 0 and op_id in known]
    shown = ranked[:_MOST_OPERATORS]
    if not shown:
        return None
    height = 15
    dots: list[dict[str, Any]] = []
    labels = []
    precisions: set[Precision] = set()
    for line, (_, op_id) in enumerate(shown):
        y = line * height + height / 2
        labels.append({"y": y, "text": str(op_id).removesuffix("#0")})
        for variant, omega in sensitivity.omega[op_id].items():
            if omega <= 0:
                continue
            users = [group.group for group in plan.groups if group.assignments[op_id].variant == variant]
            precisions.add(variant.compute)
            fill = colour(str(variant.compute))
            says = {
                "Operator": str(op_id),
                "Precision": variant.label,
                "Ω": format_estimate(omega, sensitivity.errors.get(op_id, {}).get(variant), 3),
                "Used by": ", ".join(users) or "no group",
            }
            dots.append({"x": omega, "y": y, "colour": fill, "fill": fill if users else "var(--paper)", **says})
    lines = [{"y": label["y"]} for label in labels]
    powers = [10.0**power for power in range(*_decades([dot["x"] for dot in dots]))]
    spec = chart(
        [
            {
                "data": {"values": lines},
                "mark": {"type": "rule", "stroke": "var(--line)", "x": 0, "x2": {"expr": "width"}},
                "encoding": {"y": DOWN},
            },
            {
                "data": {"values": sorted(dots, key=lambda dot: dot["fill"] != "var(--paper)")},
                "mark": {"type": "point", "size": 60, "strokeWidth": 2, "opacity": 1},
                "encoding": {
                    "x": {
                        "field": "x",
                        "type": "quantitative",
                        "title": "Ω, gradient error",
                        "scale": {"type": "log", "nice": False, "padding": 8},
                        "axis": {"format": ".0e", "values": powers},
                    },
                    "y": DOWN,
                    "stroke": OWN_COLOUR,
                    "fill": {"field": "fill", "type": "nominal", "scale": None},
                    "tooltip": tooltips(dots),
                },
            },
            _labels(labels),
        ],
        len(shown) * height,
        padding={"left": _label_px(labels), "right": 8, "top": 2, "bottom": 2},
    )
    keys = [attrs.evolve(key, style="dot") for key in precision_keys(precisions)]
    hollow = Key("var(--soft)", "not chosen by any group", "hollow")
    count = f"The {len(shown)} most sensitive of {len(ranked)} operators" if len(ranked) > len(shown) else "All operators"
    note = (
        f"{count}, by the indicator “{sensitivity.indicator}”: the mean squared error that each adds to the gradients, on a "
        "logarithmic scale. A dot is filled where a group runs the operator so; where none is, all run it in "
        f"{plan.base}."
    )
    return Figure(spec, f"Sensitivity by operator; the most sensitive is {shown[0][1]}.", [*keys, hollow], note)


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """The powers of ten around positive values, as a range."""
    return math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))) + 1


def memory_figure(plan: PrecisionPlan) -> Figure:
    """What one process of every group takes of its device, by part, against its budget."""
    parts = {group.group: plan.memory.get(group.group) or {"peak": group.predicted_peak_bytes} for group in plan.groups}
    names = list(dict.fromkeys(name for group in parts.values() for name, nbytes in group.items() if nbytes > 0))
    ends = [sum(group.values()) for group in parts.values()] + [group.memory_budget_bytes for group in plan.groups]
    unit = size_unit(max(ends, default=0))
    bars = []
    for group in plan.groups:
        drawn = _without_negative(parts[group.group])
        stops = list(itertools.accumulate(drawn.values()))
        pieces = [
            Piece(unit.of(stop - nbytes), unit.of(stop), colour(names.index(name)), {"what": name, "size": format_bytes(nbytes)})
            for (name, nbytes), stop in zip(drawn.items(), stops, strict=True)
        ]
        total, budget, marks = sum(drawn.values()), group.memory_budget_bytes, []
        note = f"{format_bytes(total)} of {format_bytes(budget)}" if budget else format_bytes(total)
        if budget:
            marks.append((unit.of(budget), f"budget of {group.group}: {format_bytes(budget)}"))
        bars.append(Bar(group.group, pieces, note, marks))
    legend = [Key(colour(place), name) for place, name in enumerate(names)]
    legend += [Key("var(--limit)", "budget", "line")] * any(group.memory_budget_bytes for group in plan.groups)
    says = "; ".join(f"{bar.name}: {bar.note}" for bar in bars)
    spec = bars_chart([Rows("", bars)], f"memory of one process ({unit.name})", most=1.01 * max(unit.of(end) for end in ends))
    return Figure(spec, f"Memory by part. {says}.", legend)


def _without_negative(parts: Mapping[str, int]) -> dict[str, int]:
    """A measured step may take less than its parts (a negative part): then the largest part is drawn that much shorter."""
    positive = {name: nbytes for name, nbytes in parts.items() if nbytes > 0}
    if positive:
        positive[max(positive, key=lambda name: positive[name])] += sum(nbytes for nbytes in parts.values() if nbytes < 0)
    return positive


def timeline_figure(predicted: Timeline | None, measured: Timeline | None) -> Figure | None:
    """A step of one rank per group, predicted and measured beside each other; None where there is neither."""
    measured = measured and _first_ranks(measured)
    if predicted and measured:
        trace = comparison_to_perfetto(predicted, measured)
    elif one := predicted or measured:
        trace = to_perfetto(one)
    else:
        return None
    names = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    streams = {
        (event["pid"], event["tid"]): event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"
    }
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    zero = min((event["ts"] for event in events), default=0.0)
    span = max((event["ts"] + event["dur"] for event in events), default=1.0) - zero
    unit = time_unit(span * 1e3)
    blocks = []
    for process, name in names.items():
        bars = []
        for (owner, thread), stream in sorted(streams.items()):
            if owner == process:
                mine = [event for event in events if (event["pid"], event["tid"]) == (process, thread)]
                pieces = [_piece(run, zero, unit.size) for run in _runs(mine, span * _SHORTEST)]
                bars.append(Bar(stream, pieces))
        blocks.append(Rows(name, bars))
    legend = [Key(colour(phase), phase) for phase in ("forward", "backward", "optimizer", "communication")]
    which = "Predicted and measured" if predicted and measured else "Predicted" if predicted else "Measured"
    spec = bars_chart(blocks, f"time from the beginning of the step ({unit.name})", bar_px=12, edge_px=0.25)
    return Figure(spec, f"{which} timeline of a step, for one rank of each group.", legend)


def _first_ranks(timeline: Timeline) -> Timeline:
    """The same with one rank of each group, the first."""
    first = {group: rank for rank, group in sorted(timeline.rank_group.items(), reverse=True)}
    kept = {rank: group for rank, group in sorted(timeline.rank_group.items()) if first[group] == rank}
    return attrs.evolve(timeline, rank_group=kept, intervals=tuple(i for i in timeline.intervals if i.rank in kept))


def _runs(events: Sequence[dict[str, Any]], shortest: float) -> Iterator[list[dict[str, Any]]]:
    """Events of one stream, in order; short neighbours of one phase, with no gap that could be seen, come together."""
    run: list[dict[str, Any]] = []
    for event in sorted((event for event in events if event["dur"]), key=lambda event: event["ts"]):
        if run:
            last = run[-1]
            joins = event["cat"] == last["cat"] and event["ts"] - last["ts"] - last["dur"] < shortest
            short = event["dur"] < 3 * shortest and last["dur"] < 3 * shortest and event["ts"] - run[0]["ts"] < 12 * shortest
            if not (joins and short):
                yield run
                run = []
        run.append(event)
    if run:
        yield run


def _piece(run: Sequence[dict[str, Any]], zero: float, size: float) -> Piece:
    first, last = run[0], run[-1]
    begin, end = (first["ts"] - zero) * 1e3, (last["ts"] + last["dur"] - zero) * 1e3
    what = first["name"] if len(run) == 1 else f"{len(run)} from {first['name']} to {last['name']}"
    says = {"what": what, "phase": first["cat"], "time": format_ns(end - begin), "from": format_ns(begin)}
    return Piece(round(begin / size, 6), round(end / size, 6), colour(first["cat"]), says)
