"""The reasons of a plan: their wording, and that their numbers are those of replays."""

from __future__ import annotations

import math
import re

import attrs
import pytest
from planning_cases import LADDERS, Case, random_case

from qsync_core.ir.plan import PrecisionPlan
from qsync_core.units import format_bytes
from qsync_planner.allocator import Inputs, Request, allocate
from qsync_planner.allocator.problem import Problem, SearchState, Unit, build_problem
from qsync_planner.allocator.recovery import History, Refusal, Step, new_history, recover, sweep_until_stable
from qsync_planner.allocator.solution import added_time_text, reason, time_text
from qsync_planner.replayer.prediction import Prediction
from qsync_planner.replayer.replay import Replayer

UNIT = Unit("a", (), LADDERS[0], (4.0, 1.0, 0.0))


@pytest.mark.parametrize(
    "rung, history, sentence",
    [
        (2, History(1, [Step(2, 212_000)]), "recovered to float32: +212 µs, slack of the finished plan 1,830 µs"),
        (2, History(0, [Step(1, -5_000), Step(2, 217_000)]), "recovered to float32: +212 µs, slack of the finished plan 1,830 µs"),
        (0, History(0, [], [Refusal(1, 0, 38 * 2**20, True)]), "kept int8>float32: float16 would exceed memory by 38 MiB"),
        (1, History(1, [], [Refusal(2, 1_204_000, 0, True)]), "kept float16: float32 would exceed the time limit by 1,204 µs"),
        (
            1,
            History(0, [Step(1, 900)], [Refusal(2, 12_300_000, 2**30, True)]),
            "recovered to float16: +900 ns, slack of the finished plan 1,830 µs; "
            "kept float16: float32 would exceed memory by 1 GiB and the time limit by 12.3 ms",
        ),
        (
            2,
            History(1, [Step(2, 212_000, together_with="layer.0.output")]),
            "recovered to float32 together with layer.0.output: +212 µs, slack of the finished plan 1,830 µs",
        ),
        (0, History(0, [], [Refusal(1, 0, 0, False)]), "kept int8>float32: float16 would not lower its sensitivity"),
        (2, History(2), "float32 from the start: the fastest choice is already the base precision"),
    ],
)
def test_wording(rung: int, history: History, sentence: str) -> None:
    assert reason(UNIT, rung, history, 1_830_400) == sentence


def test_a_ladder_of_one_rung_says_so() -> None:
    unit = attrs.evolve(UNIT, rungs=LADDERS[0][2:], omega=(0.0,))
    assert reason(unit, 0, History(0), 0) == "float32: the only variant that it may take"


@pytest.mark.parametrize(
    "ns, text",
    [(0, "0 ns"), (999, "999 ns"), (1_000, "1 µs"), (9_999_000, "9,999 µs"), (10_000_000, "10.0 ms"), (-212_000, "-212 µs")],
)
def test_time_text(ns: int, text: str) -> None:
    assert time_text(ns) == text
    assert added_time_text(ns) == (text if ns < 0 else f"+{text}")


def replay(case: Case, problem: Problem, rungs: tuple[int, ...]) -> Prediction:
    """The plan of the only inference group, from scratch."""
    return Replayer(Inputs(case.dag, case.cluster, case.profiles)).replay({"infer0": problem.groups[0].variants(rungs)})


@pytest.mark.parametrize("seed", range(8))
def test_every_step_and_refusal_is_what_a_replay_from_scratch_says(seed: int) -> None:
    case = random_case(seed, ladder=LADDERS[0])
    full = allocate(case.inputs, Request("full")).group("infer0").predicted_peak_bytes
    if seed % 2:
        case = case.with_memory(full - 3_000)
    problem = build_problem(Inputs(case.dag, case.cluster, case.profiles, case.sensitivity))
    state = SearchState(problem, Replayer(Inputs(case.dag, case.cluster, case.profiles)))
    start = problem.groups[0].uniform(0)
    begin = state.move_to("infer0", start)
    limit = begin.iteration_ns + 150_000
    histories = recover(state, limit)["infer0"]
    final = state.rungs("infer0")
    busy = replay(case, problem, start).groups["infer0"].busy_ns
    added = sum(step.added_ns for history in histories for step in history.steps)
    assert replay(case, problem, final).groups["infer0"].busy_ns == busy + added
    assert replay(case, problem, final).iteration_ns <= limit
    refused = 0
    for index, history in enumerate(histories):
        assert history.start == start[index]
        assert final[index] == (history.steps[-1].rung if history.steps else start[index])
        for refusal in history.refusals:
            raised = tuple(refusal.rung if i == index else rung for i, rung in enumerate(final))
            predicted = replay(case, problem, raised)
            budget = case.cluster.group("infer0").memory_bytes or predicted.groups["infer0"].peak_bytes
            assert refusal.over_time_ns == max(0, predicted.iteration_ns - limit)
            assert refusal.over_memory_bytes == max(0, predicted.groups["infer0"].peak_bytes - budget)
            assert refusal.over_time_ns or refusal.over_memory_bytes
            refused += 1
    assert refused or all(rung == 2 for rung in final)


@pytest.mark.parametrize("seed", range(4))
def test_steps_below_a_bound_are_tried_where_a_unit_needs_a_reason(seed: int) -> None:
    case = random_case(seed, ladder=LADDERS[0])
    problem = build_problem(Inputs(case.dag, case.cluster, case.profiles, case.sensitivity))
    state = SearchState(problem, Replayer(Inputs(case.dag, case.cluster, case.profiles)))
    limit = state.move_to("infer0", problem.groups[0].uniform(0)).iteration_ns + 150_000
    whole = recover(state, limit)["infer0"]
    plan, objective = state.all_rungs(), problem.objective(state.all_rungs())
    without, bounded, trials = new_history(state), new_history(state), []
    for history, bound in ((without, -math.inf), (bounded, objective)):
        before = state.trials
        sweep_until_stable(state, limit, history, bound)
        trials.append(state.trials - before)
        assert state.all_rungs() == plan
    assert [history.refusals for history in without["infer0"]] == [history.refusals for history in whole]
    for one, other in zip(without["infer0"], bounded["infer0"], strict=True):
        assert one.refusals[:1] == other.refusals[:1]
    assert trials[1] <= trials[0]


@pytest.mark.parametrize("seed", range(6))
def test_what_a_plan_says_it_kept_can_be_checked_by_hand(seed: int) -> None:
    """Each "kept X: Y would exceed …" of a finished plan holds for that plan, not for some state on the way."""
    case = random_case(seed, ladder=LADDERS[0])
    full = allocate(case.inputs, Request("full")).group("infer0").predicted_peak_bytes
    case = case.with_memory(full - 3_000)
    plan = allocate(case.inputs, Request("greedy", tolerance=2.0))
    checked = 0
    for op_id, assignment in plan.group("infer0").assignments.items():
        found = re.search(r"kept \S+: (\S+) would exceed (memory by ([\d.]+ \S+))?", assignment.reason)
        if found is None or found[2] is None:
            continue
        variant = next(v for v in LADDERS[0] if v.label == found[1])
        replayed = case.replay(_with(plan, op_id, variant)).groups["infer0"].peak_bytes
        assert found[3].rstrip(";") == format_bytes(replayed - case.cluster.group("infer0").memory_bytes)
        checked += 1
    assert checked


@pytest.mark.parametrize("solver", ["greedy", "exact"])
def test_the_slack_of_a_reason_is_that_of_the_finished_plan(solver: str) -> None:
    said = 0
    for seed in range(6):
        case = random_case(seed, ladder=LADDERS[0], infer_groups=2)
        plan = allocate(case.inputs, Request(solver, tolerance=0.3))
        replayed = case.replay(plan)
        for group in plan.groups:
            slack = time_text(plan.time_limit_ns - replayed.groups[group.group].period_ns)
            for assignment in group.assignments.values():
                if "slack" in assignment.reason:
                    assert assignment.reason.split("slack of the finished plan ")[1].partition(";")[0] == slack
                    said += 1
    assert said > 10


def _with(plan: PrecisionPlan, op_id: object, variant: object) -> PrecisionPlan:
    group = plan.group("infer0")
    changed = {o: attrs.evolve(a, variant=variant) if o == op_id else a for o, a in group.assignments.items()}
    return attrs.evolve(plan, groups=tuple(attrs.evolve(g, assignments=changed) if g.group == "infer0" else g for g in plan.groups))
