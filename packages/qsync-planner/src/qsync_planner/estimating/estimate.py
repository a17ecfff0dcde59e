"""A profile of a device that is not at hand, from a measured one (docs/absent-gpus.md#the-rule).

Every distinct cost is scaled by what it has to do and what both chips can do; whole measured steps are scaled as their modelled
sums are, so that calibration keeps each phase's ratio of measured to modelled time.  Dispatch stays what it was on the source's
CPU, bytes stay bytes, and collectives are dropped: links of the cluster file say how fast ranks communicate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

import attrs

from qsync_core.artifacts.files import digest
from qsync_core.devices import precision_problem
from qsync_core.errors import PlanError
from qsync_core.ir.dag import OpClass, Operator, PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import CastModel, DeviceKind, DeviceMemory, OpCost, Profile, StepMeasurement
from qsync_core.ir.variant import Variant
from qsync_planner.estimating.chips import Datasheet, Place, datasheet
from qsync_planner.estimating.scaling import scaled_cast, scaled_ns, scaled_optimizer_ns
from qsync_planner.estimating.work import Work, cast_bytes, optimizer_work, work_of
from qsync_planner.replayer.calibration import uniform_times
from qsync_planner.replayer.cost_model import CostModel, PhaseTimes

_Key = TypeVar("_Key")
_BFLOAT16, _FLOAT16 = Precision.BFLOAT16, Precision.FLOAT16


@attrs.frozen
class Estimate:
    """An estimated profile.

    Attributes:
        profile: as if measured on the target.
        notes: sentences on what the target lacks.
    """

    profile: Profile
    notes: tuple[str, ...]


def estimate(dag: PrecisionDag, profile: Profile, device: str, share: float = 1.0) -> Estimate:
    """Estimate a model's costs on another chip, or on another share of the same one.

    The same chip and share gives the profile itself.

    Args:
        profile: its measurements on a CUDA device.
        device: a chip of :data:`~qsync_planner.estimating.chips.DATASHEETS`, by any name that cluster files take.

    Raises:
        PlanError: a chip without a datasheet, a profile that was not measured on a GPU or is of another graph, a share out of
            range, or a job whose base the chip cannot run.
    """
    if not 0 < share <= 1:
        raise PlanError(f"the share of a device is above 0 and at most 1, got {share:g}")
    if profile.device.kind is not DeviceKind.CUDA:
        raise PlanError(f"estimates scale profiles of GPUs, and this one was measured on {profile.device.name}, a CPU")
    if profile.estimated_from:
        raise PlanError(
            f"this profile of {profile.device.name} is itself estimated, from {profile.estimated_from}; estimate from that one"
        )
    if profile.dag_digest != digest(dag):
        raise PlanError(
            f"the profile was measured for another graph ({profile.model!r}, digest {profile.dag_digest[:12]}) than {dag.model!r}, "
            f"digest {digest(dag)[:12]}; give the graph that was profiled"
        )
    source = Place(datasheet(profile.device.name), profile.device.share)
    target = Place(datasheet(device), share)
    if problem := precision_problem(target.sheet.name, dag.base):
        raise PlanError(f"{dag.model} trains in {dag.base}: {problem}")
    if source == target:
        return Estimate(profile, (f"the profile was measured on {profile.device.name} at this share: nothing is estimated",))
    return _Scaling(dag, profile, source, target).estimate()


class _Scaling:
    """One estimate."""

    def __init__(self, dag: PrecisionDag, profile: Profile, source: Place, target: Place) -> None:
        self.dag, self.profile, self.source, self.target = dag, profile, source, target
        self.contiguous = profile.software.get("memory_format") == "contiguous"
        self.variants = _translations({v for by in profile.cost_index.values() for v in by}, target.sheet)

    def estimate(self) -> Estimate:
        """The whole profile."""
        profile, sheet = self.profile, self.target.sheet
        same_chip = self.source.sheet == sheet
        costs, cost_index = self._costs()
        compute_ns = self._optimizer_ns(profile.optimizer_compute_ns)
        share = f", share {profile.device.share:g}" if profile.device.share != 1 else ""
        device = attrs.evolve(profile.device, share=self.target.share)
        if not same_chip:
            capability = sheet.chip.compute_capability
            device = attrs.evolve(device, name=sheet.name, memory_cap_bytes=0, compute_capability=capability)
        scaled = attrs.evolve(
            profile,
            mixed=(),
            batches=(),
            chains=(),  # kernels of another chip say nothing of fused ones here
            device=device,
            costs=costs,
            cost_index=cost_index,
            casts=self._casts(),
            optimizer_compute_ns=compute_ns,
            collective=None,
            steps=(),
            estimated_from=f"{profile.device.name}{share}",
        )
        return Estimate(attrs.evolve(scaled, steps=self._steps(scaled), memory=self._memory()), self._notes())

    def _optimizer_ns(self, time_ns: int) -> int:
        return scaled_optimizer_ns(time_ns, optimizer_work(self.dag, self.profile), self.source, self.target)

    def _costs(self) -> tuple[tuple[OpCost, ...], Mapping[OpId, Mapping[Variant, int]]]:
        """Each distinct cost once, for each amount of work that it stands for."""
        costs: dict[tuple[int, Work, Work], int] = {}
        scaled: list[OpCost] = []
        index: dict[OpId, dict[Variant, int]] = {}
        for operator in self.dag.operators:
            by_variant = self.profile.cost_index.get(operator.op_id)
            if by_variant is None:
                continue
            index[operator.op_id] = {}
            for variant, position in _carried_over(by_variant, self.variants).items():
                cost = self.profile.costs[position]
                forward, backward = work_of(operator, variant, cost.backend, self.contiguous)
                key = (position, forward, backward)
                if key not in costs:
                    costs[key] = len(scaled)
                    scaled.append(self._cost(operator, cost, forward, backward))
                index[operator.op_id][variant] = costs[key]
        return tuple(scaled), index

    def _cost(self, operator: Operator, cost: OpCost, forward: Work, backward: Work) -> OpCost:
        convolutions, linears = _tf32_of(self.profile)
        tf32 = convolutions if operator.kind.startswith("conv") else linears
        return attrs.evolve(
            cost,
            forward_compute_ns=scaled_ns(cost.forward_compute_ns, forward, self.source, self.target, tf32=tf32),
            backward_compute_ns=scaled_ns(cost.backward_compute_ns, backward, self.source, self.target, tf32=tf32),
        )

    def _casts(self) -> tuple[CastModel, ...]:
        has = self.target.sheet.chip.precisions
        by_key = {model.key: model for model in self.profile.casts}
        keys = {key: attrs.evolve(key, source=_translated(key.source, has), target=_translated(key.target, has)) for key in by_key}
        kept = {key: new for key, new in keys.items() if {new.source, new.target} <= has}
        return tuple(
            attrs.evolve(
                by_key[model],
                key=key,
                ns_per_element=scaled_cast(by_key[model].ns_per_element, cast_bytes(key), self.source, self.target),
                samples=(),
            )
            for key, model in _carried_over({key: key for key in by_key}, kept).items()
        )

    def _memory(self) -> DeviceMemory | None:
        """What the process took, with the rungs that the chip has."""
        if self.profile.memory is None:
            return None
        rungs = _carried_over({rung.variant: rung for rung in self.profile.memory.rungs}, self.variants)
        return attrs.evolve(self.profile.memory, rungs=tuple(attrs.evolve(rung, variant=v) for v, rung in rungs.items()))

    def _steps(self, scaled: Profile) -> tuple[StepMeasurement, ...]:
        """Whole steps, each phase scaled as the sum of its parts is."""
        before, after = CostModel(self.dag, self.profile), CostModel(self.dag, scaled)
        found = []
        by_variant = {step.variant: step for step in self.profile.steps}
        for variant, step in _carried_over(by_variant, self.variants).items():
            try:
                old, new = uniform_times(self.dag, before, step.variant), uniform_times(self.dag, after, variant)
            except PlanError:  # an operator was not measured in this rung: calibration leaves such a step out, too
                continue
            found.append(self._step(attrs.evolve(step, variant=variant), old, new))
        return tuple(found)

    def _step(self, step: StepMeasurement, old: PhaseTimes, new: PhaseTimes) -> StepMeasurement:
        forward = _in_proportion(step.forward_compute_ns, old.forward_compute_ns, new.forward_compute_ns)
        backward = _in_proportion(step.backward_compute_ns, old.backward_compute_ns, new.backward_compute_ns)
        optimizer = self._optimizer_ns(step.optimizer_compute_ns)
        dispatch = step.forward_dispatch_ns + step.backward_dispatch_ns + step.optimizer_dispatch_ns
        was = max(dispatch, step.forward_compute_ns + step.backward_compute_ns + step.optimizer_compute_ns)
        return attrs.evolve(
            step,
            forward_compute_ns=forward,
            backward_compute_ns=backward,
            optimizer_compute_ns=optimizer,
            iteration_ns=max(0, step.iteration_ns - was) + max(dispatch, forward + backward + optimizer),
        )

    def _notes(self) -> tuple[str, ...]:
        """What the chip lacks of what was measured, and which format stands in for which."""
        chip, notes = self.target.sheet.chip, []
        adjustable = {o.op_id for o in self.dag.operators if o.op_class is OpClass.ADJUSTABLE}
        rungs = {v for op_id, by in self.profile.cost_index.items() if op_id in adjustable for v in by}
        for rung in sorted(rungs, key=str):
            if rung not in self.variants:
                lacking = next(p for p in _formats(rung) if _translated(p, chip.precisions) not in chip.precisions)
                notes.append(f"{rung.label} is left out: {precision_problem(chip.name, lacking)}")
        if any(_BFLOAT16 in _formats(old) and _BFLOAT16 not in _formats(new) for old, new in self.variants.items()):
            notes.append(f"{chip.name} has no bfloat16 hardware: float16 stands in for it, at the costs measured in bfloat16")
        return (*notes, *(self._notes_on_another_chip() if self.source.sheet != self.target.sheet else ()))

    def _notes_on_another_chip(self) -> Iterator[str]:
        """Settings of the source that its user may not have, and what the rule was never held against."""
        sheet, base = self.target.sheet, self.dag.base
        convolutions, linears = _tf32_of(self.profile)
        under = "without autocast" if base is Precision.FLOAT32 else f"under autocast in {base}"
        kinds = {o.is_convolution for o in self.dag.adjustable}
        formats = {False: f"linear layers in {_FLOAT32_AS[linears]}", True: f"convolutions in {_FLOAT32_AS[convolutions]}"}
        products = " and its ".join(formats[kind] for kind in sorted(kinds))
        yield f"the source was measured {under}, its {products}; for a job with other settings, profile it with those"
        if ((convolutions and True in kinds) or (linears and False in kinds)) and not sheet.tf32_tera:
            yield f"TF32 products of the source are estimated in float32: {sheet.name} has no TF32"
        if sheet.remark:
            yield f"{sheet.name}: {sheet.remark}"


_FLOAT32_AS = {False: "float32", True: "TF32"}
"""What float32 products run in, by whether TF32 is allowed."""


def _tf32_of(profile: Profile) -> tuple[bool, bool]:
    """Whether convolutions, and linear layers, were measured with TF32 allowed."""
    settings = profile.software
    return settings.get("cudnn_tf32") == "True", settings.get("float32_matmul", "highest") != "highest"


def _formats(variant: Variant) -> tuple[Precision, ...]:
    """Formats in which it multiplies."""
    return (variant.compute, variant.grad_input, variant.grad_weight)


def _translated(precision: Precision, has: frozenset[Precision]) -> Precision:
    """float16 for bfloat16 on a chip that lacks it: both take the same bytes, and products of both are equally fast."""
    return _FLOAT16 if precision is _BFLOAT16 and precision not in has and _FLOAT16 in has else precision


def _translations(variants: set[Variant], sheet: Datasheet) -> dict[Variant, Variant]:
    """Measured variants that the chip can run, each with what it is there."""
    has = sheet.chip.precisions
    found = {
        v: attrs.evolve(
            v,
            compute=_translated(v.compute, has),
            output=_translated(v.output, has),
            saved=_translated(v.saved, has),
            grad_input=_translated(v.grad_input, has),
            grad_weight=_translated(v.grad_weight, has),
        )
        for v in variants
    }
    return {old: new for old, new in found.items() if set(_formats(new)) <= has}


_Value = TypeVar("_Value")


def _carried_over(measured: Mapping[_Key, _Value], names: Mapping[_Key, _Key]) -> dict[_Key, _Value]:
    """What was measured, by its new name; what was measured under that name itself comes before what stands in for it."""
    found = {names[key]: value for key, value in measured.items() if key in names}
    return found | {key: value for key, value in measured.items() if names.get(key) == key}


def _in_proportion(value: int, before: int, after: int) -> int:
    """``value * after / before``, to the nearest integer; unchanged where there was nothing."""
    return (2 * value * after + before) // (2 * before) if before > 0 else value
