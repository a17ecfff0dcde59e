"""A model with the operators of a plan: what it meets when it is put into force, in each forward, and in its first step."""

from __future__ import annotations

import functools
import re
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import nn, overrides

from qsync_core.errors import BackendError, PlanError
from qsync_core.ir.op_id import OpId
from qsync_core.ir.variant import Variant
from qsync_core.settings import CHECKED_ON
from qsync_torch.apply.first_step import LOW_BASES, device_of, float32_outputs
from qsync_torch.apply.handles import OperatorCall
from qsync_torch.apply.job_settings import check_settings, job_differences
from qsync_torch.apply.kernel_check import check_backends, check_numbers, first_named, prebuild
from qsync_torch.apply.lag import LagWatch
from qsync_torch.apply.local_batches import SIZE_FLAG, PlannedPass
from qsync_torch.apply.operator import InForce, Operator, Refused, Unchanged
from qsync_torch.apply.place_in_job import PlaceInJob
from qsync_torch.apply.plan_fit import STORED, Planned, check_weights, locate, unplanned, weight_name
from qsync_torch.apply.planned_modules import is_planned, put_plan
from qsync_torch.apply.sharded_parameters import check_sharding, check_whole_model
from qsync_torch.apply.stored_modules import store_weights, stored_names
from qsync_torch.devices import gpu_and_sms, number_settings
from qsync_torch.distributed.buffers import before_forward, buffers_of
from qsync_torch.distributed.communication import check_communication, check_reducer
from qsync_torch.distributed.ranks import together
from qsync_torch.failures import deepest_line
from qsync_torch.kernels.canary import Canary
from qsync_torch.kinds.table import OPERATOR_KINDS
from qsync_torch.operators.products import OFFSET_OF_STEP
from qsync_torch.operators.step_key import StepKey
from qsync_torch.replaying import extension
from qsync_torch.sharing.job_check import check_job


class PlannedModel:
    """A model whose operators run as a plan says.

    Args:
        model: parameters as they train.
        seed: of the random numbers, of which each rank draws its own.
        lower_eval: whether the plan is in force in eval mode too.
        keep_stored: whether weights that it stores are kept on the CPU as they were.

    Attributes:
        variants: what every named operator runs as.
        group: the device group, where a plan was applied.
        key: what the random numbers are drawn with, and the step.
        place: of this process in its job.
        lag_watch: what compares steps with the plan's prediction, if anything.
        base: the format of the job: where it has 16 bits, the model runs under autocast to it.
    """

    def __init__(self, model: nn.Module, planned: Planned, *, seed: int, lower_eval: bool, keep_stored: bool = False) -> None:
        self.model = model
        self._keep_stored = keep_stored
        self.planned = planned
        self._addressed = locate(model, planned.on(device_of(model)), planned.plan, planned.caller)
        check_weights(model, self._addressed, planned.plan, planned.caller, planned.base)
        self.variants = {op_id: entry.variant for op_id, entry in self._addressed.entries.items()}
        self.group, self.base = planned.group, planned.base
        self.place = PlaceInJob.of(model, planned, seed)
        self.key = StepKey(self.place.stream, model)
        self.key.ends.append(self._step_ended)
        held = self._addressed.holds(self.base)
        self._in_force = InForce(model, self.key, self.base, lower_eval, planned.caller, held)
        self._operators: dict[OpId, Operator] = {}
        self._of_classes: dict[type, tuple[Any, ...]] = {}
        self._planned_modules: list[nn.Module] = []
        self._take_out: Callable[[], None] | None = None
        self._give_weights_back: Callable[[], None] | None = None
        self._placed_on: torch.device | None = None
        self._settings: dict[str, str] | None = None
        self._awaits_calls, self._delivers_low = True, False
        self._said: set[str] = set()
        self._frozen: dict[str, nn.Parameter] = {}  # beside weights that are stored
        self.lag_watch: LagWatch | None = None
        self._as_planned, self._looks_at_wrapper = True, False
        self._forwards = 0
        self._first_pass: PlannedPass | None = None
        if planned.plan is not None and planned.group is not None:
            any_size = SIZE_FLAG in planned.allow_flags
            self._first_pass = PlannedPass.of(planned.plan, planned.group, model, planned.caller, any_size=any_size)

    @property
    def holds_base(self) -> bool:
        """Whether weights are held in the base themselves, so that the job may run without autocast."""
        return self._in_force.held

    @property
    def stores_weights(self) -> bool:
        """Whether some weights are no parameters of the model, because a group of the plan stores them."""
        return any(STORED in module.__dict__ for module in self.model.modules())

    def take_place(self, place: PlaceInJob) -> None:
        """Know the ranks of the job, as all have told each other, before the operators are installed."""
        self.place = place
        self.key.rekey(place.stream)

    def watch_lag(self, on: bool) -> None:
        """Whether to warn, once, where steps take longer than the plan predicts."""
        if self.lag_watch is not None:
            self.lag_watch.stop()
            self.lag_watch = None
        plan, group = self.planned.plan, self.planned.group
        if on and plan is not None and group is not None and self.place.job is not None:

            def differs() -> bool:
                """Whether this process has other settings than its group's profile, or communicates otherwise; both were said."""
                return not self._as_planned or bool(job_differences(plan, group, plan.group(group).device, self.model))

            self.lag_watch = LagWatch(self.model, plan, group, self.place.job.groups, differs)

    @property
    def accumulate(self) -> int:
        """Micro-batches of a step that the plan was made for."""
        return 1 if self.planned.plan is None else self.planned.plan.accumulate

    def meet_accumulation(self, accumulate: int) -> None:
        """Warn where the loop runs another number of micro-batches for each optimizer step than the plan was made for."""
        if self.planned.plan is not None and accumulate != self.accumulate:
            warnings.warn(
                f"the loop accumulates gradients over {accumulate} micro-batches in an optimizer step, and the plan was made for "
                f"{self.accumulate}: its numbers hold, its predicted step and what it weighs exchanges with do not; "
                f"{self.planned.caller.plan_again} for this loop",
                stacklevel=3,
            )

    @property
    def _changes_nothing(self) -> bool:
        """All operators run as without a plan, under autocast; in float32 they are installed all the same, for their checks."""
        return self.base in LOW_BASES and all(variant == Variant.plain(self.base) for variant in self.variants.values())

    def check_parameters(self, device: torch.device) -> None:
        """Refuse parameters of which this rank has a part, where operators cannot run with them; scripts shard before and after.

        Raises:
            PlanError: naming a module or an operator.
        """
        check_whole_model(self.model)
        check_sharding(self._addressed, device, self.planned.allow_flags, self.planned.caller)

    def check_kernels(self) -> None:
        """Ask the backends for every kernel, unless the model is still to be moved to where they run.

        Raises:
            BackendError: when a planned backend is missing, or refuses a kernel that an operator needs.
        """
        device = device_of(self.model)
        if self._changes_nothing or device.type == "meta":
            return
        try:
            check_backends(self._addressed, device, self.planned.caller)
        except BackendError:
            if not _may_move_from(device):
                raise
        else:
            self._placed_on = device
            self.key.on(device)

    def lower(self) -> None:
        """Put the operators into the model, in their variants.

        Raises:
            BackendError: when a kernel cannot be built.
        """
        addressed, plan = self._addressed, self.planned.plan
        modules, places, entries = dict(addressed.modules), dict(addressed.weights), addressed.entries
        calls: dict[tuple[nn.Module, str], OperatorCall] = {}
        stored = stored_names(self.model, plan, entries)
        if self._changes_nothing:
            self._check_numbers()
            self._placed_on = device_of(self.model)
            calls = {(module, "weight"): Unchanged(str(op_id), self._in_force) for op_id, module in addressed.modules}
            for op_id, read in addressed.functional:
                if weight_name(self.model, read.fqn) in stored:  # which is no parameter then
                    calls[read.module, read.name] = Unchanged(str(op_id), self._in_force)
        else:
            if self._placed_on is not None:
                prebuild(addressed, self._placed_on, self.planned.caller)
                self._check_numbers()
            for op_id in addressed.planned:
                place = places.get(op_id)
                held = torch.float32 if place is None or place.weight is None else place.weight.dtype
                self._operators[op_id] = Operator(op_id, entries[op_id], self._in_force, modules.get(op_id), held)
            if self._placed_on is not None:
                self._prepare_operators(self._placed_on)
            calls.update(addressed.places(self._operators, self.model))
            unnamed, weights = ([], []) if plan is None else unplanned(self.model, addressed, plan)
            for fqn, module in unnamed:
                calls.setdefault((module, "weight"), Refused(fqn, self._in_force))
            for place in weights:
                calls.setdefault((place.module, place.name), Refused(place.fqn, self._in_force))
        outputs = {entry.variant.output for entry in entries.values()}
        self._delivers_low = self.base not in LOW_BASES and bool(outputs & LOW_BASES)
        self._in_force.begins = self._begin
        self._of_classes = {type(module): _methods(type(module)) for module, _ in calls}
        self._planned_modules = list(dict.fromkeys(module for module, _ in calls))
        self._give_weights_back = store_weights(self.model, addressed, stored, self._keep_stored)
        self._take_out = put_plan(self.model, calls, self._around)
        if self.stores_weights:
            self._frozen = {
                name: p for name, p in self.model.named_parameters() if not p.requires_grad and not name.endswith("bias")
            }

    def remove(self) -> None:
        """Take the operators out of the model.

        Raises:
            PlanError: when a class or a forward was changed since; take that change back first.
        """
        if self._take_out is not None:
            self._take_out()
            self._take_out = None
        if self._give_weights_back is not None:
            self._give_weights_back()
            self._give_weights_back = None
        self._in_force.is_removed = True
        self.key.ends.clear()
        self.key.release()
        self._in_force.forget_casts()

    def _check_numbers(self) -> None:
        """Check the kernels on a GPU that is not the one on which they were checked for the group's profile.

        Raises:
            BackendError: naming those that are wrong.
        """
        device, plan = device_of(self.model), self.planned.plan
        if device.type != "cuda" or plan is None or self.group is None:
            return
        if plan.software.get(self.group, {}).get(CHECKED_ON) != gpu_and_sms(device):
            check_numbers(self._addressed, Canary(device), self.planned.caller)

    def _around(self, model: nn.Module, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a forward of the model."""
        if not self._in_force.is_on(model):
            return inner(model, *args, **kwargs)
        self._check_recording()
        self._check_classes()
        if self._first_pass is not None and model.training and torch.is_grad_enabled():
            self.meet_batch(args, kwargs)
        if torch.compiler.is_compiling():
            self._in_force.check_autocast(device_of(model))
            check_reducer()
            self.place.batches.check_weighted()
            if self.place.training and torch.is_grad_enabled():
                torch.ops.qsync.share_buffers(buffers_of(model), self.place.training)
            if self.planned.fuses:
                OFFSET_OF_STEP(self.key.on(device_of(model)))
            return self._finished(inner(model, *args, **kwargs))
        if modes := overrides._get_current_function_mode_stack():
            _name_modes(modes)
        if self.lag_watch is not None:
            self.lag_watch.forward((args, kwargs))
        if self._in_force.begins is not None:
            self._begin()
        device = device_of(model)
        self._look_at_wrapper(device)
        self._check_settings(device)
        self._meet(device)
        self._in_force.check_autocast(device)
        if self.place.training and torch.is_grad_enabled():
            before_forward(buffers_of(model), self.place.training)
        if self.lag_watch is not None:
            self.lag_watch.started()
        self._forwards += 1
        if self._forwards & (self._forwards - 1) == 0:
            self._name_lost()
            self._name_unfrozen()
        return self._finished(self._in_force.run(lambda: self._explained(model, inner, args, kwargs)))

    def _finished(self, output: Any) -> Any:
        """The script reads float32, also of outputs that no loss does, whose readers a trace does not know."""
        return float32_outputs(output) if self._delivers_low else output

    def _explained(self, model: nn.Module, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What fails on a format, in a forward whose operators deliver 16 bits, the script has not seen without a plan.

        Raises:
            PlanError: with the line of the model's code.
        """
        try:
            return inner(model, *args, **kwargs)
        except (RuntimeError, TypeError) as error:
            outputs = {operator.assigned.variant.output for operator in self._operators.values()} & LOW_BASES
            if self.base in LOW_BASES or not outputs or not _OF_FORMATS.search(text := str(error).strip()):
                raise
            place = deepest_line(error) or type(self.model).__name__
            raise PlanError(
                f"{place} fails with {text.splitlines()[-1].removeprefix('RuntimeError: ')!r}, where operators of the plan deliver "
                f"{' and '.join(sorted(map(str, outputs)))}: call .float() on what this function takes, or plan the operators "
                "before it to deliver float32"
            ) from error

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _check_recording(self) -> bool:
        """A recorded forward would round with the same random numbers whenever it runs; a compiler asks this while it reads.

        Raises:
            PlanError: naming 8-bit operators.
        """
        what = "torch.export.export" if torch.compiler.is_exporting() else "torch.jit.trace" if torch.jit.is_tracing() else ""
        if what and (quantized := [op_id for op_id, operator in self._operators.items() if operator.is_quantized]):
            raise PlanError(
                f"{what} records one forward of a model under a plan, with the random numbers that its 8-bit operators "
                f"({first_named(quantized)}) draw anew in every step: record it in eval mode, which is in full precision, or after "
                "remove()"
            )
        return True

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _check_classes(self) -> bool:
        """The forwards that the planned modules' classes had are those that would run; a compiler asks this while it reads.

        Raises:
            PlanError: when a class has another one now, or PyTorch other functions.
        """
        for name in OPERATOR_KINDS:
            if not isinstance(function := getattr(torch.nn.functional, name), types.BuiltinFunctionType):
                raise PlanError(
                    f"torch.nn.functional.{name} is {getattr(function, '__qualname__', function)} of the script, which operators "
                    "of a plan do not call: put PyTorch's own back, and write what it does into the model, before trace and apply_"
                )
        changed = [module for module in self._planned_modules if not is_planned(module)]
        for kind, methods in self._of_classes.items():
            if _methods(kind) != methods:
                changed += [module for module in self._planned_modules if isinstance(module, kind)][:1]
        if changed:
            name = next((repr(name) for name, module in self.model.named_modules() if module is changed[0] and name), "the model")
            kind = type(changed[0])
            raise PlanError(
                f"the class of {name}, {kind.__name__}, has another forward than when the plan was applied, which "
                "would not run: change classes and their forwards before trace and apply_, or call remove() and apply_ again"
            )
        return True

    def meet_batch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Hold the first batch of training against the planned one; what one rank has no memory for, all refuse.

        Args:
            args, kwargs: what the model is called with.

        Raises:
            PlanError: the group's memory budget is too small for it.
        """
        if (planned := self._first_pass) is None:
            return
        samples = planned.samples(args, kwargs)
        if torch.compiler.is_compiling():  # which no rank hears of, and which is not the first call only
            refusal, warning = planned.while_compiling
            if samples is not None and planned.most is not None and samples > planned.most:
                raise PlanError(refusal)
            if samples is not None and samples > planned.size and not planned.any_size:
                _say_while_compiling(warning)
            return
        self._first_pass = None
        with together("the first batch under a plan"):
            if samples is not None and (refusal := planned.refusal(samples)):
                raise PlanError(refusal)
        if samples is None or (self.place.batches.takes_parts and samples < planned.size):
            return
        if text := planned.warning(samples):
            warnings.warn(text, stacklevel=6)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begin(self) -> None:
        """The first forward, of the model or of a part of it: what one rank refuses, all refuse."""
        self._in_force.begins = None
        device = device_of(self.model)
        extension.want(device)
        if self.planned.plan is None:
            self._meet(device)
            return
        what = "the first step under a plan"
        plan, group = self.planned.plan, self.planned.group
        with together(what, {"whether gradients are weighted": "yes" if self.place.batches.is_weighted else "no"}):
            self._check_settings(device)
            self._meet(device)
            self._in_force.check_autocast(device)
            check_reducer()
        self.place.batches.check_weighted()  # which is the same on all ranks
        if plan is not None and group is not None:  # by now the model is on its GPU
            check_job(what, plan, group, self.model, self.planned.allow_flags, self.planned.caller, warn=False)
        self._looks_at_wrapper = True
        self._look_at_wrapper(device)

    def _look_at_wrapper(self, device: torch.device) -> None:
        """Compare how ranks communicate, in the first forward that is trained: drawing samples needs no wrapper."""
        if self._looks_at_wrapper and torch.is_grad_enabled():
            self._looks_at_wrapper = False
            self._as_planned = check_communication(self.planned.plan, self.model, device, self.planned.caller)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _check_settings(self, device: torch.device) -> None:
        """Settings of a plan's profile may have changed since ``apply_``, or since the last forward.

        Raises:
            PlanError: when one that changes numbers is not that of the profile.
        """
        plan, group = self.planned.plan, self.planned.group
        if plan is None or group is None or (found := number_settings(device)) == self._settings:
            return
        check_settings(plan, group, self.model, self.planned.allow_flags, self.planned.caller, warn=False)
        self._settings = found

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _meet(self, device: torch.device) -> None:
        """What every forward meets must be what the plan was made for.

        Raises:
            PlanError: when the model is on the meta device still, or a parameter is one that operators cannot run with.
            BackendError: when the model has been moved to a device that does not run the planned kernels.
        """
        if device.type == "meta":
            raise PlanError("a model under a plan runs on a device, and this one is on meta: move it with to_empty before it runs")
        if self._awaits_calls:
            self.check_parameters(device)
        if device == self._placed_on or self._changes_nothing:
            return
        # Of what was found where the plan was put in force: wrappers and adapters may have changed names since.
        self._addressed = attrs.evolve(self._addressed, entries=self.planned.on(device))
        check_backends(self._addressed, device, self.planned.caller)
        prebuild(self._addressed, device, self.planned.caller)
        for op_id, operator in self._operators.items():
            operator.assign(self._addressed.entries[op_id])
        self._prepare_operators(device)
        self._placed_on = device
        self.key.on(device)

    def _prepare_operators(self, device: torch.device) -> None:
        weights = {op_id: place.weight for op_id, place in self._addressed.weights}
        for op_id, operator in self._operators.items():
            operator.prepare(device, weights.get(op_id))

    def _step_ended(self) -> None:
        """Say after the first step of this model which lowered operators it did not run."""
        self._in_force.step_ended()
        if not self._awaits_calls or not self._operators:
            return
        if self._in_force.begins is not None and self.key.counts_any:  # another model's optimizer, before this one has run
            return
        self._awaits_calls = False
        missing = [op_id for op_id, operator in self._operators.items() if not operator.has_run and operator.is_lowered]
        if not missing or self._in_force.is_compiled:
            return
        in_eval = "" if self.model.training else f", or, where the script trains in eval mode, call {self._lower_eval}"
        stored = [op_id for op_id in missing if self.variants[op_id].storage.is_quantized and not in_eval]
        if lowered := [op_id for op_id in missing if op_id not in stored]:
            warnings.warn(
                f"the plan lowers {first_named(lowered)}, which the first step did not run as a linear or convolution: they keep "
                f"their precision; if that is not meant, {self.planned.caller.trace_again}{in_eval}",
                stacklevel=4,
            )
        if stored:
            warnings.warn(
                f"the plan stores {first_named(stored)}, which the first step did not run as a linear or convolution: code that "
                "reads such a weight otherwise gets it dequantized, which takes the memory that storing it saves until backward is "
                "through; multiply by F.linear(x, self.weight), or plan it as the script has it",
                stacklevel=4,
            )

    @property
    def _lower_eval(self) -> str:
        return self.planned.caller.with_option("lower_eval=True")

    def _name_lost(self) -> None:
        """Say which lowered operators the script has taken out of the model since the first step."""
        present = {id(module) for module in self.model.modules()}
        gone = (op_id for op_id, module in self._addressed.modules if id(module) not in present)
        if lost := [op_id for op_id in gone if op_id in self._operators and self._operators[op_id].is_lowered]:
            self._say_of_model(
                f"the plan lowers {first_named(lost)}, whose modules are not in the model any more: what runs in their "
                f"places is not planned; call remove(), and {self.planned.caller.call} with a plan for the model as it is now"
            )

    def _name_unfrozen(self) -> None:
        """Say which parameters the script trains now that were frozen: a loop over them has not met what is stored."""
        if unfrozen := [name for name, parameter in self._frozen.items() if parameter.requires_grad]:
            self._frozen = {}
            self._say_of_model(
                f"{unfrozen[0]} was frozen when the plan was applied and is trained now; weights that the plan stores are no "
                "parameters, and are not trained with it: where they are to be, call remove(), and apply a plan of the model as it "
                "is now"
            )

    def _say_of_model(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            warnings.warn(text, stacklevel=4)


def _methods(of_class: type) -> tuple[Any, ...]:
    return tuple(getattr(of_class, name, None) for name in _METHODS)


_METHODS = tuple(dict.fromkeys(("forward", *(name for kind in OPERATOR_KINDS.values() for name in kind.methods))))


_OF_FORMATS = re.compile(r"(?i)bfloat16|\bhalf\b|float16|\bdtypes?\b|scalar ?type|float or double|same type")
"""Words of PyTorch's about a format that a function does not take."""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _say_while_compiling(text: str) -> bool:
    """Once, and not as a part of the graph: a model may be compiled again for other sizes."""
    _say_once(text)
    return True


def _name_modes(modes: Sequence[overrides.TorchFunctionMode]) -> None:
    """Say which modes of the script's are around a model: operators of a plan end with it, and are not handed on."""
    for kind in map(type, modes):
        if not kind.__module__.startswith(("torch.", "qsync_torch.")):
            _say_once(
                f"{kind.__name__}, a TorchFunctionMode, is active around a model under a plan, whose operators do not come to it: "
                "what it makes of operators is left out; do that in the model, before trace and apply_"
            )


@functools.cache
def _say_once(text: str) -> None:
    warnings.warn(text, stacklevel=3)


def _may_move_from(device: torch.device) -> bool:
    """Trainers move a model to its GPU after they have made it."""
    return device.type == "cpu" and torch.cuda.is_available()
