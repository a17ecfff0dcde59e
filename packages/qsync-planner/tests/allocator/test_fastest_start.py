"""The fastest start against enumeration of every assignment."""

from __future__ import annotations

import attrs
import pytest
from planning_cases import Case, random_case

from qsync_planner.allocator.blocks import MAX_COMBINATIONS, find_blocks
from qsync_planner.allocator.greedy import _walk, move_to_fastest
from qsync_planner.allocator.problem import SearchState, build_problem
from qsync_planner.matching import Inputs
from qsync_planner.replayer.replay import Replayer


def start(case: Case) -> SearchState:
    problem = build_problem(Inputs(case.dag, case.cluster, case.profiles, case.sensitivity))
    return SearchState(problem, Replayer(Inputs(case.dag, case.cluster, case.profiles)))


def fastest_by_enumeration(case: Case, group: str = "infer0") -> tuple[int, int]:
    """The best (period the group imposes, busy time) of all assignments, each replayed from scratch."""
    replayer = Replayer(Inputs(case.dag, case.cluster, case.profiles))
    best = []
    for variants in case.assignments(group):
        predicted = replayer.replay({group: variants}).groups[group]
        best.append((predicted.period_ns, predicted.busy_ns))
    return min(best)


@pytest.mark.parametrize("seed", range(25))
def test_is_optimal_where_the_model_is_one_block(seed: int) -> None:
    case = random_case(seed, blocks=1 + seed % 2)
    state = start(case)
    assert len(find_blocks(state.problem.groups[0])) == 1
    move_to_fastest(state, "infer0")
    found = state.prediction.groups["infer0"]
    assert (found.period_ns, found.busy_ns) == fastest_by_enumeration(case)


def test_stays_near_the_optimum_and_never_loses_to_uniform_across_blocks() -> None:
    ratios = []
    for seed in range(12):
        case = random_case(seed, blocks=2, ladder=None)
        state = start(case)
        problem = attrs.evolve(state.problem.groups[0])
        uniform = min(
            state.move_to("infer0", problem.uniform(index)).groups["infer0"].period_ns for index in range(len(problem.group.ladder))
        )
        # A limit of nine combinations makes every block a pair of operators.
        blocks = find_blocks(problem, max_combinations=16)
        assert len(blocks) > 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("qsync_planner.allocator.greedy.find_blocks", lambda group: find_blocks(group, 16))
            move_to_fastest(state, "infer0")
        found = state.prediction.groups["infer0"].period_ns
        assert found <= uniform
        ratios.append(found / fastest_by_enumeration(case)[0])
    assert max(ratios) < 1.10
    assert sum(ratios) / len(ratios) < 1.02


def test_leaves_other_groups_alone() -> None:
    case = random_case(3, infer_groups=2)
    state = start(case)
    before = state.rungs("infer1")
    move_to_fastest(state, "infer0")
    assert state.rungs("infer1") == before


@pytest.mark.parametrize("sizes", [[1], [2], [3, 2], [2, 3, 4], [1, 3, 1, 2]])
def test_walk_visits_every_combination_once_by_single_changes(sizes: list[int]) -> None:
    begin = [size - 1 for size in sizes]
    current, seen = list(begin), {tuple(begin)}
    for position, value in _walk(sizes, begin):
        assert current[position] != value
        current[position] = value
        assert tuple(current) not in seen
        seen.add(tuple(current))
    product = 1
    for size in sizes:
        product *= size
    assert len(seen) == product


def test_the_limit_admits_six_operators_with_three_rungs() -> None:
    assert 3**6 <= MAX_COMBINATIONS < 3**7
