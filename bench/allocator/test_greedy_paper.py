"""``greedy-paper``: the printed algorithm against references made for the test, and on cases worked by hand."""

from __future__ import annotations

import heapq
import itertools
import math
import re
from collections.abc import Mapping

import attrs
import pytest
from brute_force_formats import delivered
from hand_models import BF16, FP32, I8, I8_BF16, profile
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import FULL, LADDERS, Case, random_case
from synthetic import FLOAT16, FLOAT32, GraphBuilder, resnet, transformer

from allocator.greedy_paper import STARTS, initial_plan, memory_budgets, solve_greedy_paper
from hypothesis_profiles import tries
from qsync_core.artifacts.files import digest
from qsync_core.errors import PlanError
from qsync_core.ir.cluster import Cluster, DeviceGroup
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Role
from qsync_core.ir.precision import Granularity, Precision
from qsync_core.ir.profile import OpCost
from qsync_core.ir.semantics import run_precision
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.variant import Variant
from qsync_core.units import format_bytes
from qsync_planner.allocator.baselines import UniformStart, move_to_uniform, time_limit_ns
from qsync_planner.allocator.blocks import classes, find_blocks
from qsync_planner.allocator.exact.programs import Programs
from qsync_planner.allocator.problem import GroupProblem, SearchState, build_problem
from qsync_planner.allocator.solution import Solution
from qsync_planner.matching import Inputs
from qsync_planner.replayer.replay import Replayer

BY_ROW = attrs.evolve(I8, x_granularity=Granularity.PER_ROW)


@attrs.frozen
class Begun:
    """A search at the uniform plan, as solvers get it."""

    state: SearchState
    uniform: Mapping[str, UniformStart]
    limit_ns: int

    def solve(self, start: str = "fastest") -> Solution:
        return solve_greedy_paper(self.state, self.uniform, self.limit_ns, start=start)


def begin(case: Case, tolerance: float = 0.0) -> Begun:
    problem = build_problem(Inputs(case.dag, case.cluster, case.profiles, case.sensitivity))
    state = SearchState(problem, Replayer(Inputs(case.dag, case.cluster, case.profiles)))
    programs = Programs(state.replayer)
    uniform = {group.name: move_to_uniform(state, group.name, programs) for group in problem.groups}
    return Begun(state, uniform, time_limit_ns(state.prediction.iteration_ns, tolerance))


def peaks(case: Case, group: str = "infer0") -> list[int]:
    """Peaks of the uniform plans of a group, one for each rung of its ladder."""
    replayer = Replayer(Inputs(case.dag, case.cluster, case.profiles))
    plans = [{operator.op_id: rung for operator in case.dag.adjustable} for rung in case.cluster.group(group).ladder]
    return [replayer.replay({group: plan}).groups[group].peak_bytes for plan in plans]


# Memory budgets


@pytest.mark.parametrize(
    "limit, budgets",
    [
        (965, [70, 55, 40]),  # 35 too many over capacities 60, 10, 0: 30 and 5 are asked for
        (999, [99, 59, 40]),  # rounded up, so that the shares are enough together
        (900, [40, 50, 40]),  # no more than the capacities
        (1_070, [160, 70, 40]),  # room is shared out likewise
        (0, [None, None, None]),
    ],
)
def test_budgets_by_hand(limit: int, budgets: list[int | None]) -> None:
    assert memory_budgets(limit, 1_000, [100, 60, 40], [40, 50, 50]) == budgets


def test_nothing_that_can_be_compressed_is_asked_for_nothing() -> None:
    assert memory_budgets(10, 1_000, [100, 60], [100, 70]) == [100, 60]


@given(
    sizes=st.lists(st.tuples(st.integers(0, 1_000), st.integers(0, 1_000)), min_size=1, max_size=6),
    limit=st.integers(1, 6_000),
    peak=st.integers(0, 6_000),
)
def test_the_lowest_or_the_base_precision_keeps_every_budget_and_all_shares_are_enough(
    sizes: list[tuple[int, int]], limit: int, peak: int
) -> None:
    full, lowest = zip(*sizes, strict=True)
    budgets = memory_budgets(limit, peak, full, lowest)
    for budget, at_base, at_lowest in zip(budgets, full, lowest, strict=True):
        assert budget is not None
        assert min(at_base, at_lowest) <= budget
    capacity = sum(max(0, a - b) for a, b in sizes)
    saved = sum(full) - sum(budget for budget in budgets if budget is not None)
    assert saved >= min(capacity, peak - limit) or not capacity


# The block search


def subgraph_cost(case: Case, group: str, choice: Mapping[OpId, Variant], inside: range) -> tuple[int, int, int]:
    """(busy, compute, bytes) of operators cut out of the model, from the profile and the formats alone."""
    measured = case.profiles[group]
    formats: dict[OpId, Precision] = {}
    dispatch = compute = nbytes = 0
    low = {op_id: Variant.of(FLOAT16) for op_id in choice}
    may_deliver = {op_id for op_id, variant in delivered(case.dag, low).items() if variant.output is FLOAT16}
    for operator in [case.dag.operators[position] for position in inside]:
        inputs = [formats.get(producer, FLOAT32) for producer in operator.inputs]
        run = choice.get(operator.op_id) or Variant.plain(run_precision(operator, inputs))
        if operator.op_id in choice and operator.op_id not in may_deliver:
            run = attrs.evolve(run, output=FLOAT32)
        cost = measured.cost(operator.op_id, run)
        formats[operator.op_id] = run.output if operator.op_id in choice else run.compute
        launch, work = cost.forward_dispatch_ns + cost.backward_dispatch_ns, cost.forward_compute_ns + cost.backward_compute_ns
        dispatch, compute = (
            (dispatch, compute + launch + work) if measured.device.is_synchronous else (dispatch + launch, compute + work)
        )
        nbytes += cost.saved_own_bytes
        nbytes += sum(math.prod(operator.input_shapes[i]) * run.compute.nbytes for i in cost.saves_inputs)
        nbytes += operator.output_numel * run.output.nbytes if cost.saves_output else 0
    return max(dispatch, compute), compute, nbytes


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("share", [None, 0.0, 0.4, 1.2])
def test_one_block_gets_the_fastest_combination_within_its_budget(seed: int, share: float | None) -> None:
    case = random_case(seed, blocks=1 + seed % 2, ladder=LADDERS[seed % 3])
    if share is not None:
        each = peaks(case)
        case = case.with_memory(max(1, each[0] + int(share * (each[-1] - each[0]))))
    problem = build_problem(Inputs(case.dag, case.cluster, case.profiles, case.sensitivity))
    group = problem.groups[0]
    assert len(find_blocks(group)) == 1
    positions = [case.dag.index[op_id] for unit in group.units for op_id in unit.operators]
    inside = range(
        min(positions), max(positions) + 1
    )  # what follows the last adjustable operator belongs to no module of the block

    def cost(rungs: tuple[int, ...]) -> tuple[int, int, int]:
        return subgraph_cost(case, "infer0", group.variants(rungs), inside)

    top, lowest = cost(tuple(unit.top for unit in group.units)), cost((0,) * len(group.units))
    budget = math.inf
    if group.group.memory_bytes:
        budget = top[2] - min(max(0, top[2] - lowest[2]), peaks(case)[-1] - group.group.memory_bytes)
    best = min(
        c for rungs in itertools.product(*(range(len(unit.rungs)) for unit in group.units)) if (c := cost(rungs))[2] <= budget
    )
    state = SearchState(problem, Replayer(Inputs(case.dag, case.cluster, case.profiles)))
    before = state.all_rungs()
    assert cost(initial_plan(state, "infer0")) == best
    assert state.all_rungs() == before


@pytest.mark.parametrize("model", ["transformer", "resnet"])
def test_isomorphic_blocks_get_the_same_rungs(model: str) -> None:
    from synthetic import LADDER, hybrid_cluster, hybrid_profiles

    dag = (
        transformer(layers=3, hidden=64, heads=2, batch=2, tokens=8)
        if model == "transformer"
        else resnet(width=8, image=32, batch=2)
    )
    cluster, profiles = hybrid_cluster(ladder=LADDER), hybrid_profiles(dag)
    problem = build_problem(Inputs(dag, cluster, profiles))
    rungs = initial_plan(SearchState(problem, Replayer(Inputs(dag, cluster, profiles))), "infer")
    group = problem.groups[0]
    for blocks in classes(dag, group, find_blocks(group)):
        assert len({tuple(rungs[index] for index in block.units) for block in blocks}) == 1


# Two linear layers, costs chosen so that what is odd in the paper shows


def chain_case(
    costs: Mapping[str, Mapping[Variant, OpCost]],
    omega: Mapping[Variant, float],
    ladder: tuple[Variant, ...],
    memory_bytes: int = 0,
) -> Case:
    """A chain of linear layers on one device whose casts cost 10 to 120 ns and 1 ns an element."""
    g = GraphBuilder("chain")
    x = g.input("x", (2, 4))
    for name in costs:
        x = g.linear(name, x, 4)
    g.loss(x)
    dag = g.build()
    cluster = Cluster("one", (DeviceGroup("g", "hand", 1, Role.INFER, FLOAT32, ladder, memory_bytes),))
    sensitivity = Sensitivity(dag.model, digest(dag), "", "by hand", {operator.op_id: dict(omega) for operator in dag.adjustable})
    return Case(dag, cluster, {"g": profile(dag, costs)}, sensitivity)


def work(compute_ns: int, saved: int = 0) -> OpCost:
    return OpCost(0, compute_ns, 0, 0, saved_own_bytes=saved)


def test_an_initial_plan_that_casts_make_too_slow_gives_way_to_uniform_precision() -> None:
    # int8 is 1 ns faster than bfloat16 for its kernel, and its casts cost far more.
    costs = {name: {I8: work(999), BF16: work(1_000), FP32: work(3_000)} for name in "ab"}
    begun = begin(chain_case(costs, {I8: 4.0, BF16: 1.0, FP32: 0.0}, (I8, BF16, FP32)))
    assert initial_plan(begun.state, "g") == (0, 0)
    solution = begun.solve()
    assert solution.rungs["g"] == (1, 1)
    slower = begun.state.move_to("g", (0, 0)).iteration_ns - begun.limit_ns
    assert solution.notes[1].startswith(
        f"the initial plan of group g exceeds the time limit by {slower} ns: the paper's block search"
    )
    assert solution.notes[0].startswith("greedy recovery as the paper prints it, from the fastest start, ")


def test_an_initial_plan_that_exceeds_memory_gives_way_to_uniform_precision() -> None:
    # int8 is the fastest and keeps least, but needs a workspace, which no budget counts.
    costs = {"a": {I8: attrs.evolve(work(100), workspace_bytes=10_000), BF16: work(200, saved=10), FP32: work(5_000, saved=100)}}
    case = chain_case(costs, {I8: 4.0, BF16: 1.0, FP32: 0.0}, (I8, BF16, FP32))
    at_int8, at_bfloat16, _ = peaks(case, "g")
    assert at_bfloat16 < at_int8
    begun = begin(case.with_memory(at_int8 - 7, "g"), tolerance=1.0)
    assert initial_plan(begun.state, "g") == (0,)
    solution = begun.solve()
    assert begun.uniform["g"].rungs == solution.rungs["g"] == (1,)
    assert solution.notes[1] == (
        "the initial plan of group g exceeds the memory budget by 7 B: the paper's block search counts no casts, shared tensors or "
        "workspace; recovery began at uniform precision instead"
    )


def test_a_refused_step_hides_the_rungs_above_it() -> None:
    # One operator: int8 with a scale for each row does not fit the time, bfloat16 would.
    costs = {"a": {I8: work(1_000), BY_ROW: work(9_000), BF16: work(1_100), FP32: work(20_000)}}
    case = chain_case(costs, {I8: 8.0, BY_ROW: 4.0, BF16: 1.0, FP32: 0.0}, (I8, BY_ROW, BF16, FP32))
    begun = begin(case, tolerance=1.0)
    solution = begun.solve()
    assert initial_plan(begun.state, "g") == solution.rungs["g"] == (0,)
    assert re.fullmatch(r"kept int8>float32: \S+ would exceed the time limit by [\d,]+ µs", solution.reasons["g"][0])
    assert begun.solve("uniform").rungs["g"] == (0,)  # the search stands where it was left, as any solver's


def test_uniform_start_recovers_from_the_uniform_plan() -> None:
    costs = {"a": {I8: work(1_000), I8_BF16: work(9_000), BF16: work(1_100), FP32: work(20_000)}}
    begun = begin(chain_case(costs, {I8: 8.0, I8_BF16: 4.0, BF16: 1.0, FP32: 0.0}, (I8, I8_BF16, BF16, FP32)), tolerance=1.0)
    solution = begun.solve("uniform")
    assert solution.rungs["g"] == (2,)
    assert solution.notes == (solution.notes[0],)
    assert "from the uniform start" in solution.notes[0]


def test_a_step_that_raises_sensitivity_is_taken_all_the_same() -> None:
    costs = {"a": {I8: work(1_000), BF16: work(1_100), FP32: work(1_200)}}
    begun = begin(chain_case(costs, {I8: 1.0, BF16: 2.0, FP32: 0.0}, (I8, BF16, FP32)), tolerance=1.0)
    assert initial_plan(begun.state, "g") == (0,)
    assert begun.solve().rungs["g"] == (2,)


# Recovery, and what must hold of any plan


def reference_recovery(case: Case, begun: Begun, start: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The recovery of section V written down again; every trial is a replay from scratch."""
    groups = {group.name: group for group in begun.state.problem.groups}
    replayer = Replayer(Inputs(case.dag, case.cluster, case.profiles))
    rungs = {name: list(start[name]) for name in groups}
    heaps: dict[str, list[tuple[float, int]]] = {name: [] for name in groups}

    def push(group: GroupProblem, index: int) -> None:
        omega, rung = group.units[index].omega, rungs[group.name][index]
        if rung + 1 < len(omega):
            heapq.heappush(heaps[group.name], (omega[rung + 1] - omega[rung], index))

    for group in groups.values():
        for index in range(len(group.units)):
            push(group, index)
    while any(heaps.values()):
        for name, group in groups.items():
            if heaps[name]:
                _, index = heapq.heappop(heaps[name])
                rungs[name][index] += 1
                found = replayer.replay({n: g.variants(rungs[n]) for n, g in groups.items()})
                if found.iteration_ns <= begun.limit_ns and group.fits(found.groups[name].peak_bytes):
                    push(group, index)
                else:
                    rungs[name][index] -= 1
    return {name: tuple(entry) for name, entry in rungs.items()}


CASES = st.builds(
    random_case,
    st.integers(0, 10_000),
    blocks=st.integers(1, 3),
    infer_groups=st.integers(1, 2),
    train=st.integers(0, 1),
    shared=st.booleans(),
)


@tries(30)
@given(case=CASES, share=st.floats(0.0, 1.0), tolerance=st.sampled_from([0.0, 0.1, 0.6]), start=st.sampled_from(STARTS))
def test_recovers_as_written_and_keeps_time_and_memory(case: Case, share: float, tolerance: float, start: str) -> None:
    each = peaks(case)
    case = case.with_memory(min(each) + int(share * (max(each) - min(each))))
    begun = begin(case, tolerance)
    groups = begun.state.problem.groups
    replayer = Replayer(Inputs(case.dag, case.cluster, case.profiles))
    begins = {}
    for group in groups:
        begins[group.name] = begun.uniform[group.name].rungs
        if start == "fastest":
            rungs = initial_plan(begun.state, group.name)
            found = replayer.replay({group.name: group.variants(rungs)}).groups[group.name]
            if found.period_ns <= begun.limit_ns and group.fits(found.peak_bytes):
                begins[group.name] = rungs
    solution = begun.solve(start)
    assert solution.rungs == reference_recovery(case, begun, begins)
    found = replayer.replay({group.name: group.variants(solution.rungs[group.name]) for group in groups})
    assert found.iteration_ns == solution.prediction.iteration_ns <= begun.limit_ns
    assert all(group.fits(found.groups[group.name].peak_bytes) for group in groups)
    assert len(solution.notes) == 1 + sum(
        begins[g.name] == begun.uniform[g.name].rungs != initial_plan(begun.state, g.name) for g in groups
    ) * (start == "fastest")


@pytest.mark.parametrize("seed", range(10))
def test_every_reason_can_be_checked_by_hand(seed: int) -> None:
    case = random_case(seed, blocks=2, ladder=LADDERS[0])
    each = peaks(case)
    case = case.with_memory((min(each) + max(each)) // 2)
    begun = begin(case, tolerance=0.3)
    solution = begun.solve()
    group = begun.state.problem.groups[0]
    rungs = solution.rungs["infer0"]
    checked = 0
    for index, (unit, sentence) in enumerate(zip(group.units, solution.reasons["infer0"], strict=True)):
        assert ("kept" in sentence) == (rungs[index] < unit.top)
        assert f"kept {unit.rungs[rungs[index]].label}: " in sentence or rungs[index] == unit.top
        if rungs[index] == unit.top:
            continue
        raised = tuple(rung + (i == index) for i, rung in enumerate(rungs))
        found = begun.state.replayer.replay({"infer0": group.variants(raised)})
        over_memory = found.groups["infer0"].peak_bytes - group.group.memory_bytes
        over_time = found.iteration_ns - begun.limit_ns
        assert (f"memory by {format_bytes(over_memory)}" in sentence) == (over_memory > 0)
        assert ("the time limit by" in sentence) == (over_time > 0)
        assert sentence.endswith("did not fit when it was tried, and is not tried again") == (over_memory <= 0 and over_time <= 0)
        checked += 1
    assert checked or rungs == tuple(unit.top for unit in group.units)


def test_a_step_for_which_others_made_room_is_said_to_be_tried_once() -> None:
    """Raising b refuses first; raising a then removes the casts between them, and b is not tried again."""
    sentences = [
        sentence
        for seed in range(40)
        for sentence in begin(random_case(seed, blocks=2, ladder=LADDERS[1]), tolerance=0.2).solve().reasons["infer0"]
    ]
    outdated = [sentence for sentence in sentences if "is not tried again" in sentence]
    assert outdated
    assert all(re.search(r"(^|; )kept \S+: \S+ did not fit when it was tried, and is not tried again$", text) for text in outdated)


def test_a_ladder_of_the_base_precision_alone_stays_there() -> None:
    begun = begin(random_case(0, ladder=(FULL,)))
    solution = begun.solve()
    assert set(solution.rungs["infer0"]) == {0}
    assert set(solution.reasons["infer0"]) == {"float32: the only variant that it may take"}


def test_an_unknown_start_is_named() -> None:
    with pytest.raises(PlanError, match="there is no start 'slowest'; choose one of fastest, uniform"):
        begin(random_case(0)).solve("slowest")
