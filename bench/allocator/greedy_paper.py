"""``greedy-paper``: the paper's allocator to the letter, to measure the others by (paper, Allocator).

Brute force inside isomorphic subgraphs under memory budgets of their own, then one max-heap per inference group of
Ω(b) − Ω(next higher b) and one sweep over it.  A subgraph is judged by itself: the kernels of its operators, adjustable and
dependent, with everything outside at the base precision.  Casts take no time there, and what an operator keeps is counted once for
each operator that keeps it.  qsync-planner's ``greedy`` corrects that; what is read into the paper where it leaves something open
is in ``docs/decisions/greedy-paper.md``.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import attrs

from qsync_core.errors import PlanError
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.precision import Precision
from qsync_core.units import format_bytes
from qsync_planner.allocator.baselines import UniformStart
from qsync_planner.allocator.blocks import Block, classes, find_blocks, members
from qsync_planner.allocator.problem import GroupProblem, SearchState, Unit
from qsync_planner.allocator.recovery import History, Refusal, keep_if_fitting, new_history, overruns, slack_ns
from qsync_planner.allocator.solution import Solution, reason, time_text
from qsync_planner.replayer.cost_mapper import CostMapper
from qsync_planner.replayer.cost_model import CostModel

STARTS = ("fastest", "uniform")
"""Where recovery may begin: the paper's initial plan, or uniform precision to compare it with."""


@attrs.frozen
class GreedyPaper:
    """The solver, as a request of a plan takes it."""

    start: str = "fastest"
    name = "greedy-paper"

    def __call__(self, state: SearchState, starts: Mapping[str, UniformStart], limit_ns: int) -> Solution:
        """Find a plan from uniform precision."""
        return solve_greedy_paper(state, starts, limit_ns, start=self.start)


def solve_greedy_paper(
    state: SearchState, uniform: Mapping[str, UniformStart], limit_ns: int, *, start: str = "fastest"
) -> Solution:
    """Find a plan that keeps ``limit_ns`` and every memory budget.

    Expects ``state`` at the uniform plan, which keeps both, so that a plan is always found.

    Args:
        state: the search.
        uniform: per group the uniform plan, which stands in where the initial plan breaks a limit.
        limit_ns: T.
        start: one of :data:`STARTS`.

    Raises:
        PlanError: an unknown start.
    """
    if start not in STARTS:
        raise PlanError(f"there is no start {start!r}; choose one of {', '.join(STARTS)}")
    notes = []
    if start == "fastest":
        notes = [note for group in state.problem.groups if (note := _move_to_initial(state, group.name, uniform, limit_ns))]
    history = recover_as_printed(state, limit_ns)
    _judge_again(state, limit_ns, history)
    solution = Solution.of(state).with_reasons(
        state.problem,
        lambda group, index, unit, rung: _reason(unit, rung, history[group][index], slack_ns(state.prediction, group, limit_ns)),
    )
    way = f"greedy recovery as the paper prints it, from the {start} start, {state.trials:,} replayed trials"
    return attrs.evolve(solution, notes=(way, *notes))


def recover_as_printed(state: SearchState, limit_ns: int) -> dict[str, tuple[History, ...]]:
    """Raise plans as the paper prints it: in one sweep, in which a refused step is the end of its unit.

    Whether a step lowers Ω is not asked.  Refusals are judged against the plan as it stood when the step was tried.
    """
    history = new_history(state)
    heaps: dict[str, list[tuple[float, int, int]]] = {group.name: [] for group in state.problem.groups}

    def push(group: str, index: int, rung: int) -> None:
        unit = state.problem.by_name[group].units[index]
        if rung <= unit.top:
            heapq.heappush(heaps[group], (unit.omega[rung] - unit.omega[state.rung(group, index)], index, rung))

    for name in heaps:
        for index, rung in enumerate(state.rungs(name)):
            push(name, index, rung + 1)
    while any(heaps.values()):
        for name, heap in heaps.items():
            if heap:
                _, index, rung = heapq.heappop(heap)
                if keep_if_fitting(state, name, index, rung, limit_ns, history[name][index]):
                    push(name, index, rung + 1)
    return history


def _move_to_initial(state: SearchState, group: str, uniform: Mapping[str, UniformStart], limit_ns: int) -> str:
    """Move a group to its initial plan, or back to the uniform one where that breaks a limit; returns what a reader must know.

    Neither limit depends on what other groups do: memory is the group's own, and the job keeps the time limit exactly where the
    period that each group alone would impose keeps it.
    """
    problem = state.problem.by_name[group]
    predicted = state.move_to(group, initial_plan(state, group)).groups[group]
    limits = []
    if not problem.fits(predicted.peak_bytes):
        limits.append(f"the memory budget by {format_bytes(predicted.peak_bytes - problem.group.memory_bytes)}")
    if predicted.period_ns > limit_ns:
        limits.append(f"the time limit by {time_text(predicted.period_ns - limit_ns)}")
    if not limits:
        return ""
    state.move_to(group, uniform[group].rungs)
    return (
        f"the initial plan of group {group} exceeds {' and '.join(limits)}: the paper's block search counts no casts, shared "
        "tensors or workspace; recovery began at uniform precision instead"
    )


def _judge_again(state: SearchState, limit_ns: int, history: Mapping[str, Sequence[History]]) -> None:
    """Judge the refusals against the final plan, so that each can be checked; nothing is kept of it."""
    for group, entries in history.items():
        for index, entry in enumerate(entries):
            if entry.refusals:
                rung = entry.refusals[0].rung
                over_time, over_memory = overruns(state, group, state.try_moves(group, {index: rung}), limit_ns)
                state.reject()
                entry.refusals[:] = [Refusal(rung, over_time, over_memory, gains=True)]


def _reason(unit: Unit, rung: int, history: History, slack: int) -> str:
    """Give the reason for a unit, as :func:`reason` does; a step that fits by now was refused before others made room for it."""
    outdated = [refusal for refusal in history.refusals if not (refusal.over_time_ns or refusal.over_memory_bytes)]
    if not outdated:
        return reason(unit, rung, history, slack)
    label, refused = unit.rungs[rung].label, unit.rungs[outdated[0].rung].label
    kept = f"kept {label}: {refused} did not fit when it was tried, and is not tried again"
    if not history.steps:
        return kept
    return f"{reason(unit, rung, attrs.evolve(history, refusals=[]), slack)}; {kept}"


def initial_plan(state: SearchState, group: str) -> tuple[int, ...]:
    """The rungs that the block searches give to every unit of ``group``; whether they fit is not asked.

    The accepted plan of ``state`` stays as it is.
    """
    problem = state.problem.by_name[group]
    subgraphs = _subgraphs(state, problem)
    budgets = memory_budgets(
        problem.group.memory_bytes,
        _full_peak_bytes(state, problem),
        [entry.cost(entry.full).nbytes for entry in subgraphs.values()],
        [entry.cost(entry.lowest).nbytes for entry in subgraphs.values()],
    )
    budget_of = dict(zip(subgraphs, budgets, strict=True))
    rungs = [unit.top for unit in problem.units]
    for blocks in classes(state.problem.dag, problem, list(subgraphs)):
        best = subgraphs[blocks[0]].fastest(budget_of[blocks[0]])
        for block in blocks:
            for index, rung in zip(block.units, best, strict=True):
                rungs[index] = rung
    return tuple(rungs)


def memory_budgets(limit_bytes: int, peak_bytes: int, full_bytes: Sequence[int], lowest_bytes: Sequence[int]) -> list[int | None]:
    """What each subgraph may keep, in bytes.

    A subgraph's compression capacity is what the lowest precision of all its operators saves.  What the whole model must save is
    shared out in proportion to it, and so is the room where the model fits; no subgraph is asked for more than its capacity.

    Args:
        limit_bytes: the group's memory (0: no limit, every budget is then None).
        peak_bytes: predicted peak of the whole model at the base precision.
        full_bytes: what each subgraph keeps at the base precision.
        lowest_bytes: what it keeps at its lowest.
    """
    if not limit_bytes:
        return [None] * len(full_bytes)
    capacities = [max(0, full - lowest) for full, lowest in zip(full_bytes, lowest_bytes, strict=True)]
    excess, total = peak_bytes - limit_bytes, sum(capacities)
    return [
        full - min(capacity, -(-capacity * excess // total) if total else 0)
        for full, capacity in zip(full_bytes, capacities, strict=True)
    ]


def _full_peak_bytes(state: SearchState, problem: GroupProblem) -> int:
    prediction = state.try_moves(problem.name, {index: unit.top for index, unit in enumerate(problem.units)})
    state.reject()
    return prediction.groups[problem.name].peak_bytes


def _subgraphs(state: SearchState, problem: GroupProblem) -> dict[Block, _Subgraph]:
    dag, model = state.problem.dag, state.replayer.model(problem.name)
    base = CostMapper(dag, model, state.replayer.base_variants(problem.name))
    outside = [state.evaluation.output for state in base.states]
    blocks = find_blocks(problem)
    positions = members(dag, problem, blocks)
    return {block: _Subgraph(dag, model, problem, block, inside, outside) for block, inside in zip(blocks, positions, strict=True)}


class _Cost(NamedTuple):
    """What a subgraph takes by itself; the smaller the better, from left to right.

    ``busy_ns`` is the compute time of its kernels, or their dispatch where that is more; ``nbytes`` what its operators keep for the
    backward pass.
    """

    busy_ns: int
    compute_ns: int
    nbytes: int


class _Subgraph:
    """One block with the operators that follow it, cut out of the model."""

    def __init__(
        self,
        dag: PrecisionDag,
        model: CostModel,
        group: GroupProblem,
        block: Block,
        positions: Sequence[int],
        outside: Sequence[Precision],
    ) -> None:
        self._model = model
        self._units = [group.units[index] for index in block.units]
        unit_of = {dag.index[op_id]: i for i, unit in enumerate(self._units) for op_id in unit.operators}
        # A block by itself does not know what other blocks deliver: an operator delivers 16 bits where these can let it.
        decides, together = model.formats.decides, model.formats.together
        self._numbers = [
            [
                model.intern(variant if not decides or all(o.fqn in together for o in unit.operators) else variant.in_float32)
                for variant in unit.variants
            ]
            for unit in self._units
        ]
        self._outside = outside
        # Per operator: its position, its unit (-1: it has none), and the positions of its producers.
        self._rows = [
            (position, unit_of.get(position, -1), tuple(dag.index[producer] for producer in dag.operators[position].inputs))
            for position in positions
        ]
        self.lowest = (0,) * len(self._units)
        self.full = tuple(unit.top for unit in self._units)

    def cost(self, rungs: Sequence[int]) -> _Cost:
        """Kernels and kept bytes of all operators, one after the other."""
        formats: dict[int, Precision] = {}
        dispatch = compute = nbytes = 0
        for position, unit, producers in self._rows:
            number = self._numbers[unit][rungs[unit]] if unit >= 0 else self._model.follows_inputs
            inputs = tuple([formats.get(producer, self._outside[producer]) for producer in producers])
            found = self._model.evaluate(position, number, inputs)
            formats[position] = found.output
            dispatch += found.forward_dispatch_ns + found.backward_dispatch_ns
            compute += found.forward_compute_ns + found.backward_compute_ns
            nbytes += found.saved_own_bytes + sum(saved.nbytes for saved in found.saved_inputs)
            nbytes += found.output_bytes if found.saves_output else 0
        return _Cost(max(dispatch, compute), compute, nbytes)

    def fastest(self, budget_bytes: int | None) -> tuple[int, ...]:
        """The fastest rungs within the budget, by brute force; among equals the leaner, then the higher ones."""
        found = ((self.cost(rungs), rungs) for rungs in self._combinations())
        fitting = ((cost, rungs) for cost, rungs in found if budget_bytes is None or cost.nbytes <= budget_bytes)
        return min(fitting, key=lambda entry: entry[0])[1]

    def _combinations(self) -> Iterator[tuple[int, ...]]:
        """Every combination of rungs, the highest first."""
        return itertools.product(*(range(unit.top, -1, -1) for unit in self._units))
