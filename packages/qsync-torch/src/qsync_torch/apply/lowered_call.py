"""One operator of an applied plan: its kernels, its random numbers, and the calls that replace PyTorch's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from qsync_core.errors import NumericsError
from qsync_core.geometry import Geometry, Pair, pair
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_torch.apply.first_step import check_autocast
from qsync_torch.apply.plan_fit import Assigned, check_weight_dtype
from qsync_torch.apply.recomputation import HERE, operator_runs
from qsync_torch.apply.sharded_parameters import check_ordinary
from qsync_torch.aten.random_bits import stream_key
from qsync_torch.caller import BY_HAND, Caller
from qsync_torch.kernels.binding import OperatorBinding, operator_binding
from qsync_torch.kernels.library_ops import PLAIN_TENSORS
from qsync_torch.operators.casts import GRAD, CastCache, Seeds, W, X
from qsync_torch.operators.conv2d import resolve_geometry, run_conv2d
from qsync_torch.operators.linear import run_linear
from qsync_torch.operators.lowered_ops import lowered_conv2d, lowered_linear
from qsync_torch.operators.step_counter import StepCounter

_NO_SEEDS = Seeds()
_FLOAT32 = Variant.plain(Precision.FLOAT32)
_NUMBERS = itertools.count()
_TRACED: set[str] = set()


def _is_jagged(x: Any) -> bool:
    """Whether it is nested as PyTorch's linear takes it: (B, *, ...), with sequences one after the other."""
    return isinstance(x, torch.Tensor) and x.layout is torch.jagged and x.is_contiguous() and getattr(x, "_ragged_idx", 1) == 1


def _has_functions(x: Any) -> bool:
    """Whether the class of a tensor has functions of its own now, as those have that carry something along (MONAI's, fastai's)."""
    if not isinstance(x, torch.Tensor) or type(x).__torch_function__ is torch._C._disabled_torch_function_impl:
        return False
    return torch._C._is_torch_function_enabled()


def _by_class(run: Callable[..., torch.Tensor], x: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Hand a call to the class of its input, which calls it in turn, and makes the result one of its own."""
    result: torch.Tensor = type(x).__torch_function__(run, (type(x),), (x, *rest), {})
    return result


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _traces(name: str) -> bool:
    """A compiler reads a call; this runs while it reads, and is nothing in what it makes."""
    _TRACED.add(name)
    return True


class LoweredCall:
    """An operator as a plan wants it; stands where the model calls ``F.linear`` or ``F.conv2d``.

    ``has_run`` says whether it was called outside compiled code.

    Nothing of what random numbers it draws is its own: they follow from the data (:mod:`qsync_torch.operators.casts`).
    """

    def __init__(
        self,
        op_id: OpId,
        assigned: Assigned,
        seed: int,
        steps: StepCounter,
        cache: CastCache,
        module: nn.Module | None = None,
        base: Precision = Precision.FLOAT32,
        caller: Caller = BY_HAND,
    ) -> None:
        self.op_id, self._caller, self._shown = op_id, caller, f"operator {op_id}"
        self._x_seed, self._w_seed, self._grad_seed = (stream_key(seed, role) for role in (X, W, GRAD))
        self._steps, self._cache, self._module, self._base = steps, cache, module, base
        self.has_run = False
        self._name = str(next(_NUMBERS))  # text: a compiler takes the second int that it meets for a symbol, in torch 2.11 at least
        self.assign(assigned)

    def assign(self, assigned: Assigned) -> None:
        """Take a variant and its kernels.

        The binding of a convolution module's geometry is worked out here, which ``torch.compile`` cannot follow.
        """
        self.assigned = assigned
        self._linear = operator_binding(assigned.variant, assigned.choice)
        self._prepared: tuple[tuple[object, ...], OperatorBinding] = ((), self._linear)
        module = self._module
        if isinstance(module, nn.Conv2d) and not isinstance(module.padding, str):
            geometry = Geometry(pair(module.stride), pair(module.padding), pair(module.dilation), module.groups)
            binding = operator_binding(assigned.variant, assigned.choice, geometry)
            self._prepared = ((module.stride, module.padding, module.dilation, module.groups), binding)

    @property
    def was_traced(self) -> bool:
        """Whether compiled code has this call."""
        return self._name in _TRACED

    @property
    def is_quantized(self) -> bool:
        """Whether the operands are 8-bit."""
        return self._linear.is_quantized

    @property
    def is_lowered(self) -> bool:
        """Whether it runs in another variant than the job does by itself."""
        return self.assigned.variant != Variant.plain(self._base)

    def seeds_for(self, weight: torch.Tensor) -> Seeds:
        """Which random numbers this step's calls with a weight take; float formats take none."""
        if not self._linear.is_quantized:
            return _NO_SEEDS
        return Seeds(self._x_seed, self._w_seed, self._steps.offset_for(weight), self._grad_seed, self._shown)

    def linear(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Run the operator as planned where the model calls ``F.linear``."""
        if torch.compiler.is_compiling():
            _traces(self._name)
            if input.layout is torch.jagged and _is_jagged(input):
                return self._linear_of_jagged(input, weight, bias)
            if self._linear.is_quantized:
                return lowered_linear(input, weight, bias, self._linear, self.seeds_for(weight))
            with torch._C.DisableTorchFunction():  # casts of the plan are none of the model's
                return run_linear(input, weight, bias, self._linear, _NO_SEEDS, self._cache)
        if type(input) not in PLAIN_TENSORS:
            if _is_jagged(input):
                return self._linear_of_jagged(input, weight, bias)
            if _has_functions(input):
                return _by_class(self.linear, input, weight, bias)
        try:
            # Modes that are active would be asked about each torch call inside, and change nothing here.
            with torch._C.DisableTorchFunction():
                self._check(input, weight)
                cache = self._casts()
                if self._base is not Precision.FLOAT32:
                    with torch.autocast(weight.device.type, enabled=False):
                        return run_linear(input, weight, bias, self._linear, self.seeds_for(weight), cache)
                return run_linear(input, weight, bias, self._linear, self.seeds_for(weight), cache)
        except NumericsError as error:
            raise self._named(error) from None

    def _linear_of_jagged(self, input: Any, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.nested.nested_tensor_from_jagged(self.linear(input.values(), weight, bias), input.offsets())

    def conv2d(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        stride: Pair = 1,
        padding: Pair | str = 0,
        dilation: Pair = 1,
        groups: int = 1,
    ) -> torch.Tensor:
        """Run the operator as planned where the model calls ``F.conv2d``."""
        if type(input) not in PLAIN_TENSORS and not torch.compiler.is_compiling() and _has_functions(input):
            return _by_class(self.conv2d, input, weight, bias, stride, padding, dilation, groups)
        prepared, binding = self._prepared
        if prepared != (stride, padding, dilation, groups):
            input, geometry = resolve_geometry(input, weight, stride, padding, dilation, groups)
            binding = operator_binding(self.assigned.variant, self.assigned.choice, geometry)
        if torch.compiler.is_compiling():
            _traces(self._name)
            if binding.is_quantized:
                return lowered_conv2d(input, weight, bias, binding, self.seeds_for(weight))
            with torch._C.DisableTorchFunction():  # casts of the plan are none of the model's
                return run_conv2d(input, weight, bias, binding, _NO_SEEDS, self._cache)
        try:
            with torch._C.DisableTorchFunction():
                self._check(input, weight)
                cache = self._casts()
                if self._base is not Precision.FLOAT32:
                    with torch.autocast(weight.device.type, enabled=False):
                        return run_conv2d(input, weight, bias, binding, self.seeds_for(weight), cache)
                return run_conv2d(input, weight, bias, binding, self.seeds_for(weight), cache)
        except NumericsError as error:
            raise self._named(error) from None

    def _check(self, input: torch.Tensor, weight: torch.Tensor) -> None:
        """Whether this call is the one that was planned.

        Raises:
            PlanError: when the weight is not an ordinary float32 tensor any more, or autocast is not what the plan was made for.
            NumericsError: when the input is one that the operator does not run on.
        """
        self.has_run = True
        if not isinstance(input, torch.Tensor) or input.layout is not torch.strided or input.is_nested:
            self._check_dense(input)
        if type(weight) not in PLAIN_TENSORS:
            check_ordinary(self.op_id.fqn, weight)
        if weight.dtype is not torch.float32:
            check_weight_dtype(self.op_id.fqn, weight, self._caller)
        if torch._C._is_any_autocast_enabled() or self._base is not Precision.FLOAT32:
            check_autocast(self._base, weight.device, self._shown, self._caller)

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
        dense = "make it with layout=torch.jagged, for a linear operator" if is_nested else "call to_dense() on it before"
        raise NumericsError(
            f"in {self.assigned.variant.label} it takes dense tensors, and its input is {kind}: {dense}, or keep the operator in "
            "float32 in the plan"
        )

    def _casts(self) -> CastCache:
        """Where this call's casts are shared; float ones, which draw no random numbers, always among all."""
        if not (HERE.open or HERE.scopes) and torch.is_grad_enabled():
            return self._cache
        cache = operator_runs(self._cache)
        return cache if self._linear.is_quantized else self._cache

    def _named(self, error: NumericsError) -> NumericsError:
        return NumericsError(f"{self._shown}: {error}")
