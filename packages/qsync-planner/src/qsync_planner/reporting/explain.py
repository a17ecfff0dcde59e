"""``explain``: why a plan is as it is, for the whole and for every operator."""

from __future__ import annotations

import difflib
from collections import Counter
from typing import Any

from qsync_core.errors import PlanError
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import GroupPlan, PrecisionPlan


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
        "gap": None if plan.bound is None else (plan.objective - plan.bound) / plan.objective if plan.objective > 0 else 0.0,
        "baselines_ns": dict(sorted(plan.baselines.items())),
        "verdict": None if verdict is None else {"sentence": verdict.sentence, "speedup": verdict.speedup},
        "rank0_group": plan.rank0_group,
        "groups": [_group(plan, group, chosen) for group in plan.groups],
        "notes": list(plan.notes),
    }


def _group(plan: PrecisionPlan, group: GroupPlan, chosen: tuple[OpId, ...]) -> dict[str, Any]:
    return {
        "group": group.group,
        "role": str(group.role),
        "count": group.count,
        "device": group.device.name,
        "base": str(group.base),
        "local_batch": plan.local_batches.get(group.group),
        "predicted_busy_ns": group.predicted_busy_ns,
        "predicted_peak_bytes": group.predicted_peak_bytes,
        "memory_budget_bytes": group.memory_budget_bytes,
        "needs_loss_scaling": group.needs_loss_scaling,
        "variants": dict(Counter(assignment.variant.label for assignment in group.assignments.values()).most_common()),
        "operators": [
            {
                "operator": str(op_id),
                "variant": str(group.assignments[op_id].variant),
                "label": group.assignments[op_id].variant.label,
                "backend": group.assignments[op_id].backend,
                "config": group.assignments[op_id].config,
                "reason": group.assignments[op_id].reason,
            }
            for op_id in chosen
        ],
    }
