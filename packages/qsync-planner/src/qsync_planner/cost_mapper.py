"""The cost mapper: what a change of some operators' variants does to every operator's formats, casts and time (DESIGN 6.2).

One forward sweep over the affected closure, in the order of execution, without recursion: an operator is visited when its variant
or the format of one of its inputs changed, and passes the change on only where its own output's format changed.  Casts of a tensor
that several consumers share are charged to the first of them, forward and backward: it is the first to need the copy, and the last
to hand its gradient back.

Updates are transactions: :meth:`CostMapper.update` keeps what it overwrote until ``commit`` or ``rollback``.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import attrs

from qsync_core.dag import OpClass, PrecisionDag
from qsync_core.errors import PlanError
from qsync_core.op_id import OpId
from qsync_core.precision import Precision
from qsync_core.semantics import CastSite
from qsync_core.variant import Variant
from qsync_planner.cost_model import CostModel, PricedCast, Settled
from qsync_planner.work import NOTHING, Work, kernel, sequence

FORWARD_SITES = (CastSite.INPUT, CastSite.WEIGHT)
"""Casts that happen before an operator's forward kernel; the others belong to its backward."""


class Recosted(NamedTuple):
    """An operator whose charged work may differ, and what it was before."""

    position: int
    forward: Work
    backward: Work


@attrs.frozen
class Change:
    """What an update touched; operators are positions in ``dag.operators``.

    Attributes:
        settled: those whose variant or formats may differ, ascending.
        recosted: those whose charged work may.
        producers: those whose output is read under other casts than before, or changed itself.
    """

    settled: tuple[int, ...]
    recosted: tuple[Recosted, ...]
    producers: tuple[int, ...]


class CostMapper:
    """The state of one device group's operators under some assignment of variants.

    Attributes:
        settled: per operator its formats and costs, see :class:`~qsync_planner.cost_model.Settled`.
        charged: per operator the casts charged to it, in the order in which they happen.
        forward, backward: per operator its work including the charged casts.
        inputs: per operator the positions of its producers; ``readers``: of its consumers, each once, ascending.
    """

    def __init__(self, dag: PrecisionDag, model: CostModel, variants: Mapping[OpId, Variant]) -> None:
        self.dag = dag
        self.model = model
        index = dag.index
        self.inputs: list[tuple[int, ...]] = [tuple(index[p] for p in operator.inputs) for operator in dag.operators]
        self.readers: list[tuple[int, ...]] = [tuple(dict.fromkeys(entry)) for entry in dag.consumers]
        self._variant = self._initial_variants(variants)
        self.settled: list[Settled] = []
        for position in range(len(dag.operators)):
            self.settled.append(self._settle(position))
        self.charged: list[tuple[PricedCast, ...]] = [self._charge(i) for i in range(len(dag.operators))]
        self.forward: list[Work] = [NOTHING] * len(dag.operators)
        self.backward: list[Work] = [NOTHING] * len(dag.operators)
        for position in range(len(dag.operators)):
            self.forward[position], self.backward[position] = self._work(position)
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
        heap: list[int] = []
        for op_id, variant in variants.items():
            position = self.dag.index.get(op_id, -1)
            if position < 0 or not self.dag.operators[position].is_adjustable:
                raise self._not_adjustable(op_id)
            number = self.model.intern(variant)
            if number != self._variant[position]:
                undo.variant.append((position, self._variant[position]))
                self._variant[position] = number
                heap.append(position)
        heapq.heapify(heap)
        settled = self._sweep(heap, undo)
        producers = set(settled)
        for position in settled:
            producers.update(self.inputs[position])
        recosted = set(settled)
        for producer in producers:
            recosted.update(self.readers[producer])
        for position in recosted:
            undo.charged.append((position, self.charged[position]))
            undo.work.append(Recosted(position, self.forward[position], self.backward[position]))
            self.charged[position] = self._charge(position)
            self.forward[position], self.backward[position] = self._work(position)
        return Change(tuple(settled), tuple(undo.work), tuple(producers))

    def _sweep(self, heap: list[int], undo: _Undo) -> list[int]:
        """Settle the closure of the positions on the heap, in order of execution."""
        visited: list[int] = []
        while heap:
            position = heapq.heappop(heap)
            if visited and visited[-1] == position:
                continue
            visited.append(position)
            before = self.settled[position]
            after = self._settle(position)
            undo.settled.append((position, before))
            self.settled[position] = after
            if after.output is not before.output:
                for reader in self.readers[position]:
                    heapq.heappush(heap, reader)
        return visited

    def commit(self) -> None:
        """Keep the pending update."""
        self._undo = None

    def rollback(self) -> None:
        """Undo the pending update."""
        undo, self._undo = self._undo, None
        if undo is None:
            return
        for position, number in reversed(undo.variant):
            self._variant[position] = number
        for position, settled in reversed(undo.settled):
            self.settled[position] = settled
        for position, charged in undo.charged:
            self.charged[position] = charged
        for position, forward, backward in undo.work:
            self.forward[position], self.backward[position] = forward, backward

    def _settle(self, position: int) -> Settled:
        formats: tuple[Precision, ...] = tuple([self.settled[p].output for p in self.inputs[position]])
        number = self._variant[position] if self.dag.operators[position].op_class is OpClass.ADJUSTABLE else self._plain
        return self.model.settle(position, number, formats)

    @property
    def _plain(self) -> int:
        """The number under which non-adjustable operators are settled: their variant plays no part."""
        return self.model.intern(_PLAIN)

    def _charge(self, position: int) -> tuple[PricedCast, ...]:
        """The casts of an operator without those that an earlier consumer of the same tensor already does."""
        inputs = self.inputs[position]
        charged = []
        for i, priced in enumerate(self.settled[position].casts):
            if priced.share >= 0:
                producer = inputs[priced.cast.input_index]
                own = self.settled[position].casts[:i]
                if self._shared_already(own, inputs, priced.share, producer) or any(
                    self._shared_already(self.settled[reader].casts, self.inputs[reader], priced.share, producer)
                    for reader in self.readers[producer]
                    if reader < position
                ):
                    continue
            charged.append(priced)
        return tuple(charged)

    @staticmethod
    def _shared_already(casts: Sequence[PricedCast], inputs: Sequence[int], share: int, producer: int) -> bool:
        return any(other.share == share and inputs[other.cast.input_index] == producer for other in casts)

    def _work(self, position: int) -> tuple[Work, Work]:
        settled = self.settled[position]
        charged = self.charged[position]
        forward_kernel = kernel(settled.forward_dispatch_ns, settled.forward_compute_ns)
        backward_kernel = kernel(settled.backward_dispatch_ns, settled.backward_compute_ns)
        if not charged:
            return forward_kernel, backward_kernel
        before = [kernel(p.dispatch_ns, p.compute_ns) for p in charged if p.cast.site in FORWARD_SITES]
        gradient_in = [kernel(p.dispatch_ns, p.compute_ns) for p in charged if p.cast.site is CastSite.GRAD_OUTPUT]
        gradient_out = [kernel(p.dispatch_ns, p.compute_ns) for p in charged if p.cast.site is CastSite.GRAD_INPUT]
        return sequence([*before, forward_kernel]), sequence([*gradient_in, backward_kernel, *gradient_out])


_PLAIN = Variant.of(Precision.FLOAT32)


class _Undo:
    """What a pending update overwrote."""

    def __init__(self) -> None:
        self.variant: list[tuple[int, int]] = []
        self.settled: list[tuple[int, Settled]] = []
        self.charged: list[tuple[int, tuple[PricedCast, ...]]] = []
        self.work: list[Recosted] = []
