"""The search by stages: plans and bounds as by enumeration, the extremes, and what it does where it does not apply."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import attrs
import numpy as np
import pytest
from brute_force_instances import accumulating, handing_on, random_instance
from chained_models import chained_dags, chained_profiles
from hypothesis import Phase, given
from hypothesis import strategies as st
from planning_cases import LADDERS, Case, random_case, random_costs
from random_models import RUNGS
from synthetic import BFLOAT16, FLOAT32, INT8

from hypothesis_profiles import tries
from qsync_core.artifacts.files import digest
from qsync_core.chains.finding import chains_of
from qsync_core.ir.chain import ChainVariant
from qsync_core.ir.cluster import Cluster, DeviceGroup
from qsync_core.ir.communication import CommunicationSettings
from qsync_core.ir.plan import Role
from qsync_core.ir.profile import DeviceKind
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.variant import Variant
from qsync_planner.allocator import Inputs, Request, allocate
from qsync_planner.allocator.exact import labels, staged, stages
from qsync_planner.allocator.exact.counts import countings
from qsync_planner.allocator.exact.group_program import GroupProgram, Quantity, Replayed
from qsync_planner.allocator.exact.labels import best_path
from qsync_planner.allocator.exact.network import Network, Row, best_prices
from qsync_planner.allocator.exact.programs import least
from qsync_planner.allocator.exact.staged import Endurance, StagedSearch
from qsync_planner.allocator.problem import GroupProblem, build_problem
from qsync_planner.matching import under_base
from qsync_planner.replayer.replay import Replayer

pytest.importorskip("highspy")

MOST_PLANS = 400
EXACTLY = Endurance(gap=0.0, labels=100_000)


@attrs.frozen
class Drawn:
    """A group of a drawn job with its program, and all its plans, replayed."""

    group: GroupProblem
    program: GroupProgram
    plans: tuple[Replayed, ...]

    @classmethod
    def of(cls, group: GroupProblem, replayer: Replayer) -> Drawn | None:
        """None where a step is no sum, where there is nothing to decide and so no stage, or where there are too many plans."""
        program = GroupProgram(group, replayer)
        if not program.deadlines or not group.units or math.prod(len(unit.rungs) for unit in group.units) > MOST_PLANS:
            return None
        plans = itertools.product(*(range(len(unit.rungs)) for unit in group.units))
        return cls(group, program, tuple(program.replay(rungs) for rungs in plans))

    def search(self, limit_ns: int, budget: int, endurance: Endurance = EXACTLY) -> tuple[Replayed | None, float]:
        """By stages, from the first plan whatever it takes."""
        search = StagedSearch(self.group, self.program, limit_ns, budget, endurance)
        found = search.run(self.plans[0])
        assert found is not None
        return found.plan, found.bound

    def best(self, limit_ns: int, budget: int) -> float:
        """The least Σ Ω of all plans within the limits; infinite where there is none."""
        fitting = (p for p in self.plans if p.period_ns <= limit_ns and (not budget or p.peak_bytes <= budget))
        return min((self.group.omega(plan.rungs) for plan in fitting), default=math.inf)

    def limits(self, rng: random.Random) -> Iterator[tuple[int, int]]:
        """Time limits and budgets that some plan keeps to the nanosecond and the byte."""
        times, peaks = (sorted({getattr(plan, name) for plan in self.plans}) for name in ("period_ns", "peak_bytes"))
        for _ in range(4):
            yield rng.choice(times), 0
            yield rng.choice(times), rng.choice(peaks)
            yield max(times), rng.choice(peaks)
        yield min(times) - 1, 0


def assert_best(drawn: Drawn, rng: random.Random) -> None:
    for limit_ns, budget in drawn.limits(rng):
        best = drawn.best(limit_ns, budget)
        plan, bound = drawn.search(limit_ns, budget)
        if not math.isfinite(best):
            assert plan is None
            assert bound == math.inf
            continue
        assert plan is not None
        assert plan.period_ns <= limit_ns
        assert not budget or plan.peak_bytes <= budget
        assert drawn.group.omega(plan.rungs) == pytest.approx(best, rel=1e-9, abs=1e-300)
        assert best * (1 - 1e-6) <= bound <= best * (1 + 1e-12)


def groups_of(case: Case, replayer: Replayer | None = None, *, with_chains: bool = False) -> Iterator[Drawn]:
    replayer = replayer or Replayer(Inputs(case.dag, case.cluster, case.profiles))
    for group in build_problem(case.inputs, with_chains=with_chains).groups:
        drawn = Drawn.of(group, replayer)
        if drawn is not None:
            yield drawn


@pytest.mark.parametrize("change", [None, accumulating, handing_on])
def test_plans_are_the_best_of_all_and_bounds_are_met(change: object) -> None:
    """Several groups each, of shared modules and measured steps; alone, accumulating, and handing on what operators read."""
    count = 0
    for number in itertools.count():
        instance = random_instance(9, number)
        instance = change(instance) if callable(change) else instance
        for drawn in groups_of(Case(instance.dag, instance.cluster, instance.profiles, instance.sensitivity)):
            assert_best(drawn, random.Random(number))
            count += 1
        if count >= 8:
            return


@tries(12)
@given(seed=st.integers(0, 10**6), ladder=st.sampled_from(LADDERS[:3]), shared=st.booleans())
def test_any_small_model_is_planned_as_by_enumeration(seed: int, ladder: tuple[Variant, ...], shared: bool) -> None:
    for drawn in groups_of(random_case(seed, blocks=1 if shared else 2, ladder=ladder, shared=shared)):
        assert_best(drawn, random.Random(seed))


@pytest.mark.parametrize("number", range(3))
def test_of_few_labels_none_of_the_best_plan_is_missed(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every label is compared with the best, and the first look is at little more than the shortest path."""
    for module, name, value in ((labels, "_FEW", 0), (labels, "_STRONG", 2), (staged, "_ARCS", 1), (staged, "_FEW", 3)):
        monkeypatch.setattr(module, name, value)
    for drawn in groups_of(random_case(number, blocks=2, ladder=LADDERS[0])):
        assert_best(drawn, random.Random(number))


def drawn_network(rng: random.Random, stages_: int, arcs: int, rows: int) -> tuple[Network, list[Row]]:
    """Stages without states, whose arcs cost and take what is drawn; rows are kept by a part of all paths."""
    table = stages.Table(np.arange(arcs)[:, None], np.eye(arcs), np.zeros((arcs, 0)), np.ones(arcs, dtype=bool))
    path = [
        stages.Stage(np.array([i]), np.arange(i * arcs, (i + 1) * arcs), table, np.zeros(arcs, dtype=np.int64), 1)
        for i in range(stages_)
    ]
    costs = np.array([rng.random() for _ in range(stages_ * arcs)])
    network = Network(path, costs, math.inf)
    taken = [np.array([float(rng.randrange(10**6)) for _ in costs]) for _ in range(rows)]
    return network, [network.row(amounts, 0.0, 0.5 * stages_ * 10**6) for amounts in taken]


@pytest.mark.parametrize("seed", range(3))
def test_labels_that_take_more_of_every_row_and_cost_more_are_dropped(seed: int) -> None:
    """Of ten stages with three arcs, whose amounts are all different, within two rows."""
    network, rows = drawn_network(random.Random(seed), 10, 3, 2)
    priced = network.priced(rows, np.array([1e-7, 1e-7]))
    found = best_path(network, rows, priced, math.inf, math.inf, 10**6)
    paths = np.array([*itertools.product(range(3), repeat=10)]) + network.first[:-1]
    keeps = np.all([row.amounts[paths].sum(axis=1) <= row.most for row in rows], axis=0)
    assert found.complete
    assert found.path is not None
    assert network.cost[found.path].sum() == pytest.approx(network.cost[paths[keeps]].sum(axis=1).min(), rel=1e-12)
    assert found.most <= 100  # of up to 976 that differ in some row


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("all_differ", [False, True])
def test_labels_of_one_row_are_compared_once(all_differ: bool, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by enumeration where many are compared by sorting; also where what takes more costs less, so that none is dropped."""
    monkeypatch.setattr(labels, "_FEW", 0)
    monkeypatch.setattr(labels, "_not_worse", None)
    network, rows = drawn_network(random.Random(seed), 7, 3, 1)
    if all_differ:
        rows = [Row(np.round((1 - network.cost) * 10**9), 3.5e9)]
    found = best_path(network, rows, network.priced(rows, np.array([1e-10])), math.inf, math.inf, 10**6)
    paths = np.array([*itertools.product(range(3), repeat=7)]) + network.first[:-1]
    keeps = rows[0].amounts[paths].sum(axis=1) <= rows[0].most
    assert found.complete
    assert found.path is not None
    assert network.cost[found.path].sum() == pytest.approx(network.cost[paths[keeps]].sum(axis=1).min(), rel=1e-12)


def test_prices_that_come_back_end_the_search_for_better_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where costs are scaled for a first path thousands of times dearer than the best one, and the solver stops early."""
    network, rows = drawn_network(random.Random(1), 40, 3, 1)
    found, _ = best_prices(network, rows, [], 1.0)
    asked, shortest = [], Network.shortest

    def counted(self: Network, costs: stages.Numbers) -> tuple[float, stages.Indices]:
        asked.append(costs)
        return shortest(self, costs)

    monkeypatch.setattr(Network, "shortest", counted)
    coarse, _ = best_prices(network, rows, [], 1e5)
    assert len(asked) < 20  # of 200
    assert found.bound * (1 - 1e-4) < coarse.bound <= found.bound * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_among_few_arcs_a_plan_is_found_and_nothing_is_proven(seed: int) -> None:
    network, rows = drawn_network(random.Random(seed), 40, 3, 1)
    priced, mixture = best_prices(network, rows, [], 1.0)
    nearest = max(float(priced.excess[path].max()) for path in mixture.paths)
    found = best_path(network, rows, priced, math.inf, math.inf, 10**6, nearest)
    best = best_path(network, rows, priced, math.inf, math.inf, 10**6)
    assert best.complete
    assert best.path is not None
    assert not found.complete  # whether or not there is a plan among them
    if found.path is not None:
        assert rows[0].amounts[found.path].sum() <= rows[0].most
        assert network.cost[found.path].sum() >= network.cost[best.path].sum() * (1 - 1e-12)
        assert priced.excess[found.path].max() <= nearest + 2 * priced.error


@pytest.mark.parametrize("seed", range(4))
def test_deadlines_of_many_buckets_are_two_counts_of_a_label(seed: int) -> None:
    """Forward work of all stages, and backward work of those from a bucket's on; as by enumeration, at any prices."""
    rng = random.Random(seed)
    network, _ = drawn_network(rng, 8, 3, 0)
    forward, backward = (np.array([float(rng.randrange(10**6)) for _ in network.cost]) for _ in range(2))
    rows = [
        Row(forward + backward * (network.stage >= first), math.floor((8 + 8 - first) * 10**6 * rng.uniform(0.3, 0.5)))
        for first in range(8)
    ]
    prices = np.array([rng.choice((0.0, rng.random())) * 1e-7 for _ in rows])
    found = best_path(network, rows, network.priced(rows, prices), math.inf, math.inf, 10**6)
    paths = np.array([*itertools.product(range(3), repeat=8)]) + network.first[:-1]
    keeps = np.all([row.amounts[paths].sum(axis=1) <= row.most for row in rows], axis=0)
    assert found.complete
    if not keeps.any():
        assert found.path is None
    else:
        assert found.path is not None
        assert network.cost[found.path].sum() == pytest.approx(network.cost[paths[keeps]].sum(axis=1).min(), rel=1e-12)
    amounts, limits = np.stack([row.amounts for row in rows], axis=1), np.array([row.most for row in rows])
    assert max(len(counting.cut) for counting in countings(amounts, limits, prices, network.first)) == 2


@tries(6, phases=(Phase.explicit, Phase.generate))
@given(st.data())
def test_chains_are_fused_as_by_enumeration(data: st.DataObject) -> None:
    dag = data.draw(chained_dags(4))
    kind = data.draw(st.sampled_from(list(DeviceKind)))
    ladder = (RUNGS[0], RUNGS[4])
    group = DeviceGroup("g", f"chip-{kind}", 1, Role.INFER, FLOAT32, ladder)
    measured = attrs.evolve(data.draw(chained_profiles(dag, kind)), dag_digest=digest(dag))
    draw = random.Random(data.draw(st.integers(0, 99)))
    omega = {o.op_id: {rung: draw.random() * (rung.compute is not FLOAT32) for rung in ladder} for o in dag.adjustable}
    omega |= {chain.name: {ChainVariant(saved=INT8).rated_as: draw.random()} for chain in chains_of(dag)}
    case = Case(dag, Cluster("c", (group,)), {"g": measured}, Sensitivity(dag.model, digest(dag), "", "drawn", omega))
    for drawn in groups_of(case, with_chains=True):
        assert_best(drawn, draw)


@pytest.mark.parametrize("seed", range(4))
def test_deadlines_under_contention_bound_what_the_joint_step_takes(seed: int) -> None:
    """The group's own deadlines, with the least that open collectives delay it: the program's limits, which stages keep exactly."""
    rng, case = random.Random(seed), random_case(seed, blocks=2, kind=DeviceKind.CUDA)
    way = CommunicationSettings(0.001, broadcast_buffers=seed % 2 == 0)
    replayer = Replayer(Inputs(case.dag, case.cluster, case.profiles, communication=random_costs(case, rng)), settings=way)
    for drawn in groups_of(case, replayer):
        assert_best(drawn, rng)
        for plan in drawn.plans[:: len(drawn.plans) // 8]:
            whole = replayer.replay({drawn.group.name: drawn.group.variants(plan.rungs)})
            assert plan.period_ns <= whole.iteration_ns


@pytest.mark.parametrize("seed", range(3))
def test_the_base_of_autocast_counts_as_one_rung_of_the_best_plan(seed: int) -> None:
    case = random_case(seed, ladder=LADDERS[1], kind=DeviceKind.CUDA)
    dag, under = attrs.evolve(case.dag, base=BFLOAT16), Variant.of(INT8, output=BFLOAT16)
    profiles = {}
    for name, profile in case.profiles.items():
        index = {op_id: {**by_variant, under: by_variant[LADDERS[1][0]]} for op_id, by_variant in profile.cost_index.items()}
        profiles[name] = attrs.evolve(profile, dag_digest=digest(dag), cost_index=index)
    draw = random.Random(seed)
    omega = {operator.op_id: {under: draw.random()} for operator in dag.adjustable}
    sensitivity = attrs.evolve(case.sensitivity, dag_digest=digest(dag), omega=omega)
    cluster, _ = under_base(case.cluster, dag)
    assert_best(next(groups_of(Case(dag, cluster, profiles, sensitivity))), draw)


def drawn_group(seed: int, **options: object) -> Drawn:
    return next(groups_of(random_case(seed, blocks=2, **options)))  # type: ignore[arg-type]


def without_highs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("branch and bound was asked")

    monkeypatch.setattr("qsync_planner.allocator.exact.program.Program.solve", refuse)


@pytest.mark.parametrize("seed", range(4))
def test_the_fastest_and_the_leanest_plan_are_found_without_branch_and_bound(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, rng = drawn_group(seed), random.Random(seed)
    without_highs(monkeypatch)
    times, peaks = ([getattr(plan, name) for plan in drawn.plans] for name in ("period_ns", "peak_bytes"))
    for start in (drawn.plans[0], rng.choice(drawn.plans), drawn.plans[-1]):
        fastest = least(drawn.program, Quantity.TIME, budget_bytes=start.peak_bytes, start=start.rungs)
        assert fastest is not None
        within = min(time for time, peak in zip(times, peaks, strict=True) if peak <= start.peak_bytes)
        assert within <= fastest.period_ns <= within * (1 + 1e-6)
        leanest = least(drawn.program, Quantity.MEMORY, start.period_ns, start=start.rungs)
        assert leanest is not None
        within = min(peak for time, peak in zip(times, peaks, strict=True) if time <= start.period_ns)
        assert within <= leanest.peak_bytes <= within * (1 + 1e-6)
    leanest = least(drawn.program, Quantity.MEMORY)
    assert leanest is not None
    assert leanest.peak_bytes <= min(peaks) * (1 + 1e-6)


def test_bounds_hold_where_one_label_is_kept() -> None:
    incomplete = 0
    for seed in range(6):
        drawn, rng = drawn_group(seed), random.Random(seed)
        for limit_ns, budget in drawn.limits(rng):
            best = drawn.best(limit_ns, budget)
            plan, bound = drawn.search(limit_ns, budget, Endurance(0.0, labels=1))
            assert bound <= best * (1 + 1e-12)
            if plan is not None:
                assert plan.period_ns <= limit_ns
                assert not budget or plan.peak_bytes <= budget
                incomplete += bound < drawn.group.omega(plan.rungs) * (1 - 1e-6)
    assert incomplete > 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("enough", [0.05, 0.001])
def test_a_search_ends_with_a_plan_that_is_near_enough(enough: float, seed: int) -> None:
    drawn = drawn_group(seed)
    for limit_ns, budget in drawn.limits(random.Random(seed)):
        best = drawn.best(limit_ns, budget)
        plan, bound = drawn.search(limit_ns, budget, Endurance(0.0, 100_000, enough))
        if not math.isfinite(best):
            assert plan is None
            continue
        assert plan is not None
        assert plan.period_ns <= limit_ns
        assert not budget or plan.peak_bytes <= budget
        omega = drawn.group.omega(plan.rungs)
        assert bound <= best * (1 + 1e-12)
        assert omega - bound <= enough * omega


def test_a_plan_of_many_layers_is_proven_without_branch_and_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_case(3, blocks=24, ladder=LADDERS[2])
    without_highs(monkeypatch)
    for tolerance in (0.0, 0.05, 0.3):
        plan = allocate(case.inputs, Request("exact", tolerance=tolerance))
        assert plan.notes[0] == "proven optimal"
        assert plan.predicted_iteration_ns <= plan.time_limit_ns


def test_units_that_hang_together_too_much_are_planned_by_branch_and_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_case(5, blocks=2)
    expected = allocate(case.inputs, Request("exact", tolerance=0.1))
    monkeypatch.setattr(stages, "MAX_ARCS", 1)
    program = drawn_group(5).program
    with pytest.raises(stages.NoStages):
        program.stages()
    plan = allocate(case.inputs, Request("exact", tolerance=0.1))
    assert plan.objective == pytest.approx(expected.objective, rel=1e-6)
    assert plan.notes[0] == expected.notes[0] == "proven optimal"


@pytest.mark.parametrize(("objective", "omega_limit"), [("time", None), ("time", 1e9), ("memory", None)])
def test_every_objective_keeps_its_limits_when_its_time_is_up(objective: str, omega_limit: float | None) -> None:
    case = random_case(2, infer_groups=2)
    options = {} if omega_limit is None else {"omega_limit": omega_limit}
    plan = allocate(case.inputs, Request("exact", objective=objective, seconds=1e-6, **options))
    assert case.replay(plan).iteration_ns == plan.predicted_iteration_ns <= plan.time_limit_ns
    roomy = allocate(case.inputs, Request("exact", objective=objective, seconds=600.0, **options))
    best = allocate(case.inputs, Request("exact", objective=objective, **options))
    assert attrs.evolve(roomy, notes=()) == attrs.evolve(best, notes=())
