"""One plan by one solver: its objective, the proven bound, and the processor time that it took."""

from __future__ import annotations

import time
from typing import Any

import attrs

from allocator.instances import Instance
from qsync_core.ir.plan import PrecisionPlan, Role
from qsync_planner.allocator import Inputs, Request, allocate
from qsync_planner.replayer.replay import Replayer, plan_variants

Row = dict[str, Any]
"""A row as :func:`results.write_rows` takes it."""

LIMITED = ("exact", "auto")
"""Solvers that can be told when to stop."""


@attrs.frozen
class Solved:
    """A plan's figures.

    Attributes:
        instance: how the instance is called.
        objective, bound: Σ Ω of the plan, and a lower bound of that of any plan; None without a proof.
        seconds: processor time of ``allocate``, of all its threads.
    """

    instance: str
    objective: float
    bound: float | None
    seconds: float

    @property
    def gap(self) -> float:
        """(objective − bound) / objective, 0 where the objective is 0, 1 where nothing is proven."""
        if self.objective == 0:
            return 0.0
        return 1.0 if self.bound is None else max(0.0, self.objective - self.bound) / self.objective


def solve(found: Instance, solver: str, *, seconds: float | None = None, objective: str = "omega") -> Solved:
    """Plan with ``solver``, ``seconds`` of wall-clock time at most if given, and check the plan.

    Raises:
        AssertionError: a plan that, replayed from scratch, breaks a limit, or is better than its own bound allows.
    """
    options: dict[str, Any] = {} if seconds is None or solver not in LIMITED else {"seconds": seconds}
    if objective != "omega":
        options["objective"] = objective
    start = time.process_time()
    plan = allocate(
        Inputs(found.dag, found.cluster, found.profiles, found.sensitivity), Request(solver, tolerance=found.tolerance, **options)
    )
    took = time.process_time() - start
    check(found, plan)
    return Solved(found.label if objective == "omega" else f"{found.label} {objective}", plan.objective, plan.bound, took)


def check(found: Instance, plan: PrecisionPlan) -> None:
    """The plan keeps its limits when it is replayed from scratch, its objective is Σ Ω, and its bound is not above that."""
    prediction = Replayer(Inputs(found.dag, found.cluster, found.profiles)).replay(plan_variants(plan, found.cluster))
    assert prediction.iteration_ns <= plan.time_limit_ns, f"{found.label}: {prediction.iteration_ns} ns > {plan.time_limit_ns} ns"
    least = most = 0.0
    for group in plan.groups:
        budget = found.cluster.group(group.group).memory_bytes
        peak = prediction.groups[group.group].peak_bytes
        assert budget == 0 or peak <= budget, f"{found.label}: {group.group} takes {peak} bytes of {budget}"
        for op_id, assigned in group.assignments.items() if group.role is Role.INFER else ():
            # A plan says in which format an operator delivers; the rung that was picked may have asked for 16 bits.
            ladder = found.cluster.group(group.group).ladder
            rungs = [rung for rung in ladder if assigned.variant in (rung, rung.in_float32)]
            rated = [found.sensitivity.omega[op_id].get(rung, 0.0) for rung in rungs]
            least, most = least + group.count * min(rated), most + group.count * max(rated)
    told = f"{found.label}: Σ Ω is {least} to {most}, the plan says {plan.objective}"
    assert least * (1 - 1e-9) <= plan.objective <= most * (1 + 1e-9), told
    if plan.bound is not None:
        assert plan.bound <= plan.objective * (1 + 1e-9), f"{found.label}: bound {plan.bound} above objective {plan.objective}"
