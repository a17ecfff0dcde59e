"""What a solver found: rungs, prediction and reasons; and the PrecisionPlan made of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import attrs

from qsync_core.chains.finding import chains_of
from qsync_core.ir.chain import ChainForm, ChainVariant
from qsync_core.ir.cluster import DeviceGroup
from qsync_core.ir.communication import CommunicationSettings
from qsync_core.ir.formats import OutputFormats
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment, ChainAssignment, GroupPlan, Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import DeviceKind, Profile
from qsync_core.ir.semantics import chain_result
from qsync_core.ir.variant import Variant
from qsync_core.kernels.choice import FLOAT_BACKEND
from qsync_core.units import format_bytes
from qsync_planner.allocator.problem import Problem, SearchState, Unit
from qsync_planner.allocator.recovery import History, Refusal
from qsync_planner.replayer.chains import Variants
from qsync_planner.replayer.prediction import Prediction
from qsync_planner.replayer.replay import Replayer

_LITTLE_LEFT = 3 / 4
"""The part of a budget beside which what fixed segments were seen to reserve over a profile, a quarter more, still fits."""


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
        way: how the job communicates; None while that is not chosen.
        periods_ns: its period under every way that is considered.
    """

    rungs: Mapping[str, tuple[int, ...]]
    prediction: Prediction
    reasons: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)
    local_batches: Mapping[str, int] = attrs.field(factory=dict)
    notes: tuple[str, ...] = ()
    bound: float | None = None
    way: CommunicationSettings | None = None
    periods_ns: Mapping[CommunicationSettings, int] = attrs.field(factory=dict)

    @classmethod
    def of(cls, state: SearchState) -> Solution:
        """The accepted plan of a search, without reasons."""
        return cls(state.all_rungs(), state.prediction)

    def fits(self, problem: Problem) -> bool:
        """Whether every inference group is within its memory budget."""
        return all(group.fits(self.prediction.groups[group.name].peak_bytes) for group in problem.groups)

    def with_one_reason(self, problem: Problem, sentence: str) -> Solution:
        """The same with one reason for all units: the unit's variant and ``sentence``."""
        return self.with_reasons(problem, lambda group, index, unit, rung: f"{unit.rungs[rung].label}: {sentence}")

    def with_reasons(self, problem: Problem, reason: Callable[[str, int, Unit, int], str]) -> Solution:
        """The same with the reason for every unit: of the group's name, the unit's index, the unit and its rung."""
        reasons = {
            group.name: tuple(
                reason(group.name, index, unit, rung)
                for index, (unit, rung) in enumerate(zip(group.units, self.rungs[group.name], strict=True))
            )
            for group in problem.groups
        }
        return attrs.evolve(self, reasons=reasons)


def group_plan(problem: Problem, group: DeviceGroup, solution: Solution) -> GroupPlan:
    """What the ranks of a group carry out."""
    profile = problem.profiles[group.name]
    chosen: dict[OpId, tuple[Variant, str]] = {}
    chains: dict[OpId, ChainAssignment] = {}
    if group.role is Role.TRAIN:
        base = Variant.plain(group.base)
        reason = f"{base.label}: a training group keeps its base precision"
        chosen = {operator.op_id: (base, reason) for operator in problem.dag.adjustable}
    else:
        units = problem.by_name[group.name].units
        rows = zip(units, solution.rungs[group.name], solution.reasons[group.name], strict=True)
        for unit, rung, reason in rows:
            picked = unit.rungs[rung]
            if isinstance(picked, ChainVariant):
                chains[unit.operators[0]] = ChainAssignment(picked, _producer(profile, unit.operators[0], picked), "", reason)
            else:
                chosen |= dict.fromkeys(unit.operators, (picked, reason))
    delivered = OutputFormats.of(problem.dag).decided({op_id: variant for op_id, (variant, _) in chosen.items()})
    assignments = {}
    for op_id in (operator.op_id for operator in problem.dag.adjustable):
        variant, reason = delivered[op_id], chosen[op_id][1]
        cost = profile.cost(op_id, variant)
        assignments[op_id] = Assignment(variant, cost.backend, cost.config, reason)
    prediction = solution.prediction.groups[group.name]
    return GroupPlan(
        group=group.name,
        role=group.role,
        count=group.count,
        device=profile.device,
        base=group.base,
        assignments=assignments,
        memory_budget_bytes=problem.budgets[group.name],
        predicted_peak_bytes=prediction.peak_bytes,
        predicted_busy_ns=prediction.busy_ns,
        needs_loss_scaling=any(_needs_loss_scaling(assignment.variant) for assignment in assignments.values()),
        chains=chains,
        chain_forms=dict(_forms(problem, chains, {op_id: entry.variant for op_id, entry in assignments.items()})),
    )


def _forms(
    problem: Problem, chains: Mapping[OpId, ChainAssignment], variants: Mapping[OpId, Variant]
) -> Iterator[tuple[OpId, ChainForm]]:
    """What the chains that are fused were predicted as, by their names."""
    for chain in chains_of(problem.dag) if chains else ():
        if chain.name in chains and chains[chain.name].variant.fused:
            yield chain.name, chain.form(chain_result(chain, variants).float_result)


def _producer(profile: Profile, name: OpId, chosen: ChainVariant) -> str:
    """Whose producers were measured for a chain, as a chain of backends; empty where it is not fused."""
    rows = (entry.cost.backend for entry in profile.chains if name in entry.chains)
    used = {backend for row in rows for backend in row.split("+")} if chosen.fused else set()
    return "+".join(sorted(used, key=lambda backend: (backend == FLOAT_BACKEND, backend)))


def memory_parts(
    replayer: Replayer, variants: Mapping[str, Variants], local_batches: Mapping[str, int]
) -> dict[str, Mapping[str, int]]:
    """Predict what a process of each group takes of its device under a plan, by part."""
    return {name: replayer.memory(name, chosen).at_batch(local_batches[name]).process_parts for name, chosen in variants.items()}


def memory_notes(problem: Problem, peaks_bytes: Mapping[str, int]) -> Iterator[str]:
    """What a reader must know of memory budgets on GPUs, given by group the plan's peak of tensors."""
    for name, budget in problem.budgets.items():
        profile = problem.profiles[name]
        if not budget or profile.device.kind is not DeviceKind.CUDA:
            continue
        if profile.memory is None:
            yield (
                f"group {name}: its profile does not say what a process takes beside tensors (CUDA context, allocator's reserve), "
                "so that its memory budget is for tensors alone; profile again"
            )
        elif (
            profile.software.get("expandable_segments") == "False"
            and problem.process_bytes(name, peaks_bytes[name]) > budget * _LITTLE_LEFT
        ):
            yield (
                f"group {name}: its profile was made without expandable segments, so that PyTorch's allocator may reserve more "
                "than was measured; set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True for qsync profile and for training"
            )


def _needs_loss_scaling(variant: Variant) -> bool:
    """Whether a gradient passes through float16: computed in it, or received in the format of a float16 output."""
    return Precision.FLOAT16 in (variant.grad_input, variant.grad_weight, variant.output)


def reason(unit: Unit, rung: int, history: History, slack_ns: int) -> str:
    """The reason for one unit after recovery; ``slack_ns`` is of the finished plan.

    ``recovered to float32: +212 µs, slack of the finished plan 1,830 µs`` |
    ``kept int8: float16 would exceed memory by 38.1 MiB`` | ``kept bfloat16: float32 would exceed the time limit by 1,204 µs``.
    A unit that was raised part of the way has both halves.
    """
    label = unit.rungs[rung].label
    parts = []
    if history.steps:
        added = sum(step.added_ns for step in history.steps)
        partners = dict.fromkeys(step.together_with for step in history.steps if step.together_with)
        together = f" together with {' and '.join(partners)}" if partners else ""
        parts.append(f"recovered to {label}{together}: {added_time_text(added)}, {slack_text(slack_ns)}")
    if history.refusals:
        parts.append(f"kept {label}: {refusal_text(unit, history.refusals[0])}")
    if parts:
        return "; ".join(parts)
    if len(unit.rungs) == 1:
        return f"{label}: the only variant that it may take"
    return f"{label} from the start: the fastest choice is already the base precision"


def refusal_text(unit: Unit, refusal: Refusal) -> str:
    """Why a step was refused."""
    label = unit.rungs[refusal.rung].label
    if not refusal.gains:
        return f"{label} would not lower its sensitivity"
    limits = []
    if refusal.over_memory_bytes:
        limits.append(f"memory by {format_bytes(refusal.over_memory_bytes)}")
    if refusal.over_time_ns:
        limits.append(f"the time limit by {time_text(refusal.over_time_ns)}")
    return f"{label} would exceed {' and '.join(limits)}"


def slack_text(slack_ns: int) -> str:
    """What a rank of the group has left below the time limit when the search has ended."""
    return f"slack of the finished plan {time_text(slack_ns)}"


def time_text(ns: int) -> str:
    """``840 ns``, ``1,830 µs``, ``12.3 ms``: microseconds from 1 µs to 10 ms."""
    magnitude = abs(ns)
    sign = "-" if ns < 0 else ""
    if magnitude < 1_000:
        return f"{sign}{magnitude} ns"
    if magnitude < 10_000_000:
        return f"{sign}{magnitude / 1e3:,.0f} µs"
    return f"{sign}{magnitude / 1e6:,.1f} ms"


def added_time_text(ns: int) -> str:
    """A difference, always signed: ``+212 µs``, ``-3 µs``."""
    return time_text(ns) if ns < 0 else f"+{time_text(ns)}"


def rounded_up(value: float) -> str:
    """Six significant digits that are not below the value."""
    if value <= 0:
        return "0"
    text = f"{value:.6g}"
    return text if float(text) >= value else f"{value + 10.0 ** (math.floor(math.log10(value)) - 5):.6g}"
