"""What every operator of a group may cost, as indicators over the columns of a program.

A column ``x[u, r]`` says that unit u runs at rung r.  Where a rung delivers 16 bits only together with other units
(:mod:`qsync_core.ir.formats`), a column says that all of them do.  The format of a tensor is an indicator for each format that it
may have: of an adjustable operator a sum of its unit's columns, of a dependent one what its inputs decide.  An operator's *choice*
is what it costs for one combination of its rung and its inputs' formats; where two of these are free, columns of their own stand
for the combinations, tied to both by marginal sums.  Once the units' columns are integers, so is everything else.

An operator of a chain has the chain's rungs, and the last one beside them what it writes, which the rungs of its readers decide.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from qsync_core.errors import PlanError
from qsync_core.ir.chain import ChainVariant
from qsync_core.ir.dag import OpClass
from qsync_core.ir.precision import Precision
from qsync_core.ir.semantics import CastTarget, ChainResult, chain_result, readable_copy
from qsync_core.ir.variant import Variant
from qsync_planner.allocator.exact.program import ALWAYS, Indicator, Program, all_of, combined, total
from qsync_planner.allocator.problem import GroupProblem
from qsync_planner.replayer.cost_mapper import OpState
from qsync_planner.replayer.cost_model import CostModel, Evaluation, PricedCast

MAX_COMBINATIONS = 1024
"""Combinations of formats and rungs of one operator; a concatenation of a dozen free tensors has more than a program should."""


class TooManyCombinations(PlanError):
    """An operator reads so many tensors of free formats that their combinations are not listed."""


class Choice(NamedTuple):
    """What an operator costs in one combination, and the indicator of that combination."""

    state: OpState
    chosen: Indicator
    reads: tuple[Precision, ...]
    """Formats of its inputs."""

    @property
    def evaluation(self) -> Evaluation:
        """The formats and costs of the operator."""
        return self.state.evaluation


_Formats = dict[Precision, Indicator]
"""The formats that a tensor may have, with the indicator of each; tensors whose formats are one decision share the object."""
_Source = tuple[object, Sequence[Indicator]]
"""Something that is decided: what stands for it, and the indicator of each outcome."""


class Choices:
    """Choices of all operators of one group.

    Attributes:
        columns: per unit the column of each rung.
        of: per operator its choices; exactly one is chosen.
        wiring: which operator reads which.

    Raises:
        TooManyCombinations: naming the operator.
    """

    def __init__(self, group: GroupProblem, model: CostModel, program: Program) -> None:
        dag = model.dag
        self._model, self._program = model, program
        self.columns = [tuple(program.column(integer=True) for _ in unit.rungs) for unit in group.units]
        for row in self.columns:
            program.row(dict.fromkeys(row, 1), lower=1, upper=1)
        operators = [(index, unit) for index, unit in enumerate(group.units) if not unit.is_chain]
        self._unit_of = {dag.index[op_id]: index for index, unit in operators for op_id in unit.operators}
        self._variants = [tuple(model.intern(variant) for variant in unit.variants) for unit in group.units]
        self._units = group.units
        self._unit_named = {op_id.fqn: index for index, unit in operators for op_id in unit.operators}
        self._delivering: dict[tuple[Precision, tuple[int, ...]], Indicator] = {}
        self._runs_of: dict[int, list[tuple[int, Indicator]]] = {}
        chains = {model.chains.by_name[u.operators[0]]: index for index, u in enumerate(group.units) if u.is_chain}
        self.chain_of = {position: (number, unit) for number, unit in chains.items() for position in model.chains.members[number]}
        """Chains that may be fused, by the positions of their operators: the chain's number, and its unit."""
        self._results: dict[int, dict[ChainResult, Indicator]] = {}
        self._needs: dict[tuple[int, int], Indicator] = {}
        self._states: dict[tuple[int, tuple[int, ...]], OpState] = {}
        self._joint: dict[tuple[object, ...], dict[tuple[int, ...], Indicator]] = {}
        self._known: dict[tuple[object, ...], _Formats] = {}
        self.chains = model.chains
        self.wiring = model.wiring
        self.of: list[list[Choice]] = []
        self._formats: list[_Formats] = []
        for position in range(len(dag.operators)):
            self._add(position)

    def formats(self, position: int) -> Mapping[Precision, Indicator]:
        """The formats that an operator's output may have, with the indicator of each."""
        return self._formats[position]

    def ends_chain(self, position: int) -> bool:
        """Whether an operator is the last of a chain that may be fused."""
        return position in self.chain_of and self._model.chains.members[self.chain_of[position][0]][-1] == position

    def uses(self, reader: int, slot: int) -> dict[int, tuple[PricedCast, Indicator]]:
        """The shared casts of the tensor at ``slot`` that a reader may use, by share number, with the indicator that it does."""
        slots = self.wiring.slots[reader]
        found: dict[int, tuple[PricedCast, list[Indicator]]] = {}
        for state, chosen, _ in self.of[reader]:
            needed: dict[int, PricedCast] = {}
            for cast in state.evaluation.casts:
                if cast.share >= 0 and slots[cast.cast.input_index] == slot:
                    needed.setdefault(cast.share, cast)
            for share, cast in needed.items():
                found.setdefault(share, (cast, []))[1].append(chosen)
        return {share: (cast, total(terms)) for share, (cast, terms) in found.items()}

    def needs(self, producer: int, reader: int, share: int, used: Indicator) -> Indicator:
        """Say where a reader that uses a cast of a result needs it made: no fused chain writes that copy for it."""
        if not self.ends_chain(producer) or reader not in self._model.chains.product_readers[self.chain_of[producer][0]]:
            return used
        written = total([choice.chosen for choice in self.of[producer] if choice.evaluation.written == share])
        if not written:
            return used
        found = self._needs.get((reader, share))
        if found is None:
            found = self._needs[reader, share] = self._all_of([used, combined((written, -1), constant=1)])
        return found

    def _add(self, position: int) -> None:
        unit, operator = self._unit_of.get(position), self._model.dag.operators[position]
        runs_of = [] if unit is None else self._runs(unit)
        if unit is not None:
            numbers: Sequence[int] = [number for number, _ in runs_of]
        elif operator.op_class is OpClass.ADJUSTABLE:
            numbers = (self._model.intern(operator.variant),)
        else:
            numbers = (self._model.follows_inputs,)
        read = [self._formats[producer] for producer in self.wiring.inputs[position]]
        free = list({id(entry): entry for entry in read if len(entry) > 1}.values())
        sources: list[_Source] = [(id(entry), list(entry.values())) for entry in free]
        if unit is not None and len(numbers) > 1:
            sources.append((id(self.columns[unit]), [chosen for _, chosen in runs_of]))

        indicators = self._combinations(position, sources)
        first = [next(iter(entry)) for entry in read]
        varied = [([*entry], [slot for slot, own in enumerate(read) if own is entry]) for entry in free]
        formats: dict[tuple[int, ...], tuple[Precision, ...]] = {}
        for combination in itertools.product(*(range(len(known)) for known, _ in varied)):
            found = [*first]
            for (known, slots), index in zip(varied, combination, strict=True):
                for slot in slots:
                    found[slot] = known[index]
            formats[combination] = tuple(found)
        runs = [
            (numbers[combination[-1]] if len(sources) > len(free) else numbers[0], formats[combination[: len(free)]], chosen)
            for combination, chosen in indicators.items()
        ]
        if position in self.chain_of:
            by_input: _Source = (("inputs", *(key for key, _ in sources)), list(indicators.values()))
            choices = list(filter(None, self._evaluated(position, self._in_chain(position, by_input, [run[1] for run in runs]))))
            # Fusing changes no format: what is delivered follows from the inputs alone.
            delivered = {choice.reads: choice.evaluation.output for choice in choices}
            outputs = [(delivered.get(read_as), chosen) for _, read_as, chosen in runs]
        else:
            evaluated = self._evaluated(position, runs)
            choices = list(filter(None, evaluated))
            outputs = [(choice and choice.evaluation.output, run[2]) for choice, run in zip(evaluated, runs, strict=True)]
        self.of.append(choices)
        self._formats.append(self._output(outputs, tuple(key for key, _ in sources), free if len(sources) == len(free) else []))

    def _runs(self, unit: int) -> list[tuple[int, Indicator]]:
        """What the operators of a unit may run as, each with its indicator: a rung, or the same delivering float32."""
        found = self._runs_of.get(unit)
        if found is None:
            found = self._runs_of[unit] = []
            rungs, others = list(zip(self._variants[unit], self.columns[unit], strict=True)), self._others(unit)
            for number, column in rungs:
                output, rung = self._model.variant(number).output, {column: 1}
                if not self._model.formats.decides or output is Precision.FLOAT32 or others == ():
                    found.append((number, rung))
                    continue
                wide = self._model.in_float32(number)
                together = self._all_deliver(output, (unit, *others)) if others else None
                if together is None:
                    found.append((wide, rung))
                    continue
                alike = [other for other, _ in rungs if self._model.variant(other).output is output]
                narrow = together if len(alike) == 1 else self._all_of([rung, together])
                found += [(number, narrow), (wide, combined((rung, 1), (narrow, -1)))]
        return found

    def _others(self, unit: int) -> tuple[int, ...] | None:
        """The other units with which one delivers 16 bits; None where it delivers float32 in any case."""
        found: set[int] = set()
        for op_id in self._units[unit].operators:
            together = self._model.formats.together.get(op_id.fqn)
            if together is None:
                return None
            found.update(self._unit_named[name] for name in together)
        return tuple(sorted(found - {unit}))

    def _all_deliver(self, output: Precision, units: tuple[int, ...]) -> Indicator | None:
        """The indicator that all these units deliver in a 16-bit format; None where some never do."""
        key = (output, tuple(sorted(units)))
        if key in self._delivering:
            return self._delivering[key]
        terms = []
        for unit in key[1]:
            rungs = zip(self._variants[unit], self.columns[unit], strict=True)
            columns = [column for number, column in rungs if self._model.variant(number).output is output]
            if not columns:
                return None
            terms.append(dict.fromkeys(columns, 1))
        found = self._delivering[key] = self._all_of(terms)
        return found

    def _all_of(self, terms: Sequence[Indicator]) -> Indicator:
        """A column that is 1 where all of these are."""
        found = self._program.largest_of([all_of(terms)])
        for term in terms:
            self._program.row(combined((found, 1), (term, -1)), upper=0)
        return found

    def _in_chain(
        self, position: int, by_input: _Source, formats: Sequence[tuple[Precision, ...]]
    ) -> list[tuple[int, tuple[Precision, ...], Indicator]]:
        """How an operator of a chain may run: by the formats of its inputs, the chain's rung and, at its end, what it writes."""
        number, unit = self.chain_of[position]
        chains, intern = self._model.chains, self._model.intern
        results: dict[ChainResult, Indicator] = self._written(number) if self.ends_chain(position) else {}
        sources: list[_Source] = [by_input, (id(self.columns[unit]), [{column: 1} for column in self.columns[unit]])]
        if results:
            sources.append((("result", number), list(results.values())))
        found = []
        for combination, chosen in self._combinations(position, sources).items():
            way = self._units[unit].rungs[combination[1]]
            assert isinstance(way, ChainVariant)
            run = self._model.follows_inputs
            if way.fused and results:
                run = intern(chains.end_with(number, way, list(results)[combination[2]]))
            elif way.fused:
                run = intern(dict(chains.absorbed(number, way))[position])
            found.append((run, formats[combination[0]], chosen))
        return found

    def _written(self, number: int) -> dict[ChainResult, Indicator]:
        """What a fused chain may write, by the rungs of its readers."""
        chain, readers = self._model.chains.all[number], self._model.chains.product_readers[number]
        units = list(dict.fromkeys(self._unit_of[reader] for reader in readers))
        rungs: list[list[Variant]] = []
        sources: list[_Source] = []
        for unit in units:
            by_copy: dict[CastTarget | None, list[int]] = {}
            for rung, variant in enumerate(self._units[unit].variants):
                by_copy.setdefault(readable_copy(chain.producer, variant), []).append(rung)
            columns, variants = self.columns[unit], self._units[unit].variants
            rungs.append([variants[alike[0]] for alike in by_copy.values()])
            sources.append(((unit, chain.producer), [total([{columns[rung]: 1} for rung in alike]) for alike in by_copy.values()]))
            if len(by_copy) == 1:
                sources[-1] = (sources[-1][0], [ALWAYS])
        found: dict[ChainResult, list[Indicator]] = {}
        for combination, chosen in self._combinations(self._model.chains.members[number][-1], sources).items():
            of_unit = {unit: rungs[place][index] for place, (unit, index) in enumerate(zip(units, combination, strict=True))}
            variants_of = {name: of_unit[self._unit_of[r]] for name, r in zip(chain.product_readers, readers, strict=True)}
            found.setdefault(chain_result(chain, variants_of), []).append(chosen)
        return {result: total(terms) for result, terms in found.items()}

    def _evaluated(self, position: int, runs: Sequence[tuple[int, tuple[Precision, ...], Indicator]]) -> list[Choice | None]:
        """What an operator costs in every combination; None for one that was not measured, which is forbidden.

        Args:
            runs: the number of how it runs, the formats of its inputs, and the indicator.
        """
        choices: list[Choice | None] = []
        forbidden: list[Indicator] = []
        for number, formats, chosen in runs:
            try:
                evaluation = self._model.evaluate(position, number, formats)
            except PlanError:
                if len(runs) == 1:
                    raise
                forbidden.append(chosen)
                choices.append(None)
                continue
            slots = self.wiring.slots[position]
            key = (id(evaluation), slots)
            state = self._states.get(key) or self._states.setdefault(key, OpState(evaluation, slots))
            choices.append(Choice(state, chosen, formats))
        if not any(choices):
            operator = self._model.dag.operators[position]
            raise PlanError(f"no variant of operator {operator.op_id} was measured with the formats that it may get")
        for chosen in forbidden:
            self._program.forbid(chosen)
        return choices

    def _combinations(self, position: int, sources: Sequence[_Source]) -> dict[tuple[int, ...], Indicator]:
        """The indicator of every combination of what is decided for an operator, by the indices of the outcomes."""
        count = math.prod(len(outcomes) for _, outcomes in sources)
        if count > MAX_COMBINATIONS:
            operator = self._model.dag.operators[position]
            raise TooManyCombinations(
                f"operator {operator.op_id} can run in {count:,} combinations of formats, more than {MAX_COMBINATIONS:,}"
            )
        free = [place for place, (_, outcomes) in enumerate(sources) if len(outcomes) > 1]
        if not free:
            return {(0,) * len(sources): ALWAYS}
        if len(free) == 1:
            before, after = (0,) * free[0], (0,) * (len(sources) - 1 - free[0])
            return {(*before, i, *after): outcome for i, outcome in enumerate(sources[free[0]][1])}
        key = tuple(entry for entry, _ in sources)
        found = self._joint.get(key)
        if found is None:
            columns = {}
            for combination in itertools.product(*(range(len(outcomes)) for _, outcomes in sources)):
                chosen = [sources[place][1][combination[place]] for place in free]
                columns[combination] = self._program.derived([all_of(chosen)])
            for place in free:
                for i, indicator in enumerate(sources[place][1]):
                    marginal = {column: 1 for combination, column in columns.items() if combination[place] == i}
                    self._program.row(combined((marginal, 1), (indicator, -1)), lower=0, upper=0)
            found = self._joint[key] = {combination: {column: 1} for combination, column in columns.items()}
        return found

    def _output(
        self, outputs: Sequence[tuple[Precision | None, Indicator]], sources: tuple[object, ...], free: Sequence[_Formats]
    ) -> _Formats:
        by_format: dict[Precision, list[Indicator]] = {}
        for precision, chosen in outputs:
            if precision is not None:
                by_format.setdefault(precision, []).append(chosen)
        if len(by_format) == 1:
            return self._known.setdefault((next(iter(by_format)),), {next(iter(by_format)): ALWAYS})
        if len(free) == 1 and list(by_format) == list(free[0]):
            return free[0]
        key = (*sources, *(precision for precision, _ in outputs))
        if key not in self._known:
            self._known[key] = {precision: total(terms) for precision, terms in by_format.items()}
        return self._known[key]
