"""The cost mapper: what a change of some operators' variants does to every operator's formats, casts and time.

See docs/design/cost-mapper.md#what-one-change-reaches.

One forward sweep over the affected closure, in the order of execution, without recursion: an operator is visited when its variant
or the format of one of its inputs changed, and passes the change on only where its own output's format changed.  Casts of a tensor
that several consumers share are charged to the first of them, forward and backward: it is the first to need the copy, and the last
to hand its gradient back.

In which format an operator delivers follows from the variants of all operators that it goes together with
(:mod:`qsync_core.ir.formats`): a change of one of these may be a change of it too.

A fused chain (:mod:`qsync_planner.replayer.chains`) runs at its last operator.  What it writes follows from its readers' variants,
so that a change of one of these visits it as well; a cast that it writes costs its readers nothing.

Updates are transactions: :meth:`CostMapper.update` keeps what it overwrote until ``commit`` or ``rollback``.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from qsync_core.errors import PlanError
from qsync_core.ir.chain import UNFUSED, ChainVariant
from qsync_core.ir.dag import OpClass, PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.semantics import CastSite
from qsync_core.ir.variant import Variant
from qsync_planner.replayer.chains import Variants
from qsync_planner.replayer.cost_model import CostModel, Evaluation, PricedCast
from qsync_planner.replayer.max_plus import Work, sequence

BEFORE_FORWARD = (CastSite.INPUT, CastSite.WEIGHT)
AFTER_FORWARD = (CastSite.OUTPUT,)
BEFORE_BACKWARD = (CastSite.GRAD_OUTPUT, CastSite.WEIGHT_AGAIN)
AFTER_BACKWARD = (CastSite.GRAD_INPUT,)
"""When casts happen, beside an operator's kernels."""
ALL_ELSEWHERE = -1
"""Every shared cast is made by an earlier reader; see :meth:`OpState.charge`."""

_FORMATS = len(Precision) + 1
_NUMBER = {precision: number for number, precision in enumerate(Precision, 1)}


class ChargedCost(NamedTuple):
    """What an operator takes: the casts charged to it, in the order in which they happen, and its work including them."""

    casts: tuple[PricedCast, ...]
    forward: Work
    backward: Work


SlotCast = tuple[int, int]
"""Where an operator reads a tensor (its first input that does), and the number under which the tensor's readers share the cast."""
Copy = tuple[int, int, bool]
"""A cast copy of a tensor that is read: its number and bytes, and whether autograd keeps it."""


class OpState:
    """An operator in one variant with inputs of given formats, and what of it matters to other readers of the same tensors.

    Equal operators (layers repeat) share one object.  Whether an operator pays for a cast depends on earlier readers of the same
    tensor; everything else about it does not change.

    Attributes:
        format: a number for the format of its output.
        shared: the casts that it shares with other readers of its inputs, each with a bit of its own.
        copies: by slot (the first input that reads a tensor) the cast copies of it that are read, each once.
        kept: the slots whose tensors autograd keeps as they are.

    Args:
        slots: per input its slot.
    """

    __slots__ = ("_charges", "_slots", "copies", "evaluation", "format", "kept", "shared")

    def __init__(self, evaluation: Evaluation, slots: Sequence[int]) -> None:
        self.evaluation = evaluation
        self._slots = slots
        self.format = _NUMBER[evaluation.output]
        self.shared: dict[SlotCast, int] = {}
        copies: dict[int, dict[int, Copy]] = {}
        saved_inputs = {saved.input_index for saved in evaluation.saved_inputs}
        for priced in evaluation.casts:
            if priced.share >= 0:
                slot = slots[priced.cast.input_index]
                self.shared.setdefault((slot, priced.share), 1 << len(self.shared))
                if priced.cast.site is CastSite.INPUT:
                    of_slot = copies.setdefault(slot, {})
                    keeps = priced.cast.input_index in saved_inputs or (priced.share in of_slot and of_slot[priced.share][2])
                    of_slot[priced.share] = (priced.share, priced.nbytes, keeps)
        self.copies = {slot: tuple(of_slot.values()) for slot, of_slot in copies.items()}
        self.kept = {slots[saved.input_index] for saved in evaluation.saved_inputs if saved.share < 0}
        self._charges: dict[int, ChargedCost] = {}

    def charge(self, elsewhere: int) -> ChargedCost:
        """What it takes where earlier readers make the shared casts of these bits; of its own equal casts it pays the first."""
        found = self._charges.get(elsewhere)
        if found is None:
            found = self._charges[elsewhere] = self._charge(elsewhere)
        return found

    def _charge(self, done: int) -> ChargedCost:
        charged = []
        for priced in self.evaluation.casts:
            bit = self.shared[self._slots[priced.cast.input_index], priced.share] if priced.share >= 0 else 0
            if not bit & done:
                charged.append(priced)
                done |= bit

        return _with_casts(tuple(charged), self.evaluation.forward, self.evaluation.backward)


def _with_casts(charged: tuple[PricedCast, ...], forward: Work, backward: Work) -> ChargedCost:
    """An operator's kernels with the casts around them."""
    if not charged:
        return ChargedCost(charged, forward, backward)

    def work(sites: tuple[CastSite, ...]) -> list[Work]:
        return [priced.work for priced in charged if priced.cast.site in sites]

    return ChargedCost(
        charged,
        sequence([*work(BEFORE_FORWARD), forward, *work(AFTER_FORWARD)]),
        sequence([*work(BEFORE_BACKWARD), backward, *work(AFTER_BACKWARD)]),
    )


class Change(NamedTuple):
    """What an update touched; operators are positions in ``dag.operators``.

    Attributes:
        evaluated: those whose variant or formats may differ, ascending.
        recosted: those whose charged cost differs.
        producers: those whose output may be kept or read in another way than before.
    """

    evaluated: list[int]
    recosted: list[int]
    producers: list[int]


class CostMapper:
    """The state of one device group's operators under some assignment of variants.

    Attributes:
        states: per operator how it now runs.
        forward, backward: per operator its work including the charged casts.
    """

    def __init__(self, dag: PrecisionDag, model: CostModel, variants: Variants) -> None:
        self.dag = dag
        self.model = model
        self.wiring = model.wiring
        self._adjustable = dag.once(_adjustable)
        self._variant = self._initial_variants({op_id: v for op_id, v in variants.items() if isinstance(v, Variant)})
        self._wanted = dict(self._variant_of_adjustable())
        """The variants of adjustable operators as they are given; what they run as is decided from those."""
        self._together, self._concerns = model.once(_read_formats)
        for position in self._wanted:
            self._variant[position] = self._decided(position)
        self._chosen: dict[int, ChainVariant] = {}
        """What fused chains run as, by their number."""
        for number, chosen in self._chains_in(variants).items():
            if chosen.fused:
                self._chosen[number] = chosen
                for position, run in self._runs(number):
                    self._variant[position] = run
        self._known = model.once(_known_states)
        self.states: list[OpState] = []
        for position in range(len(dag.operators)):
            self.states.append(self._state(position))
        self._costs = [self._charge(position) for position in range(len(dag.operators))]
        self.forward: list[Work] = [cost.forward for cost in self._costs]
        self.backward: list[Work] = [cost.backward for cost in self._costs]
        self._undo: _Undo | None = None

    @property
    def charged(self) -> list[tuple[PricedCast, ...]]:
        """The casts charged to each operator, in the order in which they happen."""
        return [cost.casts for cost in self._costs]

    @property
    def is_synchronous(self) -> bool:
        """Whether the CPU runs the kernels."""
        return self.model.synchronous

    def serves(self, producer: int, reader: int) -> bool:
        """Whether an operator reads the whole result of the chain that ends with a producer, so that its copy serves it."""
        chains = self.model.chains
        number = chains.read_by.get(reader)
        return number is not None and chains.members[number][-1] == producer

    def _initial_variants(self, variants: Mapping[OpId, Variant]) -> list[int]:
        numbers, interned = [*self.model.once(_own_variants)], dict[int, int]()
        for op_id, position in self._adjustable.items():
            variant = variants.get(op_id)
            if variant is None:
                raise PlanError(f"no variant is given for operator {op_id}; a plan names every adjustable operator")
            number = interned.get(id(variant))  # few objects stand for all: comparing them takes less than what they are made of
            numbers[position] = interned[id(variant)] = self.model.intern(variant) if number is None else number
        if len(variants) > len(self._adjustable):
            raise self._not_adjustable(next(op_id for op_id in variants if op_id not in self._adjustable))
        return numbers

    def _variant_of_adjustable(self) -> Iterator[tuple[int, int]]:
        return ((position, self._variant[position]) for position in self._adjustable.values())

    def _decided(self, position: int) -> int:
        """What an adjustable operator runs as: as it is given, or the same delivering float32."""
        number, model = self._wanted[position], self.model
        output = model.variant(number).output
        if output is Precision.FLOAT32 or not model.formats.decides:
            return number
        if position not in self._together:
            return model.in_float32(number)
        for other in self._together[position]:
            its = self._wanted[other]
            if its != number and model.variant(its).output is not output:
                return model.in_float32(number)
        return number

    def _not_adjustable(self, op_id: OpId) -> PlanError:
        if op_id not in self.dag.index:
            return PlanError(f"model {self.dag.model!r} has no operator {op_id}; is the plan for another model?")
        operator = self.dag[op_id]
        reason = operator.not_applicable or f"a {operator.kind} is {operator.op_class}, it follows its inputs"
        return PlanError(f"the variant of operator {op_id} cannot be chosen: {reason}")

    def _chains_in(self, variants: Variants) -> dict[int, ChainVariant]:
        """What is said of chains, by their number."""
        said = {name: chosen for name, chosen in variants.items() if isinstance(chosen, ChainVariant)}
        return {self.model.chains.number(name, self.model.profile): chosen for name, chosen in said.items()}

    def _runs(self, number: int) -> Iterator[tuple[int, int]]:
        """Position of each operator of a chain, and the number of how it runs."""
        chains, model = self.model.chains, self.model
        chosen = self._chosen.get(number, UNFUSED)
        if not chosen.fused:
            yield from ((position, model.follows_inputs) for position in chains.members[number])
            return
        yield from ((position, model.intern(run)) for position, run in chains.absorbed(number, chosen))
        end = chains.end(number, chosen, lambda reader: model.variant(self._variant[reader]))
        yield chains.members[number][-1], model.intern(end)

    def update(self, variants: Variants) -> Change:
        """Give some adjustable operators other variants, or run chains otherwise; ends with :meth:`commit` or :meth:`rollback`.

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

    def _update(self, variants: Variants, undo: _Undo) -> Change:
        changed: list[int] = []
        of_chains = bool(self._chosen)
        for op_id, variant in variants.items():
            if isinstance(variant, ChainVariant):
                of_chains = True
                continue
            position = self._adjustable.get(op_id)
            if position is None:
                raise self._not_adjustable(op_id)
            self._want(position, self.model.intern(variant), undo)
        for position in undo.concerned:
            self._run_as(position, self._decided(position), changed, undo)
        if of_chains:
            self._update_chains(variants, changed, undo)
        heapq.heapify(changed)
        evaluated = self._sweep(changed, undo)
        producers, recosted = set(evaluated), set(evaluated)
        for position, before in undo.state:
            producers.update(self.wiring.inputs[position])
            for slot, _ in before.shared.keys() ^ self.states[position].shared.keys():
                recosted.update(self.wiring.readers[self.wiring.inputs[position][slot]])
            if before.evaluation.written != self.states[position].evaluation.written:
                recosted.update(self.wiring.readers[position])
        return Change(evaluated, self._recost(recosted, undo), list(producers))

    def _want(self, position: int, number: int, undo: _Undo) -> None:
        """Give an operator another variant, and note whose formats that may change."""
        before = self._wanted[position]
        if number != before:
            undo.wanted.append((position, before))
            self._wanted[position] = number
            undo.concerned[position] = None
            undo.concerned.update(dict.fromkeys(self._concerns.get(position, ())))

    def _run_as(self, position: int, number: int, changed: list[int], undo: _Undo) -> None:
        if number != self._variant[position]:
            undo.variant.append((position, self._variant[position]))
            self._variant[position] = number
            changed.append(position)

    def _update_chains(self, variants: Variants, changed: list[int], undo: _Undo) -> None:
        """Run chains as they are now to be run, and those that are read by operators that changed."""
        touched = self._chains_in(variants)
        for number, chosen in touched.items():
            undo.chosen.append((number, self._chosen.get(number, UNFUSED)))
            self._choose(number, chosen)
        read_by = self.model.chains.read_by
        for position in changed:
            if read_by.get(position) in self._chosen:
                touched.setdefault(read_by[position], UNFUSED)
        for number in touched:
            for position, run in self._runs(number):
                self._run_as(position, run, changed, undo)

    def _choose(self, number: int, chosen: ChainVariant) -> None:
        if chosen.fused:
            self._chosen[number] = chosen
        else:
            self._chosen.pop(number, None)

    def _sweep(self, heap: list[int], undo: _Undo) -> list[int]:
        """Evaluate the closure of the positions on the heap, in order of execution."""
        visited: list[int] = []
        while heap:
            position = heapq.heappop(heap)
            if visited and visited[-1] == position:
                continue
            visited.append(position)
            before, after = self.states[position], self._state(position)
            if before is after:
                continue
            undo.state.append((position, before))
            self.states[position] = after
            if after.format != before.format:
                for reader in self.wiring.readers[position]:
                    heapq.heappush(heap, reader)
        return visited

    def _recost(self, positions: Iterable[int], undo: _Undo) -> list[int]:
        """Charge operators anew; returns those whose cost differs."""
        differ = []
        for position in positions:
            before, after = self._costs[position], self._charge(position)
            if before is not after:
                undo.cost.append((position, before))
                self._set_cost(position, after)
                differ.append(position)
        return differ

    def _set_cost(self, position: int, cost: ChargedCost) -> None:
        self._costs[position] = cost
        _, self.forward[position], self.backward[position] = cost

    def commit(self) -> None:
        """Keep the pending update."""
        self._undo = None

    def rollback(self) -> None:
        """Undo the pending update."""
        undo, self._undo = self._undo, None
        if undo is None:
            return
        for position, number in reversed(undo.wanted):
            self._wanted[position] = number
        for position, number in reversed(undo.variant):
            self._variant[position] = number
        for chain, chosen in reversed(undo.chosen):
            self._choose(chain, chosen)
        for position, state in undo.state:
            self.states[position] = state
        for position, cost in undo.cost:
            self._set_cost(position, cost)

    def _state(self, position: int) -> OpState:
        """How an operator now runs, given its variant and the formats of its inputs."""
        inputs, states = self.wiring.inputs[position], self.states
        key = self._variant[position]
        for producer in inputs:
            key = key * _FORMATS + states[producer].format
        found = self._known[position].get(key)
        if found is None:
            formats = tuple([states[producer].evaluation.output for producer in inputs])
            evaluation = self.model.evaluate(position, self._variant[position], formats)
            found = self._known[position][key] = OpState(evaluation, self.wiring.slots[position])
        return found

    def _charge(self, position: int) -> ChargedCost:
        """What an operator takes, without the casts that an earlier reader of the same tensor, or its producer, already makes."""
        state = self.states[position]
        if not state.shared:
            return state.charge(0)
        elsewhere = 0
        for (slot, share), bit in state.shared.items():
            producer = self.wiring.inputs[position][slot]
            written = self.states[producer].evaluation.written == share
            if written and self.serves(producer, position):
                elsewhere |= bit
                continue
            for reader, its_slot in self.wiring.reads[producer]:
                if reader >= position:
                    break
                if (its_slot, share) in self.states[reader].shared and not (written and self.serves(producer, reader)):
                    elsewhere |= bit
                    break
        return state.charge(elsewhere)


def _adjustable(dag: PrecisionDag) -> dict[OpId, int]:
    """The positions of adjustable operators."""
    return {operator.op_id: position for position, operator in enumerate(dag.operators) if operator.is_adjustable}


def _own_variants(model: CostModel) -> list[int]:
    """The numbers of the variants that operators run in by themselves, by position; a plan names those of adjustable ones."""
    return [
        model.intern(operator.variant) if operator.op_class is OpClass.ADJUSTABLE else model.follows_inputs
        for operator in model.dag.operators
    ]


def _read_formats(model: CostModel) -> tuple[dict[int, tuple[int, ...]], dict[int, tuple[int, ...]]]:
    """Find with whom operators deliver 16 bits, of those that may, and whose format an operator's variant decides beside its
    own; both by position."""
    formats = model.formats
    calls: dict[str, list[int]] = {}
    for op_id, position in model.dag.once(_adjustable).items():
        calls.setdefault(op_id.fqn, []).append(position)
    together, concerns = {}, dict[int, list[int]]()
    for name, others in formats.together.items():
        members = tuple(position for other in others for position in calls.get(other, ()))
        for position in calls.get(name, ()):
            together[position] = members
            for member in members:
                if member != position:
                    concerns.setdefault(member, []).append(position)
    return together, {position: tuple(found) for position, found in concerns.items()}


def _known_states(model: CostModel) -> list[dict[int, OpState]]:
    """The states of operators that all mappers of a model share, by position and what decides it; operators that are alike share
    theirs."""
    found: dict[int, dict[int, OpState]] = {}
    return [found.setdefault(number, {}) for number in model.alike]


class _Undo:
    """What a pending update overwrote."""

    def __init__(self) -> None:
        self.wanted: list[tuple[int, int]] = []
        self.concerned: dict[int, None] = {}
        self.variant: list[tuple[int, int]] = []
        self.chosen: list[tuple[int, ChainVariant]] = []
        self.state: list[tuple[int, OpState]] = []
        self.cost: list[tuple[int, ChargedCost]] = []
