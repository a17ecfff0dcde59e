"""Torch functions while an applied model's forward runs: mixed formats, guarded operators, functional calls.

Elementwise functions, ``cat``, ``stack`` and ``where`` promote mixed dtypes by themselves, exactly as core's ``promote`` does.
Matrix products, attention and some others refuse mixed dtypes; a :class:`torch.overrides.TorchFunctionMode` around the forward
promotes their operands first.  The same mode finds ``F.linear`` and ``F.conv2d`` calls with a weight that a plan names
(:mod:`qsync_torch.apply.functional_calls`), and products with such a weight on the right, which store it as (K, N).
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from qsync_core.errors import PlanError
from qsync_core.ir.precision import promote
from qsync_torch.apply.functional_calls import CONV2D, LINEAR, PRODUCT, OperatorCall, WeightCalls
from qsync_torch.apply.recomputation import HERE, communicates
from qsync_torch.distributed.collective_calls import COLLECTIVES, FUNCTIONAL, in_format_of_the_job, written_by
from qsync_torch.dtypes import LOW_FLOATS, PRECISION, TORCH_DTYPE
from qsync_torch.operators.addresses import has_class_forward
from qsync_torch.operators.casts import CastCache, float_key
from qsync_torch.operators.norms import FLOAT32_FUNCTIONS, LOSSES, NORMS, call_in_float32, call_norm

Function = Callable[..., Any]


def _named(owner: object, *names: str) -> list[Any]:
    return [getattr(owner, name) for name in names if hasattr(owner, name)]


PROMOTED: frozenset[Function] = frozenset(
    [
        *_named(torch, "matmul", "mm", "bmm", "mv", "dot", "vdot", "inner", "outer"),
        *_named(torch, "addmm", "addmv", "addbmm", "baddbmm", "chain_matmul"),
        *_named(torch, "einsum", "tensordot", "bilinear", "cross", "lerp", "addcmul", "addcdiv", "grid_sampler"),
        *_named(torch, "heaviside", "vecdot"),
        *_named(torch.linalg, "matmul", "multi_dot", "vecdot", "cross"),
        *_named(torch.sparse, "mm", "addmm"),
        *_named(F, "embedding_bag"),
        *_named(torch, "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        *_named(torch, "index_put", "scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "masked_scatter"),
        *_named(torch, "index_reduce"),
        *_named(torch, "lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
        *_named(torch._VF, "lstm", "gru", "rnn_tanh", "rnn_relu", "einsum", "tensordot"),
        *_named(F, "linear", "bilinear", "grouped_mm", "grid_sample", "scaled_dot_product_attention", "cosine_similarity", "prelu"),
        *_named(torch.Tensor, "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "dot", "vdot", "inner", "outer"),
        *_named(torch.Tensor, "addmm", "addmv", "addbmm", "baddbmm", "lerp", "addcmul", "addcdiv", "cross"),
        *_named(torch.Tensor, "index_put", "scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "masked_scatter"),
        *_named(torch.Tensor, "index_reduce"),
    ]
)  # fmt: skip
"""Functions that take several tensors and refuse mixed floating-point dtypes."""

RIGHT_FACTORS: dict[Function, str] = {
    torch.matmul: "other",
    torch.mm: "mat2",
    torch.linalg.matmul: "other",
    torch.Tensor.matmul: "other",
    torch.Tensor.__matmul__: "other",
    torch.Tensor.mm: "mat2",
}
"""Products of two tensors, and what they call the second one."""

CASTS: frozenset[Function] = frozenset(_named(torch.Tensor, "to", "type", "type_as", "bfloat16", "half"))
"""Casts that a model may make of its own parameters."""

NAMED_CASTS: frozenset[Function] = frozenset(_named(torch.Tensor, "bfloat16", "half"))
"""Casts whose names say into which format."""

NUMBERED: frozenset[Function] = frozenset(_named(torch, "arange", "linspace", "logspace"))
"""Make numbers that 16 bits do not tell apart: positions, in the format of an activation (bfloat16 has no 257)."""

UNSEEN_WRITES: frozenset[Function] = frozenset(_named(torch.Tensor.data, "__get__", "__set__"))
"""Ways to change a tensor that leave its version as it was."""

FORMAT_READS: frozenset[Function] = frozenset(_named(torch.Tensor.dtype, "__get__"))
"""``h.dtype``, into which a model may cast something else."""

WRITES: frozenset[Function] = frozenset(
    [
        *_named(torch.Tensor, "__setitem__", "index_put_", "scatter_", "scatter_add_", "scatter_reduce_", "index_add_"),
        *_named(torch.Tensor, "index_copy_", "index_reduce_", "masked_scatter_"),
    ]
)
"""Writes into an existing tensor: what is written takes the format of what is written to."""

GATHERS: frozenset[Function] = frozenset([*_named(torch.Tensor, "__getitem__", "take"), torch.take])
"""Reads whose gradient a CPU sums entry by entry in the format of what was read: of 4,096 bfloat16 entries 256 count."""

READS: frozenset[Function] = frozenset(
    [
        *_named(torch, "t", "transpose", "permute", "swapaxes", "einsum", "tensordot", "inner", "bmm"),
        *_named(torch.Tensor, "t", "transpose", "permute", "swapaxes", "inner", "bmm"),
        *(getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH")),
    ]
)
"""Ways to multiply with a weight that are no linear of a plan, or to prepare that."""

IN_PLACE: dict[Function, Function] = {
    torch.Tensor.add_: torch.add,
    torch.Tensor.sub_: torch.sub,
    torch.Tensor.mul_: torch.mul,
    torch.Tensor.div_: torch.div,
}
"""What ``x += y`` and its like call.  It binds the result to ``x``, so a wider ``y`` widens it like ``x + y`` does."""


INDIFFERENT: frozenset[type[nn.Module]] = frozenset(
    [
        *_named(nn, "Identity", "Flatten", "Unflatten", "Embedding", "EmbeddingBag", "LayerNorm"),
        *_named(nn, "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d"),
        *_named(nn, "Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout"),
        *_named(nn, "ReLU", "ReLU6", "LeakyReLU", "ELU", "SELU", "CELU", "GELU", "SiLU", "Mish", "Softplus", "Softsign"),
        *_named(nn, "Sigmoid", "LogSigmoid", "Tanh", "Hardtanh", "Hardsigmoid", "Hardswish", "Softmax", "LogSoftmax", "Softmax2d"),
        *_named(nn, "MaxPool1d", "MaxPool2d", "MaxPool3d", "AvgPool1d", "AvgPool2d", "LPPool1d", "LPPool2d"),
        *_named(nn, "AdaptiveAvgPool1d", "AdaptiveAvgPool2d", "AdaptiveAvgPool3d"),
        *_named(nn, "AdaptiveMaxPool1d", "AdaptiveMaxPool2d", "AdaptiveMaxPool3d"),
        *_named(nn, "ZeroPad1d", "ZeroPad2d", "ZeroPad3d", "ConstantPad1d", "ConstantPad2d", "ConstantPad3d"),
        *_named(nn, "Upsample", "PixelShuffle", "PixelUnshuffle", "ChannelShuffle"),
    ]
)  # fmt: skip
"""PyTorch's modules that call none of the functions handled here (``LayerNorm``: where
:func:`qsync_torch.operators.norms.layer_norm` runs it)."""


def is_indifferent(module: nn.Module) -> bool:
    """Whether the module's forward runs the same without :class:`Interception`."""
    return type(module) in INDIFFERENT and has_class_forward(module)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif type(value) in (list, tuple):
            yield from _tensors(value)


def widest_dtype(values: Iterable[Any]) -> torch.dtype | None:
    """The format that operands of these dtypes promote to; None where there is nothing to do.

    Numbers in a 0-dimensional tensor do not count, as in PyTorch's own promotion.
    """
    found = {value.dtype for value in _tensors(values) if value.dtype in PRECISION and value.is_floating_point() and value.ndim}
    if len(found) < 2:
        return None
    return TORCH_DTYPE[promote(*(PRECISION[dtype] for dtype in found))]


_INTEGERS = (torch.int16, torch.int32, torch.int64)


def _may_repeat(index: Any) -> bool:
    """Whether an index names entries by number, in a tensor or a list, and so may name one several times."""
    if isinstance(index, tuple):
        return any(map(_may_repeat, index))
    return isinstance(index, list) or (isinstance(index, torch.Tensor) and index.dtype is not torch.bool)


def _never_overridden(func: Any) -> Function:
    """A copy of a Python function of PyTorch that does not ask whether a mode overrides it."""
    module_globals = {**func.__globals__, "has_torch_function": lambda _: False}
    copy = types.FunctionType(func.__code__, module_globals, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


_MULTI_HEAD_ATTENTION = _never_overridden(F.multi_head_attention_forward)


class Interception(TorchFunctionMode):
    """The mode that is active while an applied model's forward runs.

    Args:
        cache: where casts of promoted operands are shared.
        calls: what replaces functional calls.
        promote: whether formats can mix, so that functions that refuse mixed ones need their operands promoted.
        installation: whose it is.
    """

    def __init__(self, cache: CastCache, calls: WeightCalls, *, promote: bool, installation: object = None) -> None:
        super().__init__()
        self.promotes, self.installation = promote, installation
        self._cache = cache
        self._calls = calls
        self._own: dict[int, weakref.ref[torch.Tensor]] = {}
        self._reads_formats = False
        self._handlers: dict[Function, Callable[[Function, tuple[Any, ...], dict[str, Any]], Any]] = {
            F.linear: self._functional_linear,
            torch.conv2d: self._functional_conv2d,
            **dict.fromkeys(RIGHT_FACTORS, self._product),
            **dict.fromkeys((torch.addmm, torch.Tensor.addmm), self._addmm),
            F.multi_head_attention_forward: self._open,
            checkpoint: self._checkpointed,
            **dict.fromkeys(CASTS, self._cast_by_model),
            **dict.fromkeys(UNSEEN_WRITES, self._written_unseen),
            **dict.fromkeys(READS, self._read),
            **dict.fromkeys(COLLECTIVES, self._communicated),
        }
        if promote:
            self._handlers = {
                **dict.fromkeys(PROMOTED, self._promoted),
                **dict.fromkeys(WRITES, self._written),
                **dict.fromkeys(IN_PLACE, self._in_place),
                **dict.fromkeys(GATHERS, self._gathered),
                **dict.fromkeys(NUMBERED, self._numbered),
                **dict.fromkeys(NORMS, call_norm),
                **dict.fromkeys(FUNCTIONAL, self._communicated_functionally),
                **dict.fromkeys(FORMAT_READS, self._format_read),
                **dict.fromkeys((*LOSSES, *FLOAT32_FUNCTIONS, F.embedding), call_in_float32),
                **self._handlers,
                **dict.fromkeys(READS & PROMOTED, self._read_promoted),
            }

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Hand a function to its handler, or run it as it is."""
        handler = self._handlers.get(func)
        if self._own and not torch.compiler.is_compiling():
            result = func(*args, **(kwargs or {})) if handler is None else handler(func, args, kwargs or {})
            self._pass_on(result, args, kwargs or {})
            return result
        if handler is None:
            return func(*args, **(kwargs or {}))
        return handler(func, args, kwargs or {})

    def _checkpointed(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``torch.compile`` makes of a checkpoint: its function is read when this mode has been left."""
        function, *rest = args

        def inside(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return func(inside, *rest, **kwargs)

    def step_out(self) -> bool:
        """Leave the mode for a while; False, and nothing has happened, where it is not the innermost mode."""
        depth = torch._C._len_torch_function_stack()
        if not depth or torch._C._get_function_stack_at(depth - 1) is not self:
            return False
        torch._C._pop_torch_function_stack()
        return True

    def step_in(self) -> None:
        """Come back after :meth:`step_out`."""
        torch._C._push_on_torch_function_stack(self)

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, torch.Tensor):
            if value.dtype is dtype or value.dtype not in PRECISION or not value.is_floating_point():
                return value
            if not self._cache.applies_to(value):
                return value.to(dtype)
            entry = self._cache.find(value, float_key(value.dtype, dtype))
            if (cast := entry.value) is None:
                cast = entry.value = value.to(dtype)
            return cast
        if type(value) in (list, tuple):
            return type(value)(self._cast(item, dtype) for item in value)
        return value

    def _promoted(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dtype = widest_dtype((*args, *kwargs.values()))
        if dtype is None:
            return func(*args, **kwargs)
        return func(*self._cast(args, dtype), **{key: self._cast(value, dtype) for key, value in kwargs.items()})

    def _written(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target = args[0]
        if not target.is_floating_point() or target.dtype not in PRECISION:
            return func(*args, **kwargs)
        rest = (self._cast(value, target.dtype) for value in args[1:])
        return func(target, *rest, **{key: self._cast(value, target.dtype) for key, value in kwargs.items()})

    def _in_place(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dtype = widest_dtype(args) if args[0].dtype in LOW_FLOATS else None
        if dtype in (None, args[0].dtype):
            return func(*args, **kwargs)
        result = IN_PLACE[func](*self._cast(args, dtype), **kwargs)
        # Called as a method for its effect, the same function must still change the tensor, in the tensor's own format.
        func(*args, **kwargs)
        return result

    def _gathered(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not args:  # torch.take(input=h, index=rows)
            args, kwargs = (kwargs["input"],), {name: value for name, value in kwargs.items() if name != "input"}
        x, *index = args
        if x.dtype not in LOW_FLOATS or x.device.type != "cpu" or not (x.requires_grad and _may_repeat((*index, *kwargs.values()))):
            return func(*args, **kwargs)
        return func(self._cast(x, torch.float32), *index, **kwargs).to(x.dtype)

    def _written_unseen(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``x.data.mul_(2)``: what was made of ``x`` before is not what the next operator is to read."""
        if not torch.compiler.is_compiling():
            self._cache.leave_out(args[0])
        return func(*args, **kwargs)

    def _communicated(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What leaves this rank has the format that it has without a plan: others send and expect that."""
        if torch.compiler.is_compiling():
            if COLLECTIVES[func].is_compiled:  # as a functional collective, which comes here too
                return func(*args, **kwargs)
            torch._dynamo.graph_break()
        for tensor in written_by(func, args, kwargs):
            self._cache.leave_out(tensor)
            if tensor._base is not None:
                self._cache.leave_out(tensor._base)
        if not self.promotes:
            return func(*args, **kwargs)
        communicates()
        return in_format_of_the_job(func, args, kwargs, self._is_lowered)

    def _communicated_functionally(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*map(self._widened, args), **{key: self._widened(value) for key, value in kwargs.items()})

    def _widened(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(torch.float32) if self._is_lowered(value) else value
        return [self._widened(item) for item in value] if type(value) in (list, tuple) else value

    def _is_lowered(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has 16 bits for the plan: the model itself has not cast it, nor what it was computed from."""
        return tensor.dtype in LOW_FLOATS and not self._is_own(tensor)

    def _is_own(self, tensor: torch.Tensor) -> bool:
        known = self._own.get(id(tensor))
        return known is not None and known() is tensor

    def _pass_on(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What a function makes of 16-bit tensors that are all the model's own is the model's own too."""
        low = [tensor for tensor in _tensors((*args, *kwargs.values())) if tensor.dtype in LOW_FLOATS]
        if low and all(map(self._is_own, low)):
            self._add_own(result)

    def _add_own(self, result: Any) -> None:
        for tensor in _tensors((result,)):
            if tensor.dtype in LOW_FLOATS:
                key = id(tensor)
                self._own[key] = weakref.ref(tensor, lambda _, key=key: self._own.pop(key, None))  # type: ignore[misc]

    def _format_read(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``x.to(h.dtype)``: from now on, a format that a cast is given may be one of the plan's."""
        dtype = func(*args, **kwargs)
        if dtype in LOW_FLOATS:
            self._reads_formats = True
        return dtype

    def _read(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.compiler.is_compiling() and HERE.open:
            self._calls.read_otherwise((*args, *kwargs.values()))
        return func(*args, **kwargs)

    def _read_promoted(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.compiler.is_compiling() and HERE.open:
            self._calls.read_otherwise((*args, *kwargs.values()))
        return self._promoted(func, args, kwargs)

    def _cast_by_model(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``weight.to(x.dtype)``, as in Whisper: under a plan the activation's format is another than in the trace."""
        x, result = args[0], func(*args, **kwargs)  # a name, of ``weight.type()``
        if not isinstance(result, torch.Tensor) or result.dtype not in LOW_FLOATS:
            return result
        if isinstance(x, nn.Parameter):
            self._calls.remember_cast(x, result)
        elif not self.promotes or torch.compiler.is_compiling():
            return result
        elif x.dtype in _INTEGERS:  # time steps, in the format of an activation
            return x.to(result.device, torch.float32)
        elif func in NAMED_CASTS or not (self._reads_formats or func is torch.Tensor.type_as):
            result = result.view_as(result) if result is x else result
            self._add_own(result)
        return result

    def _numbered(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("dtype") in LOW_FLOATS:
            kwargs = {**kwargs, "dtype": torch.float32}
        return func(*args, **kwargs)

    def _functional_linear(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        weight = self._calls.uncast(args[1] if len(args) > 1 else kwargs.get("weight"))
        planned = self._planned(args[0] if args else kwargs.get("input"), weight, LINEAR)
        if planned is None:
            return self._promoted(func, args, kwargs)
        args, kwargs = self._with_parameters(args, kwargs)
        return planned.linear(*args, **kwargs)

    def _with_parameters(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The parameters themselves in place of the model's own casts: an operator makes those of its variant."""
        uncast = self._calls.uncast
        others = {key: value if key == "input" else uncast(value) for key, value in kwargs.items()}
        return (*args[:1], *map(uncast, args[1:])), others

    def _planned(self, x: Any, weight: Any, way: str) -> OperatorCall | None:
        call = self._calls.called(weight, way)
        return None if call is None or self._calls.is_stored(x) else call

    def _product(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``x @ weight``, where that is the linear of a plan."""
        weight = self._calls.uncast(args[1] if len(args) > 1 else kwargs.get(RIGHT_FACTORS[func]))
        if isinstance(weight, torch.Tensor) and weight.ndim == 2 and "out" not in kwargs:
            x = args[0] if args else kwargs["input"]
            planned = self._planned(x, weight, PRODUCT)
            if planned is not None:
                return planned.linear(x, weight.t())
        return self._promoted(func, args, kwargs)

    def _addmm(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``bias + x @ weight``, where that is the linear of a plan."""
        operands: list[Any] = [*args[:3], *(kwargs.get(name) for name in ("input", "mat1", "mat2")[len(args) :])]
        bias, x, weight = self._calls.uncast(operands[0]), operands[1], self._calls.uncast(operands[2])
        planned = self._planned(x, weight, PRODUCT) if isinstance(weight, torch.Tensor) else None
        if planned is None:
            return self._promoted(func, args, kwargs)
        scaled = any(kwargs.get(factor, 1) != 1 for factor in ("alpha", "beta"))
        if scaled or len(args) > 3 or "out" in kwargs or bias.shape != weight.shape[1:]:
            raise PlanError(
                f"torch.addmm is called with {self._calls.fqn_of(weight)} and a factor, summand or output that no linear has, "
                f"which it was not when the plan was made; {self._calls.remedy}"
            )
        return planned.linear(x, weight.t(), bias)

    def _functional_conv2d(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        planned = self._calls.called(self._calls.uncast(args[1] if len(args) > 1 else kwargs.get("weight")), CONV2D)
        if planned is None:
            return self._promoted(func, args, kwargs)
        args, kwargs = self._with_parameters(args, kwargs)
        return planned.conv2d(*args, **kwargs)

    def _open(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a Python function of PyTorch with this mode still active inside it.

        Such a function first asks whether a mode overrides it, and would call this one without end; a copy that never asks runs
        instead.
        """
        with self:
            return _MULTI_HEAD_ATTENTION(*args, **kwargs)
