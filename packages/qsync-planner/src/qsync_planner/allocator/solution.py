"""What a solver found: rungs, prediction and reasons; and the PrecisionPlan made of it."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from qsync_core.ir.cluster import DeviceGroup
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment, GroupPlan, Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import Profile
from qsync_core.ir.variant import Variant
from qsync_planner.allocator.problem import GroupProblem, Problem
from qsync_planner.allocator.search_state import SearchState
from qsync_planner.replayer.replay import Prediction


@attrs.frozen
class Solution:
    """A plan in the allocator's terms.

    Attributes:
        rungs: per inference group the rung of every unit.
        prediction: what the replayer says of it.
        reasons: per inference group a sentence for every unit.
        local_batches: per group; empty means the traced batch size everywhere.
        notes: what a reader of the plan must know.
        bound: Σ Ω over all inference devices that no plan is below; None where nothing was proven.
    """

    rungs: Mapping[str, tuple[int, ...]]
    prediction: Prediction
    reasons: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)
    local_batches: Mapping[str, int] = attrs.field(factory=dict)
    notes: tuple[str, ...] = ()
    bound: float | None = None

    @classmethod
    def of(cls, state: SearchState) -> Solution:
        """The accepted plan of a search, without reasons."""
        return cls(state.all_rungs(), state.prediction)

    def fits(self, problem: Problem) -> bool:
        """Whether every inference group is within its memory budget."""
        return all(group.fits(self.prediction.groups[group.name].peak_bytes) for group in problem.groups)

    def with_one_reason(self, problem: Problem, sentence: str) -> Solution:
        """The same with one reason for all units: the unit's variant and ``sentence``."""
        reasons = {
            group.name: tuple(
                f"{unit.rungs[rung].label}: {sentence}" for unit, rung in zip(group.units, self.rungs[group.name], strict=True)
            )
            for group in problem.groups
        }
        return attrs.evolve(self, reasons=reasons)


def group_plans(problem: Problem, solution: Solution) -> tuple[GroupPlan, ...]:
    """One GroupPlan per group of the cluster, in its order."""
    return tuple(_group_plan(problem, group, solution) for group in problem.cluster.groups)


def _group_plan(problem: Problem, group: DeviceGroup, solution: Solution) -> GroupPlan:
    profile = problem.profiles[group.name]
    if group.role is Role.TRAIN:
        base = Variant.plain(group.base)
        reason = f"{base.label}: a training group keeps its base precision"
        chosen = {operator.op_id: (base, reason) for operator in problem.dag.adjustable}
    else:
        chosen = _chosen(problem.by_name[group.name], solution)
    assignments = {
        operator.op_id: _assignment(profile, operator.op_id, *chosen[operator.op_id]) for operator in problem.dag.adjustable
    }
    prediction = solution.prediction.groups[group.name]
    return GroupPlan(
        group=group.name,
        role=group.role,
        count=group.count,
        device=profile.device,
        base=group.base,
        assignments=assignments,
        memory_budget_bytes=group.memory_bytes,
        predicted_peak_bytes=prediction.peak_bytes,
        predicted_busy_ns=prediction.busy_ns,
        needs_loss_scaling=any(_needs_loss_scaling(assignment.variant) for assignment in assignments.values()),
    )


def _chosen(group: GroupProblem, solution: Solution) -> dict[OpId, tuple[Variant, str]]:
    rows = zip(group.units, solution.rungs[group.name], solution.reasons[group.name], strict=True)
    return {op_id: (unit.rungs[rung], reason) for unit, rung, reason in rows for op_id in unit.operators}


def _assignment(profile: Profile, op_id: OpId, variant: Variant, reason: str) -> Assignment:
    cost = profile.cost(op_id, variant)
    return Assignment(variant, cost.backend, cost.config, reason)


def _needs_loss_scaling(variant: Variant) -> bool:
    """Whether a gradient passes through float16: computed in it, or received in the format of a float16 output."""
    return Precision.FLOAT16 in (variant.grad_input, variant.grad_weight, variant.output)
