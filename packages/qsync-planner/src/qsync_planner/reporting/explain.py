"""``explain``: why a plan is as it is; ``diff_plans``: what changed between two plans for one model."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import attrs

from qsync_core.errors import PlanError
from qsync_core.ir.communication import PlannedCommunication
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import GroupPlan, PrecisionPlan
from qsync_planner.allocator.communication import how_to_apply
from qsync_planner.allocator.exact.solve import relative_gap
from qsync_planner.matching import first_differences

_TOTALS = ("solver", "indicator", "predicted_iteration_ns", "time_limit_ns", "objective")


def select_operators(plan: PrecisionPlan, fqn: str | None) -> tuple[OpId, ...]:
    """The operators that ``fqn`` names: all (None), one (``layer1.0.conv1#0``), or everything of a module (``layer1.0``).

    Raises:
        PlanError: when it names nothing; suggests the closest names.
    """
    if fqn is None:
        return plan.operator_ids
    chosen = tuple(
        op_id for op_id in plan.operator_ids if fqn in (str(op_id), op_id.fqn) or op_id.fqn.startswith(f"{fqn.rstrip('.')}.")
    )
    if chosen:
        return chosen
    modules = {op_id.fqn.rsplit(".", depth)[0] for op_id in plan.operator_ids for depth in range(op_id.fqn.count(".") + 1)}
    close = difflib.get_close_matches(fqn, sorted(modules | {str(op_id) for op_id in plan.operator_ids}), n=3)
    first = f"the plan's operators begin with {plan.operator_ids[0]}" if plan.operator_ids else "the plan has none at all"
    hint = f"did you mean {', '.join(close)}?" if close else first
    raise PlanError(f"the plan for {plan.model!r} has no adjustable operator or module {fqn!r}; {hint}")


def explain(plan: PrecisionPlan, fqn: str | None = None) -> dict[str, Any]:
    """Everything the plan says, as plain data: times in ns, memory in bytes, a variant and a reason per operator.

    Raises:
        PlanError: when ``fqn`` names no operator of the plan.
    """
    chosen = select_operators(plan, fqn)
    verdict = plan.verdict
    return {
        "model": plan.model,
        "solver": plan.solver,
        "indicator": plan.indicator,
        "predicted_iteration_ns": plan.predicted_iteration_ns,
        "time_limit_ns": plan.time_limit_ns,
        "objective": plan.objective,
        "bound": plan.bound,
        "gap": None if plan.bound is None else relative_gap(plan.objective, plan.bound),
        "baselines_ns": dict(sorted(plan.baselines.items())),
        "verdict": None if verdict is None else {"sentence": verdict.sentence, "speedup": verdict.speedup},
        "rank0_group": plan.rank0_group,
        "communication": None if plan.communication is None else _communication(plan.communication),
        "groups": [_group(plan, group, chosen) for group in plan.groups],
        "notes": list(plan.notes),
    }


def _communication(planned: PlannedCommunication) -> dict[str, Any]:
    return {
        "settings": attrs.asdict(planned.settings),
        "label": planned.settings.label,
        "reason": planned.reason,
        "how_to_apply": list(how_to_apply(planned)),
        "alternatives": [
            {"label": choice.settings.label, "settings": attrs.asdict(choice.settings), "iteration_ns": choice.iteration_ns}
            for choice in planned.alternatives
        ],
    }


def _group(plan: PrecisionPlan, group: GroupPlan, chosen: tuple[OpId, ...]) -> dict[str, Any]:
    return {
        "group": group.group,
        "role": str(group.role),
        "count": group.count,
        "device": group.device.name,
        "estimated_from": plan.estimated.get(group.group),
        "base": str(group.base),
        "local_batch": plan.local_batches.get(group.group),
        "predicted_busy_ns": group.predicted_busy_ns,
        "predicted_peak_bytes": group.predicted_peak_bytes,
        "memory_budget_bytes": group.memory_budget_bytes,
        "memory_parts_bytes": dict(plan.memory.get(group.group, {})),
        "needs_loss_scaling": group.needs_loss_scaling,
        "variants": dict(Counter(assignment.variant.label for assignment in group.assignments.values()).most_common()),
        "chains": {
            str(name): {"label": entry.variant.label, "backend": entry.backend, "reason": entry.reason}
            for name, entry in group.chains.items()
        },
        "operators": [
            {
                "operator": str(op_id),
                "label": assignment.variant.label,
                **attrs.asdict(assignment, recurse=False),
                "variant": str(assignment.variant),
            }
            for op_id in chosen
            for assignment in (group.assignments[op_id],)
        ],
    }


def diff_plans(before: PrecisionPlan, after: PrecisionPlan) -> dict[str, Any]:
    """Differences as plain data: totals, inputs, groups and operators; equal things are left out of the lists.

    Raises:
        PlanError: when the plans are for different graphs; names the first operators that differ.
    """
    if before.dag_digest != after.dag_digest:
        raise PlanError(
            f"the plans are for different graphs ({before.model!r}, digest {before.dag_digest[:12]}, and {after.model!r}, digest "
            f"{after.dag_digest[:12]}): of the second, {first_differences(before.operator_ids, after.operator_ids)}; "
            "compare plans for one traced job"
        )
    old = {group.group: group for group in before.groups}
    new = {group.group: group for group in after.groups}
    return {
        "model": before.model,
        "identical": before == after,
        "totals": {name: {"before": getattr(before, name), "after": getattr(after, name)} for name in _TOTALS},
        "inputs_changed": sorted(
            name
            for name in before.input_digests.keys() | after.input_digests.keys()
            if before.input_digests.get(name) != after.input_digests.get(name)
        ),
        "groups_removed": sorted(old.keys() - new.keys()),
        "groups_added": sorted(new.keys() - old.keys()),
        "groups": [_group_changes(old[name], new[name], before.operator_ids) for name in old if name in new],
    }


def _group_changes(before: GroupPlan, after: GroupPlan, operator_ids: Sequence[OpId]) -> dict[str, Any]:
    changes = []
    for op_id in operator_ids:
        assignment, other = before.assignments[op_id], after.assignments[op_id]
        if (assignment.variant, assignment.backend, assignment.config) != (other.variant, other.backend, other.config):
            changes.append(
                {
                    "operator": str(op_id),
                    "before": str(assignment.variant),
                    "after": str(other.variant),
                    "labels": [assignment.variant.label, other.variant.label],
                    "backends": [assignment.backend, other.backend],
                    "reason": other.reason,
                }
            )
    return {
        "group": before.group,
        "peak_bytes": {"before": before.predicted_peak_bytes, "after": after.predicted_peak_bytes},
        "busy_ns": {"before": before.predicted_busy_ns, "after": after.predicted_busy_ns},
        "operators": changes,
    }
