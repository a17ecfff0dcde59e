"""What the allocator decides: units of operators, the rungs each may take, and what each rung costs in Ω.

See docs/design/allocator.md#the-problem.

minimise Σ over inference devices and operators of Ω_o(b)  subject to  memory_i ≤ budget_i  and  iteration time ≤ T.

:class:`SearchState` is the plan under search.  A trial changes some units of one group and predicts; it is then either accepted, or
rejected without a trace.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property

import attrs

from qsync_core.errors import PlanError
from qsync_core.ir.chain import UNFUSED, ChainVariant
from qsync_core.ir.cluster import Cluster, DeviceGroup
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.formats import OutputFormats
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Role
from qsync_core.ir.profile import Profile
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.variant import Variant
from qsync_planner.allocator.batch_scaling import BatchScaling
from qsync_planner.matching import Inputs
from qsync_planner.replayer.chains import Chains, Chosen
from qsync_planner.replayer.prediction import Prediction
from qsync_planner.replayer.process_memory import ProcessMemory
from qsync_planner.replayer.replay import Replayer


@attrs.frozen
class Unit:
    """Operators that share one variant (calls of one module), and what the plan may pick for them on one device group; or a chain.

    Attributes:
        name: the ``variant_group`` they have in common; of a chain its name.
        operators: their names, in order of execution; of a chain its name.
        rungs: variants of the group's ladder that were measured for all of them, lowest first; of a chain what was measured of it,
            not fused last.
        omega: Σ Ω over the operators, one entry per rung, on one device.
    """

    name: str
    operators: tuple[OpId, ...]
    rungs: tuple[Chosen, ...]
    omega: tuple[float, ...]

    @property
    def top(self) -> int:
        """Index of the highest rung, the base precision."""
        return len(self.rungs) - 1

    @property
    def is_chain(self) -> bool:
        """Whether it is a chain, which may be fused, and not operators with a variant."""
        return self.rungs[self.top] == UNFUSED

    def at_base(self) -> Unit:
        """The same with nothing to choose."""
        return attrs.evolve(self, rungs=self.rungs[-1:], omega=self.omega[-1:])

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The unit's rungs that are variants; none of a chain."""
        return tuple(rung for rung in self.rungs if isinstance(rung, Variant))


@attrs.frozen
class GroupProblem:
    """The decisions on one inference group."""

    group: DeviceGroup
    units: tuple[Unit, ...]

    @property
    def name(self) -> str:
        """The group's name."""
        return self.group.name

    def fits(self, peak_bytes: int) -> bool:
        """Whether a peak is within the memory budget (0: no limit)."""
        return self.group.memory_bytes == 0 or peak_bytes <= self.group.memory_bytes

    def omega(self, rungs: Sequence[int]) -> float:
        """Σ Ω of one device of the group."""
        return sum(unit.omega[rung] for unit, rung in zip(self.units, rungs, strict=True))

    def uniform(self, ladder_index: int) -> tuple[int, ...]:
        """Every unit at one rung of the ladder; where it was not measured, at the next higher one that was.  Nothing is fused."""
        wanted = (*self.group.ladder[ladder_index:], UNFUSED)
        return tuple(next(unit.rungs.index(variant) for variant in wanted if variant in unit.rungs) for unit in self.units)

    def variants(self, rungs: Sequence[int]) -> dict[OpId, Chosen]:
        """The assignment as the replayer takes it."""
        return {op_id: unit.rungs[rung] for unit, rung in zip(self.units, rungs, strict=True) for op_id in unit.operators}


@attrs.frozen
class Problem:
    """The inputs of a plan, with the decisions on each inference group.

    Attributes:
        inputs: the model, the groups, and their profiles.
        cluster: as the planner takes it: each group's memory is what its tensors may take of the budget.
        groups: the decisions.
        budgets: the memory budgets as they were given, by group.
    """

    inputs: Inputs
    cluster: Cluster
    groups: tuple[GroupProblem, ...]
    budgets: Mapping[str, int]

    @property
    def dag(self) -> PrecisionDag:
        """The model."""
        return self.inputs.dag

    @property
    def profiles(self) -> Mapping[str, Profile]:
        """Costs by group."""
        return self.inputs.profiles

    @cached_property
    def scalings(self) -> dict[str, BatchScaling]:
        """The costs of every group as functions of its local batch; groups of one device type share them."""
        found: dict[str, BatchScaling] = {}
        known: dict[tuple[object, ...], BatchScaling] = {}
        for group in self.cluster.groups:
            key = (id(self.profiles[group.name]), id(self.inputs.further.get(group.name)), group.base)
            if key not in known:
                known[key] = BatchScaling(self.inputs, group.name)
            found[group.name] = known[key]
        return found

    def process_bytes(self, group: str, peak_bytes: int) -> int:
        """The smallest budget of a process of the group whose tensors have this peak."""
        return ProcessMemory.of(self.profiles[group]).process_bytes(peak_bytes)

    @cached_property
    def by_name(self) -> dict[str, GroupProblem]:
        """The inference groups by name."""
        return {group.name: group for group in self.groups}

    def objective(self, rungs: Mapping[str, Sequence[int]]) -> float:
        """Σ Ω over all inference devices: a group of n ranks counts n times (paper, eq. 1)."""
        return sum(group.group.count * group.omega(rungs[group.name]) for group in self.groups)

    def variants(self, rungs: Mapping[str, Sequence[int]]) -> dict[str, dict[OpId, Chosen]]:
        """The plan as the replayer takes it, by inference group."""
        return {group.name: group.variants(rungs[group.name]) for group in self.groups}


def build_problem(inputs: Inputs, *, with_chains: bool = False, keep: Collection[OpId] = ()) -> Problem:
    """Collect the decisions; without a sensitivity all Ω are 0.

    Args:
        inputs: of a plan.
        with_chains: whether chains that were measured are decisions too; else none is fused.
        keep: operators that stay at the base precision, with all that share their variant.

    Raises:
        PlanError: when an operator's base precision or a whole rung was not measured, or an Ω is missing.
    """
    dag, profiles, sensitivity = inputs.dag, inputs.profiles, inputs.sensitivity
    budgets = {group.name: group.memory_bytes for group in inputs.cluster.groups}
    cluster = attrs.evolve(
        inputs.cluster,
        groups=tuple(
            attrs.evolve(group, memory_bytes=ProcessMemory.of(profiles[group.name]).tensors_within(group.memory_bytes))
            for group in inputs.cluster.groups
        ),
    )
    groups = tuple(
        GroupProblem(group, _units(dag, group, profiles[group.name], sensitivity, with_chains, keep))
        for group in cluster.groups
        if group.role is Role.INFER
    )
    for group in cluster.groups:
        if group.role is Role.TRAIN:
            _check_base_measured(dag, group, profiles[group.name])
    return Problem(inputs, cluster, groups, budgets)


def _units(
    dag: PrecisionDag,
    group: DeviceGroup,
    profile: Profile,
    sensitivity: Sensitivity | None,
    with_chains: bool,
    keep: Collection[OpId],
) -> tuple[Unit, ...]:
    members: dict[str, list[OpId]] = {}
    for operator in dag.adjustable:
        members.setdefault(operator.variant_group or operator.op_id.fqn, []).append(operator.op_id)
    _check_base_measured(dag, group, profile)
    units = []
    formats = OutputFormats.of(dag)
    for name, op_ids in members.items():
        rungs = tuple(v for v in group.ladder if all(v in profile.cost_index[op_id] for op_id in op_ids))
        omega = tuple(sum(_omega(sensitivity, op_id, rung, group, formats) for op_id in op_ids) for rung in rungs)
        units.append(Unit(name, tuple(op_ids), rungs, omega))
    _check_rungs_measured(group, profile, units)
    units = [unit.at_base() if any(op_id in keep for op_id in unit.operators) else unit for unit in units]
    rungs_of = {op_id: unit.variants for unit in units for op_id in unit.operators}
    chains = [*_chains(dag, profile, sensitivity, rungs_of)] if with_chains and profile.chains else []
    if chains and sensitivity is not None:
        # Chains that may be fused mostly are where 8-bit operators read them: these read a copy of the chain's scale.
        units = [attrs.evolve(unit, omega=_with_copies(unit, sensitivity)) for unit in units]
    return (*units, *chains)


def _with_copies(unit: Unit, sensitivity: Sensitivity) -> tuple[float, ...]:
    gains = [sensitivity.copies[op_id] for op_id in unit.operators if op_id in sensitivity.copies]
    return tuple(own + sum(gain.get(rung, 0.0) for gain in gains) for rung, own in zip(unit.variants, unit.omega, strict=True))


def _chains(
    dag: PrecisionDag, profile: Profile, sensitivity: Sensitivity | None, rungs: Mapping[OpId, Sequence[Variant]]
) -> Iterator[Unit]:
    """Chains that were measured whatever their neighbours run in; an 8-bit input only where its Ω is known."""
    chains = Chains.of(dag)
    for number, chain in enumerate(chains.all):
        omega: dict[ChainVariant, float] = {}
        for chosen in chains.measured(number, profile, rungs):
            rated = 0.0 if chosen.saved is None else _omega_of_saved(sensitivity, chain.name, chosen)
            if rated is not None:
                omega[chosen] = rated
        if omega:
            name = chain.name.fqn if chain.name.call == 0 else str(chain.name)
            ranked = sorted(omega.items(), key=lambda entry: -entry[1])
            yield Unit(name, (chain.name,), (*(way for way, _ in ranked), UNFUSED), (*(rated for _, rated in ranked), 0.0))


def _omega_of_saved(sensitivity: Sensitivity | None, name: OpId, chosen: ChainVariant) -> float | None:
    return None if sensitivity is None else sensitivity.omega.get(name, {}).get(chosen.rated_as)


def _check_rungs_measured(group: DeviceGroup, profile: Profile, units: Sequence[Unit]) -> None:
    """Refuse a ladder with a rung at which no operator was measured: a plan without it would not be what was asked for.

    But for rungs whose kernels are wrong on the device, which the profile has left out by name.
    """
    wrong = set() if profile.check is None else {entry.variant for entry in profile.check.wrong}
    missing = [rung for rung in group.ladder if rung not in wrong and units and not any(rung in unit.rungs for unit in units)]
    if missing:
        has = {
            variant for op_ids in (unit.operators for unit in units) for op_id in op_ids for variant in profile.cost_index[op_id]
        }
        alike = {rung.label for rung in missing} & {variant.label for variant in has}
        offered, measured = (", ".join(sorted(str(v) if v.label in alike else v.label for v in some)) for some in (missing, has))
        has_none = f"the ladder of group {group.name!r} offers {offered}, at which its profile of {profile.device.name}"
        if profile.estimated_from:
            near = sorted(
                {v.label for v in has if v.compute in {rung.compute for rung in missing}} - {rung.label for rung in missing}
            )
            write = f"write {' or '.join(near)}, " if near else "take it off the ladder, "
            raise PlanError(
                f"{has_none}, estimated from {profile.estimated_from}, has no costs (it has {measured}); {write}or estimate from a "
                f"profile that has {offered}"
            )
        raise PlanError(
            f"{has_none} measured no operator (it has {measured}); run 'qsync profile' there with --cluster and --group "
            f"{group.name}, or take it off the ladder"
        )


def _check_base_measured(dag: PrecisionDag, group: DeviceGroup, profile: Profile) -> None:
    base = Variant.plain(group.base)
    for operator in dag.adjustable:
        if base not in profile.cost_index.get(operator.op_id, {}):
            raise PlanError(
                f"the profile of group {group.name!r} has no cost of {operator.op_id} at {base.label}, the group's base precision; "
                "run 'qsync profile' with that precision on its ladder"
            )


def _omega(sensitivity: Sensitivity | None, op_id: OpId, variant: Variant, group: DeviceGroup, formats: OutputFormats) -> float:
    """Ω of an operator at a rung: where it delivers float32 whatever the others do, that without the rounding of its output.

    One that delivers 16 bits together with others counts that rounding, also where they do not.
    """
    if sensitivity is None:
        return 0.0
    rated = sensitivity.omega.get(op_id, {})
    value = rated.get(variant)
    if formats.decides and op_id.fqn not in formats.together:
        value = rated.get(variant.in_float32, value)
    if value is not None:
        return value
    if variant == Variant.plain(group.base):
        return 0.0
    raise PlanError(
        f"the sensitivity by {sensitivity.indicator!r} has no Ω of {op_id} at {variant.label} ({variant}), which is on the ladder "
        f"of group {group.name!r}; run 'qsync observe' and 'qsync indicate' with that group's ladder"
    )


class SearchState:
    """Current rungs and their prediction; begins at the base precision.  At most one trial is open at any time."""

    def __init__(self, problem: Problem, replayer: Replayer) -> None:
        self.problem = problem
        self.replayer = replayer
        self.trials = 0
        self._rungs = {group.name: [unit.top for unit in group.units] for group in problem.groups}
        self.prediction = replayer.start({})
        self._open: tuple[str, dict[int, int], Prediction] | None = None

    def rungs(self, group: str) -> tuple[int, ...]:
        """The accepted rung of every unit of a group."""
        return tuple(self._rungs[group])

    def rung(self, group: str, index: int) -> int:
        """The accepted rung of one unit."""
        return self._rungs[group][index]

    def all_rungs(self) -> dict[str, tuple[int, ...]]:
        """The accepted rungs of all groups."""
        return {name: tuple(rungs) for name, rungs in self._rungs.items()}

    def try_moves(self, group: str, moves: Mapping[int, int]) -> Prediction:
        """Open a trial: unit index → rung index.  Returns the prediction with those moves made."""
        assert self._open is None, "a trial is still open"
        units = self.problem.by_name[group].units
        changed = {index: rung for index, rung in moves.items() if self._rungs[group][index] != rung}
        variants = {op_id: units[index].rungs[rung] for index, rung in changed.items() for op_id in units[index].operators}
        prediction = self.replayer.trial(group, variants)
        self._open = (group, changed, prediction)
        self.trials += 1
        return prediction

    def accept(self) -> None:
        """Keep the open trial."""
        assert self._open is not None, "no trial is open"
        group, moves, prediction = self._open
        self.replayer.commit()
        for index, rung in moves.items():
            self._rungs[group][index] = rung
        self.prediction = prediction
        self._open = None

    def reject(self) -> None:
        """Drop the open trial; nothing of it remains."""
        assert self._open is not None, "no trial is open"
        self.replayer.rollback()
        self._open = None

    def move_to(self, group: str, rungs: Sequence[int]) -> Prediction:
        """Set every unit of a group and keep it."""
        assert self._open is None, "a trial is still open"
        if self.replayer.is_tried(group):
            self.try_moves(group, dict(enumerate(rungs)))
            self.accept()
        elif tuple(rungs) != self.rungs(group):
            self.trials += 1
            self.prediction = self.replayer.place(group, self.problem.by_name[group].variants(rungs))
            self._rungs[group] = [*rungs]
        return self.prediction

    def peak_bytes(self, group: str) -> int:
        """Predicted peak of the accepted plan."""
        return self.prediction.groups[group].peak_bytes
