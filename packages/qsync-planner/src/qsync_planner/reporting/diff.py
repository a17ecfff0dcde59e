"""``diff_plans``: what changed between two plans for one model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qsync_core.errors import PlanError
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import GroupPlan, PrecisionPlan
from qsync_planner.matching import first_differences


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
        "totals": {name: {"before": a, "after": b} for name, a, b in _totals(before, after)},
        "inputs_changed": sorted(
            name
            for name in before.input_digests.keys() | after.input_digests.keys()
            if before.input_digests.get(name) != after.input_digests.get(name)
        ),
        "groups_removed": sorted(old.keys() - new.keys()),
        "groups_added": sorted(new.keys() - old.keys()),
        "groups": [_group_changes(old[name], new[name], before.operator_ids) for name in old if name in new],
    }


def _totals(before: PrecisionPlan, after: PrecisionPlan) -> list[tuple[str, Any, Any]]:
    return [
        ("solver", before.solver, after.solver),
        ("indicator", before.indicator, after.indicator),
        ("predicted_iteration_ns", before.predicted_iteration_ns, after.predicted_iteration_ns),
        ("time_limit_ns", before.time_limit_ns, after.time_limit_ns),
        ("objective", before.objective, after.objective),
    ]


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
