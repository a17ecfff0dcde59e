"""``greedy``: the paper's way with its errors mended (docs/design/allocator.md#greedy).

Start from the fastest plan (casts counted, memory repaired globally) and from the uniform one, recover each in the paper's order
and by density, keep the best, and raise neighbouring pairs in it: the paper's way alone ends far from the best plan where memory
binds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import attrs

from qsync_planner.allocator.baselines import UniformStart
from qsync_planner.allocator.blocks import Block, classes, find_blocks
from qsync_planner.allocator.problem import SearchState
from qsync_planner.allocator.recovery import History, move_to_fitting, raise_pairs, recover, recover_by_density
from qsync_planner.allocator.solution import Solution, reason
from qsync_planner.replayer.incremental import Deferred
from qsync_planner.replayer.replay import GroupPrediction

# ---- merged from qsync_planner.allocator.greedy
# The fastest start: brute force inside each class of isomorphic blocks, casts counted (paper, Allocator;
# docs/design/allocator.md#greedy).
#
# Each combination is judged by replaying the model with it, so casts at the block's borders and the latch of dependent operators
# count; memory does not yet (see :mod:`memory_repair`).

MAX_PASSES = 4
"""Passes of single changes after the brute force; borders between blocks change while blocks do."""


def move_to_fastest(state: SearchState, group: str) -> None:
    """Leave ``group`` at the fastest rungs found; other groups stay as they are.

    Starts from the current rungs and never ends at a slower plan.
    """
    problem = state.problem.by_name[group]
    blocks = find_blocks(problem)
    for entry in classes(state.problem.dag, problem, blocks):
        _improve_class(state, group, entry)
    if len(blocks) == 1:
        return
    for _ in range(MAX_PASSES):
        if not _improve_units(state, group):
            return


def speed_key(predicted: GroupPrediction, omega: Callable[[], float]) -> tuple[int, int, Deferred[float]]:
    """What "faster" compares, lower being better: the period that the group alone would impose, its busy time, Σ Ω.

    The job's period would not do: while another group is slower, nothing that this one does shows in it.  Σ Ω is over all units and
    seldom decides, so it is added up when it does.
    """
    return (predicted.period_ns, predicted.busy_ns, Deferred(omega))


def _improve_class(state: SearchState, group: str, blocks: Sequence[Block]) -> None:
    """Find the best combination on the class's middle block and give it to every block of the class where it helps."""
    problem = state.problem.by_name[group]
    start = state.rungs(group)
    start_key = speed_key(state.prediction.groups[group], partial(problem.omega, start))
    block = blocks[len(blocks) // 2]
    sizes = [len(problem.units[index].rungs) for index in block.units]
    current = list(start)
    best_key, best = start_key, [current[index] for index in block.units]
    # Walk all combinations so that each differs from the one before in one unit: every trial is a small change.
    for position, rung in _walk(sizes, [current[index] for index in block.units]):
        index = block.units[position]
        prediction = state.try_moves(group, {index: rung})
        state.accept()
        current[index] = rung
        key = speed_key(prediction.groups[group], partial(problem.omega, tuple(current)))
        if key < best_key:
            best_key, best = key, [current[i] for i in block.units]
    everywhere = {index: rung for other in blocks for index, rung in zip(other.units, best, strict=True)}
    here = dict(zip(block.units, best, strict=True))
    for moves in (everywhere, here):
        target = list(start)
        for index, rung in moves.items():
            target[index] = rung
        prediction = state.move_to(group, target)
        if speed_key(prediction.groups[group], partial(problem.omega, target)) <= start_key:
            return
    state.move_to(group, start)


def _walk(sizes: Sequence[int], start: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Visit every combination once by single changes ``(position, value)``, from ``start``: a reflected mixed-radix Gray code."""
    # Values are relabelled so that the walk begins at ``start``: label 0 is the start value, the others follow in order.
    labels = [[first, *(value for value in range(size) if value != first)] for size, first in zip(sizes, start, strict=True)]
    digits, directions = [0] * len(sizes), [1] * len(sizes)
    while True:
        for position, size in enumerate(sizes):
            nxt = digits[position] + directions[position]
            if 0 <= nxt < size:
                digits[position] = nxt
                yield position, labels[position][nxt]
                break
            directions[position] = -directions[position]
        else:
            return


def _omega_after(state: SearchState, group: str, index: int, rung: int) -> float:
    """Σ Ω of the accepted plan with one unit at another rung."""
    rungs = list(state.rungs(group))
    rungs[index] = rung
    return state.problem.by_name[group].omega(rungs)


def _improve_units(state: SearchState, group: str) -> bool:
    """Single changes that make the plan faster, over all units once: catches what borders between blocks hide."""
    problem = state.problem.by_name[group]
    improved = False
    for index, unit in enumerate(problem.units):
        for rung in range(len(unit.rungs)):
            if state.rung(group, index) == rung:
                continue
            key = speed_key(state.prediction.groups[group], lambda: problem.omega(state.rungs(group)))
            predicted = state.try_moves(group, {index: rung}).groups[group]
            if speed_key(predicted, partial(_omega_after, state, group, index, rung)) < key:
                state.accept()
                improved = True
            else:
                state.reject()
    return improved


# ---- from here on: qsync_planner.allocator.greedy


def solve_greedy(state: SearchState, uniform: Mapping[str, UniformStart], limit_ns: int) -> Solution:
    """Find a plan that keeps ``limit_ns`` and every memory budget.

    Expects ``state`` at the uniform plan, which keeps both, so that a plan is always found.
    """
    problem = state.problem
    for group in problem.groups:
        move_to_fastest(state, group.name)
        if not move_to_fitting(state, group.name):
            state.move_to(group.name, uniform[group.name].rungs)
    starts = {"fastest": state.all_rungs(), "uniform": {name: entry.rungs for name, entry in uniform.items()}}
    if starts["fastest"] == starts["uniform"] or not _keeps_limits(state, limit_ns):
        del starts["fastest"]
    candidates = []
    for start, rungs in starts.items():
        for order, recover_in in (("gain", recover), ("density", recover_by_density)):
            for name in rungs:
                state.move_to(name, rungs[name])
            history = recover_in(state, limit_ns)
            candidates.append(_Candidate(f"{start} start in order of {order}", history, Solution.of(state)))
    best = min(candidates, key=lambda candidate: problem.objective(candidate.solution.rungs))
    for name, found in best.solution.rungs.items():
        state.move_to(name, found)
    raise_pairs(state, limit_ns, best.history)
    return _with_reasons(state, attrs.evolve(best, solution=Solution.of(state)))


@attrs.frozen
class _Candidate:
    """A recovered plan, how it came about, and the history of every unit."""

    way: str
    history: Mapping[str, Sequence[History]]
    solution: Solution


def _keeps_limits(state: SearchState, limit_ns: int) -> bool:
    return state.prediction.iteration_ns <= limit_ns and Solution.of(state).fits(state.problem)


def _with_reasons(state: SearchState, candidate: _Candidate) -> Solution:
    solution = candidate.solution
    reasons = {
        group.name: tuple(
            reason(unit, rung, entry)
            for unit, rung, entry in zip(group.units, solution.rungs[group.name], candidate.history[group.name], strict=True)
        )
        for group in state.problem.groups
    }
    note = f"greedy recovery from the {candidate.way}, {state.trials:,} replayed trials"
    return attrs.evolve(solution, reasons=reasons, notes=(note,))
