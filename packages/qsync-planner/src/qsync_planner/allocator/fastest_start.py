"""The fastest start: brute force inside each class of isomorphic blocks, casts counted (paper, Allocator; DESIGN 7).

Each combination is judged by replaying the model with it, so casts at the block's borders and the latch of dependent operators
count; memory does not yet (see :mod:`memory_repair`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from qsync_planner.allocator.blocks import Block, classes, find_blocks
from qsync_planner.allocator.search_state import SearchState
from qsync_planner.replayer.deferred import Deferred
from qsync_planner.replayer.replay import GroupPrediction

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
