"""The cost model: what one operator costs on one device, given its variant and the formats of its inputs.

``CostModel.evaluate`` is a pure function, cached; everything above it only adds integers up.  That is why an incremental update and
a rebuild from scratch agree bit for bit (docs/design/cost-mapper.md#incremental-equals-full).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import attrs

from qsync_core.errors import PlanError
from qsync_core.ir.dag import OpClass, Operator, PrecisionDag
from qsync_core.ir.formats import OutputFormats
from qsync_core.ir.functions import function_of
from qsync_core.ir.precision import Granularity, Precision, Rounding, Storage
from qsync_core.ir.profile import CastKey, CastModel, OpCost, Profile
from qsync_core.ir.semantics import Autocast, Cast, CastSite, casts, output_precision, run_precision
from qsync_core.ir.variant import Variant
from qsync_planner.replayer.ablation import NOTHING, Ablation
from qsync_planner.replayer.chains import Absorbed, ChainEnd, Chains
from qsync_planner.replayer.max_plus import Work, kernel

T = TypeVar("T")
GRADIENT_NBYTES = Precision.FLOAT32.nbytes
_FREE = OpCost(0, 0, 0, 0)
_KEYS = itertools.starmap(CastKey, itertools.product(Precision, Precision, Granularity, Rounding, (True, False)))
_SHARE = {pair: number for number, pair in enumerate(itertools.product(CastSite, _KEYS))}
"""Shared casts of one tensor are one cast if their sites and keys are equal: a number for each, and so on for each further view of
what a producer made."""
_PLAIN = {precision: Variant.plain(precision) for precision in Precision if not precision.needs_scale}


class PricedCast(NamedTuple):
    """A cast, what it costs, and the number under which consumers of one tensor share it (-1: not shared)."""

    cast: Cast
    dispatch_ns: int
    compute_ns: int
    share: int

    @property
    def work(self) -> Work:
        """The cast's kernel."""
        return kernel(self.dispatch_ns, self.compute_ns)

    @property
    def nbytes(self) -> int:
        """Bytes of the copy that it makes."""
        return self.cast.numel * self.cast.key.target.nbytes


class SavedInput(NamedTuple):
    """An input kept for backward: the operator's input position, and the share number of the cast copy (-1: uncast)."""

    input_index: int
    share: int
    nbytes: int


class Evaluation(NamedTuple):
    """Everything about one operator that follows from its variant and the formats of its inputs.

    Kernel times are calibrated and do not include casts; on a synchronous device dispatch is merged into compute.
    """

    run: Variant
    output: Precision
    casts: tuple[PricedCast, ...]
    forward_dispatch_ns: int
    forward_compute_ns: int
    backward_dispatch_ns: int
    backward_compute_ns: int
    output_bytes: int
    saved_inputs: tuple[SavedInput, ...]
    saves_output: bool
    saved_own_bytes: int
    workspace_bytes: int
    backward_workspace_bytes: int
    gradient_copy_bytes: int
    """The incoming gradient's copies in the gradient formats, alive during this operator's backward."""
    memory_correction_bytes: int
    gradient_bytes: int
    """The output's gradient; the output itself may take nothing (a fused chain without a float result)."""
    delay: int = 0
    """How many operators later it runs: an operator of a fused chain runs with the last of them."""
    held_bytes: int = 0
    """What storing its weight in another format adds to the parameters' bytes: negative where that saves memory."""
    written: int = -1
    """The share number of the copy of its output that it writes by itself; -1: none."""
    written_bytes: int = 0

    @property
    def lasting_bytes(self) -> int:
        """What it adds to memory at every moment."""
        return self.held_bytes + self.memory_correction_bytes

    @property
    def forward(self) -> Work:
        """The forward kernel."""
        return kernel(self.forward_dispatch_ns, self.forward_compute_ns)

    @property
    def backward(self) -> Work:
        """The backward kernel."""
        return kernel(self.backward_dispatch_ns, self.backward_compute_ns)


class PhaseTimes(NamedTuple):
    """Dispatch and compute time of a forward and a backward, in nanoseconds."""

    forward_dispatch_ns: int
    forward_compute_ns: int
    backward_dispatch_ns: int
    backward_compute_ns: int


@attrs.frozen
class Correction:
    """What calibration adds to one operator in one variant, after scaling its kernels."""

    times: PhaseTimes
    memory_bytes: int
    saved_bytes: int = 0
    """How much of that a compiled graph keeps for backward."""

    def plus(self, more: Correction) -> Correction:
        """Both."""
        times = PhaseTimes(*map(sum, zip(self.times, more.times, strict=True)))
        return Correction(times, self.memory_bytes + more.memory_bytes, self.saved_bytes + more.saved_bytes)


@attrs.frozen
class Scale:
    """A rational factor, applied to integers with rounding to the nearest."""

    numerator: int = 1
    denominator: int = 1

    def __call__(self, value: int) -> int:
        """The value scaled."""
        return (2 * value * self.numerator + self.denominator) // (2 * self.denominator)


@attrs.frozen
class Calibration:
    """How the sum of parts is brought to whole measured steps (see :mod:`qsync_planner.replayer.calibration`).

    Attributes:
        scales: factors of every operator's kernel times, in the order of :class:`PhaseTimes`.
        product_scales: those of products, which a compiler leaves to libraries; None: the same.
        everywhere: added to every operator, in execution order, where there was nothing to scale.
        corrections: what a rung adds to an adjustable operator that runs in it: ``[operator position, variant]``.
        optimizer_dispatch_ns, optimizer_compute_ns: one optimizer step, with everything of a step outside forward and backward.
        memory_bytes: added to the peak.
        memory_floor_bytes: the peak is never below this (a moment that no plan changes, such as the optimizer's), without DDP's
            buckets.
        saved_bytes: how much of ``memory_bytes`` is kept for backward, and with it proportional to the batch.
    """

    optimizer_dispatch_ns: int
    optimizer_compute_ns: int
    scales: tuple[Scale, ...] = (Scale(),) * 4
    product_scales: tuple[Scale, ...] | None = None
    everywhere: tuple[PhaseTimes, ...] = ()
    corrections: Mapping[tuple[int, Variant], Correction] = attrs.field(factory=dict)
    memory_bytes: int = 0
    memory_floor_bytes: int = 0
    saved_bytes: int = 0


@attrs.frozen
class Wiring:
    """Which operator reads which, as positions in ``dag.operators``.

    Attributes:
        inputs: per operator its producers.
        slots: per operator and input the first of its inputs that reads the same tensor.
        readers: per operator its consumers, each once, ascending.
        reads: the same, each with the slot that reads the operator.
        parameter_gradients: per moment of a step (docs/design/memory.md#moments) the bytes of parameters' gradients that begin to
            live: at their last user's backward.
        gradients_copied: per moment, and for the one after the last, the bytes of those whose first user ran backward just before
            it: from there on a gradient that DDP keeps as a view of its bucket is nowhere else.
        first_gradient: per operator the moment at which its output's gradient is first made: the backward of its last reader that
            makes one.  The last operator (the loss) starts from its own; None where no reader makes any, and for inputs.
    """

    inputs: tuple[tuple[int, ...], ...]
    slots: tuple[tuple[int, ...], ...]
    readers: tuple[tuple[int, ...], ...]
    reads: tuple[tuple[tuple[int, int], ...], ...]
    parameter_gradients: tuple[int, ...]
    gradients_copied: tuple[int, ...]
    first_gradient: tuple[int | None, ...]

    @classmethod
    def of(cls, dag: PrecisionDag) -> Wiring:
        """The wiring of a model."""
        return dag.once(_wiring)


def _wiring(dag: PrecisionDag) -> Wiring:
    inputs = tuple(tuple(dag.index[producer] for producer in operator.inputs) for operator in dag.operators)
    readers = tuple(tuple(dict.fromkeys(consumers)) for consumers in dag.consumers)
    reads = tuple(tuple((r, inputs[r].index(position)) for r in row) for position, row in enumerate(readers))
    slots = tuple(tuple(map(row.index, row)) for row in inputs)
    return Wiring(inputs, slots, readers, reads, *_parameter_gradients(dag), _first_gradients(dag, inputs))


def _parameter_gradients(dag: PrecisionDag) -> tuple[tuple[int, ...], tuple[int, ...]]:
    numel = {p.fqn: p.numel for p in dag.parameters if p.requires_grad}
    first_user: dict[str, int] = {}
    last_user: dict[str, int] = {}
    for position, operator in enumerate(dag.operators):
        for name in operator.parameters:
            first_user.setdefault(name, position)
            last_user[name] = position
    begin = [0] * (2 * len(dag.operators))
    copied = [0, *begin]
    for name, size in numel.items():
        if name in last_user:
            begin[-1 - last_user[name]] += size * GRADIENT_NBYTES
            copied[-1 - first_user[name]] += size * GRADIENT_NBYTES
    return tuple(begin), tuple(copied)


def is_product(operator: Operator) -> bool:
    """Whether a compiler leaves an operator to a library's kernel or to ours, and fuses it with nothing."""
    return operator.is_adjustable or function_of(operator.kind).is_product


def is_fused(cast: Cast) -> bool:
    """Whether a compiler makes a cast a part of the kernel before or behind it: one of an activation or a gradient between floats.

    A weight's is a pass of its own.
    """
    return cast.site is not CastSite.WEIGHT and not cast.key.source.needs_scale and not cast.key.target.needs_scale


def _first_gradients(dag: PrecisionDag, inputs: Sequence[Sequence[int]]) -> tuple[int | None, ...]:
    last = 2 * len(dag.operators) - 1

    def first(producer: int) -> int | None:
        readers = dag.consumers[producer]
        for reader in reversed(readers):
            skipped = dag.operators[reader].no_grad_inputs
            if any(source == producer and i not in skipped for i, source in enumerate(inputs[reader])):
                return last - reader
        return None if readers else last - producer

    return tuple(None if operator.kind == "input" else first(position) for position, operator in enumerate(dag.operators))


def _cast_before(dag: PrecisionDag, autocast: Autocast | None) -> frozenset[int]:
    """Operators whose weight autocast casts for an earlier one that keeps the copy too; in a forward it casts each once."""
    first: dict[str, int] = {}
    found: set[int] = set()
    for position, operator in enumerate(dag.operators if autocast is not None else ()):
        keeps = operator.is_adjustable and operator.parameters and 0 not in operator.no_grad_inputs
        if keeps and first.setdefault(operator.parameters[0], position) != position:
            found.add(position)
    return frozenset(found)


def _first_calls(dag: PrecisionDag) -> frozenset[int]:
    """The first calls of modules, by position: all calls of one hold the same weight."""
    first: dict[str, int] = {}
    for position, operator in enumerate(dag.operators):
        first.setdefault(operator.op_id.fqn, position)
    return frozenset(first.values())


def _operator_facts(dag: PrecisionDag) -> tuple[int, ...]:
    """A number for everything about an operator but its name, what it reads and what was measured of it, by position."""
    numbers: dict[tuple[object, ...], int] = {}
    wiring, first_calls, found = Wiring.of(dag), dag.once(_first_calls), []
    for position, o in enumerate(dag.operators):
        produced = tuple(dag.operators[producer].output_numel for producer in wiring.inputs[position])
        own = (o.op_class, o.is_adjustable, o.variant, o.no_grad_inputs, o.views, produced, wiring.slots[position])
        found.append(numbers.setdefault((o.cost_key, own, position in first_calls), len(numbers)))
    return tuple(found)


class CostModel:
    """Costs of a model's operators on one device type.

    Attributes:
        follows_inputs: the variant number of operators that have no variant of their own.

    Args:
        calibration: how they are brought to whole steps; None for the plain sum of parts.
        without: parts of the model that are left out.
        lowers: whether it is one of plans that lower some operator (:attr:`~qsync_core.ir.semantics.Autocast.beside_plan`).
    """

    def __init__(
        self,
        dag: PrecisionDag,
        profile: Profile,
        calibration: Calibration | None = None,
        without: Ablation = NOTHING,
        *,
        lowers: bool = False,
    ) -> None:
        self.dag = dag
        self.profile = profile
        self.synchronous = profile.device.is_synchronous
        if calibration is None:
            dispatch, compute = profile.optimizer_dispatch_ns, profile.optimizer_compute_ns
            calibration = Calibration(0, dispatch + compute) if self.synchronous else Calibration(dispatch, compute)
        self._without_dispatch = Ablation.DISPATCH in without and not self.synchronous
        self._without_casts = Ablation.CASTS in without
        self._compiled = profile.compiled is not None
        self.calibration = attrs.evolve(calibration, optimizer_dispatch_ns=0) if self._without_dispatch else calibration
        self.wiring = Wiring.of(dag)
        self._cast_models: dict[CastKey, CastModel] = {model.key: model for model in profile.casts}
        self._variants: dict[Variant | Absorbed | ChainEnd, int] = {}
        self._variant_of: list[Variant | Absorbed | ChainEnd] = []
        self._in_float32: dict[int, int] = {}
        # A compiled graph makes equal casts once, with a plan and without.
        self._autocast = Autocast.of(dag.autocast_base, profile.device.kind, beside_plan=lowers or self._compiled)
        self._cast_before = _cast_before(dag, self._autocast)
        self._first_calls = dag.once(_first_calls)
        self._fixed_formats = self._base_formats() if Ablation.FORMATS in without else ()
        self.follows_inputs = self.intern(_PLAIN[dag.base])
        self._evaluated: dict[tuple[int, int, tuple[Precision, ...]], Evaluation] = {}
        self._facts: dict[object, Any] = {}

    def once(self, work_out: Callable[[CostModel], T]) -> T:
        """What a function makes of this model: worked out when it is first asked for, and the same again."""
        if work_out not in self._facts:
            self._facts[work_out] = work_out(self)
        fact: T = self._facts[work_out]
        return fact

    @property
    def chains(self) -> Chains:
        """The chains of the model."""
        return Chains.of(self.dag)

    @cached_property
    def formats(self) -> OutputFormats:
        """Which of its operators may deliver 16 bits."""
        return OutputFormats.of(self.dag)

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """A number by position: operators of one number cost the same wherever they run alike.  Layers repeat, so there are few."""
        numbers: dict[tuple[object, ...], int] = {}
        corrections: dict[int, list[tuple[Variant, Correction]]] = {}
        for (position, variant), correction in self.calibration.corrections.items():
            corrections.setdefault(position, []).append((variant, correction))
        first: dict[OpCost, int] = {}
        same = [first.setdefault(cost, number) for number, cost in enumerate(self.profile.costs)]
        fixed, everywhere, found = self._fixed_formats, self.calibration.everywhere, []
        for position, facts in enumerate(self.dag.once(_operator_facts)):
            measured = self.profile.cost_index.get(self.dag.operators[position].op_id)
            key = (
                facts,
                None if measured is None else tuple([(variant, same[number]) for variant, number in measured.items()]),
                everywhere and everywhere[position],
                tuple(corrections.get(position, ())),
                position in self._cast_before,
                fixed and tuple([fixed[other] for other in (position, *self.wiring.inputs[position])]),
            )
            found.append(numbers.setdefault(key, len(numbers)))
        return tuple(found)

    def in_float32(self, number: int) -> int:
        """The number of a variant that delivers float32 and is else that of a number."""
        found = self._in_float32.get(number)
        if found is None:
            found = self._in_float32[number] = self.intern(self.variant(number).in_float32)
        return found

    def intern(self, variant: Variant | Absorbed | ChainEnd) -> int:
        """A small number for a variant, or for how an operator of a fused chain runs; equal ones have equal numbers."""
        number = self._variants.setdefault(variant, len(self._variants))
        if number == len(self._variant_of):
            self._variant_of.append(variant)
        return number

    def evaluate(self, position: int, variant: int, inputs: tuple[Precision, ...]) -> Evaluation:
        """Costs and formats of the operator at ``position``.

        Args:
            position: in ``dag.operators``.
            variant: number of its variant, or ``follows_inputs`` where it has none.
            inputs: formats of its activations.

        Raises:
            PlanError: when the profile lacks the operator in the variant it would run in, or a cast it needs.
        """
        key = (self.alike[position], variant, inputs)
        found = self._evaluated.get(key)
        if found is None:
            run = self._variant_of[variant]
            if isinstance(run, Variant):
                found = self._evaluate(position, run, inputs)
            else:
                found = self._evaluate_fused(position, run, inputs)
            self._evaluated[key] = found
        return found

    def cost_number(self, operator: Operator, run: Variant) -> int:
        """The place of an operator's cost among the profile's; -1 of an input, which takes nothing.

        Raises:
            PlanError: when the profile lacks the operator in that variant.
        """
        return self._found(operator, run)[0]

    def variant(self, number: int) -> Variant:
        """The variant of a number that stands for one."""
        found = self._variant_of[number]
        assert isinstance(found, Variant)
        return found

    def _evaluate_fused(self, position: int, run: Absorbed | ChainEnd, inputs: tuple[Precision, ...]) -> Evaluation:
        operator, fixed = self.dag.operators[position], self._fixed_formats
        if fixed:
            inputs = tuple(fixed[producer] for producer in self.wiring.inputs[position])
        output = fixed[position] if fixed else run_precision(operator, inputs, self._autocast)
        cost, written, written_bytes = _FREE, -1, 0
        ends = isinstance(run, ChainEnd)
        if isinstance(run, ChainEnd):
            cost = self.chains.cost(run, self.chains.run(run, output), self.profile)
            copy = run.result.copy
            if copy is not None and (cast := copy.from_(output)) is not None:
                written, written_bytes = _SHARE[CastSite.INPUT, cast], operator.output_numel * copy.precision.nbytes
        nbytes = operator.output_numel * output.nbytes
        times = self._scaled(cost, self.calibration.scales) if ends else PhaseTimes(0, 0, 0, 0)
        return Evaluation(
            _PLAIN[output],
            output,
            (),
            *times,
            output_bytes=nbytes if isinstance(run, ChainEnd) and run.result.float_result else 0,
            saved_inputs=tuple(self._saved_input(operator, index, None, inputs) for index in run.keeps),
            saves_output=False,
            saved_own_bytes=cost.saved_own_bytes,
            workspace_bytes=cost.workspaces[0],
            backward_workspace_bytes=cost.workspaces[1],
            gradient_copy_bytes=0,
            memory_correction_bytes=0,
            gradient_bytes=nbytes if ends else 0,
            delay=0 if isinstance(run, ChainEnd) else run.delay,
            written=written,
            written_bytes=written_bytes,
        )

    def _evaluate(self, position: int, variant: Variant, inputs: tuple[Precision, ...]) -> Evaluation:
        operator = self.dag.operators[position]
        adjustable = operator.op_class is OpClass.ADJUSTABLE
        if adjustable and not operator.is_adjustable and not self.dag.autocast:
            variant = operator.variant  # in a model that holds 16 bits, as the script runs it
        if self._fixed_formats:
            inputs = tuple(self._fixed_formats[producer] for producer in self.wiring.inputs[position])
        run = variant if adjustable else _PLAIN[run_precision(operator, inputs, self._autocast)]
        cost, written = self._measured(operator, run)
        times = self._calibrate(position, run, cost)
        correction = self.calibration.corrections.get((position, run))
        held = 0
        if run.storage.is_quantized and position in self._first_calls:
            held = operator.stored_bytes(run.storage) - operator.stored_bytes(Storage.AS_IS)
        fixed = self._fixed_formats
        output = fixed[position] if fixed else output_precision(operator, run, inputs, self._autocast)
        own = cost.saved_own_bytes
        needed = casts(operator, run if adjustable else None, inputs, self._autocast)
        if position in self._cast_before and self._autocast is not None and self._autocast.runs(operator, run):
            needed = tuple(cast for cast in needed if cast.site is not CastSite.WEIGHT)
            own = max(0, own - operator.weight_numel * run.compute.nbytes)
        if written is not run.output:
            needed = (*needed, Cast(CastSite.OUTPUT, CastKey(written, run.output), operator.output_numel))
        priced = tuple(self._price(operator, cast) for cast in needed)
        copies = {p.cast.input_index: p for p in priced if p.cast.site is CastSite.INPUT}
        if self._autocast is not None and not self._autocast.copies(operator):
            copies = {}
        # A copy that is not shared is this operator's alone: for backward where it saves that input, else while it runs.
        alone = {index: copy.nbytes for index, copy in copies.items() if copy.share < 0}
        passing = sum(nbytes for index, nbytes in alone.items() if index not in cost.saves_inputs)
        return Evaluation(
            run,
            output,
            priced,
            *times,
            output_bytes=operator.output_numel * output.nbytes,
            saved_inputs=tuple(
                self._saved_input(operator, index, copies.get(index), inputs) for index in cost.saves_inputs if index not in alone
            ),
            saves_output=cost.saves_output,
            saved_own_bytes=own + sum(alone[index] for index in cost.saves_inputs if index in alone),
            workspace_bytes=cost.workspaces[0]
            + passing
            + (operator.output_numel * written.nbytes if written is not run.output else 0),
            backward_workspace_bytes=cost.workspaces[1],
            gradient_copy_bytes=sum(p.nbytes for p in priced if p.cast.site is CastSite.GRAD_OUTPUT),
            memory_correction_bytes=correction.memory_bytes if correction else 0,
            gradient_bytes=operator.output_numel * output.nbytes,
            held_bytes=held,
        )

    def _base_formats(self) -> tuple[Precision, ...]:
        """Find the format of every operator's output where all operators run at the base precision."""
        formats: list[Precision] = []
        for operator, producers in zip(self.dag.operators, self.wiring.inputs, strict=True):
            arriving = [formats[producer] for producer in producers]
            variant = _PLAIN[self.dag.base] if operator.is_adjustable or self.dag.autocast else operator.variant
            formats.append(output_precision(operator, variant, arriving, self._autocast))
        return tuple(formats)

    def _measured(self, operator: Operator, run: Variant) -> tuple[OpCost, Precision]:
        """What was measured of an operator, and in which format it wrote its result: where that is not the variant's, an operator
        that delivers float32 was measured delivering 16 bits, and casts.
        """
        number, written = self._found(operator, run)
        if number < 0:
            return _FREE, written
        cost = self.profile.costs[number]
        bad = [i for i in cost.saves_inputs if not 0 <= i < len(operator.inputs)]
        if bad:
            raise PlanError(
                f"the profile of device {self.profile.device.name} says that operator {operator.op_id} saves input {bad[0]}, but "
                f"it has {len(operator.inputs)}; it was made from another graph: run 'qsync profile' again"
            )
        return cost, written

    def _found(self, operator: Operator, run: Variant) -> tuple[int, Precision]:
        by_variant = self.profile.cost_index.get(operator.op_id)
        if by_variant is None:
            if operator.kind == "input":
                return -1, run.output
            raise PlanError(
                f"the profile of device {self.profile.device.name} has no cost of operator {operator.op_id} ({operator.kind}); "
                "it was made from another graph: run 'qsync profile' again"
            )
        number = by_variant.get(run)
        if number is not None:
            return number, run.output
        measured = run.known_as(by_variant)
        if measured is None:
            labels = sorted(v.label for v in by_variant)
            wanted = run.label
            if wanted in labels:  # they differ in what a label leaves out
                labels, wanted = sorted(str(v) for v in by_variant), str(run)
            known = ", ".join(labels) or "none"
            raise PlanError(
                f"the profile of device {self.profile.device.name} has no cost of operator {operator.op_id} ({operator.kind}) in "
                f"{wanted}, only in: {known}; profile again with that precision in the ladder, or leave it out of the cluster's"
            )
        return by_variant[measured], measured.output

    def _price(self, operator: Operator, cast: Cast) -> PricedCast:
        share = -1
        if cast.shared:
            share = _SHARE[cast.site, cast.key] + len(_SHARE) * operator.view(cast.input_index)
        if self._without_casts or (self._compiled and is_fused(cast)):
            return PricedCast(cast, 0, 0, share)
        model = self._cast_models.get(cast.key)
        if model is None:
            key = cast.key
            how = f"{key.granularity}, {key.rounding}" + ("" if key.symmetric else ", affine")
            raise PlanError(
                f"the profile of device {self.profile.device.name} has no cost of the cast {key.source} to {key.target} "
                f"({how}) that operator {operator.op_id} needs; profile again with this ladder"
            )
        compute = model.cost_ns(cast.numel)
        if self.synchronous:
            return PricedCast(cast, 0, model.dispatch_ns + compute, share)
        return PricedCast(cast, 0 if self._without_dispatch else model.dispatch_ns, compute, share)

    def _scaled(self, cost: OpCost, scales: tuple[Scale, ...]) -> PhaseTimes:
        """A measured cost as it is at the base precision of a whole step."""
        forward, backward = cost.forward_dispatch_ns, cost.backward_dispatch_ns
        if self.synchronous:
            measured = (0, forward + cost.forward_compute_ns, 0, backward + cost.backward_compute_ns)
        else:
            measured = (forward, cost.forward_compute_ns, backward, cost.backward_compute_ns)
        times = [scale(time) for scale, time in zip(scales, measured, strict=True)]
        if self._without_dispatch:
            times[0] = times[2] = 0
        return PhaseTimes(*times)

    def _calibrate(self, position: int, run: Variant, cost: OpCost) -> PhaseTimes:
        scales = self.calibration.scales
        if self.calibration.product_scales is not None and is_product(self.dag.operators[position]):
            scales = self.calibration.product_scales
        scaled = self._scaled(cost, scales)
        correction = self.calibration.corrections.get((position, run))
        added = [self.calibration.everywhere[position]] if self.calibration.everywhere else []
        if correction:
            added.append(correction.times)
        elif not added and min(scaled) >= 0:
            return scaled
        times = list(scaled)
        for more in added:
            times = [time + extra for time, extra in zip(times, more, strict=True)]
        if self._without_dispatch:
            times[0] = times[2] = 0
        return PhaseTimes(*(max(0, time) for time in times))

    def _saved_input(self, operator: Operator, index: int, copy: PricedCast | None, inputs: tuple[Precision, ...]) -> SavedInput:
        producer = self.dag[operator.inputs[index]]
        if copy is None:
            return SavedInput(index, -1, producer.output_numel * inputs[index].nbytes)
        return SavedInput(index, copy.share, copy.nbytes)
