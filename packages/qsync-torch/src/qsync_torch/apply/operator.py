"""One operator of a plan in force: its kernels and its random numbers, wherever the model's code calls it.

It is the same object for a module's forward, for ``F.linear`` with the parameter, and for a piece of a forward that runs again in a
backward pass: what it computes follows from its operands and the optimizer step alone.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed import distributed_c10d
from torch.overrides import has_torch_function

from qsync_core.errors import BackendError, NumericsError, PlanError
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_torch.apply.first_step import check_autocast
from qsync_torch.apply.handles import in_backward
from qsync_torch.apply.kernel_check import not_in_8_bit
from qsync_torch.apply.plan_fit import STORED, Assigned, check_weight_dtype
from qsync_torch.apply.sharded_parameters import check_ordinary
from qsync_torch.apply.stored_modules import HeldWeight
from qsync_torch.caller import Caller
from qsync_torch.kernels.binding import OperatorBinding, operator_binding
from qsync_torch.kernels.library_ops import PLAIN_TENSORS, WithoutAutocast
from qsync_torch.kinds.kind import OperatorKind, Settings
from qsync_torch.kinds.products import operand_of
from qsync_torch.kinds.table import OF_ROWS, kind_of_module
from qsync_torch.operators.autograd import apply_of
from qsync_torch.operators.cast_cache import CastCache
from qsync_torch.operators.casts import Operand, Seeds, place_of_cast, wants_transposed
from qsync_torch.operators.channel_factors import Factor
from qsync_torch.operators.products import QuantizedProduct, lowered_node, run_product
from qsync_torch.operators.replays import REPLAY_OF
from qsync_torch.operators.step_key import StepKey
from qsync_torch.operators.stored import run_stored
from qsync_torch.replaying import extension
from qsync_torch.torch_internals import DisableTorchFunction, process_groups

_NO_SEEDS = Seeds()
_FLOAT32 = Variant.plain(Precision.FLOAT32)
_NO_DATA = torch.empty(0)
"""Operands of a call whose geometry follows from its settings alone."""


def _is_jagged(x: Any) -> bool:
    """Whether it is nested as PyTorch's product of rows takes it: (B, *, ...), with sequences one after the other."""
    return isinstance(x, torch.Tensor) and x.layout is torch.jagged and x.is_contiguous() and getattr(x, "_ragged_idx", 1) == 1


def _has_functions(x: Any) -> bool:
    """Whether the class of a tensor has functions of its own now, as those have that carry something along (MONAI's, fastai's)."""
    if not isinstance(x, torch.Tensor) or type(x).__torch_function__ is nn.Parameter.__torch_function__:
        return False
    return has_torch_function((x,))


def _by_class(run: Callable[..., torch.Tensor], x: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Hand a call to the class of its input, which calls it in turn, and makes the result one of its own."""
    result: torch.Tensor = type(x).__torch_function__(run, (type(x),), (x, *rest), {})
    return result


def _collectives_so_far() -> int:
    """How many collectives this process has begun, in all its groups; another number each time where a backend does not count."""
    try:
        return sum(group._get_sequence_number_for_group() for group in process_groups())  # type: ignore[attr-defined]
    except RuntimeError:
        return next(_UNCOUNTED)


_UNCOUNTED = itertools.count(-1, -1)


class _Forwards(threading.local):
    """How many forwards of the model run in this thread, one inside another."""

    depth = 0


class InForce:
    """What all operators of a plan in force share.

    Attributes:
        key: of this rank's random numbers in a step.
        base: format of the job's autocast.
        lower_eval: whether the plan is in force in eval mode too.
        begins: what the first operator of all waits for; None once it was called.
        is_compiled: whether a compiler has read an operator; its graphs do not tell which operators they run.
        held: whether weights are held in the base themselves, so that the job may run without autocast.
        is_removed: whether the plan was removed; a shallow copy of the model still asks.
    """

    def __init__(
        self, model: nn.Module, key: StepKey, base: Precision, lower_eval: bool, caller: Caller, held: bool = False
    ) -> None:
        self.model, self.key, self.base, self.lower_eval, self.caller, self.held = model, key, base, lower_eval, caller, held
        self._casts, self._collectives, self._forwards = CastCache(), 0, _Forwards()
        self._buffers: frozenset[int] | None = None
        self._was_on = False
        self.begins: Callable[[], None] | None = None
        self.is_compiled, self.is_removed = False, False

    def check_autocast(self, device: torch.device, where: str = "the model") -> None:
        """Compare what autocast does with what the plan was made for.

        Raises:
            PlanError: with both, and what to do.
        """
        check_autocast(self.base, device, where, self.caller, held=self.held)

    def run(self, forward: Callable[[], Any]) -> Any:
        """Run a forward of the model, in which its operators share casts."""
        if not self._forwards.depth:
            self.forget_casts()
        self._forwards.depth += 1
        try:
            return forward()
        finally:
            self._forwards.depth -= 1

    def forget_casts(self) -> None:
        """Make all casts anew."""
        self._casts.clear()

    def step_ended(self) -> None:
        """Look for the model's buffers anew, which are other tensors after ``model.to(device)``."""
        self._buffers = None

    def casts_of(self, x: torch.Tensor) -> CastCache | None:
        """The cache of casts of an activation, until the job's ranks write into some: a collective leaves no new version.

        Nor does what a script writes into an input by NumPy or through ``x.data`` from one forward to the next, or into the state
        of a recurrent model.  So casts are of one forward, and buffers have none; and outside of forwards, where parts of a model
        are called, only results of other operations have any.
        """
        if x.grad_fn is None and (not self._forwards.depth or id(x) in self._stored()):
            return None
        if distributed_c10d.is_initialized() and (count := _collectives_so_far()) != self._collectives:
            self._collectives = count
            self._casts.clear()
        return self._casts

    def _stored(self) -> frozenset[int]:
        if self._buffers is None:
            self._buffers = frozenset(map(id, self.model.buffers()))
        return self._buffers

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def compiler_reads(self) -> bool:
        """A compiler reads an operator; this runs while it reads, and is nothing in what it makes."""
        self.is_compiled = True
        return True

    def is_on(self, module: nn.Module) -> bool:
        """Whether the plan is in force for a module: in training, and in eval mode where that was asked for.

        A part may share no mode with the model: one that is frozen in eval mode trains where there are gradients, and a feature
        extractor made of the model's layers evaluates.  What a backward pass runs again was planned if it would be now, or if the
        last forward was: a script may have changed the mode meanwhile.
        """
        is_on = self.lower_eval or (self.model.training and (module.training or torch.is_grad_enabled()))
        if self.is_removed:
            return False
        if torch.compiler.is_compiling():
            return is_on
        if in_backward():
            return is_on or self._was_on
        self._was_on = is_on
        return is_on


class Operator:
    """An operator as a plan wants it; stands where the model calls the function of its kind.

    ``has_run`` says whether it was called outside compiled code.
    """

    follows_casts = lowers = True

    def __init__(
        self, op_id: OpId, assigned: Assigned, in_force: InForce, module: nn.Module | None = None, held: torch.dtype = torch.float32
    ) -> None:
        self.op_id, self._named_as, self._shown = op_id, str(op_id), f"operator {op_id}"
        self.forms: set[tuple[str, bool]] = set()
        self.model, self._in_force, self._module, self._held = in_force.model, in_force, module, held
        self._kind = kind_of_module(module) or OF_ROWS
        if module is not None:
            self.forms.add((self._kind.name, True))
        self.has_run = False
        self.assign(assigned)

    def is_on(self, owner: nn.Module) -> bool:
        """Whether the plan is in force for the module that reads the parameter."""
        return self._in_force.is_on(owner)

    def assign(self, assigned: Assigned) -> None:
        """Take a variant and its kernels.

        The binding of a module's geometry is worked out here, which ``torch.compile`` cannot follow.
        """
        self.assigned = assigned
        settings, geometry = (), None
        if (module := self._module) is not None and self._kind.prepare is not None:
            # A padding that depends on the operands is worked out in each call.
            settings = tuple(getattr(module, name) for name in self._kind.settings)
            if not isinstance(getattr(module, "padding", 0), str):
                _, geometry = self._kind.prepare(_NO_DATA, _NO_DATA, settings)
        self._binding = operator_binding(assigned.variant, assigned.choice, geometry)
        self._prepared = settings if self._kind.prepare is None or geometry is not None else None

    @property
    def is_quantized(self) -> bool:
        """Whether the operands are 8-bit."""
        return self._binding.is_quantized

    @property
    def is_lowered(self) -> bool:
        """Whether it runs in another variant than the job does by itself."""
        return self.assigned.variant != Variant.plain(self._in_force.base)

    @property
    def label(self) -> str:
        """What it runs as, where it is lowered; else empty."""
        return self.assigned.variant.label if self.is_lowered else ""

    def _seeds(self, weight: torch.Tensor) -> Seeds:
        """Which random numbers a call takes; float formats take none."""
        if not self._binding.is_quantized:
            return _NO_SEEDS
        key = self._in_force.key
        offset = key.on(weight.device) if torch.compiler.is_compiling() else key.now(weight.device)
        return Seeds(offset=offset, name=self._shown)

    def _factor(self, binding: OperatorBinding, weight: torch.Tensor) -> Factor | None:
        return self._in_force.key.factors.of(self._named_as, weight.shape[1], weight.device) if binding.factored else None

    def prepare(self, device: torch.device, weight: torch.Tensor | None) -> None:
        """Make what a compiler that reads the operator first could not make.

        Args:
            device: on which it runs.
            weight: the parameter; None where that is computed.
        """
        if self._binding.factored and weight is not None and weight.ndim == 2:
            self._in_force.key.factors.of(self._named_as, weight.shape[1], device)

    def run(
        self,
        input: torch.Tensor,
        weight: torch.Tensor | HeldWeight,
        bias: torch.Tensor | None,
        kind: OperatorKind,
        settings: Settings = (),
    ) -> torch.Tensor:
        """Run the operator as planned where the model calls the function of a kind.

        Args:
            input, weight, bias, settings: as that function takes them; or what is stored of a weight.
            kind: which function.

        Raises:
            BackendError: when that kind has no kernels in 8 bit: of a parameter a plan does not say as which kind it is called.
        """
        is_compiling = torch.compiler.is_compiling()
        if is_compiling:
            if not isinstance(weight, HeldWeight) and weight.dtype is not self._held:  # as fully_shard may gather it
                check_weight_dtype(self.op_id.fqn, weight, self._in_force.caller)
            self._in_force.compiler_reads()
        if type(input) not in PLAIN_TENSORS:
            if kind is OF_ROWS and _is_jagged(input):
                return self._of_jagged(input, weight, bias)
            if not is_compiling and _has_functions(input):
                return _by_class(self.run, input, weight, bias, kind, settings)
        binding = self._binding
        if kind is not self._kind or settings != self._prepared:
            if not kind.row.in_8_bit and self.is_quantized:
                raise BackendError(not_in_8_bit([self.op_id], kind.name, self.label))
            geometry = None
            if kind.prepare is not None:
                shaped = torch.empty(weight.shape, device="meta") if isinstance(weight, HeldWeight) else weight
                input, geometry = kind.prepare(input, shaped, settings)
            binding = operator_binding(self.assigned.variant, self.assigned.choice, geometry)
        if isinstance(weight, HeldWeight):
            return self._run_stored(input, weight, bias, binding)
        if is_compiling:
            if binding.turns_weight:
                weight = operand_of(weight, binding.called)
            if binding.is_quantized:
                return lowered_node(input, weight, bias, binding, self._seeds(weight), self._factor(binding, weight))
            with DisableTorchFunction(), self._compiled_format(weight.device):  # casts of the plan are none of the model's
                return run_product(input, weight, bias, binding, _NO_SEEDS)
        try:
            # Modes that are active would be asked about each torch call inside, and change nothing here.
            with DisableTorchFunction():
                self._check(input, weight)
                casts, seeds = self._in_force.casts_of(input), self._seeds(weight)
                if binding.turns_weight:
                    weight = operand_of(weight, binding.called)
                factor = self._factor(binding, weight)
                is_product = binding.is_quantized and factor is None and (binding.of_rows or input.ndim == weight.ndim)
                if is_product and extension.loaded() is not None:
                    y = self._replayed(input, weight, bias, binding, seeds, casts)
                    if y is not None:
                        return y
                device = weight.device.type
                if self._in_force.base is not Precision.FLOAT32 and torch.is_autocast_enabled(device):
                    with WithoutAutocast(device):
                        return run_product(input, weight, bias, binding, seeds, casts, factor)
                if is_product:
                    run = apply_of(QuantizedProduct, binding, seeds)  # nothing is left of run_product
                    return run(input, weight, bias, binding, seeds, torch.is_grad_enabled(), casts)
                return run_product(input, weight, bias, binding, seeds, casts, factor)
        except NumericsError as error:
            raise self._named(error) from None

    def _compiled_format(self, device: torch.device) -> AbstractContextManager[Any]:
        """What keeps the autocast of compiled code from casting operands to its format, where the plan has another one."""
        base = self._in_force.base
        if base is Precision.FLOAT32 or self.assigned.variant.compute is base:
            return nullcontext()
        return torch.autocast(device.type, enabled=False)

    def _replayed(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        binding: OperatorBinding,
        seeds: Seeds,
        cache: CastCache | None,
    ) -> torch.Tensor | None:
        """The result, where the extension can run the call."""
        run, offset, entry = REPLAY_OF[binding], self._in_force.key.on(weight.device), None
        if cache is not None and cache.applies_to(x):
            entry = place_of_cast(x, binding, seeds, cache, torch.is_grad_enabled() and wants_transposed(x, binding))
        y: torch.Tensor | None
        if entry is None or entry.value is not None:
            y = run(x, weight, bias, offset, None if entry is None else entry.value, False, self._shown)
            return y
        found = run(x, weight, bias, offset, None, True, self._shown)
        if found is None:
            return None
        y, copy = found
        entry.value = Operand(*copy)
        return y

    def _run_stored(
        self, input: torch.Tensor, held: HeldWeight, bias: torch.Tensor | None, binding: OperatorBinding
    ) -> torch.Tensor:
        stored = held.tensors
        if torch.compiler.is_compiling():
            with DisableTorchFunction(), self._compiled_format(held.device):
                return run_stored(input, stored, held.storage, held.shape, bias, binding, self._seeds(stored.values))
        try:
            with DisableTorchFunction():
                self._check_call(input, held.device)
                if held.dtype is not self._held:
                    check_weight_dtype(self.op_id.fqn, held.parameter, self._in_force.caller)
                casts, seeds = self._in_force.casts_of(input), self._seeds(stored.values)
                with WithoutAutocast(held.device.type):
                    return run_stored(input, stored, held.storage, held.shape, bias, binding, seeds, casts)
        except NumericsError as error:
            raise self._named(error) from None

    def _of_jagged(self, input: Any, weight: torch.Tensor | HeldWeight, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.nested.nested_tensor_from_jagged(self.run(input.values(), weight, bias, OF_ROWS), input.offsets())

    def _check(self, input: torch.Tensor, weight: torch.Tensor) -> None:
        """Whether this call is the one that was planned.

        Raises:
            PlanError: when the weight is not an ordinary float32 tensor any more, or autocast is not what the plan was made for.
            NumericsError: when the input is one that the operator does not run on.
        """
        self._check_call(input, weight.device)
        if type(weight) not in PLAIN_TENSORS:
            check_ordinary(self.op_id.fqn, weight)
        if weight.dtype is not self._held:
            check_weight_dtype(self.op_id.fqn, weight, self._in_force.caller)

    def _check_call(self, input: torch.Tensor, device: torch.device) -> None:
        self.has_run = True
        if (begins := self._in_force.begins) is not None:
            begins()
        if not isinstance(input, torch.Tensor) or input.layout is not torch.strided or input.is_nested:
            self._check_dense(input)
        self._in_force.check_autocast(device, self._shown)

    def _check_dense(self, input: Any) -> None:
        """An input that is no dense tensor: where the plan leaves the operator in float32, PyTorch runs on it.

        Raises:
            NumericsError: with what to do.
        """
        if not isinstance(input, torch.Tensor):
            raise NumericsError(f"it takes a tensor, got {type(input).__name__}: convert it before")
        if self.assigned.variant == _FLOAT32:
            return
        is_nested = input.is_nested
        kind = "nested" if is_nested else str(input.layout).removeprefix("torch.").lstrip("_")
        dense = f"make it with layout=torch.jagged, for a {OF_ROWS.name} operator" if is_nested else "call to_dense() on it before"
        raise NumericsError(
            f"in {self.assigned.variant.label} it takes dense tensors, and its input is {kind}: {dense}, or keep the operator in "
            "float32 in the plan"
        )

    def _named(self, error: NumericsError) -> NumericsError:
        return NumericsError(f"{self._shown}: {error}")


class _NotLowered:
    """What stands where a plan has no variant to run: as its weight is read, so it is looked at."""

    follows_casts = False
    lowers = True
    label = ""

    def __init__(self, name: str, in_force: InForce) -> None:
        self.forms: set[tuple[str, bool]] = set()
        self._name, self.model, self._in_force = name, in_force.model, in_force


class Unchanged(_NotLowered):
    """An operator of a plan that runs as it does without one, under autocast, which is looked at all the same."""

    lowers = False

    def is_on(self, owner: nn.Module) -> bool:
        """Never, in the place of PyTorch's operator.

        Raises:
            PlanError: where the weight or autocast is not what the plan was made for.
        """
        if not torch.compiler.is_compiling() and self._in_force.is_on(owner):
            if self._in_force.begins is not None:
                self._in_force.begins()
            held: HeldWeight | None = owner.__dict__.get(STORED)
            weight = next(owner.parameters()) if held is None else held.parameter
            check_weight_dtype(self._name, weight, self._in_force.caller, base=self._in_force.base)
            self._in_force.check_autocast(weight.device, f"operator {self._name}")
        return False

    def run(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Not called."""
        raise NotImplementedError


class Refused(_NotLowered):
    """Stands where a model calls an operator that its whole plan does not name."""

    def is_on(self, owner: nn.Module) -> bool:
        """Whether the plan is in force for the module that reads the parameter."""
        return self._in_force.is_on(owner)

    def run(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Refuse.

        Raises:
            PlanError: naming the operator.
        """
        raise PlanError(
            f"{self._name} runs but the plan does not name it, so the plan was made for another model or for another way through "
            f"this one; {self._in_force.caller.trace_again}"
        )
