"""Calibration: bringing the sum of measured parts to whole measured steps (docs/design/cost-mapper.md#calibration).

Operators timed alone miss what a step adds (autograd, Python, cold caches) and gain what it overlaps.  The profile holds whole
steps at the base precision and at every rung uniformly; the model reproduces each of them, and plans in between mix their
corrections:

1. at the base precision every operator's kernels are scaled by measured over modelled, per phase and resource, in all its variants;
2. at each rung the rest (measured minus what step 1 gives) goes to the adjustable operators as they run there, in proportion to
   their kernels' time there, so that none becomes negative (to their flops where no time was measured).  In proportion to flops
   throughout would be wrong by far for single operators: a ResNet's convolutions have equal flops and differ in time tenfold;
3. beside lowered operators, those that stay at the base precision take the CPU longer than without a plan, equally much each.

Memory likewise: what is missing at the base is added to every plan, the rest at a rung to its operators by their elements.

Casts keep their own measured models.  Everything is rounded to integers once, per (operator, variant).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Container, Mapping, Sequence

import attrs

from qsync_core.errors import PlanError
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import Profile, StepMeasurement
from qsync_core.ir.variant import Variant
from qsync_planner.replayer.ablation import NOTHING, Ablation
from qsync_planner.replayer.cost_mapper import AFTER_FORWARD, BEFORE_FORWARD, CostMapper
from qsync_planner.replayer.cost_model import Calibration, Correction, CostModel, PhaseTimes, Scale, is_product
from qsync_planner.replayer.max_plus import kernel, sequence
from qsync_planner.replayer.memory import MemoryLedger

_PARTS = 64
"""A measured dispatch is cut to so many shares of it; which is found in 8 replays of a step."""
_CLOSE = 200
"""A replayed step may be longer than it was measured by this part of it."""


def spread_integer(total: int, weights: Sequence[int]) -> list[int]:
    """Split a total in proportion to weights, as integers that add up to it (equally where all weights are 0).

    Largest remainders get the odd units, earlier positions first among equals.
    """
    if not weights:
        return []
    if sum(weights) == 0:
        weights = [1] * len(weights)
    whole = sum(weights)
    sign = -1 if total < 0 else 1
    parts = [abs(total) * weight // whole for weight in weights]
    remainders = sorted(range(len(weights)), key=lambda i: (-(abs(total) * weights[i] % whole), i))
    for position in remainders[: abs(total) - sum(parts)]:
        parts[position] += 1
    return [sign * part for part in parts]


def calibrated_model(
    dag: PrecisionDag, profile: Profile, base: Variant, without: Ablation = NOTHING, *, lowers: bool = False
) -> CostModel:
    """A cost model of this device that reproduces the profile's whole steps.

    Without a measured step at the base precision, it begins from one in which frozen weights are stored otherwise (the base did not
    fit); without that, it is the plain sum of parts.  What ``without`` leaves out, is left out of the model
    that the whole one is calibrated to.  ``lowers``: of plans that lower some operator; the step at the base precision is one
    without a plan, where autocast casts for each operator by itself.
    """
    plain = CostModel(dag, profile)
    stored = next((step for step in profile.steps if step.variant.storage.is_quantized), None)
    base_step = next((step for step in profile.steps if step.variant == base), stored)
    if base_step is None:
        return CostModel(dag, profile, without=without, lowers=lowers) if without or lowers else plain
    if base_step.variant != base:  # a plan was in force
        plain = CostModel(dag, profile, lowers=True)
    floor = _memory_floor([step.peak_bytes for step in profile.steps])
    calibration = attrs.evolve(_fit_base(dag, profile, plain, base_step, base), memory_floor_bytes=floor)
    if base_step.peak_bytes:
        memory_bytes, saved_bytes = _missing_memory(dag, profile, calibration, base_step, _all_in(dag, base_step.variant, base))
        calibration = attrs.evolve(calibration, memory_bytes=memory_bytes, saved_bytes=saved_bytes)
    rungs: dict[tuple[int, Variant], Correction] = {}
    # Operators that may not deliver 16 bits run as those of the rung that delivers float32, where that was measured too.
    for step in sorted(profile.steps, key=lambda step: step.variant.output is not Precision.FLOAT32):
        if step is not base_step:
            rungs.update(_fit_rung(dag, profile, attrs.evolve(calibration, corrections=rungs), step, base))
    if lowers:
        rungs.update(_fit_alternating(dag, profile, attrs.evolve(calibration, corrections=rungs), base))
    return CostModel(dag, profile, attrs.evolve(calibration, corrections=rungs), without, lowers=lowers)


def _fit_alternating(
    dag: PrecisionDag, profile: Profile, calibration: Calibration, base: Variant
) -> dict[tuple[int, Variant], Correction]:
    """What operators at the base precision take beside lowered ones: what was measured where those alternate, less what the casts
    between them account for, for as many operators as stayed.
    """
    measured = profile.alternating
    if measured is None:
        return {}
    without_plan, adjustable = CostModel(dag, profile, calibration), dag.adjustable
    model = CostModel(dag, profile, calibration, lowers=True)
    every = _all_in(dag, measured.variant, base)
    lowered = {op_id: variant if number % 2 else base for number, (op_id, variant) in enumerate(every.items())}
    staying = len(adjustable) - len(adjustable) // 2
    try:
        ends = [uniform_times(dag, of, variant) for of, variant in ((without_plan, base), (model, measured.variant))]
    except PlanError:  # as in _fit_rung
        return {}
    column = 1 if model.synchronous else 0  # there all of it is compute
    parts = []
    for phase, wanted in ((column, measured.forward_ns), (column + 2, measured.backward_ns)):
        have = _modelled(CostMapper(dag, model, lowered))[phase] - (ends[0][phase] + ends[1][phase]) // 2
        total = max(0, wanted - have) * len(adjustable) // staying
        parts.append(spread_integer(total, [1] * len(adjustable)))
    found = {}
    for operator, forward, backward in zip(adjustable, *parts, strict=True):
        times = PhaseTimes(0, forward, 0, backward) if model.synchronous else PhaseTimes(forward, 0, backward, 0)
        found[dag.index[operator.op_id], base] = Correction(times, 0)
    return found


def _target(step: StepMeasurement, synchronous: bool, optimizer: tuple[int, int], modelled: PhaseTimes) -> PhaseTimes:
    """The phases that a step was measured to have, beside the one optimizer of all plans.

    By how much the step's own optimizer took longer (dispatch, compute), its backward does, so that nothing of the period is lost.
    On a synchronous device forward and backward are scaled to fill the measured period up to the optimizer.
    """
    phases = PhaseTimes(step.forward_dispatch_ns, step.forward_compute_ns, step.backward_dispatch_ns, step.backward_compute_ns)
    dispatch_ns, optimizer_ns = optimizer
    if not synchronous:
        return phases._replace(
            backward_dispatch_ns=_longer(phases.backward_dispatch_ns, step.optimizer_dispatch_ns, dispatch_ns),
            backward_compute_ns=_longer(phases.backward_compute_ns, step.optimizer_compute_ns, optimizer_ns),
        )
    forward = phases.forward_dispatch_ns + phases.forward_compute_ns
    backward = phases.backward_dispatch_ns + phases.backward_compute_ns
    if forward + backward == 0:
        forward, backward = modelled.forward_compute_ns, modelled.backward_compute_ns
    if step.iteration_ns > optimizer_ns and forward + backward > 0:
        both = step.iteration_ns - optimizer_ns
        forward = both * forward // (forward + backward)
        backward = both - forward
    return PhaseTimes(0, forward, 0, backward)


def _longer(backward_ns: int, own_ns: int, of_all_ns: int) -> int:
    """A backward and what an optimizer of its own took more than that of all plans; a time of 0 was not measured apart."""
    return max(0, backward_ns + own_ns - of_all_ns) if backward_ns and own_ns else backward_ns


def _optimizer(profile: Profile, step: StepMeasurement) -> tuple[int, int]:
    dispatch = step.optimizer_dispatch_ns or profile.optimizer_dispatch_ns
    compute = step.optimizer_compute_ns or profile.optimizer_compute_ns
    return (0, dispatch + compute) if profile.device.is_synchronous else (dispatch, compute)


def _modelled(mapper: CostMapper) -> PhaseTimes:
    forward, backward = sequence(mapper.forward), sequence(mapper.backward)
    return PhaseTimes(forward.dispatch_ns, forward.compute_ns, backward.dispatch_ns, backward.compute_ns)


def uniform_times(dag: PrecisionDag, model: CostModel, variant: Variant) -> PhaseTimes:
    """What a model says of a step with every adjustable operator that runs in a variant in it, the others at the base.

    Raises:
        PlanError: when an operator was not measured so.
    """
    return _modelled(CostMapper(dag, model, _all_in(dag, variant, Variant.plain(dag.base))))


def _fit_base(dag: PrecisionDag, profile: Profile, plain: CostModel, step: StepMeasurement, base: Variant) -> Calibration:
    variants = _all_in(dag, step.variant, base)
    mapper = CostMapper(dag, plain, variants)
    optimizer = _optimizer(profile, step)

    def fitted(target: PhaseTimes) -> Calibration:
        return _scaled_to(target, mapper, optimizer, compiled=profile.compiled is not None)

    def period_ns(target: PhaseTimes) -> int:
        model = CostModel(dag, profile, fitted(target), lowers=step.variant != base)
        return _level_period_ns(CostMapper(dag, model, variants), optimizer)

    target = _target(step, profile.device.is_synchronous, optimizer, _modelled(mapper))
    return fitted(_filling(target, step, period_ns) if _begins_level(profile) else target)


def _begins_level(profile: Profile) -> bool:
    """Whether CPU and device begin every step together, so that it takes as long as its longest chain."""
    return profile.synchronises and not profile.device.is_synchronous


def _level_period_ns(mapper: CostMapper, optimizer: tuple[int, int]) -> int:
    return sequence((*mapper.forward, *reversed(mapper.backward), kernel(*optimizer))).chain_ns


def _filling(target: PhaseTimes, step: StepMeasurement, period_ns: Callable[[PhaseTimes], int]) -> PhaseTimes:
    """The phases with as much less dispatch as it takes for the longest chain of a step to be no longer than it was measured.

    Phases alone do not say which kernels wait for the CPU: much computation behind a forward's last dispatch (a loss over a large
    vocabulary) comes on top of all of it.
    """
    most = step.iteration_ns + step.iteration_ns // _CLOSE

    def share(parts: int) -> PhaseTimes:
        forward_ns, backward_ns = (ns * parts // _PARTS for ns in (target.forward_dispatch_ns, target.backward_dispatch_ns))
        return target._replace(forward_dispatch_ns=forward_ns, backward_dispatch_ns=backward_ns)

    if not step.iteration_ns or period_ns(target) <= most:
        return target
    # Where no share of it brings the step there (a cast in front of all computation), as much stays as makes it no longer.
    most = max(most, period_ns(share(1)))
    return share(bisect_right(range(_PARTS), most, lo=2, key=lambda parts: period_ns(share(parts))) - 1)


def _scaled_to(target: PhaseTimes, mapper: CostMapper, optimizer: tuple[int, int], *, compiled: bool) -> Calibration:
    """What brings the sum of parts at the base precision to measured phases."""
    scales: list[Scale] = []
    product_scales: list[Scale] = []
    operators = mapper.dag.operators
    everywhere = [[0, 0, 0, 0] for _ in operators]
    products = _product_times(mapper) if compiled else PhaseTimes(0, 0, 0, 0)
    for column, (want, have, cast) in enumerate(zip(target, _modelled(mapper), _cast_times(mapper), strict=True)):
        kernels, apart = have - cast, products[column]
        if apart and kernels > apart and want > cast + apart:  # products as they are alone, and the rest is what was fused
            scales.append(Scale(want - cast - apart, kernels - apart))
            product_scales.append(Scale())
            continue
        if kernels > 0 and want > cast:
            scales.append(Scale(want - cast, kernels))
            product_scales.append(scales[-1])
            continue
        casts_take_all = kernels > 0 and want > 0 and column in (0, 2)  # dispatch: nothing is left of it for kernels
        scales.append(Scale(0, kernels) if casts_take_all else Scale())
        product_scales.append(scales[-1])
        if kernels == 0 and want > cast:
            real = [int(operator.kind != "input") for operator in operators]
            for entry, part in zip(everywhere, spread_integer(want - cast, real), strict=True):
                entry[column] = part
    added = tuple(PhaseTimes(*entry) for entry in everywhere) if any(map(any, everywhere)) else ()
    apart_from_rest = None if product_scales == scales else tuple(product_scales)
    return Calibration(*optimizer, tuple(scales), apart_from_rest, added)


def _product_times(mapper: CostMapper) -> PhaseTimes:
    """Compute time of products, which compiled graphs run as they are alone; their dispatch is that of the whole graph."""
    states = [mapper.states[i].evaluation for i, operator in enumerate(mapper.dag.operators) if is_product(operator)]
    return PhaseTimes(0, sum(one.forward_compute_ns for one in states), 0, sum(one.backward_compute_ns for one in states))


def _memory_floor(peaks: Sequence[int]) -> int:
    """The peak that several rungs share to the byte: it lies where no rung changes anything.  0 where no two lowest peaks agree."""
    lowest = min(peaks, default=0)
    return lowest if peaks.count(lowest) > 1 else 0


def _missing_memory(
    dag: PrecisionDag, profile: Profile, calibration: Calibration, step: StepMeasurement, variants: Mapping[OpId, Variant]
) -> tuple[int, int]:
    """What the model lacks of a measured peak, and of what a compiled graph was measured to keep for backward.

    A step at the floor only says that the model may not exceed it.
    """
    lowers = step.variant != Variant.plain(dag.base)
    unbounded = CostModel(dag, profile, attrs.evolve(calibration, memory_floor_bytes=0), lowers=lowers)
    ledger = MemoryLedger(CostMapper(dag, unbounded, variants), distributed=False)
    missing = step.peak_bytes - ledger.peak_bytes()
    saved = 0 if step.saved_bytes is None else step.saved_bytes - ledger.saved_bytes()
    return min(0, missing) if step.peak_bytes == calibration.memory_floor_bytes else missing, saved


def _cast_times(mapper: CostMapper) -> PhaseTimes:
    """Time of the charged casts alone."""
    times = [0, 0, 0, 0]
    for charged in mapper.charged:
        for priced in charged:
            first = 0 if priced.cast.site in (*BEFORE_FORWARD, *AFTER_FORWARD) else 2
            times[first] += priced.dispatch_ns
            times[first + 1] += priced.compute_ns
    return PhaseTimes(*times)


def _fit_rung(
    dag: PrecisionDag, profile: Profile, calibration: Calibration, step: StepMeasurement, base: Variant
) -> dict[tuple[int, Variant], Correction]:
    """What operators take beyond their parts where all run in a rung; where some of them alone were measured in it, those first."""
    every = _all_in(dag, step.variant, base)
    alone = [mixed for mixed in profile.mixed if mixed.step.variant == step.variant and every.keys() >= set(mixed.lowered)]
    found: dict[tuple[int, Variant], Correction] = {}
    for mixed in alone:
        variants = dict.fromkeys(every, base) | dict.fromkeys(mixed.lowered, step.variant)
        found |= _fit(dag, profile, calibration, mixed.step, variants, mixed.lowered)
    lowered = {op_id for op_id, variant in every.items() if variant != base} or every.keys()
    others = lowered - {op_id for mixed in alone for op_id in mixed.lowered}
    # What the others cannot take back, because no time becomes negative, all give together: graphs of some layers alone may each
    # take the CPU what the whole takes it once.
    for who in dict.fromkeys((frozenset(others or lowered), frozenset(lowered))):
        known = attrs.evolve(calibration, corrections={**calibration.corrections, **found})
        for key, more in _fit(dag, profile, known, step, every, who, settled=calibration.corrections).items():
            found[key] = found[key].plus(more) if key in found else more
    return found


def _all_in(dag: PrecisionDag, rung: Variant, base: Variant) -> dict[OpId, Variant]:
    """What operators ran in where a whole step was measured in a rung: those that do not run in it stayed at the base."""
    return {operator.op_id: rung if operator.runs_in(rung) else base for operator in dag.adjustable}


def _fit(
    dag: PrecisionDag,
    profile: Profile,
    calibration: Calibration,
    step: StepMeasurement,
    variants: Mapping[OpId, Variant],
    who: Collection[OpId],
    settled: Container[tuple[int, Variant]] | None = None,
) -> dict[tuple[int, Variant], Correction]:
    """What is to be added to some of the lowered operators, so that a measured step comes out; ``settled`` stay as they are."""
    model = CostModel(dag, profile, calibration, lowers=True)
    try:
        mapper = CostMapper(dag, model, variants)
    except PlanError:  # an operator cannot run in this rung, so the step was not uniform and says nothing about the model's sum
        return {}
    modelled = _modelled(mapper)
    optimizer = (calibration.optimizer_dispatch_ns, calibration.optimizer_compute_ns)
    target = _target(step, profile.device.is_synchronous, optimizer, modelled)
    runs = {i: mapper.states[i].evaluation.run for i in sorted(dag.index[op_id] for op_id in who)}
    positions = [i for i, run in runs.items() if (i, run) not in (calibration.corrections if settled is None else settled)]
    evaluations = [mapper.states[i].evaluation for i in positions]
    flops = [dag.operators[i].flops for i in positions]

    def times_for(target: PhaseTimes) -> list[PhaseTimes]:
        columns: list[list[int]] = []
        for name, want, have in zip(PhaseTimes._fields, target, modelled, strict=True):
            dispatch = "dispatch" in name
            rest = 0 if dispatch and want == 0 else want - have  # a dispatch time of 0 was not measured apart
            times = [getattr(evaluation, name) for evaluation in evaluations]
            weights = times if any(times) else [1] * len(positions) if dispatch else flops
            columns.append(spread_integer(max(rest, -sum(times)), weights))
        return [PhaseTimes(*row) for row in zip(*columns, strict=True)]

    def period_ns(target: PhaseTimes) -> int:
        rows = zip(positions, times_for(target), strict=True)
        more = {(position, runs[position]): Correction(times, 0) for position, times in rows}
        corrected = attrs.evolve(calibration, corrections={**calibration.corrections, **more})
        return _level_period_ns(CostMapper(dag, CostModel(dag, profile, corrected, lowers=True), variants), optimizer)

    if _begins_level(profile):
        target = _filling(target, step, period_ns)
    memory: list[Sequence[int]] = [[0] * len(positions)] * 2
    if step.peak_bytes:
        elements = [dag.operators[i].input_numel(0) + dag.operators[i].weight_numel for i in positions]
        memory = [spread_integer(missing, elements) for missing in _missing_memory(dag, profile, calibration, step, variants)]
    rows = zip(positions, times_for(target), *memory, strict=True)
    return {(position, runs[position]): Correction(times, *nbytes) for position, times, *nbytes in rows}
