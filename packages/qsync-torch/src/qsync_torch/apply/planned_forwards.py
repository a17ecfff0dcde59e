"""What every forward under a plan meets: operators in their variants, checks, new random numbers, and what the first step says."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import nn

from qsync_core.errors import BackendError, PlanError
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import PrecisionPlan
from qsync_core.ir.variant import Variant
from qsync_core.settings import CHECKED_ON
from qsync_torch.apply.calls_outside import CallsOutside, Product
from qsync_torch.apply.first_step import LOW_BASES, check_autocast, device_of, float32_outputs
from qsync_torch.apply.functional_calls import RefusedCall, may_call_functions
from qsync_torch.apply.installation import Forward, Installation, copies_refused
from qsync_torch.apply.interception import is_indifferent
from qsync_torch.apply.job_settings import check_settings
from qsync_torch.apply.kernel_check import check_backends, check_numbers, first_named, prebuild
from qsync_torch.apply.lag import LagWatch
from qsync_torch.apply.local_batches import SIZE_FLAG, LocalBatches, PlannedPass
from qsync_torch.apply.lowered_call import LoweredCall
from qsync_torch.apply.plan_fit import Planned, PlannedChain, check_weights, locate, unplanned
from qsync_torch.apply.recomputation import PLAIN, is_recording, runs_detached, wrap_checkpointing
from qsync_torch.apply.sharded_parameters import check_gathered_formats, check_sharding, check_whole_model
from qsync_torch.apply.two_passes import COPIED, FirstPasses
from qsync_torch.devices import gpu_and_sms, number_settings
from qsync_torch.distributed.buffers import before_forward, buffers_of
from qsync_torch.distributed.communication import check_communication, check_reducer
from qsync_torch.distributed.ranks import together
from qsync_torch.dtypes import LOW_FLOATS, TORCH_DTYPE
from qsync_torch.failures import deepest_line
from qsync_torch.kernels.canary import Canary
from qsync_torch.operators.step_counter import Position, StepCounter
from qsync_torch.sharing.job_check import check_job


class PlannedForwards(Installation):
    """The operators of a plan in a model, and what each of its forwards meets.

    Args:
        model: parameters as they train.
        planned: what the operators run as.
        seed: of the random numbers; a subclass that knows this rank's place gives each rank its own.
        lower_eval: whether the plan is in force in eval mode too.

    Attributes:
        variants: what every named operator runs as.
        group: the device group, where a plan was applied.
        lower_eval: as given.
        base: the format of the job: where it has 16 bits, the model runs under autocast to it.
    """

    _batches: LocalBatches

    def __init__(self, model: nn.Module, planned: Planned, *, seed: int, lower_eval: bool) -> None:
        super().__init__(model)
        self._planned = planned
        self._addressed = locate(model, planned.on(device_of(model)), planned.plan, planned.caller)
        check_weights(model, self._addressed, planned.plan, planned.caller)
        self.variants = {op_id: entry.variant for op_id, entry in self._addressed.entries.items()}
        self.group, self.lower_eval, self.base = planned.group, lower_eval, planned.base
        self._rank_seed = seed
        self._training: tuple[int, ...] = ()  # where rank 0 does not train: those that do
        self._steps = StepCounter()
        self._lowered: dict[OpId, LoweredCall] = {}
        self._placed_on: torch.device | None = None
        self._buffers: list[tuple[dict[str, torch.Tensor | None], str]] = []
        self._has_met = planned.plan is None
        self._settings: dict[str, str] | None = None
        self._awaits_calls = True
        self._rounds = self._has_run_part = self._has_named_uncompiled = False
        self._calls_outside: CallsOutside | None = None
        self._named_outside: set[OpId] = set()
        self._said: set[str] = set()
        self._lag_watch: LagWatch | None = None
        self._as_planned = True
        self._forwards = self._plain_forwards = 0
        self._first_passes = FirstPasses()
        self._repeats: Position | None = None
        self._first_pass: PlannedPass | None = None
        if planned.plan is not None and planned.group is not None:
            any_size = SIZE_FLAG in planned.allow_flags
            self._first_pass = PlannedPass.of(planned.plan, planned.group, model, planned.caller, any_size=any_size)

    @property
    def plan(self) -> PrecisionPlan | None:
        """The whole plan, of all groups; None where variants by operator were applied."""
        return self._planned.plan

    @property
    def chains(self) -> dict[OpId, PlannedChain] | None:
        """The chains that the plan fuses, by their names; None where it says nothing of any chain."""
        return self._planned.chains

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
        check_sharding(self._addressed, device, self._planned.allow_flags, self._planned.caller)
        check_gathered_formats(self.model, self._addressed)

    def check_kernels(self) -> None:
        """Ask the backends for every kernel, unless the model is still to be moved to where they run.

        Raises:
            BackendError: when a planned backend is missing, or refuses a kernel that an operator needs.
        """
        device = device_of(self.model)
        if self._changes_nothing or device.type == "meta":
            return
        try:
            check_backends(self._addressed, device, self._planned.caller)
        except BackendError:
            if not _may_move_from(device):
                raise
        else:
            self._placed_on = device
            self._steps.move_to(device)

    def lower(self) -> None:
        """Install the operators in their variants; where all run in the base, only what a forward meets is checked.

        Raises:
            BackendError: when a kernel cannot be built.
        """
        self._calls_outside = CallsOutside(self.model, self._addressed.weights, self.nodes, self._judge, lambda: self.running)
        if self._changes_nothing:
            self._check_numbers()
            self._placed_on = device_of(self.model)
            wrap_checkpointing()
            planned = {id(place.weight) for _, place in self._addressed.weights}
            for module in self.model.modules():  # parts with operators too, which a script may call by themselves
                operators = any(id(parameter) in planned for parameter in module.parameters())
                if module is not self.model and operators and may_call_functions(module):
                    self.replace_forward(module, functools.partial(self._entry, False))
            self.replace_forward(self.model, functools.partial(self._entry, True))
            return
        addressed, plan = self._addressed, self._planned.plan
        if self._placed_on is not None:
            prebuild(addressed, self._placed_on, self._planned.caller)
            self._check_numbers()
        modules, entries = dict(addressed.modules), addressed.entries
        self._lowered = {
            op_id: LoweredCall(
                op_id, entries[op_id], self._rank_seed, self._steps, self.cache, modules.get(op_id), self.base, self._planned.caller
            )
            for op_id in addressed.planned
        }
        self._rounds = any(call.is_quantized for call in self._lowered.values())
        # Where every operator gives float32, formats cannot mix; under autocast it is autocast that mends them.
        sixteen_bit = any(TORCH_DTYPE[entry.variant.output] in LOW_FLOATS for entry in entries.values())
        if sixteen_bit and self.base not in LOW_BASES:
            self._buffers = [
                (module._buffers, name)
                for module in self.model.modules()
                if not is_indifferent(module)
                for name, buffer in module._buffers.items()
                if buffer is not None and buffer.dtype is torch.float32
            ]
        unnamed, weights = ([], []) if plan is None else unplanned(self.model, addressed, plan)
        self.install(
            addressed,
            self._lowered,
            promote=sixteen_bit and self.base not in LOW_BASES,
            refused=weights,
            remedy=self._planned.caller.trace_again,
        )
        for fqn, module in unnamed:
            self.replace_forward(module, functools.partial(self._refuse, RefusedCall(fqn, self._planned.caller.trace_again)))

    def _check_numbers(self) -> None:
        """Check the kernels on a GPU that is not the one on which they were checked for the group's profile.

        Raises:
            BackendError: naming those that are wrong.
        """
        device, plan = device_of(self.model), self._planned.plan
        if device.type != "cuda" or plan is None or self.group is None:
            return
        if plan.software.get(self.group, {}).get(CHECKED_ON) != gpu_and_sms(device):
            check_numbers(self._addressed, Canary(device), self._planned.caller)

    def is_on(self, module: nn.Module) -> bool:
        """Whether the plan is in force for a module: in training, and in eval mode where that was asked for.

        A part that is called by itself may share no mode with the model: a feature extractor made of its layers, in evaluation.
        With gradients a part in eval mode trains (its BatchNorm is frozen), and a reentrant checkpoint runs it without them first.
        """
        if self.lower_eval or (self.model.training and module.training):
            return True
        return self.model.training and (torch.is_grad_enabled() or is_recording())

    def start_forward(self, whole: bool) -> None:
        """Checks, new random numbers, and the copies of this step's weights."""
        device = device_of(self.model)
        if torch.compiler.is_compiling():
            check_autocast(self.base, device, caller=self._planned.caller)
            check_reducer()
            self._batches.check_weighted()
        elif self._has_met:
            self._check_settings(device)
            self._meet(device, whole)
        else:
            self._has_met = True
            self._meet_ranks(device, whole)
        if not torch.compiler.is_compiling() and self._awaits_calls and self._lowered:
            self._refuse_compiled_parts()
        if whole and self._training and torch.is_grad_enabled():
            if torch.compiler.is_compiling():
                torch.ops.qsync.share_buffers(buffers_of(self.model), self._training)
            else:
                before_forward(buffers_of(self.model), self._training)
        if torch.compiler.is_compiling() or self._repeats is None:
            self._steps.advance()
        if not whole:
            if not torch.compiler.is_compiling():
                self._has_run_part = True
        else:
            if self._lag_watch is not None and not torch.compiler.is_compiling():
                self._lag_watch.started()

    def _run(self, whole: bool, replaced: Forward, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._check_recording()
        if whole or torch.compiler.is_compiling():
            self.check_classes()
        if whole and self._lag_watch is not None and not torch.compiler.is_compiling():
            self._lag_watch.forward((args, kwargs))
        if whole and self._first_pass is not None and self.model.training and torch.is_grad_enabled():
            self.meet_batch(args, kwargs)
        if torch.compiler.is_compiling():
            if self.model.training and not torch.is_grad_enabled():
                self._say_first_pass()
            return super()._run(whole, replaced, module, args, kwargs)
        if torch._C._len_torch_function_stack():
            _name_modes()
        self._forwards += 1
        now_and_then = self._forwards & (self._forwards - 1) == 0
        if now_and_then and not whole:
            self.check_classes()
        elif now_and_then and not self._awaits_calls:
            self._name_lost()
        self._repeats = self._first_pass_of(module, args, kwargs)
        with (
            copies_refused() if now_and_then else nullcontext(),
            nullcontext() if self._repeats is None else self._steps.at(self._repeats),
        ):
            try:
                output = super()._run(whole, replaced, module, args, kwargs)
            except (RuntimeError, TypeError) as error:
                self._explain(error)
                raise
        if self.model.training and not torch.is_grad_enabled() and not runs_detached():
            self._first_passes.remember(module, args, kwargs, self._steps.position)
        return output

    def _explain(self, error: Exception) -> None:
        """What fails on a format, in a forward whose operators deliver 16 bits, the script has not seen without a plan.

        Raises:
            PlanError: with the line of the model's code.
        """
        outputs = {call.assigned.variant.output for call in self._lowered.values()} & LOW_BASES
        if self.base in LOW_BASES or not outputs or not _OF_FORMATS.search(text := str(error).strip()):
            return
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
        if what and (quantized := [op_id for op_id, call in self._lowered.items() if call.is_quantized]):
            raise PlanError(
                f"{what} records one forward of a model under a plan, with the random numbers that its 8-bit operators "
                f"({first_named(quantized)}) draw anew in every step: record it in eval mode, which is in full precision, or after "
                "remove()"
            )
        return True

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _say_first_pass(self) -> bool:
        """A compiled forward without gradients may be the first of two passes, which nothing tells the second."""
        if self._rounds and not runs_detached():
            _say_once(
                "a compiled model under a plan runs without gradients in training mode: where training has two passes over a batch "
                "(GradCache), set applied.step back before the second one, or it rounds anew and gets the gradients of other "
                "representations; where it evaluates, call model.eval() before"
            )
        return True

    def _first_pass_of(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Position | None:
        """The place of the forward without gradients that this one with them repeats."""
        if not torch.is_grad_enabled() or (position := self._first_passes.take(module, args, kwargs)) is None:
            return None
        if position == COPIED:
            if any(call.is_quantized for call in self._lowered.values()):
                _say_once(
                    f"a {type(module).__name__} has run without gradients, and runs with them on other tensors of the same values: "
                    "where training has two passes (GradCache), give both the same tensors, or the second one rounds anew and gets "
                    "the gradients of other representations"
                )
            return None
        if position == PLAIN:
            _say_once(
                f"a {type(module).__name__} in eval mode has run without gradients in full precision, and runs with them as "
                "planned on the same batch: where training has two passes (GradCache), put it into training mode in both, or it "
                "gets the gradients of other representations"
            )
            return None
        is_captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # its replays must differ
        return None if is_captured else cast(Position, position)

    def begins_plain(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A part in eval mode runs in full precision where gradients are off, and as planned where they are not."""
        if self.model.training and not torch.is_grad_enabled():
            self._first_passes.remember(module, args, kwargs, PLAIN)
        elif torch.is_grad_enabled() and self._calls_outside is not None:
            self._plain_forwards += 1
            if self._plain_forwards & (self._plain_forwards - 1) == 0:
                self._calls_outside.look_next()

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
        if samples is None or (self._batches.takes_parts and samples < planned.size):
            return
        if text := planned.warning(samples):
            warnings.warn(text, stacklevel=6)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _meet_ranks(self, device: torch.device, whole: bool) -> None:
        """The first forward: what one rank refuses, all refuse, also where the compiler has given up on that forward."""
        what = "the first step under a plan"
        plan, group = self._planned.plan, self._planned.group
        with together(what, {"whether gradients are weighted": "yes" if self._batches.is_weighted else "no"}):
            self._check_settings(device)
            self._meet(device, whole)
            check_reducer()
        self._batches.check_weighted()  # which is the same on all ranks
        if plan is not None and group is not None:  # by now the model is on its GPU
            check_job(what, plan, group, self.model, self._planned.allow_flags, self._planned.caller, warn=False)
        self._as_planned = check_communication(plan, self.model, device, self._planned.caller)

    def _check_settings(self, device: torch.device) -> None:
        """Settings of a plan's profile may have changed since ``apply_``, or since the last forward.

        Raises:
            PlanError: when one that changes numbers is not that of the profile.
        """
        plan, group = self._planned.plan, self._planned.group
        if plan is None or group is None or (found := number_settings(device)) == self._settings:
            return
        check_settings(plan, group, self.model, self._planned.allow_flags, self._planned.caller, warn=False)
        self._settings = found

    def _meet(self, device: torch.device, whole: bool) -> None:
        """What every forward meets must be what the plan was made for.

        Raises:
            PlanError: when autocast is not the plan's, or the model is on the meta device still.
            BackendError: when the model has been moved to a device that does not run the planned kernels.
        """
        if device.type == "meta":
            raise PlanError("a model under a plan runs on a device, and this one is on meta: move it with to_empty before it runs")
        # A part may hold no operator (a loss, computed outside of autocast); those that run in it look for themselves.
        if whole or not self._lowered:
            check_autocast(self.base, device, caller=self._planned.caller)
        if self._awaits_calls:
            self.check_parameters(device)
        if device == self._placed_on:
            return
        self._addressed = locate(self.model, self._planned.on(device), self._planned.plan, self._planned.caller)
        check_backends(self._addressed, device, self._planned.caller)
        prebuild(self._addressed, device, self._planned.caller)
        for op_id, call in self._lowered.items():
            call.assign(self._addressed.entries[op_id])
        self._placed_on = device
        self._steps.move_to(device)

    def _refuse_compiled_parts(self) -> None:
        """PyTorch's compiler fails on a part that is called while functions are intercepted.

        Raises:
            PlanError: naming the part.
        """
        for name, module in self.model.named_modules():
            if name and is_compiled(module):
                raise PlanError(
                    f"module {name!r} is compiled by itself, and inside a model under a plan PyTorch cannot compile parts: compile "
                    f"the whole model, with torch.compile(model) after {self._planned.caller.call}"
                )

    def end_forward(self) -> None:
        """Free unused copies of weights."""

    def finish(self, output: Any, whole: bool) -> Any:
        """The loss reads float32; under autocast it takes what autocast gives."""
        if whole and torch.compiler.is_compiling():
            self._awaits_calls = False  # compiled code does not tell; reading it would compile the second step anew
        elif whole and self._awaits_calls:
            self._name_missing_calls()
        if not torch.compiler.is_compiling():
            for buffers, name in self._buffers:  # which the forward may have replaced
                if (buffer := buffers.get(name)) is not None and buffer.dtype in LOW_FLOATS:
                    buffers[name] = buffer.float()
        return output if self.base in LOW_BASES else float32_outputs(output)

    def _name_missing_calls(self) -> None:
        """Say after the first step which lowered operators it did not run."""
        self._awaits_calls = False
        if any(is_compiled(module) for module in self.model.modules()):
            return
        missing = [op_id for op_id, call in self._lowered.items() if not call.has_run and call.is_lowered]
        if missing:
            warnings.warn(
                f"the plan lowers {first_named(missing)}, which the first step did not run as a linear or "
                f"convolution: they keep their precision; if that is not meant, {self._planned.caller.trace_again}",
                stacklevel=6,
            )

    def _name_lost(self) -> None:
        """Say which lowered operators the script has taken out of the model since the first step."""
        present = {id(module) for module in self.model.modules()}
        gone = (op_id for op_id, module in self._addressed.modules if id(module) not in present)
        if lost := [op_id for op_id in gone if op_id in self._lowered and self._lowered[op_id].is_lowered]:
            self._say_of_model(
                f"the plan lowers {first_named(lost)}, whose modules are not in the model any more: what runs in their "
                f"places is not planned; call remove(), and {self._planned.caller.call} with a plan for the model as it is now"
            )

    def _judge(self, products: Sequence[Product]) -> None:
        """What a backward pass has of products with planned weights that the plan did not make.

        Raises:
            PlanError: when a planned call has never run, and its weight is in such a product.
        """
        if not (self.model.training or self.lower_eval):
            self._name_plain(product.op_id for product in products if product.plain)
            return
        products = [product for product in products if not product.plain]
        for product in products:
            call = self._lowered.get(product.op_id)
            if call is None:
                has_run, is_lowered = not self._awaits_calls or self._has_run_part, False
                if product.of_cast:  # autocast's, which is what the plan has
                    continue
            elif call.is_lowered or self.plan is not None:
                has_run, is_lowered = call.has_run or call.was_traced, call.is_lowered
            else:
                continue
            if has_run:
                # What runs beside it inside, with another view of the weight, the graph has as an operator that no plan reaches.
                is_outside = not (product.inside or product.of_function)
                if is_lowered and is_outside and (not product.of_cast or (call is not None and call.is_quantized)):
                    self._name_outside(product)
            elif product.compiled or not (
                product.inside
                or (product.of_function and not self._awaits_calls)
                or any(one.was_traced for one in self._lowered.values())
            ):
                self._refuse_call_outside(product)
        if products:
            self._name_uncompiled_calls()

    def _name_plain(self, op_ids: Iterable[OpId]) -> None:
        """Say that a backward pass is for parameters which a forward in eval mode read: in eval mode the script may train too."""
        lowered = (op_id for op_id in op_ids if op_id in self._lowered and self._lowered[op_id].is_lowered)
        if (op_id := next(lowered, None)) is not None:
            self._say_of_model(
                f"{op_id} gets its gradient from a forward in eval mode, in which the plan is not in force: where the script "
                f"trains in eval mode, call {self._planned.caller.with_option('lower_eval=True')}, and else model.train() before "
                "it trains"
            )

    def _say_of_model(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            warnings.warn(text, stacklevel=4)

    def _name_outside(self, product: Product) -> None:
        if product.op_id in self._named_outside:
            return
        self._named_outside.add(product.op_id)
        warnings.warn(
            f"the gradient of {product.place.fqn} comes from a product in full precision too ({product.name}), beside "
            f"{product.op_id} of the plan: if the script computes it outside of the model's forward, do it there",
            stacklevel=3,
        )

    def _refuse_call_outside(self, product: Product) -> None:
        """A planned weight is in a product, and its planned call has never run.

        Raises:
            PlanError: on all ranks, which run the same script.
        """
        error = PlanError(
            f"the gradient of {product.place.fqn} comes from a product ({product.name}) that the plan did not run, and "
            f"{product.op_id} has not run at all: the script computes with this weight outside of every forward of the model, as "
            "in a training_step that calls functions with it; do that in the model's forward, and call the model in training"
            f"{_OF_A_COMPILED_PART if product.compiled else ''}"
        )
        with together("the first gradients under a plan") if self.plan is not None else nullcontext():
            raise error

    def check_repeated(self, module: nn.Module) -> None:
        """A part may run again in a backward pass only where it is known with which random numbers, or where there are none.

        Raises:
            PlanError: naming the part.
        """
        if not self._rounds:
            return
        name = next((repr(name) for name, part in self.model.named_modules() if part is module and name), "the model")
        raise PlanError(
            f"{name} runs inside a backward pass, and nothing tells which forward it repeats, whose random numbers it has to "
            "take: checkpoint with torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
        )

    def _name_uncompiled_calls(self) -> None:
        """Warn, at the first gradients of compiled code, of lowered operators that it does not have."""
        has_compiled = self._calls_outside is not None and self._calls_outside.has_compiled
        if self._has_named_uncompiled or not (has_compiled or any(call.was_traced for call in self._lowered.values())):
            return
        self._has_named_uncompiled = True
        missing = [op_id for op_id, call in self._lowered.items() if call.is_lowered and not (call.has_run or call.was_traced)]
        if missing:
            warnings.warn(
                f"the plan lowers {first_named(missing)}, which the compiled model does not run as a linear or convolution of the "
                "plan: they keep their precision; in a branch of torch.cond or a nested_compile_region call modules, not F.linear, "
                f"and elsewhere, if that is not meant, {self._planned.caller.trace_again}",
                stacklevel=3,
            )

    def position(self) -> Position:
        """The step."""
        return self._steps.position

    def from_here(self) -> Callable[[], AbstractContextManager[None]] | None:
        """Compiled forwards that run again go on from the count that is now."""
        return functools.partial(self._steps.again_from, self._steps.count()) if self._rounds else None

    def at_position(self, position: Position) -> AbstractContextManager[None]:
        """Round as in that step."""
        return self._steps.at(position)

    def _refuse(self, call: RefusedCall, owner: nn.Module, inner: Callable[..., Any]) -> Callable[..., Any]:
        here = self.here

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            refused = (self.running or here.running) and module is owner
            return call.linear() if refused else inner(module, *args, **kwargs)

        return forward


_OF_FORMATS = re.compile(r"(?i)bfloat16|\bhalf\b|float16|\bdtypes?\b|scalar ?type|float or double|same type")
"""Words of PyTorch's about a format that a function does not take."""
_OF_A_COMPILED_PART = (
    "; a part of it that is compiled by itself runs a weight of the plan as F.linear(x, weight) or x @ weight, and not transposed"
)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _say_while_compiling(text: str) -> bool:
    """Once, and not as a part of the graph: a model may be compiled again for other sizes."""
    _say_once(text)
    return True


def _name_modes() -> None:
    """Say which modes of the script's are around a model: operators of a plan end with it, and are not handed on."""
    for index in range(torch._C._len_torch_function_stack()):
        kind = type(torch._C._get_function_stack_at(index))
        if not kind.__module__.startswith(("torch.", "qsync_torch.")):
            _say_once(
                f"{kind.__name__}, a TorchFunctionMode, is active around a model under a plan, whose operators do not come to it: "
                "what it makes of linear and conv2d is left out; do that in the model, before trace and apply_"
            )


@functools.cache
def _say_once(text: str) -> None:
    warnings.warn(text, stacklevel=3)


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` runs a module."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _may_move_from(device: torch.device) -> bool:
    """Trainers move a model to its GPU after they have made it."""
    return device.type == "cpu" and torch.cuda.is_available()
