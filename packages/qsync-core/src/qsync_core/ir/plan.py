"""The PrecisionPlan: a variant, a backend and a reason for every adjustable operator of every device group."""

from __future__ import annotations

import enum
from collections.abc import Mapping

import attrs

from qsync_core.ir import checks
from qsync_core.ir.chain import ChainForm, ChainVariant
from qsync_core.ir.communication import PlannedCommunication
from qsync_core.ir.formats import OutputFormats
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import DeviceType
from qsync_core.ir.variant import Variant

OUTSIDE = "outside PyTorch's allocator"
"""The part of a process's memory (:attr:`PrecisionPlan.memory`) that no cap of the allocator counts."""
WORTH_IT = 1.005
"""A gain below half a percent is within what a prediction can tell apart; it is called no gain."""


class Role(enum.StrEnum):
    """A training group keeps its base precision; an inference group may be lowered."""

    TRAIN = "train"
    INFER = "infer"


@attrs.frozen
class Assignment:
    """What one operator runs as, and why.

    ``reason`` is a sentence for people: ``recovered to float32: +212 µs, slack of the finished plan 1,830 µs``.
    """

    variant: Variant
    backend: str
    config: str
    reason: str


@attrs.frozen
class ChainAssignment:
    """What one chain runs as (docs/design/fused-chains.md), and why; ``backend`` and ``config`` are empty where it is not fused."""

    variant: ChainVariant
    backend: str
    config: str
    reason: str


@attrs.frozen
class GroupPlan:
    """The part of a plan that the ranks of one group carry out.

    Attributes:
        group: its name in the cluster file; role, count and device likewise.
        base: the precision of everything the plan does not lower.
        assignments: every adjustable operator of the model.
        memory_budget_bytes: what the group may use (0: no limit was given).
        predicted_peak_bytes: predicted peak memory of one rank.
        predicted_busy_ns: forward + backward + optimizer of one rank, without waiting.
        needs_loss_scaling: some gradient passes through float16.
        chains: by the names of :func:`qsync_core.chains.finding.chains_of`; a chain that is not named is not fused.
        chain_forms: of those that are fused, what memory and time were predicted for; none in plans from before there were any.
    """

    group: str
    role: Role
    count: int = attrs.field(validator=checks.non_negative_int)
    device: DeviceType
    base: Precision
    assignments: Mapping[OpId, Assignment]
    memory_budget_bytes: int = attrs.field(default=0, validator=checks.non_negative_int)
    predicted_peak_bytes: int = attrs.field(default=0, validator=checks.non_negative_int)
    predicted_busy_ns: int = attrs.field(default=0, validator=checks.non_negative_int)
    needs_loss_scaling: bool = False
    chains: Mapping[OpId, ChainAssignment] = attrs.field(factory=dict)
    chain_forms: Mapping[OpId, ChainForm] = attrs.field(factory=dict)


@attrs.frozen
class Verdict:
    """Whether the hybrid job beats the best groups alone, whatever their role: all training groups, or one group by itself.

    ``hybrid_ns`` and ``training_only_ns`` are iteration times, the latter of the training groups alone.  ``speedup`` is the ratio
    of throughputs (samples per second), above 1 where the hybrid job is worth it; ``sentence`` says it in words, and with which
    groups alone it is compared.
    """

    hybrid_ns: int = attrs.field(validator=checks.non_negative_int)
    training_only_ns: int = attrs.field(validator=checks.non_negative_int)
    speedup: float = attrs.field(validator=checks.finite)
    sentence: str


@attrs.frozen
class RecommendedWay:
    """The way to run a job that makes most samples a second, of all that there are; of ways that are alike the simplest.

    Attributes:
        groups: which train; the others are left out.
        local_batches: samples of one rank in a micro-batch, of each of them.
        options: of ``qsync plan``, which plans it; empty where it is this plan, or this plan without some groups.
    """

    groups: tuple[str, ...]
    local_batches: Mapping[str, int] = attrs.field(validator=checks.each(checks.non_negative_int))
    iteration_ns: int = attrs.field(validator=checks.non_negative_int)
    samples_per_second: float = attrs.field(validator=checks.finite)
    options: str = ""


@attrs.frozen
class PrecisionPlan:
    """Which precision every operator runs in, per device group (docs/artifacts.md).

    Attributes:
        model, dag_digest: what it is for.  ``operator_ids`` are all adjustable operators, to name differences by FQN.
        input_digests: digest of every artifact it was computed from, by name.
        time_limit_ns: T, the iteration time it had to keep: the period of uniform precision times (1 + tolerance), and 0.2% more
            where the way to communicate was chosen too (docs/design/allocator.md#communication).
        objective: Σ Ω of the inference groups, each by its share of the traced batch; bound: a proven lower bound of it, None where
            there is none.
        groups: one per device group of the cluster.
        rank0_group: a training group, whose buffers all ranks get.  Empty where there is no training group.
        verdict: hybrid against the best groups alone; None where there is no training group, or no other one.
        baselines: iteration time in ns of other ways to run the job (``full``, ``uniform``, ``dynamic-batch``).
        local_batches: local batch size per group; they differ where the plan was free to choose them, and by dynamic-batch.
        notes: anything else a reader must know.
        unaddressed_ids: linear and convolution operators that ``apply_`` cannot change; they run in the base as they are.
        base: format of the job itself: float32, or the format of the autocast that it trains under
            (docs/design/precision-semantics.md#jobs-under-amp).
        software: per group the versions and settings of the process that measured its profile (:mod:`qsync_core.settings`): the
            prediction holds for a job that has the same.  Groups of which they are not known are absent.
        weight_shapes: by the FQN of an operator the shape of its weight, which ``apply_`` compares with the model's.
        memory: per group what one process takes of its device with its local batch, by part, in bytes.
        communication: how the job is to communicate; None where nothing was measured of it, and PyTorch's defaults stand.
        estimated: by group the device from whose measurements its costs were scaled (docs/absent-gpus.md); none where measured.
        batch_axes: where the model's arguments say how large a local batch is (:attr:`~qsync_core.ir.dag.PrecisionDag.batch_axes`).
        recommended_groups: with which of its groups to train as planned: all of them, or without those that are better left out;
            empty where there is no verdict.
        recommended_way: the best way of all, which may be another plan; None where there is no verdict.
        accumulate: micro-batches of a step, as in the graph; predicted times are of whole steps, local batches of micro-batches.
        output_formats: what the graph says of the formats in which operators may deliver, by which the outputs of all variants were
            decided; None in plans from before that, whose outputs are float32 when they are carried out.
    """

    model: str
    dag_digest: str
    operator_ids: tuple[OpId, ...]
    input_digests: Mapping[str, str]
    solver: str
    indicator: str
    time_limit_ns: int = attrs.field(validator=checks.non_negative_int)
    predicted_iteration_ns: int = attrs.field(validator=checks.non_negative_int)
    objective: float = attrs.field(validator=checks.finite)
    bound: float | None = attrs.field(validator=checks.optional(checks.finite))
    groups: tuple[GroupPlan, ...]
    rank0_group: str
    verdict: Verdict | None = None
    baselines: Mapping[str, int] = attrs.field(factory=dict, validator=checks.each(checks.non_negative_int))
    local_batches: Mapping[str, int] = attrs.field(factory=dict, validator=checks.each(checks.non_negative_int))
    notes: tuple[str, ...] = ()
    unaddressed_ids: tuple[OpId, ...] = ()
    base: Precision = attrs.field(default=Precision.FLOAT32, validator=checks.base_precision)
    software: Mapping[str, Mapping[str, str]] = attrs.field(factory=dict)
    weight_shapes: Mapping[str, tuple[int, ...]] = attrs.field(factory=dict)
    communication: PlannedCommunication | None = None
    estimated: Mapping[str, str] = attrs.field(factory=dict)
    memory: Mapping[str, Mapping[str, int]] = attrs.field(factory=dict)
    batch_axes: Mapping[str, int] = attrs.field(factory=dict, validator=checks.each(checks.non_negative_int))
    recommended_groups: tuple[str, ...] = ()
    recommended_way: RecommendedWay | None = None
    accumulate: int = attrs.field(default=1, validator=checks.micro_batches)
    output_formats: OutputFormats | None = None

    def __attrs_post_init__(self) -> None:
        names = [group.group for group in self.groups]
        if len(set(names)) != len(names):
            raise ValueError(f"a plan has one entry per group, got {names}")
        if other := next((g for g in self.groups if self.base is not Precision.FLOAT32 and g.base is not self.base), None):
            raise ValueError(f"the job's base is {self.base}, but group {other.group!r} has base {other.base}")
        if self.rank0_group and self.rank0_group not in names:
            raise ValueError(f"rank 0 is to belong to group {self.rank0_group!r}, but the plan's groups are {names}")
        for what in ("local_batches", "software", "estimated", "memory"):
            if stray := sorted(set(getattr(self, what)) - set(names)):
                raise ValueError(f"{what} has an entry for group {stray[0]!r}, but the plan's groups are {names}")
        if stray := sorted(set(self.recommended_groups) - set(names)):
            raise ValueError(f"group {stray[0]!r} is recommended, but the plan's groups are {names}")
        if self.recommended_way and (stray := sorted(set(self.recommended_way.groups) - set(names))):
            raise ValueError(f"a way with group {stray[0]!r} is recommended, but the plan's groups are {names}")
        if twice := checks.first_repeated((*self.operator_ids, *self.unaddressed_ids)):
            raise ValueError(f"operator {twice} stands twice in operator_ids and unaddressed_ids")
        operators = set(self.operator_ids)
        for group in self.groups:
            if differing := operators.symmetric_difference(group.assignments):
                first = min(differing)
                problem = "has no assignment for" if first in operators else "assigns a variant to"
                where = "is" if first in operators else "is not"
                raise ValueError(f"group {group.group!r} {problem} {first}, which {where} one of the plan's operator_ids")
            if stray := sorted(operators.intersection(group.chains)):
                raise ValueError(f"group {group.group!r} has {stray[0]} as a chain and as an operator with a variant")
            if stray := sorted(set(group.chain_forms) - {name for name, entry in group.chains.items() if entry.variant.fused}):
                raise ValueError(f"group {group.group!r} has a form of {stray[0]}, which is no chain that it fuses")

    def group(self, name: str) -> GroupPlan:
        """The part of one group.

        Raises:
            KeyError: when the plan has no such group.
        """
        return {group.group: group for group in self.groups}[name]

    def process_bytes(self, group: GroupPlan) -> int:
        """What one process of a group takes of its device; its tensors alone where the plan says no more."""
        return sum(self.memory.get(group.group, {}).values()) or group.predicted_peak_bytes
