"""``greedy``: the paper's allocator with its errors corrected.

See docs/design/allocator.md.

The search starts from the fastest plan (casts counted, memory repaired globally) and from the uniform one, recovers each in the
paper's order and by density, keeps the best, and raises neighbouring pairs in it: the paper's way alone ends far from the best plan
where memory binds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import attrs

from qsync_planner.allocator.baselines import UniformStart
from qsync_planner.allocator.blocks import Block, classes, find_blocks
from qsync_planner.allocator.problem import Problem, SearchState, Unit
from qsync_planner.allocator.recovery import (
    History,
    Step,
    move_to_fitting,
    new_history,
    recover,
    slack_ns,
    sweep_until_stable,
    try_step,
)
from qsync_planner.allocator.solution import Solution, reason
from qsync_planner.replayer.incremental import Deferred
from qsync_planner.replayer.prediction import GroupPrediction

MAX_PASSES = 4
"""Passes of single changes after the brute force; borders between blocks change while blocks do."""
MAX_DENSITY_ROUNDS = 4
"""Rounds of pricing: what a step costs depends on the steps taken before it."""
MAX_PAIR_ROUNDS = 3
"""Rounds over all pairs; each makes room for others."""


@attrs.frozen
class _Candidate:
    """A recovered plan, how it came about, and the history of every unit."""

    way: str
    history: Mapping[str, Sequence[History]]
    solution: Solution


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
    if starts["fastest"] == starts["uniform"] or state.prediction.iteration_ns > limit_ns or not Solution.of(state).fits(problem):
        del starts["fastest"]
    for start, rungs in [*starts.items()]:
        if (saved := _with_inputs_in_8_bit(problem, rungs)) != rungs:
            for name in saved:
                state.move_to(name, saved[name])
            if state.prediction.iteration_ns <= limit_ns and Solution.of(state).fits(problem):
                starts[f"{start} (chains' inputs in 8 bit)"] = saved
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
    return _with_reasons(state, limit_ns, attrs.evolve(best, solution=Solution.of(state)))


def _with_inputs_in_8_bit(problem: Problem, rungs: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The same with every chain in its lowest rung: the memory that it leaves may be worth more elsewhere."""
    return {
        group.name: tuple(0 if unit.is_chain else rung for unit, rung in zip(group.units, rungs[group.name], strict=True))
        for group in problem.groups
    }


def _with_reasons(state: SearchState, limit_ns: int, candidate: _Candidate) -> Solution:
    solution = candidate.solution.with_reasons(
        state.problem,
        lambda group, index, unit, rung: reason(
            unit, rung, candidate.history[group][index], slack_ns(state.prediction, group, limit_ns)
        ),
    )
    note = f"greedy recovery from the {candidate.way}, {state.trials:,} replayed trials"
    return attrs.evolve(solution, notes=(note,))


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


def _omega_after(state: SearchState, group: str, index: int, rung: int) -> float:
    """Σ Ω of the accepted plan with one unit at another rung."""
    rungs = list(state.rungs(group))
    rungs[index] = rung
    return state.problem.by_name[group].omega(rungs)


@attrs.frozen
class _Offer:
    """A step up: its gain in Ω over the share of the group's remaining time and memory that it takes."""

    density: float
    unit: int
    rung: int


def recover_by_density(state: SearchState, limit_ns: int) -> dict[str, tuple[History, ...]]:
    """Raise the plans as :func:`recovery.recover` does, but in the order of density."""
    history = new_history(state)
    for group in state.problem.groups:
        for _ in range(MAX_DENSITY_ROUNDS):
            if not _round(state, group.name, limit_ns, history[group.name]):
                break
    sweep_until_stable(state, limit_ns, history)
    return history


def _round(state: SearchState, group: str, limit_ns: int, history: tuple[History, ...]) -> bool:
    """Price every step, then take those that fit; returns whether any was kept."""
    units = state.problem.by_name[group].units
    kept = False
    for offer in sorted(_offers(state, group, limit_ns), key=lambda entry: (-entry.density, entry.unit, entry.rung)):
        present = state.rung(group, offer.unit)
        if offer.rung > present:
            gain = units[offer.unit].omega[present] - units[offer.unit].omega[offer.rung]
            kept |= try_step(state, group, offer.unit, offer.rung, gain, limit_ns, history[offer.unit])
    return kept


def _offers(state: SearchState, group: str, limit_ns: int) -> list[_Offer]:
    problem = state.problem.by_name[group]
    before = state.prediction.groups[group]
    time_left = max(1, limit_ns - before.period_ns)
    memory_left = max(1, problem.group.memory_bytes - before.peak_bytes)
    found = []
    for index, unit in enumerate(problem.units):
        present = state.rung(group, index)
        for rung in range(present + 1, len(unit.rungs)):
            gain = unit.omega[present] - unit.omega[rung]
            if gain <= 0:
                continue
            after = state.try_moves(group, {index: rung}).groups[group]
            state.reject()
            share = max(0, after.period_ns - before.period_ns) / time_left
            if problem.group.memory_bytes:
                share += max(0, after.peak_bytes - before.peak_bytes) / memory_left
            found.append(_Offer(gain / share if share else float("inf"), index, rung))
    return found


def raise_pairs(state: SearchState, limit_ns: int, history: Mapping[str, Sequence[History]]) -> None:
    """Raise neighbouring pairs of a recovered plan to a common higher variant while both limits hold.

    Ends, as recovery does, with sweeps that change nothing, so that ``history`` holds the refusals of the final plan.
    """
    for group in state.problem.groups:
        for _ in range(MAX_PAIR_ROUNDS):
            raised = [_raise(state, group.name, index, limit_ns, history[group.name]) for index in range(len(group.units) - 1)]
            if not any(raised):
                break
            sweep_until_stable(state, limit_ns, history)


def _raise(state: SearchState, group: str, index: int, limit_ns: int, history: Sequence[History]) -> bool:
    """Try to raise units ``index`` and ``index + 1``, the higher variants first; returns whether it was done."""
    problem = state.problem.by_name[group]
    pair = problem.units[index : index + 2]
    present = [state.rung(group, index), state.rung(group, index + 1)]
    before = state.prediction.groups[group].busy_ns
    for rungs in _common_rungs(pair, present):
        prediction = state.try_moves(group, {index: rungs[0], index + 1: rungs[1]})
        if prediction.iteration_ns > limit_ns or not problem.fits(prediction.groups[group].peak_bytes):
            state.reject()
            continue
        state.accept()
        added = prediction.groups[group].busy_ns - before
        for offset in (0, 1):
            history[index + offset].steps.append(Step(rungs[offset], added, together_with=pair[1 - offset].name))
        return True
    return False


def _common_rungs(pair: Sequence[Unit], present: Sequence[int]) -> list[tuple[int, int]]:
    """Rungs of one variant, above where both now are, that lower the pair's Ω; the highest first."""
    a, b = pair
    found = []
    for rung in range(a.top, present[0], -1):
        variant = a.rungs[rung]
        if variant not in b.rungs or b.rungs.index(variant) <= present[1]:
            continue
        other = b.rungs.index(variant)
        if a.omega[present[0]] + b.omega[present[1]] > a.omega[rung] + b.omega[other]:
            found.append((rung, other))
    return found
