"""The cost mapper: what a change of some operators' variants does to every operator's formats, casts and time.

See docs/design/cost-mapper.md#what-one-change-reaches.

One forward sweep over the affected closure, in the order of execution, without recursion: an operator is visited when its variant
or the format of one of its inputs changed, and passes the change on only where its own output's format changed.  Casts of a tensor
that several consumers share are charged to the first of them, forward and backward: it is the first to need the copy, and the last
to hand its gradient back.

Updates are transactions: :meth:`CostMapper.update` keeps what it overwrote until ``commit`` or ``rollback``.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from qsync_core.errors import PlanError
from qsync_core.ir.dag import OpClass, PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.semantics import CastSite
from qsync_core.ir.variant import Variant
from qsync_planner.replayer.cost_model import CostModel, PricedCast, Settled
from qsync_planner.replayer.max_plus import Work, kernel, sequence

# ---- merged from qsync_planner.replayer.cost_mapper
# A setting: an operator in one variant with inputs of given formats, and what of it matters to others that read the same tensors.
#
# Operators that are alike (layers repeat) have equal settings, and one object for them.  Whether an operator pays for a cast
# depends
# on earlier readers of the same tensor; everything else about it does not change.

FORWARD_SITES = (CastSite.INPUT, CastSite.WEIGHT)
"""Casts that happen before an operator's forward kernel; the others belong to its backward."""

FORMATS = len(Precision) + 1
_NUMBER = {precision: number for number, precision in enumerate(Precision, 1)}

SlotCast = tuple[int, int]
"""Where an operator reads a tensor (its first input that does), and the number under which the tensor's readers share the cast."""


class Charge(NamedTuple):
    """What an operator takes: the casts charged to it, in the order in which they happen, and its work including them."""

    casts: tuple[PricedCast, ...]
    forward: Work
    backward: Work


Reading = tuple[int, int, bool]
"""One use of a tensor: the number and the bytes of the cast copy that is read (-1: none is made), whether autograd keeps it."""


class Setting:
    """An operator in one variant with inputs of given formats.

    Attributes:
        settled: its formats and costs.
        format: a number for the format of its output.
        shared: the casts that it shares with other readers of its inputs, each with a bit of its own.
        readings: by slot (the first input that reads a tensor), how the tensor is used.

    Args:
        slots: per input its slot.
    """

    __slots__ = ("_charges", "_slots", "format", "readings", "settled", "shared")

    def __init__(self, settled: Settled, slots: Sequence[int]) -> None:
        self.settled = settled
        self._slots = slots
        self.format = _NUMBER[settled.output]
        self.shared: dict[SlotCast, int] = {}
        self.readings: dict[int, tuple[Reading, ...]] = {}
        kept = {saved.input_index for saved in settled.saved_inputs}
        for priced in settled.casts:
            if priced.share >= 0:
                cast = priced.cast
                slot = slots[cast.input_index]
                self.shared.setdefault((slot, priced.share), 1 << len(self.shared))
                if cast.site is CastSite.INPUT:
                    reading = (priced.share, cast.numel * cast.key.target.nbytes, cast.input_index in kept)
                    self.readings[slot] = (*self.readings.get(slot, ()), reading)
        for saved in settled.saved_inputs:
            if saved.share < 0:
                slot = slots[saved.input_index]
                self.readings[slot] = (*self.readings.get(slot, ()), (-1, 0, True))
        self._charges: dict[int, Charge] = {}

    def charge(self, elsewhere: int) -> Charge:
        """What it takes where earlier readers make the shared casts of these bits; of its own equal casts it pays the first."""
        found = self._charges.get(elsewhere)
        if found is None:
            found = self._charges[elsewhere] = self._charge(elsewhere)
        return found

    def _charge(self, done: int) -> Charge:
        casts = []
        for priced in self.settled.casts:
            bit = self.shared[self._slots[priced.cast.input_index], priced.share] if priced.share >= 0 else 0
            if not bit & done:
                casts.append(priced)
                done |= bit
        settled = self.settled
        forward = kernel(settled.forward_dispatch_ns, settled.forward_compute_ns)
        backward = kernel(settled.backward_dispatch_ns, settled.backward_compute_ns)
        if not casts:
            return Charge((), forward, backward)
        before = [kernel(p.dispatch_ns, p.compute_ns) for p in casts if p.cast.site in FORWARD_SITES]
        gradient_in = [kernel(p.dispatch_ns, p.compute_ns) for p in casts if p.cast.site is CastSite.GRAD_OUTPUT]
        gradient_out = [kernel(p.dispatch_ns, p.compute_ns) for p in casts if p.cast.site is CastSite.GRAD_INPUT]
        return Charge(tuple(casts), sequence([*before, forward]), sequence([*gradient_in, backward, *gradient_out]))


# ---- from here on: qsync_planner.replayer.cost_mapper

__all__ = ["FORWARD_SITES", "Change", "CostMapper"]

_PLAIN = Variant.of(Precision.FLOAT32)


class Change(NamedTuple):
    """What an update touched; operators are positions in ``dag.operators``.

    Attributes:
        settled: those whose variant or formats may differ, ascending.
        recosted: those whose charge differs.
        producers: those whose output may be kept or read in another way than before.
    """

    settled: list[int]
    recosted: list[int]
    producers: list[int]


class CostMapper:
    """The state of one device group's operators under some assignment of variants.

    Attributes:
        settings: per operator how it now runs; ``settled``: its formats and costs.
        charged: per operator the casts charged to it, in the order in which they happen.
        forward, backward: per operator its work including the charged casts.
        inputs: per operator the positions of its producers.
        readers: per operator the positions of its consumers, each once, ascending; ``reads``: the same, each with its slot, the
            first of its inputs that reads the operator.
    """

    def __init__(self, dag: PrecisionDag, model: CostModel, variants: Mapping[OpId, Variant]) -> None:
        self.dag = dag
        self.model = model
        index = dag.index
        self.inputs: list[tuple[int, ...]] = [tuple(index[p] for p in operator.inputs) for operator in dag.operators]
        self.readers: list[tuple[int, ...]] = [tuple(dict.fromkeys(entry)) for entry in dag.consumers]
        self._adjustable = {operator.op_id: i for i, operator in enumerate(dag.operators) if operator.is_adjustable}
        # Non-adjustable operators are settled under one number: their variant plays no part.
        plain = model.intern(_PLAIN)
        own = [operator.op_class is OpClass.ADJUSTABLE for operator in dag.operators]
        self._variant = [n if has_own else plain for n, has_own in zip(self._initial_variants(variants), own, strict=True)]
        self._slots = [tuple(map(inputs.index, inputs)) for inputs in self.inputs]
        self.reads: list[tuple[tuple[int, int], ...]] = [
            tuple((reader, self.inputs[reader].index(position)) for reader in readers)
            for position, readers in enumerate(self.readers)
        ]
        self._known: list[dict[int, Setting]] = [{} for _ in dag.operators]
        self._equal: dict[tuple[int, tuple[int, ...]], Setting] = {}
        self.settings: list[Setting] = []
        for position in range(len(dag.operators)):
            self.settings.append(self._setting(position))
        self.settled: list[Settled] = [setting.settled for setting in self.settings]
        self._charges = [self._charge(position) for position in range(len(dag.operators))]
        self.charged: list[tuple[PricedCast, ...]] = [charge.casts for charge in self._charges]
        self.forward: list[Work] = [charge.forward for charge in self._charges]
        self.backward: list[Work] = [charge.backward for charge in self._charges]
        self._undo: _Undo | None = None

    def _initial_variants(self, variants: Mapping[OpId, Variant]) -> list[int]:
        numbers = []
        for operator in self.dag.operators:
            variant = operator.variant
            if operator.is_adjustable:
                if operator.op_id not in variants:
                    raise PlanError(f"no variant is given for operator {operator.op_id}; a plan names every adjustable operator")
                variant = variants[operator.op_id]
            numbers.append(self.model.intern(variant))
        unknown = [op_id for op_id in variants if op_id not in self.dag.index or not self.dag[op_id].is_adjustable]
        if unknown:
            raise self._not_adjustable(unknown[0])
        return numbers

    def _not_adjustable(self, op_id: OpId) -> PlanError:
        if op_id not in self.dag.index:
            return PlanError(f"model {self.dag.model!r} has no operator {op_id}; is the plan for another model?")
        operator = self.dag[op_id]
        reason = operator.not_applicable or f"a {operator.kind} is {operator.op_class}, it follows its inputs"
        return PlanError(f"the variant of operator {op_id} can not be chosen: {reason}")

    def variants(self) -> dict[OpId, Variant]:
        """The variant of every adjustable operator."""
        return {
            operator.op_id: self.model.variant(number)
            for operator, number in zip(self.dag.operators, self._variant, strict=True)
            if operator.is_adjustable
        }

    def update(self, variants: Mapping[OpId, Variant]) -> Change:
        """Give some adjustable operators other variants; ends with :meth:`commit` or :meth:`rollback`.

        Raises:
            PlanError: when an operator is unknown or not adjustable, or a cost is missing; the state is then as before.
        """
        if self._undo is not None:
            raise RuntimeError("an update is pending: commit or roll back first")
        undo = self._undo = _Undo()
        try:
            return self._update(variants, undo)
        except BaseException:
            self.rollback()
            raise

    def _update(self, variants: Mapping[OpId, Variant], undo: _Undo) -> Change:
        changed = []
        for op_id, variant in variants.items():
            position = self._adjustable.get(op_id)
            if position is None:
                raise self._not_adjustable(op_id)
            number = self.model.intern(variant)
            if number != self._variant[position]:
                undo.variant.append((position, self._variant[position]))
                self._variant[position] = number
                changed.append(position)
        heapq.heapify(changed)
        settled = self._sweep(changed, undo)
        producers, recosted = set(settled), set(settled)
        for position, before in undo.setting:
            producers.update(self.inputs[position])
            after = self.settings[position]
            if before.shared is not after.shared and before.shared.keys() != after.shared.keys():
                for slot, _ in before.shared.keys() ^ after.shared.keys():
                    recosted.update(self.readers[self.inputs[position][slot]])
        return Change(settled, self._recost(recosted, undo), list(producers))

    def _sweep(self, heap: list[int], undo: _Undo) -> list[int]:
        """Settle the closure of the positions on the heap, in order of execution."""
        visited: list[int] = []
        while heap:
            position = heapq.heappop(heap)
            if visited and visited[-1] == position:
                continue
            visited.append(position)
            before, after = self.settings[position], self._setting(position)
            if before is after:
                continue
            undo.setting.append((position, before))
            self.settings[position] = after
            self.settled[position] = after.settled
            if after.format != before.format:
                for reader in self.readers[position]:
                    heapq.heappush(heap, reader)
        return visited

    def _recost(self, positions: Iterable[int], undo: _Undo) -> list[int]:
        """Charge operators anew; returns those whose charge differs."""
        differ = []
        for position in positions:
            before, after = self._charges[position], self._charge(position)
            if before is not after:
                undo.charge.append((position, before))
                self._set_charge(position, after)
                differ.append(position)
        return differ

    def _set_charge(self, position: int, charge: Charge) -> None:
        self._charges[position] = charge
        self.charged[position], self.forward[position], self.backward[position] = charge

    def commit(self) -> None:
        """Keep the pending update."""
        self._undo = None

    def rollback(self) -> None:
        """Undo the pending update."""
        undo, self._undo = self._undo, None
        if undo is None:
            return
        for position, number in undo.variant:
            self._variant[position] = number
        for position, setting in undo.setting:
            self.settings[position] = setting
            self.settled[position] = setting.settled
        for position, charge in undo.charge:
            self._set_charge(position, charge)

    def _setting(self, position: int) -> Setting:
        """How an operator now runs, given its variant and the formats of its inputs."""
        inputs, settings = self.inputs[position], self.settings
        key = self._variant[position]
        for producer in inputs:
            key = key * FORMATS + settings[producer].format
        found = self._known[position].get(key)
        if found is None:
            formats = tuple([settings[producer].settled.output for producer in inputs])
            settled, slots = self.model.settle(position, self._variant[position], formats), self._slots[position]
            # The model keeps what it settled, so that its identity stands for it.
            found = self._equal.get((id(settled), slots))
            if found is None:
                found = self._equal[id(settled), slots] = Setting(settled, slots)
            self._known[position][key] = found
        return found

    def _charge(self, position: int) -> Charge:
        """What an operator takes, without the casts that an earlier reader of the same tensor already makes."""
        setting = self.settings[position]
        elsewhere = 0
        for (slot, share), bit in setting.shared.items():
            for reader, its_slot in self.reads[self.inputs[position][slot]]:
                if reader >= position:
                    break
                if (its_slot, share) in self.settings[reader].shared:
                    elsewhere |= bit
                    break
        return setting.charge(elsewhere)


class _Undo:
    """What a pending update overwrote."""

    def __init__(self) -> None:
        self.variant: list[tuple[int, int]] = []
        self.setting: list[tuple[int, Setting]] = []
        self.charge: list[tuple[int, Charge]] = []
