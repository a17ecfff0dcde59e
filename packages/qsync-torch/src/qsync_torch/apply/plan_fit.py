"""Whether a plan fits a model: each operator that it names is a module of the model, or a functional call of one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs
from torch import nn

from qsync_core.errors import PlanError
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment, PrecisionPlan
from qsync_core.ir.variant import Variant
from qsync_core.kernels.choice import ATEN, KernelChoice
from qsync_torch.kernels.selection import DEFAULT_BACKEND

_NAMED = 3
"""How many FQNs an error names."""


@attrs.frozen
class Assigned:
    """The variant that an operator runs in, and whose kernels run it."""

    variant: Variant
    choice: KernelChoice = ATEN


@attrs.frozen
class Addressed:
    """Operators found in a model: modules by their first call, and functional calls by owner and operator name."""

    entries: Mapping[OpId, Assigned]
    modules: tuple[tuple[OpId, nn.Module], ...]
    functional: Mapping[str, Mapping[str, tuple[OpId, ...]]]


def assignments_of(
    plan: PrecisionPlan | Mapping[OpId, Variant | Assignment],
    group: str | None,
    backend: str | None,
    default: str = DEFAULT_BACKEND,
) -> dict[OpId, Assigned]:
    """Variant, backend and configuration per operator.

    Args:
        plan: a plan, or by operator a variant or a whole assignment.
        group: which group of a plan.
        backend: instead of every planned backend; configurations go with it.
        default: backend of operators with a variant alone.

    Raises:
        PlanError: when the plan has no such group.
    """

    def assigned(entry: Variant | Assignment) -> Assigned:
        if isinstance(entry, Variant):
            return Assigned(entry, KernelChoice.parse(backend or default))
        if backend:
            return Assigned(entry.variant, KernelChoice.parse(backend))
        return Assigned(entry.variant, KernelChoice.parse(entry.backend or DEFAULT_BACKEND, entry.config))

    if not isinstance(plan, PrecisionPlan):
        return {op_id: assigned(entry) for op_id, entry in plan.items()}
    try:
        chosen = plan.group(str(group))
    except KeyError:
        known = ", ".join(entry.group for entry in plan.groups)
        raise PlanError(f"the plan has no group {group!r}; its groups are {known}") from None
    return {op_id: assigned(entry) for op_id, entry in chosen.assignments.items()}


def is_own_forward(module: nn.Module) -> bool:
    """True for an ``nn.Linear`` or ``nn.Conv2d`` that runs its own forward: an operator is named after it."""
    if isinstance(module, nn.Linear):
        return type(module).forward is nn.Linear.forward
    return (
        isinstance(module, nn.Conv2d)
        and type(module).forward is nn.Conv2d.forward
        and type(module)._conv_forward is nn.Conv2d._conv_forward
        and module.padding_mode == "zeros"
    )


def locate(model: nn.Module, assigned: Mapping[OpId, Assigned], plan_model: str | None) -> Addressed:
    """Find every operator in the model.

    Raises:
        PlanError: naming the first FQNs that the model does not have, or calls of one module with different variants.
    """
    modules = dict(model.named_modules())
    missing: list[str] = []
    found: dict[str, OpId] = {}
    by_owner: dict[str, dict[str, list[OpId]]] = {}
    for op_id, entry in assigned.items():
        module = modules.get(op_id.fqn)
        owner, _, name = op_id.fqn.rpartition(".")
        if module is None and owner in modules and name in ("linear", "conv2d"):  # a functional call
            by_owner.setdefault(owner, {}).setdefault(name, []).append(op_id)
        elif module is None or not is_own_forward(module):
            missing.append(op_id.fqn)
        elif op_id.fqn in found and assigned[found[op_id.fqn]].variant != entry.variant:
            raise PlanError(
                f"calls of {op_id.fqn} are to run as {assigned[found[op_id.fqn]].variant.label} and as {entry.variant.label}; "
                "calls that share a module share a variant"
            )
        else:
            found.setdefault(op_id.fqn, op_id)
    if missing:
        raise PlanError(_other_model(model, missing, set(found), plan_model))
    return Addressed(
        dict(assigned),
        tuple((op_id, modules[fqn]) for fqn, op_id in found.items()),
        {owner: {name: tuple(sorted(ids)) for name, ids in names.items()} for owner, names in by_owner.items()},
    )


def _other_model(model: nn.Module, missing: list[str], found: set[str], plan_model: str | None) -> str:
    unknown = list(dict.fromkeys(missing))
    source = f"the plan was made for another model ({plan_model})" if plan_model else "the variants are for another model"
    text = f"{source}: {type(model).__name__} has no linear or convolution {', '.join(unknown[:_NAMED])}"
    if len(unknown) > _NAMED:
        text += f" (and {len(unknown) - _NAMED} more)"
    extra = [name for name, module in model.named_modules() if is_own_forward(module) and name not in found]
    if extra:
        text += f", and the plan does not know {', '.join(extra[:_NAMED])}"
    return text + "; trace this model and plan again"


def unplanned_modules(model: nn.Module, addressed: Addressed, plan: PrecisionPlan) -> Iterator[tuple[str, nn.Module]]:
    """Linear and convolution modules that a whole plan does not name; they must not run (an unused auxiliary head does not)."""
    planned = {id(module) for _, module in addressed.modules}
    unaddressed = {op_id.fqn for op_id in plan.unaddressed_ids}
    for name, module in model.named_modules():
        if is_own_forward(module) and id(module) not in planned and name not in unaddressed:
            yield name, module
