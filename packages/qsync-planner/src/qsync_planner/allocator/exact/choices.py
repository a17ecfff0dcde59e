"""What every operator of a group may cost, as indicators over the columns of a program.

A column ``x[u, r]`` says that unit u runs at rung r.  The format of a tensor is an indicator for each format that it may have: of
an adjustable operator a sum of its unit's columns, of a dependent one what its inputs decide.  An operator's *choice* is what
it costs for one combination of its rung and its inputs' formats; where two of these are free, columns of their own stand for the
combinations, tied to both by marginal sums.  Once the units' columns are integers, so is everything else.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from qsync_core.errors import PlanError
from qsync_core.ir.dag import OpClass
from qsync_core.ir.precision import Precision
from qsync_planner.allocator.exact.program import ALWAYS, Indicator, Program, total
from qsync_planner.allocator.problem import GroupProblem
from qsync_planner.replayer.cost_mapper import OpState
from qsync_planner.replayer.cost_model import CostModel, Evaluation

MAX_COMBINATIONS = 1024
"""Combinations of formats and rungs of one operator; a concatenation of a dozen free tensors has more than a program should."""


class TooManyCombinations(PlanError):
    """An operator reads so many tensors of free formats that their combinations are not listed."""


class ChainsAreNoColumns(TooManyCombinations):
    """Chains that may be fused are not among the choices of a program."""


class Choice(NamedTuple):
    """What an operator costs in one combination, and the indicator of that combination."""

    state: OpState
    chosen: Indicator
    reads: tuple[Precision, ...]
    """Formats of its inputs."""

    @property
    def evaluation(self) -> Evaluation:
        """Its formats and costs."""
        return self.state.evaluation


_Formats = dict[Precision, Indicator]
"""The formats that a tensor may have, with the indicator of each; tensors whose formats are one decision share the object."""


class Choices:
    """Choices of all operators of one group.

    Attributes:
        columns: per unit the column of each rung.
        of: per operator its choices; exactly one is chosen.
        wiring: which operator reads which.

    Raises:
        TooManyCombinations: naming the operator, or a chain.
    """

    def __init__(self, group: GroupProblem, model: CostModel, program: Program) -> None:
        if chain := next((unit for unit in group.units if unit.is_chain), None):
            raise ChainsAreNoColumns(
                f"group {group.name!r} may fuse chains ({chain.name} and so on), which no program chooses; use the solver greedy"
            )
        dag = model.dag
        self._model, self._program = model, program
        self.columns = [tuple(program.column(integer=True) for _ in unit.rungs) for unit in group.units]
        for row in self.columns:
            program.row(dict.fromkeys(row, 1), lower=1, upper=1)
        self._unit_of = {dag.index[op_id]: index for index, unit in enumerate(group.units) for op_id in unit.operators}
        self._variants = [tuple(model.intern(variant) for variant in unit.variants) for unit in group.units]
        self._states: dict[tuple[int, tuple[int, ...]], OpState] = {}
        self._joint: dict[tuple[int, ...], dict[tuple[int, ...], Indicator]] = {}
        self._known: dict[tuple[object, ...], _Formats] = {}
        self.wiring = model.wiring
        self.of: list[list[Choice]] = []
        self._formats: list[_Formats] = []
        for position in range(len(dag.operators)):
            self._add(position)

    def formats(self, position: int) -> Mapping[Precision, Indicator]:
        """The formats that an operator's output may have, with the indicator of each."""
        return self._formats[position]

    def _add(self, position: int) -> None:
        operator = self._model.dag.operators[position]
        unit = self._unit_of.get(position)
        if unit is not None:
            numbers: Sequence[int] = self._variants[unit]
        elif operator.op_class is OpClass.ADJUSTABLE:
            numbers = (self._model.intern(operator.variant),)
        else:
            numbers = (self._model.follows_inputs,)
        read = [self._formats[producer] for producer in self.wiring.inputs[position]]
        free = list({id(entry): entry for entry in read if len(entry) > 1}.values())
        rungs = [self.columns[unit]] if unit is not None and len(numbers) > 1 else []
        sizes = [len(entry) for entry in free] + [len(numbers) for _ in rungs]
        count = math.prod(sizes)
        if count > MAX_COMBINATIONS:
            raise TooManyCombinations(
                f"operator {operator.op_id} can run in {count:,} combinations of formats, more than {MAX_COMBINATIONS:,}"
            )
        indicators = self._combinations(free, rungs)
        choices: list[Choice] = []
        forbidden: list[Indicator] = []
        outputs: list[Precision | None] = []
        for combination, chosen in indicators.items():
            at = {id(entry): list(entry)[index] for entry, index in zip(free, combination, strict=False)}
            formats = tuple(at.get(id(entry)) or next(iter(entry)) for entry in read)
            number = numbers[combination[-1]] if rungs else numbers[0]
            try:
                evaluation = self._model.evaluate(position, number, formats)
            except PlanError:
                if len(indicators) == 1:
                    raise
                forbidden.append(chosen)
                outputs.append(None)
                continue
            slots = self.wiring.slots[position]
            key = (id(evaluation), slots)
            state = self._states.get(key) or self._states.setdefault(key, OpState(evaluation, slots))
            choices.append(Choice(state, chosen, formats))
            outputs.append(evaluation.output)
        if not choices:
            raise PlanError(f"no variant of operator {operator.op_id} was measured with the formats that it may get")
        for chosen in forbidden:
            self._program.row(chosen, upper=0)
        self.of.append(choices)
        sources = (*(id(entry) for entry in free), *(id(entry) for entry in rungs), *outputs)
        self._formats.append(self._output(choices, sources, free if not rungs else []))

    def _combinations(self, free: Sequence[_Formats], rungs: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], Indicator]:
        """The indicator of every combination of what the free inputs and the rungs may be, by their indices."""
        sources: list[list[Indicator]] = [list(entry.values()) for entry in free]
        sources += [[{column: 1} for column in entry] for entry in rungs]
        if not sources:
            return {(): ALWAYS}
        if len(sources) == 1:
            return {(i,): indicator for i, indicator in enumerate(sources[0])}
        key = (*(id(entry) for entry in free), *(id(entry) for entry in rungs))
        found = self._joint.get(key)
        if found is None:
            columns = {
                combination: self._program.column()
                for combination in itertools.product(*(range(len(source)) for source in sources))
            }
            for place, source in enumerate(sources):
                for i, indicator in enumerate(source):
                    row = {column: 1 for combination, column in columns.items() if combination[place] == i}
                    for column, coefficient in indicator.items():
                        row[column] = row.get(column, 0) - coefficient
                    self._program.row(row, lower=0, upper=0)
            found = self._joint[key] = {combination: {column: 1} for combination, column in columns.items()}
        return found

    def _output(self, choices: Sequence[Choice], sources: tuple[object, ...], free: Sequence[_Formats]) -> _Formats:
        by_format: dict[Precision, list[Indicator]] = {}
        for choice in choices:
            by_format.setdefault(choice.evaluation.output, []).append(choice.chosen)
        if len(by_format) == 1:
            return self._known.setdefault((next(iter(by_format)),), {next(iter(by_format)): ALWAYS})
        if len(free) == 1 and list(by_format) == list(free[0]):
            return free[0]
        if sources not in self._known:
            self._known[sources] = {precision: total(terms) for precision, terms in by_format.items()}
        return self._known[sources]
