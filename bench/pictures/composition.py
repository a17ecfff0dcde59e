"""The paper's Fig. 3: what operators cost by kind and precision, kernels and casts apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from qsync_core.ir.op_id import OpId
from qsync_core.ir.variant import Variant
from qsync_planner.replayer.cost_mapper import AFTER_FORWARD, BEFORE_FORWARD
from qsync_planner.replayer.replay import Replayer

from .stored import TITLES, read_job
from .svg_picture import WIDTH, Picture

LEFT, RIGHT = 270, 70
_SMALL = 0.02
"""Kinds of operators that take less of the float32 step have no bars."""
_BAR = 15
PARTS = ("forward", "cast-forward", "backward", "cast-backward")


def composition(replayer: Replayer, group: str, variants: Mapping[OpId, Variant]) -> dict[str, Counter[str]]:
    """Device nanoseconds of a step by kind of operator and part."""
    mapper = replayer.mapper(group, variants)
    found: dict[str, Counter[str]] = {}
    for operator, state, charged in zip(replayer.dag.operators, mapper.states, mapper.charged, strict=True):
        mine = found.setdefault(operator.kind, Counter())
        mine["forward"] += state.evaluation.forward_compute_ns
        mine["backward"] += state.evaluation.backward_compute_ns
        for priced in charged:
            mine["cast-forward" if priced.cast.site in (*BEFORE_FORWARD, *AFTER_FORWARD) else "cast-backward"] += priced.compute_ns
    return found


def draw_composition(names: Sequence[str]) -> str:
    """Fig. 3: what operators cost by kind, under every precision uniformly."""
    picture = Picture(
        "What operators cost: kernels and casts, by kind and precision",
        "Device time of a step with all linears and convolutions in one precision, on half of an H200; others follow their inputs",
    )
    picture.legend(
        [("forward", "forward"), ("cast-forward", "casts, forward"), ("backward", "backward"), ("cast-backward", "casts, backward")]
    )
    for name in names:
        replayer, _ = read_job(name)
        group = next(g for g in replayer.cluster.groups if g.name == "infer")
        rungs = {
            rung.label: composition(replayer, "infer", dict.fromkeys((o.op_id for o in replayer.dag.adjustable), rung))
            for rung in reversed(group.ladder)
        }
        first = next(iter(rungs.values()))
        whole = sum(sum(parts.values()) for parts in first.values())
        kinds = [kind for kind, parts in first.items() if sum(parts.values()) > _SMALL * whole]
        kinds.sort(key=lambda kind: -sum(first[kind].values()))
        most = max(sum(by_kind[kind].values()) for by_kind in rungs.values() for kind in kinds) / 1e6
        picture.y += 22
        picture.text(16, picture.y, f"{TITLES[name]}, batch {replayer.dag.batch_size}", "ink head")
        picture.y += 8
        top = picture.y
        rows = [(kind, label) for kind in kinds for label in rungs]
        picture.scale(LEFT, WIDTH - RIGHT, most, "ms", top, top + len(rows) * _BAR + 6 * len(kinds))
        for position, (kind, label) in enumerate(rows):
            if position and position % len(rungs) == 0:
                picture.y += 6
            if position % len(rungs) == 0:
                picture.text(16, picture.y + 12, kind)
            picture.text(LEFT - 8, picture.y + 12, label, "soft small", "end")
            x = float(LEFT)
            for part in PARTS:
                ms = rungs[label][kind][part] / 1e6
                width = ms / most * (WIDTH - RIGHT - LEFT)
                if ms:
                    picture.box(x, picture.y + 2, width, _BAR - 3, part, f"{kind} {label}, {part.replace('-', ', ')}: {ms:.2f} ms")
                x += width
            picture.text(x + 5, picture.y + 12, f"{sum(rungs[label][kind].values()) / 1e6:.1f}", "soft small")
            picture.y += _BAR
        picture.y += 24
    return picture.render("As the cost model has it from tests/data/h200 (qsync profile, torch 2.11).")
