"""What whole measured steps add to the sum of parts, from docs/decisions/calibration-by-whole-steps.md, written a second time.

At the base precision every kernel is scaled by measured over modelled time, casts apart.  What a step at a rung then lacks, or has
too much, goes to the adjustable operators in that rung, in proportion to their kernels' time.  Memory likewise: what the base
step lacks to every plan, the rest of a rung to its operators by their elements.  Times are four columns: forward dispatch, forward
compute, backward dispatch, backward compute.  Shares no code with the product.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import attrs
from brute_force_formats import BEFORE_FORWARD, RESULT, WantedCast, size
from brute_force_memory import bucket_bytes, peak_bytes
from brute_force_walk import Walked, Walker

from qsync_core.ir.op_id import OpId
from qsync_core.ir.profile import StepMeasurement
from qsync_core.ir.variant import Variant

Columns = tuple[int, int, int, int]
NONE: Columns = (0, 0, 0, 0)
DISPATCH = (0, 2)


@attrs.frozen
class WholeSteps:
    """What a device's whole steps say of its parts.

    Attributes:
        optimizer: dispatch and compute time of the optimizer step.
        factors: of every kernel, by column.
        everywhere: added to each operator, where there was nothing to scale.
        at_rung: added to an operator that runs in a variant; ``bytes_at_rung`` likewise.
        bytes_always: added to every peak; no peak is below ``least_bytes``.
    """

    optimizer: tuple[int, int]
    factors: tuple[Fraction, ...] = (Fraction(1),) * 4
    everywhere: tuple[Columns, ...] = ()
    at_rung: Mapping[tuple[int, Variant], Columns] = attrs.field(factory=dict)
    bytes_at_rung: Mapping[tuple[int, Variant], int] = attrs.field(factory=dict)
    bytes_always: int = 0
    least_bytes: int = 0
    _seen: dict[object, Columns] = attrs.field(factory=dict, init=False)

    def kernel(self, walker: Walker, place: int, one: Walked) -> Columns:
        """An operator's kernel times without casts; on a CPU device all of it is compute time."""
        key = (place, one.variant, one.leaving)
        if key not in self._seen:
            self._seen[key] = self._kernel(walker, place, one)
        return self._seen[key]

    def _kernel(self, walker: Walker, place: int, one: Walked) -> Columns:
        cost = one.cost
        columns = [cost.forward_dispatch_ns, cost.forward_compute_ns, cost.backward_dispatch_ns, cost.backward_compute_ns]
        if one_clock(walker):
            columns = [0, columns[0] + columns[1], 0, columns[2] + columns[3]]
        scaled = [math.floor(factor * column + Fraction(1, 2)) for factor, column in zip(self.factors, columns, strict=True)]
        added = [self.everywhere[place] if self.everywhere else NONE]
        if one.variant is not None:
            added.append(self.at_rung.get((place, one.variant), NONE))
        a, b, c, d = (max(0, sum(parts)) for parts in zip(scaled, *added, strict=True))
        return a, b, c, d

    def peak(self, walker: Walker, walked: Sequence[Walked], *, several_ranks: bool) -> int:
        """The peak of one rank, in bytes."""
        extra = sum(self.bytes_at_rung.get((place, one.variant), 0) for place, one in enumerate(walked) if one.variant is not None)
        least = self.least_bytes + bucket_bytes(walker, several_ranks=several_ranks)
        passes = min(2, walker.dag.accumulate)
        peak = peak_bytes(walker, walked, several_ranks=several_ranks, micro_batches=passes)
        return max(least, peak + self.bytes_always + extra)


def one_clock(walker: Walker) -> bool:
    """Whether the CPU runs the kernels."""
    return walker.profile.device.kind == "cpu"


def cast_times(walker: Walker, cast: WantedCast) -> tuple[int, int]:
    """Dispatch and compute time of a cast."""
    model = walker.cast_models[cast.key]
    compute = max(0, round(model.intercept_ns + model.ns_per_element * cast.elements))
    return (0, model.dispatch_ns + compute) if one_clock(walker) else (model.dispatch_ns, compute)


def learn(walker: Walker, base: Variant) -> WholeSteps:
    """What the profile's steps say; without one at the base precision, nothing."""
    profile = walker.profile
    base_step = next((step for step in profile.steps if step.variant == base), None)
    if base_step is None:
        plain = (profile.optimizer_dispatch_ns, profile.optimizer_compute_ns)
        return WholeSteps((0, sum(plain)) if one_clock(walker) else plain)
    known = _learn_base(walker, base_step)
    peaks = [step.peak_bytes for step in profile.steps]
    least = min(peaks) if peaks.count(min(peaks)) > 1 else 0
    if base_step.peak_bytes:
        known = attrs.evolve(known, bytes_always=_lacking_bytes(walker, known, base_step, least))
    at_rung: dict[tuple[int, Variant], Columns] = {}
    bytes_at_rung: dict[tuple[int, Variant], int] = {}
    for step in sorted(profile.steps, key=lambda step: step.variant.output != "float32"):  # what it says of others' runs first
        if step is not base_step and all(step.variant in profile.cost_index[name] for name in _adjustable(walker)):
            so_far = attrs.evolve(known, at_rung=dict(at_rung), bytes_at_rung=dict(bytes_at_rung))
            _learn_rung(walker, so_far, step, least, at_rung, bytes_at_rung)
    return attrs.evolve(known, at_rung=at_rung, bytes_at_rung=bytes_at_rung, least_bytes=least)


def _learn_base(walker: Walker, step: StepMeasurement) -> WholeSteps:
    profile = walker.profile
    optimizer = (
        step.optimizer_dispatch_ns or profile.optimizer_dispatch_ns,
        step.optimizer_compute_ns or profile.optimizer_compute_ns,
    )
    if one_clock(walker):
        optimizer = (0, sum(optimizer))
    known = WholeSteps(optimizer)
    walked = walker.walk(dict.fromkeys(_adjustable(walker), step.variant))
    kernels, casts = _sums(walker, known, walked)
    factors, added = [], [[0, 0, 0, 0] for _ in walked]
    for column, wanted in enumerate(_measured(walker, known, step, walked)):
        to_fill = wanted - casts[column]
        factors.append(Fraction(to_fill, kernels[column]) if kernels[column] > 0 and to_fill > 0 else Fraction(1))
        if kernels[column] == 0 and to_fill > 0:
            shares = share_out(to_fill, [int(operator.kind != "input") for operator in walker.dag.operators])
            for entry, part in zip(added, shares, strict=True):
                entry[column] = part
    everywhere = tuple((a, b, c, d) for a, b, c, d in added)
    return attrs.evolve(known, factors=tuple(factors), everywhere=everywhere)


def _learn_rung(
    walker: Walker,
    known: WholeSteps,
    step: StepMeasurement,
    least: int,
    at_rung: dict[tuple[int, Variant], Columns],
    bytes_at_rung: dict[tuple[int, Variant], int],
) -> None:
    names = _adjustable(walker)
    walked = walker.walk(dict.fromkeys(names, step.variant))
    places = [place for place in map(walker.place.__getitem__, names) if (place, walked[place].variant) not in known.at_rung]
    kernels, casts = _sums(walker, known, walked)
    own = [known.kernel(walker, place, walked[place]) for place in places]
    shares = []
    for column, wanted in enumerate(_measured(walker, known, step, walked)):
        times = [columns[column] for columns in own]
        rest = wanted - kernels[column] - casts[column]
        if column in DISPATCH and wanted == 0:  # dispatch was not measured apart
            rest = 0
        weights = times
        if not any(times):
            weights = [1 if column in DISPATCH else walker.dag.operators[place].flops for place in places]
        shares.append(share_out(max(rest, -sum(times)), weights))
    elements = [
        size(walker.dag.operators[place].input_shapes[0]) + size(walker.dag.operators[place].weight_shape) for place in places
    ]
    lacking = _lacking_bytes(walker, known, step, least) if step.peak_bytes else 0
    for place, a, b, c, d, nbytes in zip(places, *shares, share_out(lacking, elements), strict=True):
        at_rung[place, walked[place].variant] = (a, b, c, d)
        bytes_at_rung[place, walked[place].variant] = nbytes


def _adjustable(walker: Walker) -> list[OpId]:
    return [
        operator.op_id for operator in walker.dag.operators if operator.op_class == "adjustable" and not operator.not_applicable
    ]


def _sums(walker: Walker, known: WholeSteps, walked: Sequence[Walked]) -> tuple[list[int], list[int]]:
    """Time of all kernels and of all casts, by column."""
    kernels, casts = [0] * 4, [0] * 4
    for place, one in enumerate(walked):
        for column, time in enumerate(known.kernel(walker, place, one)):
            kernels[column] += time
        for cast in one.performed:
            first = 0 if cast.where in (*BEFORE_FORWARD, RESULT) else 2
            dispatch, compute = cast_times(walker, cast)
            casts[first] += dispatch
            casts[first + 1] += compute
    return kernels, casts


def _measured(walker: Walker, known: WholeSteps, step: StepMeasurement, walked: Sequence[Walked]) -> Columns:
    """What the step took, by column, if its optimizer had been that of all plans, so that the whole comes to the same.

    On a CPU device it is the whole period up to the optimizer, shared out as it was measured.
    """
    if not one_clock(walker):
        backwards = []
        for backward, own, common in (
            (step.backward_dispatch_ns, step.optimizer_dispatch_ns, known.optimizer[0]),
            (step.backward_compute_ns, step.optimizer_compute_ns, known.optimizer[1]),
        ):
            backwards.append(max(backward + own - common, 0) if backward > 0 < own else backward)
        return step.forward_dispatch_ns, step.forward_compute_ns, backwards[0], backwards[1]
    forward = step.forward_dispatch_ns + step.forward_compute_ns
    backward = step.backward_dispatch_ns + step.backward_compute_ns
    if forward + backward == 0:
        kernels, casts = _sums(walker, known, walked)
        forward, backward = kernels[1] + casts[1], kernels[3] + casts[3]
    period = step.iteration_ns - known.optimizer[1]
    if period > 0 and forward + backward > 0:
        forward = math.floor(Fraction(period * forward, forward + backward))
        backward = period - forward
    return 0, forward, 0, backward


def _lacking_bytes(walker: Walker, known: WholeSteps, step: StepMeasurement, least: int) -> int:
    """What the model lacks of a measured peak; a step at the least peak only says that the model may not exceed it."""
    walked = walker.walk(dict.fromkeys(_adjustable(walker), step.variant))
    lacking = step.peak_bytes - peak_bytes(walker, walked, several_ranks=False) - known.bytes_always
    lacking -= sum(known.bytes_at_rung.get((place, one.variant), 0) for place, one in enumerate(walked))
    return min(0, lacking) if step.peak_bytes == least else lacking


def share_out(total: int, weights: Sequence[int]) -> list[int]:
    """Whole parts of a total in proportion to weights: the odd units go to the largest fractions, the earlier one of equals."""
    if not any(weights):
        weights = [1] * len(weights)
    exact = [Fraction(abs(total) * weight, sum(weights)) for weight in weights]
    parts = [math.floor(part) for part in exact]
    in_order = sorted(range(len(parts)), key=lambda i: (parts[i] - exact[i], i))
    for i in in_order[: abs(total) - sum(parts)]:
        parts[i] += 1
    return [part if total >= 0 else -part for part in parts]
