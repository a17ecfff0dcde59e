"""Row Q6: what a job of several times as many ranks is planned to take, from the measurements of one that is there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from four.layouts import Layout
from hybrid.rows import measured_at
from jobs.measured import Found
from qsync_core.artifacts.files import load
from qsync_core.ir.communication import CollectiveCosts
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.plan import PrecisionPlan
from qsync_core.ir.profile import Profile
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.run_folder import RunFolder
from qsync_planner.allocator import Inputs, allocate

FACTORS = (1, 2, 4)
"""As many ranks as are there, for comparison, twice and four times as many."""


def planned(folder: Path, factor: int) -> PrecisionPlan:
    """The plan for so many times the ranks of every group.

    All-reduces of more ranks follow from those that were measured (docs/design/simulator.md#all-reduce-among-unequal-groups); what
    one takes from compute is taken to be the same share of it.
    """
    run = RunFolder(folder / "run")
    cluster = run.read_cluster()
    counts = {group.name: factor * group.count for group in cluster.groups}
    larger = attrs.evolve(cluster, groups=tuple(attrs.evolve(group, count=counts[group.name]) for group in cluster.groups))
    profiles = {name: load(run.profile(name), Profile) for name in counts}
    costs = attrs.evolve(load(run.communication(counts), CollectiveCosts), ranks=counts)
    dag, sensitivity = load(run.dag, PrecisionDag), load(run.sensitivity, Sensitivity)
    return allocate(Inputs(dag, larger, profiles, sensitivity, communication=costs))


def rows(
    layout: Layout, found: Found, folder: Path, suffix: str, where: str, larger: Found | None = None
) -> Iterator[dict[str, Any]]:
    """Q6 of a prepared job; Q6b where the job of twice as many ranks was measured too."""
    plans = {factor: planned(folder, factor) for factor in FACTORS}
    told = "; ".join(
        f"{layout.times(factor)}: {plan.predicted_iteration_ns / 1e6:.2f} ms, {_rate(plan):,.1f} samples/s"
        for factor, plan in plans.items()
    )
    kept = _rate(plans[FACTORS[-1]]) / (FACTORS[-1] * _rate(plans[1]))
    ranks = " and ".join(str(factor * layout.ranks) for factor in FACTORS[1:])
    yield {
        "id": f"Q6{suffix}-{found.job.model}-{found.job.base}",
        "what": f"planned for {ranks} ranks from measurements of {layout.ranks}, {found.job.title} ({where}): samples per second "
        f"and rank of {FACTORS[-1] * layout.ranks} ranks over those of {layout.ranks}, by simulation",
        "value": kept,
        "unit": "ratio",
        "spread": told,
        "target": "reported",
    }
    way = larger.ways.get("plan") if larger is not None else None
    if larger is not None and way is not None and way.measured:
        error = plans[2].predicted_iteration_ns / 1e6 / way.measured["ms"] - 1
        told = f"{plans[2].predicted_iteration_ns / 1e6:.2f} ms planned, {way.measured['ms']:.2f} measured"
        what = f"step planned for {layout.times(2)} from measurements of {layout}, against the measured one: {found.job.title}"
        row = {"id": f"Q6b{suffix}-{found.job.model}-{found.job.base}", "what": f"{what} ({where})", "value": abs(error)}
        yield from measured_at(larger.about, [row | {"unit": "fraction", "spread": told, "target": "≤ 0.04"}])


def _rate(plan: PrecisionPlan) -> float:
    samples = sum(entry.count * plan.local_batches[entry.group] for entry in plan.groups)
    return 1e9 * samples / plan.predicted_iteration_ns
