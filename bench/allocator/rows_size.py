"""Rows T-plan: many device groups, and a deep model below whose budget no single rung is."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from allocator.bench import Bench, quartiles, row
from allocator.instances import many_groups_instance, tight_instance
from allocator.solving import Row, solve

GROUPS, LAYERS = 64, 640
ROUNDS = 3


def size_rows(bench: Bench) -> Iterator[Row]:
    """T-plan-groups, T-plan-kinds and T-plan-memory."""
    solver = bench.solver or "auto"
    groups, layers = (8, 12) if bench.quick else (GROUPS, LAYERS)
    tight = tight_instance(0, layers=layers)
    count = f"{len(tight.dag.operators):,} operators, a budget below every single rung"
    for name, what, job, target in (
        ("T-plan-groups", f"{groups} device groups of five chips, budgets of their own", many_groups_instance(0, groups), "≤ 5"),
        (
            "T-plan-kinds",
            f"{groups} device groups, each with a profile of its own",
            many_groups_instance(0, groups, alike=False),
            "reported",
        ),
        ("T-plan-memory", count, tight, "≤ 30"),
    ):
        solved = [solve(job, solver) for _ in range(ROUNDS)]
        seconds = [entry.seconds for entry in solved]
        bench.say(f"  {job.label}: Σ Ω {solved[0].objective:.6g}, gap {solved[0].gap:.2g}")
        spread = f"{quartiles(seconds, 2)} rounds, gap {solved[0].gap:.2g}"
        yield row(name, f"{what}: processor time of a plan", round(statistics.median(seconds), 2), "s", target, spread)
