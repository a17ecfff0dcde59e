"""The replayer: how long a job's training step takes, and how much memory, under any assignment of variants (docs/design/index.md).

It is a plain function of finished artifacts, and it is transactional, for searches: ``trial`` evaluates a change in time
proportional to what it affects, ``rollback`` leaves nothing of it behind, and every answer equals the replay of the whole from
scratch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import attrs

from qsync_core.errors import PlanError
from qsync_core.ir.chain import UNFUSED
from qsync_core.ir.cluster import Cluster, DeviceGroup
from qsync_core.ir.communication import PYTORCH_DEFAULTS, CollectiveCosts, CommunicationSettings
from qsync_core.ir.dag import Bucket, PrecisionDag
from qsync_core.ir.dfg import GlobalDfg, LocalDfg
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import GroupPlan, PrecisionPlan
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import Profile
from qsync_core.ir.timeline import Timeline
from qsync_core.ir.variant import Variant
from qsync_planner.matching import Inputs
from qsync_planner.replayer.ablation import NOTHING, Ablation
from qsync_planner.replayer.calibration import calibrated_model
from qsync_planner.replayer.chains import Chosen, Variants
from qsync_planner.replayer.contention import JointStep, joint_step
from qsync_planner.replayer.cost_mapper import CostMapper
from qsync_planner.replayer.cost_model import CostModel
from qsync_planner.replayer.gradient_exchange import GradientExchange
from qsync_planner.replayer.incremental import Deferred
from qsync_planner.replayer.max_plus import kernel
from qsync_planner.replayer.memory import MemoryBefore, MemoryEstimate, MemoryLedger
from qsync_planner.replayer.prediction import GroupPrediction, GroupPredictions, Prediction
from qsync_planner.replayer.step_timing import Condensed, StepShape, StepTimes, StepTiming, TimingBefore, bucket_positions


def base_rung(group: DeviceGroup) -> Variant:
    """The variant of the group's base precision: the last rung of its ladder."""
    return group.ladder[-1] if group.ladder else Variant.of(group.base)


def is_lowered(chosen: Chosen, base: Variant) -> bool:
    """Whether an operator runs in another variant than its group's base, or a chain is fused."""
    return chosen not in (base, UNFUSED)


def plan_variants(plan: PrecisionPlan, cluster: Cluster) -> dict[str, dict[OpId, Chosen]]:
    """What a plan says of operators and chains, per group of the cluster.

    Raises:
        PlanError: when the plan and the cluster have different groups.
    """
    planned, described = {group.group for group in plan.groups}, {group.name for group in cluster.groups}
    if planned != described:
        raise PlanError(
            f"the plan is for groups {', '.join(sorted(planned))}, but cluster {cluster.name!r} has "
            f"{', '.join(sorted(described))}; replay it with the cluster file it was made from"
        )
    return {group.group: group_variants(group) for group in plan.groups}


def group_variants(group: GroupPlan) -> dict[OpId, Chosen]:
    """What a plan says of a group's operators and chains."""
    variants: dict[OpId, Chosen] = {op_id: assignment.variant for op_id, assignment in group.assignments.items()}
    return variants | {name: assignment.variant for name, assignment in group.chains.items()}


MOST_READ = 1 << 19
"""Operators up to which mappers that were made to be read are kept."""


@attrs.define(eq=False)
class _Read:
    """What was made to be read, by what it was made from: a search asks for the same assignments again and again."""

    mappers: dict[tuple[object, ...], CostMapper] = attrs.field(factory=dict)
    ledgers: dict[tuple[object, ...], MemoryLedger] = attrs.field(factory=dict)


class GroupState:
    """One group's mapper, times and memory, changed together; its step has the replayer's shape unless another one is given.

    With nothing lowered it is a step without a plan, as in every replay from scratch: a search that took its operators for ones
    beside lowered ones would not find again the very step that its time limit comes from.

    ``stays``: it is read and not changed; :meth:`to_change` is the same to be changed.
    """

    def __init__(
        self, replayer: Replayer, group: DeviceGroup, variants: Variants, shape: StepShape | None = None, *, stays: bool = False
    ) -> None:
        self.stays, self._variants = stays, variants
        model = replayer.model_of(group.name, variants) if stays else replayer.model(group.name)
        shape = shape or replayer.shape(group.name)
        self.mapper = replayer.mapper(group.name, variants) if stays else CostMapper(replayer.dag, model, variants)
        self.timing = StepTiming(self.mapper, shape, synchronises=group.sync_per_step, stays=stays)
        self._ledger = replayer.ledger_to_read(self.mapper) if stays else replayer.ledger(self.mapper)
        self._base = base_rung(group)
        self._lowered: set[OpId] = set()
        self._make_alone: Callable[[], GroupState] | None = None
        if model is not replayer.model(group.name, lowers=False):
            self._lowered.update(name for name, variant in variants.items() if is_lowered(variant, self._base))
            self._make_alone = lambda: GroupState(replayer, group, replayer.base_variants(group.name), shape, stays=True)
        self._before: tuple[TimingBefore, MemoryBefore, StepTimes, int, set[OpId]] | None = None
        self._measure()

    def to_change(self, replayer: Replayer, group: DeviceGroup) -> GroupState:
        """This state where it may be changed, else a new one under the same variants."""
        return GroupState(replayer, group, self._variants) if self.stays else self

    @cached_property
    def _without_plan(self) -> GroupState | None:
        """A step with nothing lowered, where that is another model's; None where it is this one's."""
        return None if self._make_alone is None else self._make_alone()

    @property
    def memory(self) -> MemoryLedger:
        """The ledger of memory under the present variants."""
        alone = None if self._lowered else self._without_plan
        return self._ledger if alone is None else alone.memory

    def _measure(self) -> None:
        alone = None if self._lowered else self._without_plan
        self.times: StepTimes = self.timing.times() if alone is None else alone.times
        self.peak_bytes: int = self.memory.peak_bytes()

    def update(self, variants: Variants) -> None:
        """Change some operators, until ``commit`` or ``rollback``."""
        change = self.mapper.update(variants)
        flipped: set[OpId] = set()
        if self._make_alone is not None:
            flipped.update(name for name, variant in variants.items() if is_lowered(variant, self._base) != (name in self._lowered))
        self._before = (
            self.timing.refresh(change.recosted),
            self._ledger.refresh(change.evaluated, change.producers),
            self.times,
            self.peak_bytes,
            flipped,
        )
        self._lowered ^= flipped
        self._measure()

    def commit(self) -> None:
        """Keep the update."""
        self.mapper.commit()
        self._before = None

    def rollback(self) -> None:
        """Undo the update."""
        self.mapper.rollback()
        if self._before is not None:
            timing, memory, self.times, self.peak_bytes, flipped = self._before
            self._lowered ^= flipped
            self.timing.restore(timing)
            self._ledger.restore(memory)
            self._before = None


class Replayer:
    """Predicts iteration time and memory of a job.

    Args:
        inputs: the model, the groups, their profiles, and what was measured of all groups together; without that, all-reduces are
            those of each group alone, and there is no contention.
        settings: how the job communicates; without ``communication`` only the size of buckets matters, and where gradients live.
        without: parts of the model that are left out.
        like: another replayer of the same model, whose cost models are taken where profiles are the same objects.

    Raises:
        ClusterError: when nothing says how fast the groups communicate.
        PlanError: when collectives were not measured under these settings, or the model's buckets cannot have the size.
    """

    def __init__(
        self,
        inputs: Inputs,
        *,
        settings: CommunicationSettings = PYTORCH_DEFAULTS,
        without: Ablation = NOTHING,
        like: Replayer | None = None,
    ) -> None:
        dag, cluster, profiles, communication = inputs.dag, inputs.cluster, inputs.profiles, inputs.communication
        self.inputs = inputs
        self.dag: PrecisionDag = dag
        self.cluster: Cluster = cluster
        self.profiles = profiles
        self.communication: CollectiveCosts | None = communication
        self.settings = settings
        self.without = without
        self.ranks: int = sum(group.count for group in cluster.groups)
        self._models: dict[tuple[int, Variant, Ablation, bool], CostModel] = {} if like is None else like._models
        self._read: _Read = _Read() if like is None else like._read
        self._like = like  # keeps its profiles alive, by whose identity the models are known
        self._exchange = GradientExchange.of(dag, cluster, profiles, communication, settings)
        if Ablation.CONTENTION in without:
            self._exchange = self._exchange.without_contention()
        if like is not None and like.settings.bucket_cap_mb == settings.bucket_cap_mb:
            self._ready_after: tuple[int, ...] = like._ready_after
        else:
            self._ready_after = bucket_positions(dag, self.buckets)
        shapes: dict[tuple[object, ...], StepShape] = {}
        self._shapes = {group.name: self._shape(group.name, shapes) for group in cluster.groups}
        self._is_joint = any(shape.is_joint for shape in self._shapes.values())
        self._present: dict[str, GroupState] | None = None
        self._pending: GroupState | None = None

    def _shape(self, group: str, known: dict[tuple[object, ...], StepShape]) -> StepShape:
        calibration, exchange = self.model(group).calibration, self._exchange
        optimizer = kernel(calibration.optimizer_dispatch_ns, calibration.optimizer_compute_ns)
        share, copies, slowdown = exchange.compute_share[group], exchange.copies_ns[group], exchange.slowdown[group]
        key = (optimizer, share, copies, slowdown)
        if key not in known:
            known[key] = StepShape.of(
                self._ready_after,
                exchange.collective_ns,
                share,
                optimizer,
                copies,
                slowdown,
                exchange.start_delay_ns,
                self.dag.accumulate,
            )
        return known[key]

    def under(self, settings: CommunicationSettings) -> Replayer:
        """The same job with another way to communicate; trials start anew.

        Raises:
            PlanError: as for a new one.
        """
        return Replayer(self.inputs, settings=settings, without=self.without, like=self)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The gradient buckets, in the order of their collectives."""
        return self._exchange.buckets

    @property
    def collective_ns(self) -> tuple[int, ...]:
        """Duration of each bucket's collective."""
        return self._exchange.collective_ns

    @property
    def start_delay_ns(self) -> int:
        """How long after the last rank's optimizer every forward starts; 0: ranks do not wait for each other there."""
        return self._exchange.start_delay_ns

    @property
    def is_joint(self) -> bool:
        """Whether ranks slow each other down, so that the period may be longer than each group alone would make it."""
        return self._is_joint

    def slowdown(self, group: str) -> int:
        """c, what a rank of a group loses of its compute while a collective is open, in parts of ``contention.PARTS``."""
        return self._exchange.slowdown[group]

    def model(self, group: str, *, lowers: bool = True) -> CostModel:
        """The calibrated cost model of a group's plans; groups of one profile and base share it.

        ``lowers``: of plans that lower some operator, for a group whose ladder has lower rungs.
        """
        profile, base = self.profiles[group], base_rung(self.cluster.group(group))
        key = (id(profile), base, self.without, lowers and self._differs_lowered(group))
        if key not in self._models:
            self._models[key] = self.calibrated(group, profile, lowers=lowers)
        return self._models[key]

    def calibrated(self, group: str, profile: Profile, *, lowers: bool) -> CostModel:
        """The same by another profile, made anew: at another batch, say."""
        lowers = lowers and self._differs_lowered(group)
        return calibrated_model(self.dag, profile, base_rung(self.cluster.group(group)), self.without, lowers=lowers)

    def _differs_lowered(self, group: str) -> bool:
        """Whether a step of plans that lower some operator takes other costs than one without a plan."""
        profile = self.profiles[group]
        differ = profile.alternating is not None or (self.dag.base is not Precision.FLOAT32 and profile.compiled is None)
        return differ and len(self.cluster.group(group).ladder) > 1

    def model_of(self, group: str, variants: Variants) -> CostModel:
        """The calibrated cost model of a group under these variants."""
        if not self._differs_lowered(group):
            return self.model(group)
        base = base_rung(self.cluster.group(group))
        return self.model(group, lowers=any(is_lowered(variant, base) for variant in variants.values()))

    def shape(self, group: str) -> StepShape:
        """The part of a group's step that no plan changes."""
        return self._shapes[group]

    def base_variants(self, group: str) -> dict[OpId, Variant]:
        """Every adjustable operator of a group at its base precision."""
        rung = base_rung(self.cluster.group(group))
        return {operator.op_id: rung for operator in self.dag.adjustable}

    def _check_names(self, variants: Mapping[str, Variants]) -> None:
        unknown = sorted(set(variants) - {group.name for group in self.cluster.groups})
        if unknown:
            raise PlanError(f"cluster {self.cluster.name!r} has no group {unknown[0]!r}")

    def _states_to_read(self, variants: Mapping[str, Variants]) -> dict[str, GroupState]:
        """Make a state for all groups of one device type under the same variants."""
        self._check_names(variants)
        found: dict[str, GroupState] = {}
        known: list[tuple[CostModel, StepShape, bool, Variants, GroupState]] = []
        for group in self.cluster.groups:
            wanted = variants.get(group.name) or self.base_variants(group.name)
            model, shape = self.model_of(group.name, wanted), self.shape(group.name)
            for other, its_shape, synchronises, theirs, state in known:
                if other is model and its_shape is shape and synchronises == group.sync_per_step and theirs == wanted:
                    found[group.name] = state
                    break
            else:
                found[group.name] = GroupState(self, group, wanted, stays=True)
                known.append((model, shape, group.sync_per_step, wanted, found[group.name]))
        return found

    @property
    def _states(self) -> dict[str, GroupState]:
        """The state of trials; base precision everywhere until ``start``.  A group's is read until it is tried otherwise."""
        if self._present is None:
            self._present = self._states_to_read({})
        return self._present

    def replay(self, variants: Mapping[str, Variants]) -> Prediction:
        """Predict from scratch; groups not named run at their base precision.  Does not touch the state of trials.

        Raises:
            PlanError: when variants do not fit the model or were not profiled.
        """
        return self._predict(self._states_to_read(variants))

    def mapper(self, group: str, variants: Variants) -> CostMapper:
        """What the operators of a group cost under some variants, to be read; does not depend on the other groups."""
        model, read = self.model_of(group, variants), self._read
        key = (model, *variants.items())
        found = read.mappers.get(key)
        if found is None:
            if len(read.mappers) * len(self.dag.operators) > MOST_READ:
                read.mappers.clear()
                read.ledgers.clear()
            found = read.mappers[key] = CostMapper(self.dag, model, variants)
        return found

    def group_state(self, group: str, variants: Variants, shape: StepShape | None = None) -> GroupState:
        """One group under some variants, to be changed without any of the others, perhaps with another shape of its step."""
        return GroupState(self, self.cluster.group(group), variants, shape)

    def ledger(self, mapper: CostMapper, *, stays: bool = False) -> MemoryLedger:
        """Memory of a rank of this job under a mapper's variants; ``stays``: these do not change."""
        return MemoryLedger(
            mapper,
            distributed=self.ranks > 1,
            bucket_views=self.settings.gradient_as_bucket_view,
            accumulates=self.dag.accumulate > 1,
            stays=stays,
        )

    def ledger_to_read(self, mapper: CostMapper) -> MemoryLedger:
        """The same for one of :meth:`mapper`, to be read too."""
        ledgers, key = self._read.ledgers, (mapper, self.ranks > 1, self.settings.gradient_as_bucket_view)
        if key not in ledgers:
            ledgers[key] = self.ledger(mapper, stays=True)
        return ledgers[key]

    def alone(self, group: str, variants: Variants) -> GroupPrediction:
        """One group as if no other group were slower."""
        state = GroupState(self, self.cluster.group(group), variants, stays=True)
        entries = {group: (state.times, state.peak_bytes)}
        return GroupPredictions(entries, state.times.period_ns, self._joint({group: state.times}))[group]

    def period_ns(self, work: Mapping[str, Condensed]) -> int:
        """The job's period with every group's operators condensed, perhaps by another replayer of the model."""
        times: dict[str, StepTimes] = {}
        shapes: dict[int, StepShape] = {}  # runs of operators are the same for all
        for group in self.cluster.groups:
            own, whole = work[group.name], self.shape(group.name)
            shape = shapes.get(id(whole)) or shapes.setdefault(id(whole), own.shape(whole))
            times[group.name] = StepTiming(own, shape, synchronises=group.sync_per_step).times()
        return self._job_period_ns(times, self._joint(times))

    def memory(self, group: str, variants: Variants | None = None) -> MemoryEstimate:
        """Predicted memory of one rank of a group, in its parts; without variants of the present state of trials."""
        if variants is None:
            return self._states[group].memory.estimate()
        return self.ledger_to_read(self.mapper(group, variants)).estimate()

    def start(self, variants: Mapping[str, Variants]) -> Prediction:
        """Begin trials from these variants; groups not named start at their base precision."""
        self._present = self._states_to_read(variants)
        self._pending = None
        return self._predict(self._present)

    def is_tried(self, group: str) -> bool:
        """Whether there was a trial of a group since ``start``."""
        return not self._states[group].stays

    def place(self, group: str, variants: Variants) -> Prediction:
        """Run a group under other variants, all of them, from here on: without a trial, which needs a state that may be changed.

        Raises:
            PlanError: when variants do not fit the model or were not profiled; the group runs as before then.
            RuntimeError: when a trial is pending.
        """
        if self._pending is not None:
            raise RuntimeError("a trial is pending: commit or roll back first")
        self._states[group] = GroupState(self, self.cluster.group(group), variants, stays=True)
        return self._predict(self._states)

    def current(self) -> Prediction:
        """The prediction of the present state, a pending trial included."""
        return self._predict(self._states)

    def trial(self, group: str, variants: Variants) -> Prediction:
        """Evaluate a change of some operators of one group; it stays pending until ``commit`` or ``rollback``.

        Raises:
            PlanError: when an operator is unknown or not adjustable, or was not profiled so; nothing is pending then.
            RuntimeError: when another trial is pending.
        """
        if self._pending is not None:
            raise RuntimeError("a trial is pending: commit or roll back first")
        state = self._states[group] = self._states[group].to_change(self, self.cluster.group(group))
        state.update(variants)
        self._pending = state
        return self._predict(self._states)

    def commit(self) -> None:
        """Keep the pending trial."""
        if self._pending is not None:
            self._pending.commit()
        self._pending = None

    def rollback(self) -> None:
        """Forget the pending trial."""
        if self._pending is not None:
            self._pending.rollback()
        self._pending = None

    def _predict(self, states: Mapping[str, GroupState]) -> Prediction:
        entries = {name: (state.times, state.peak_bytes) for name, state in states.items()}
        steps = {name: times for name, (times, _) in entries.items()}
        joint = self._joint(steps)
        period = self._job_period_ns(steps, joint)
        ends = Deferred(lambda: self._bucket_ends([*steps.values()]) if joint is None else joint.end_ns)
        return Prediction(period, GroupPredictions(entries, period, joint), ends)

    def _joint(self, steps: Mapping[str, StepTimes]) -> JointStep | None:
        """The groups' step together; None where the job's period is the longest that one of them alone would make it."""
        if not self._is_joint:
            return None
        ranks = [times.rank_step(self.slowdown(name)) for name, times in steps.items()]
        return joint_step(ranks, self.collective_ns, self.start_delay_ns)

    def _job_period_ns(self, steps: Mapping[str, StepTimes], joint: JointStep | None) -> int:
        """The period; each group alone bounds it too, through its dispatch."""
        longest = max([times.period_ns for times in steps.values()])
        return longest if joint is None else max(joint.period_ns, longest)

    def _bucket_ends(self, times: Sequence[StepTimes]) -> tuple[int, ...]:
        """The recurrence of the collectives over all groups."""
        end, ends = 0, []
        for bucket, duration in enumerate(self.collective_ns):
            end = max(end, *(entry.optimizer_ns + entry.bucket_ready_ns[bucket] for entry in times)) + duration
            ends.append(end)
        return tuple(ends)

    def global_dfg(self, variants: Mapping[str, Variants]) -> GlobalDfg:
        """The job's data-flow graph; groups not named run at their base precision."""
        # Imported here: trials never need the node-level graph.
        from qsync_planner.replayer.simulator import build_local_dfg

        states = self._states_to_read(variants)
        joint = self._joint({name: state.times for name, state in states.items()})
        lost: Mapping[str, Sequence[int]] = {} if joint is None else dict(zip(states, joint.lost_ns, strict=True))
        locals_: list[LocalDfg] = [
            build_local_dfg(
                group.name,
                states[group.name].mapper,
                self.shape(group.name),
                self._exchange.group_ns[group.name],
                sync_per_step=group.sync_per_step,
                lost_ns=lost.get(group.name, ()),
            )
            for group in self.cluster.groups
        ]
        return GlobalDfg(tuple(locals_), tuple(group.count for group in self.cluster.groups))

    def timeline(self, variants: Mapping[str, Variants]) -> Timeline:
        """The predicted intervals of one steady step, one rank shown per group."""
        from qsync_planner.replayer.simulator import predicted_timeline

        prediction = self.replay(variants)
        peaks = {name: group.peak_bytes for name, group in prediction.groups.items()}
        measured = {name: self.profiles[name] for name in prediction.groups}
        software = {
            name: {**profile.software, "device": profile.device.name, "compiled": str(profile.compiled is not None)}
            for name, profile in measured.items()
        }
        timeline = predicted_timeline(self.dag.model, self.global_dfg(variants), prediction.iteration_ns, peaks)
        return attrs.evolve(timeline, software=software)
