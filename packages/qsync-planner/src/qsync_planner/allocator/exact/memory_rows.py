"""Memory at one moment of the step as an expression of the choices (docs/design/exact-allocator.md#rows-memory; intervals as in
:mod:`qsync_planner.replayer.memory`).

A step has 2V moments and the peak is the highest of them, so a budget is 2V rows.  Few of them bind: they are added for the moments
at which a plan that was found exceeds the budget, until none does.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from qsync_core.ir.precision import Precision
from qsync_planner.allocator.exact.choices import Choices
from qsync_planner.allocator.exact.program import ALWAYS, CONSTANT, Expression, Indicator, Program, add, all_of, total
from qsync_planner.replayer.memory import MemoryLayout

_UNIT = 2**20
"""Rows of memory are in MiB."""

Terms = Mapping[int, Indicator]
"""Indicators by the operator that they belong to."""


class _Output(NamedTuple):
    """A tensor in one format: the indicator that it is made, and its bytes; the same of its gradient."""

    precision: Precision
    present: Indicator
    nbytes: int
    gradient: Indicator
    gradient_bytes: int


class _Copy(NamedTuple):
    """A cast copy: its number, the indicators of those that use it and of those that keep it, by position, and its bytes."""

    share: int
    using: Terms
    holding: Terms
    nbytes: int


class MemoryRows:
    """Rows of one group's program that keep its budget, moment by moment.

    Attributes:
        moments: those that have a row, each with its bytes.

    Args:
        layout: what no plan changes.
        added_bytes: what calibration adds to the peak.
        budget: the column of the peak allowed, in MiB.
    """

    def __init__(self, choices: Choices, program: Program, layout: MemoryLayout, added_bytes: int, budget: int) -> None:
        self._choices, self._program, self._layout, self._budget = choices, program, layout, budget
        self._static_bytes = layout.static_bytes + added_bytes
        self.moments: dict[int, Expression] = {}
        self._kept: dict[tuple[int, object, tuple[int, ...]], Indicator] = {}
        self._outputs: dict[int, list[_Output]] = {}
        self._copies: dict[int, list[_Copy]] = {}
        last = [self._last(position) for position in range(layout.count)]
        self._by_last = sorted(range(layout.count), key=last.__getitem__)
        self._last_of = [last[position] for position in self._by_last]
        self._settled: tuple[array[int], array[int]] = array("q"), array("q")
        """Columns and bytes of what is kept for the backward pass, operator by operator."""
        self._settled_until = [0]

    def add(self, moment: int) -> bool:
        """Add a moment's row; False where it is there already."""
        if moment in self.moments:
            return False
        row = self._at(moment)
        self.moments[moment] = dict(row)
        row[self._budget] = -_UNIT
        self._program.row(row, upper=0, unit=_UNIT)
        return True

    def _at(self, moment: int) -> Expression:
        """Sum up what is alive: near the moment by all that it depends on, else what is kept from then on until long after."""
        count = self._layout.count
        at = moment if moment < count else self._layout.backward_of(moment)
        settled = bisect_left(self._last_of, at)
        found = self._kept_by(settled)
        add(found, ALWAYS, self._static_bytes + self._layout.parameter_gradients_until[moment])
        for position in self._by_last[settled:]:
            self._add_own(found, position, moment)
            if position > at:
                continue  # not made yet, or given back
            if self._is_tensor(position):
                self._add_output(found, position, moment)
            self._add_copies(found, position, moment)
        return found

    def _is_tensor(self, position: int) -> bool:
        return self._layout.dag.operators[position].kind != "input" and position not in self._layout.handed_on

    def _last(self, position: int) -> int:
        """The last operator that has to do with an operator's tensors, where fused chains run at their end."""
        concerned = [position, *(reader for reader, _ in self._reads(position)), *self._layout.handing_on.get(position, ())]
        chains, chain_of = self._choices.chains, self._choices.chain_of
        return max(chains.members[chain_of[one][0]][-1] if one in chain_of else one for one in concerned)

    def _kept_by(self, operators: int) -> Expression:
        """What the first so many operators by :attr:`_by_last` keep for the backward pass, between it and all their readers."""
        columns, nbytes = self._settled
        while len(self._settled_until) <= operators:
            position, own = self._by_last[len(self._settled_until) - 1], Expression()
            for state, chosen, _ in self._choices.of[position]:
                add(own, chosen, state.evaluation.lasting_bytes + state.evaluation.saved_own_bytes)
            for precision, present, size, _, _ in self._outputs_of(position) if self._is_tensor(position) else ():
                add(own, self._kept_output(position, precision, present, self._layout.count - 1), size)
            for share, _, holding, size in self._copies_of(position):
                add(own, self._any_of(position, share, holding), size)
            columns.extend(own)
            nbytes.extend(own.values())
            self._settled_until.append(len(columns))
        end = self._settled_until[operators]
        places = np.frombuffer(columns, dtype=np.int64)[:end] - CONSTANT if end else np.zeros(0, dtype=np.int64)
        sums = np.bincount(places, np.frombuffer(nbytes, dtype=np.int64)[:end] if end else places)
        some = np.flatnonzero(sums)
        return dict(zip((some + CONSTANT).tolist(), sums[some].astype(np.int64).tolist(), strict=True))

    def _holders(self, moment: int) -> int:
        """Operators before this one still hold what they saved for backward (before the backward pass: all of them)."""
        return self._layout.count if moment < self._layout.count else self._layout.backward_of(moment) + 1

    def _add_own(self, found: Expression, position: int, moment: int) -> None:
        """What an operator alone keeps, its workspace, and its gradient's copies."""
        backward = self._layout.backward_of(position)
        for choice in self._choices.of[position]:
            entry = choice.evaluation
            nbytes = entry.lasting_bytes
            if position <= moment <= backward:
                nbytes += entry.saved_own_bytes
            if moment == position:
                nbytes += entry.workspace_bytes
            if moment == backward:
                nbytes += entry.backward_workspace_bytes + entry.gradient_copy_bytes
            add(found, choice.chosen, nbytes)

    def _add_output(self, found: Expression, position: int, moment: int) -> None:
        """The output, until its last reader has run or for as long as an operator keeps it; and its gradient."""
        first, backward = self._layout.first_gradient[position], self._layout.backward_of(position)
        for precision, present, nbytes, made, gradient_bytes in self._outputs_of(position):
            if moment >= position:
                add(found, self._output_alive(position, precision, present, moment), nbytes)
            if first is None or moment > backward or moment < self._layout.count:
                continue
            if moment < first:
                # Readers inside a fused chain run their backward with the last of it.
                late = self._later(position, precision, self._layout.backward_of(moment), gradients=True)
                made = self._any_of(position, ("gradient", precision, moment), dict(enumerate(late)))
            add(found, made, gradient_bytes)

    def _outputs_of(self, position: int) -> list[_Output]:
        """An operator's output and its gradient in every format, whatever the moment."""
        if position not in self._outputs:
            found = self._outputs[position] = []
            entries = [state.evaluation for state, _, _ in self._choices.of[position]]
            for precision in self._choices.formats(position):
                made = [entry for entry in entries if entry.output is precision]
                found.append(
                    _Output(
                        precision,
                        self._present(position, precision, "output_bytes"),
                        max(entry.output_bytes for entry in made),
                        self._present(position, precision, "gradient_bytes"),
                        max(entry.gradient_bytes for entry in made),
                    )
                )
        return self._outputs[position]

    def _present(self, position: int, precision: Precision, what: str) -> Indicator:
        """Indicate that an operator delivers a tensor of this format; inside a fused chain none is, at its end perhaps none."""
        if position not in self._choices.chain_of:
            return self._choices.formats(position)[precision]
        options = [choice for choice in self._choices.of[position] if choice.evaluation.output is precision]
        present = [choice.chosen for choice in options if getattr(choice.evaluation, what)]
        return self._choices.formats(position)[precision] if len(present) == len(options) else total(present)

    def _reads(self, position: int) -> list[tuple[int, int]]:
        """Who reads an operator's output, also from operators that hand it on, ascending; each with its slot."""
        return sorted((*self._choices.wiring.reads[position], *self._layout.indirect_reads.get(position, ())))

    def _later(self, position: int, precision: Precision, until: int, *, gradients: bool = False) -> list[Indicator]:
        """Indicate that a reader (that makes a gradient) runs with the end of a fused chain, at ``until`` or later; by reader."""
        found = []
        makers = self._layout.gradient_makers(position) if gradients else ()
        for reader, slot in self._reads(position):
            chain = self._choices.chain_of.get(reader)
            if chain is None or chain == self._choices.chain_of.get(position):
                continue
            if gradients and reader not in makers:
                continue
            delayed = [
                choice.chosen
                for choice in self._choices.of[reader]
                if choice.reads[slot] is precision and choice.evaluation.delay and reader + choice.evaluation.delay >= until
            ]
            if delayed:
                found.append(total(delayed))
        return found

    def _output_alive(self, position: int, precision: Precision, present: Indicator, moment: int) -> Indicator:
        """Indicate that the output is there at a moment that is not before its operator's forward."""
        readers = dict.fromkeys(reader for reader, _ in self._reads(position) if reader >= moment)
        unserved = [self._unserved(position, reader) for reader in readers]
        if moment == position or ALWAYS in unserved:
            return present
        terms = [self._both(present, reads) for reads in unserved]
        late = self._later(position, precision, moment) if moment < self._layout.count else []
        kept = self._kept_output(position, precision, present, moment)
        if not terms and not late:
            return kept
        return self._any_of(position, ("output", precision, moment), dict(enumerate([*terms, *late, kept])))

    def _unserved(self, producer: int, reader: int) -> Indicator:
        """Indicate that a reader reads an operator's float result, and not a copy that this writes as the end of a fused chain."""
        if not self._choices.ends_chain(producer) or reader not in self._choices.wiring.readers[producer]:
            return ALWAYS
        found: Expression = dict(ALWAYS)
        slot = dict(self._choices.wiring.reads[producer])[reader]
        for share, (_, used) in self._choices.uses(reader, slot).items():
            add(found, used, -1)
            add(found, self._choices.needs(producer, reader, share, used))
        return {column: coefficient for column, coefficient in found.items() if coefficient}

    def _kept_output(self, position: int, precision: Precision, whole: Indicator, moment: int) -> Indicator:
        """Indicate that the output has this format and an operator keeps it for its backward, which is not over before a moment."""
        until, delays = self._holders(moment), False
        savers: dict[int, Indicator] = {}
        others = [(other, -1) for other in self._layout.handing_on.get(position, ())]
        for saver, slot in sorted(((position, -1), *others, *self._reads(position))):
            if saver >= until:
                break
            terms, all_do = [], True
            for state, chosen, reads in self._choices.of[saver]:
                if slot < 0:
                    concerned, saves = state.evaluation.output is precision, state.evaluation.saves_output
                else:
                    concerned, saves = reads[slot] is precision, slot in state.kept
                delays |= saves and state.evaluation.delay > 0
                saves &= saver + state.evaluation.delay < until
                if concerned and saves:
                    terms.append(chosen)
                all_do &= saves or not concerned
            if terms and all_do:
                return whole
            if terms:
                savers[saver if slot >= 0 or saver == position else -saver] = total(terms)
        return self._any_of(position, (precision, until) if delays else precision, savers)

    def _add_copies(self, found: Expression, producer: int, moment: int) -> None:
        """Cast copies of the producer's output, each shared by its users."""
        for share, using, holding, nbytes in self._copies_of(producer):
            add(found, self._copy_alive(producer, share, using, holding, moment), nbytes)

    def _copies_of(self, producer: int) -> list[_Copy]:
        """The copies of an operator's output, whatever the moment."""
        if producer not in self._copies:
            self._copies[producer] = self._read_copies(producer)
        return self._copies[producer]

    def _read_copies(self, producer: int) -> list[_Copy]:
        users: dict[int, dict[int, list[Indicator]]] = {}
        savers: dict[int, dict[int, list[Indicator]]] = {}
        size: dict[int, int] = {}
        if self._choices.ends_chain(producer):  # the copy that a fused chain writes is there from its own forward on
            for state, chosen, _ in self._choices.of[producer]:
                if (share := state.evaluation.written) >= 0:
                    users.setdefault(share, {}).setdefault(producer, []).append(chosen)
                    size[share] = state.evaluation.written_bytes
        for reader, slot in self._choices.wiring.reads[producer]:
            for state, chosen, _ in self._choices.of[reader]:
                for share, nbytes, keeps in state.copies.get(slot, ()):
                    size[share] = nbytes
                    users.setdefault(share, {}).setdefault(reader, []).append(chosen)
                    if keeps:
                        savers.setdefault(share, {}).setdefault(reader, []).append(chosen)
        return [
            _Copy(
                share,
                {reader: total(terms) for reader, terms in entries.items()},
                {reader: total(terms) for reader, terms in savers.get(share, {}).items()},
                size[share],
            )
            for share, entries in users.items()
        ]

    def _copy_alive(self, producer: int, share: int, using: Terms, holding: Terms, moment: int) -> Indicator:
        """Indicate whether a copy is alive: from its first user's forward to its last user's, or to its first holder's backward."""
        if moment >= self._layout.count:
            until = self._holders(moment)
            return self._any_of(producer, share, {reader: term for reader, term in holding.items() if reader < until})
        terms: dict[int, Indicator] = {}
        for first, begun in using.items():
            if first > moment:
                continue
            if first == moment:
                terms[len(terms)] = begun
            for last, to_come in [*((r, t) for r, t in using.items() if r >= moment), *holding.items()]:
                terms[len(terms)] = to_come if first == last else self._both(begun, to_come)
        return self._any_of(producer, (share, moment), terms)

    def _both(self, one: Indicator, other: Indicator) -> Indicator:
        """1 where both are: a column that is at least their sum less one."""
        if one in (ALWAYS, other):
            return other
        if other == ALWAYS:
            return one
        return self._program.largest_of([all_of([one, other])])

    def _any_of(self, producer: int, what: object, terms: Terms) -> Indicator:
        """1 where any of the terms is: a column that is at least each of them, which memory then holds down."""
        distinct: list[Indicator] = []
        for term in terms.values():
            if term == ALWAYS:
                return ALWAYS
            if term and term not in distinct:
                distinct.append(term)
        if len(distinct) <= 1:
            return distinct[0] if distinct else {}
        key = (producer, what, tuple(terms))
        if key not in self._kept:
            self._kept[key] = self._program.largest_of(distinct)
        return self._kept[key]
