"""A plan rides on the modules that it concerns: their class changes, under the same name, and changes back.

A planned module's ``forward`` runs the operator of the plan, and reading a planned parameter gives a handle
(:mod:`qsync_torch.apply.handles`).  ``_parameters`` stay as they are, plain float32, so optimizers, DistributedDataParallel and
checkpoints see nothing; copies and pickles of a module are without its plan, and need no QSync to be loaded.
"""

from __future__ import annotations

import copy
import copyreg
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from qsync_core.errors import PlanError
from qsync_torch.apply.handles import CASTING, TURNING, Handle, OperatorCall, multiplied, plain
from qsync_torch.apply.plan_fit import STORED
from qsync_torch.apply.stored_modules import (
    HeldWeight,
    ReadWeight,
    methods_of_storing,
    refuse_training,
    untrainable,
    without_storage,
)
from qsync_torch.dtypes import PRECISION
from qsync_torch.kinds.kind import OperatorKind, Settings, Spelling
from qsync_torch.kinds.table import OPERATOR_KINDS, SPELLED, kind_of_module
from qsync_torch.operators.stored import run_in_own_format
from qsync_torch.torch_internals import DisableTorchFunction

_CALLS, _AROUND, _FORWARD, _UNPLANNED = "_qsync_plan", "_qsync_around", "_qsync_forward", "_qsync_unplanned"
"""Attributes of a planned module: the operators by the names of its parameters; what runs around its forward, and a forward of the
instance's own; of its class: the one that it had."""

Around = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Runs a model's forward, a function of the model and its arguments."""


def put_plan(model: nn.Module, calls: Mapping[tuple[nn.Module, str], OperatorCall], around: Around) -> Callable[[], None]:
    """Put operators into a model.

    Args:
        model: whose forward runs through ``around``, wherever it is called from.
        calls: by module and name of the parameter, which may be one that the module computes.  A module that has the forward of a
            kind's class runs the operator of its ``weight``.

    Returns:
        What takes them out again.  It raises PlanError, and changes nothing, where a class or a forward was changed since.
    """
    by_module: dict[nn.Module, dict[str, OperatorCall]] = {model: {}}
    replaced: list[nn.Module] = []
    for (module, leaf), call in calls.items():
        by_module.setdefault(module, {})[leaf] = call
    for module, own in by_module.items():
        module._qsync_plan = own  # type: ignore[assignment]
        found = kind_of_module(module) if "weight" in own else None
        kind = "" if found is None else found.name
        is_patched = module is model and "forward" in module.__dict__
        if is_patched:
            module.__dict__[_FORWARD] = module.__dict__.pop("forward")
        if module is model:
            module.__dict__[_AROUND] = around
        # PyTorch compiles each model's forward anew.
        make: Callable[..., type] = _planned_class.__wrapped__ if module is model else _planned_class
        module.__class__ = make(type(module), tuple(sorted(own)), kind, module is model, is_patched, STORED in module.__dict__)
        if (module is model or kind) and "forward" not in module.__dict__:
            replaced.append(module)

    def remove() -> None:
        names = {id(module): name for name, module in model.named_modules()}
        for module in by_module:
            if not is_as_planned(module):
                name = names.get(id(module)) or type(module).__name__
                raise PlanError(
                    f"the class of {name} was changed after the plan was applied (it is a {type(module).__name__} now); take that "
                    "change back before remove()"
                )
        for module in replaced:
            if "forward" in module.__dict__:
                name = names.get(id(module)) or type(module).__name__
                raise PlanError(
                    f"the forward of {name} was replaced after the plan was applied; take that replacement back before remove()"
                )
        for module in by_module:
            module.__class__ = getattr(type(module), _UNPLANNED)
            own = module.__dict__
            if _FORWARD in own:
                own["forward"] = own.pop(_FORWARD)
            for name in (_CALLS, _AROUND):
                own.pop(name, None)

    return remove


def is_planned(module: nn.Module) -> bool:
    """Whether a plan rides on this module, whose class another library may have derived one from since (a parametrization)."""
    return hasattr(type(module), _UNPLANNED)


def is_as_planned(module: nn.Module) -> bool:
    """Whether its class is still the one that it got with the plan."""
    return _UNPLANNED in vars(type(module))


@functools.cache
def _planned_class(
    unplanned: type, leaves: tuple[str, ...], kind: str, is_model: bool, is_patched: bool, stores: bool = False
) -> type:
    """The class of planned modules, under the same name; one for all of a class, so that they share compiled code."""

    def reduce_ex(self: Any, protocol: Any) -> Any:
        reduced: Any = unplanned.__reduce_ex__(self, protocol)  # type: ignore[call-arg]
        function, arguments, state, *others = reduced
        if function is copyreg.__newobj__:  # type: ignore[attr-defined]  # which insists on an object's own class
            function, arguments = copyreg._reconstructor, (unplanned, object, None)  # type: ignore[attr-defined]
        return function, arguments, _without_plan(state), *others

    def deepcopy(self: Any, memo: Any) -> Any:
        copy = unplanned.__deepcopy__(self, memo)  # type: ignore[attr-defined]
        copy.__class__ = unplanned
        copy.__dict__ = _without_plan(copy.__dict__)
        return copy

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        """A new module of this class (``type(model)(config)``) is of the class without a plan."""
        if _CALLS not in self.__dict__:
            self.__class__ = unplanned
        unplanned.__init__(self, *args, **kwargs)  # type: ignore[misc]

    def extra_repr(self: Any) -> str:
        """What ``print(model)`` shows of the module, and what its operators run as."""
        calls = self.__dict__.get(_CALLS, {})
        runs = [f"{'' if leaf == 'weight' else f'{leaf} '}runs as {call.label}" for leaf, call in calls.items() if call.label]
        return ", ".join(filter(None, [unplanned.extra_repr(self), *runs]))  # type: ignore[attr-defined]

    def copy(self: Any) -> Any:
        """A shallow copy has the parts of the module, and its plan."""
        made: Any = nn.Module.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def requires_grad(self: Any, requires_grad: bool = True) -> Any:
        """What is stored is no parameter that this would reach."""
        if requires_grad:
            refuse_training(self)
        return unplanned.requires_grad_(self, requires_grad)  # type: ignore[attr-defined]

    body: dict[str, Any] = {
        "__module__": unplanned.__module__,
        "__qualname__": unplanned.__qualname__,
        "__doc__": unplanned.__doc__,
        _UNPLANNED: unplanned,
        "__init__": init,
        "__reduce_ex__": reduce_ex,
        "__copy__": copy,
        "extra_repr": extra_repr,
        "__prepare_scriptable__": _refuse_scripting,
        "_replicate_for_data_parallel": _refuse_replicas,
    }
    if hasattr(unplanned, "__deepcopy__"):
        body["__deepcopy__"] = deepcopy
    if is_model:
        own: Any = unplanned.forward  # type: ignore[attr-defined]
        body["forward"] = _entered(_patched if is_patched else _FORWARDS.get(kind, own))
    elif kind:
        body["forward"] = _FORWARDS[kind]
    if stores:
        body |= methods_of_storing(unplanned)
    if stores or is_model:
        body["requires_grad_"] = requires_grad
    for leaf in leaves:
        body[leaf] = _read_as_handle(unplanned, leaf, may_be_computed=leaf == "weight" and bool(kind))
    return type(unplanned)(unplanned.__name__, (_Unregistered, unplanned), body)


class _Unregistered(nn.Module):
    """Keeps the class of a planned module from those who are told of subclasses, to list what a script may choose among."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Tell no base of it."""


def _refuse_scripting(self: Any) -> Any:
    raise PlanError(
        "torch.jit.script reads the source of a model, which has nothing of its plan: script a copy, which is in full "
        "precision (torch.jit.script(copy.deepcopy(model))), or call remove() first"
    )


def _refuse_replicas(self: Any) -> Any:
    raise PlanError(
        "nn.DataParallel copies a model to each GPU in every forward, and a plan is for one process with one GPU: start a process "
        "for each GPU with torchrun and use DistributedDataParallel, or call remove() first"
    )


def _without_plan(state: Any) -> Any:
    if isinstance(state, tuple):  # of a class with slots
        return tuple(map(_without_plan, state))
    if not isinstance(state, dict):
        return state
    if STORED in state:
        state = without_storage(state)
    return {"forward" if name == _FORWARD else name: value for name, value in state.items() if name not in (_CALLS, _AROUND)}


def _patched(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self._qsync_forward(*args, **kwargs)


def _entered(inner: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a model, whose code is its own: PyTorch's compiler keeps what it makes beside a function's code."""

    @functools.wraps(inner)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._qsync_around(self, inner, args, kwargs)

    forward.__code__ = forward.__code__.replace()  # type: ignore[attr-defined]
    return forward


def _read_as_handle(unplanned: type, leaf: str, *, may_be_computed: bool) -> property:
    computed = getattr(unplanned, leaf, None)  # by a parametrization
    read = computed.fget if isinstance(computed, property) and computed.fget else functools.partial(_stored, leaf=leaf)

    def get(self: Any) -> Any:
        if leaf == "weight" and (held := self.__dict__.get(STORED)) is not None:
            if (given := self._parameters.get(leaf)) is not None:
                return given
            if not held.storage.is_quantized:
                return _handle(held.parameter, self._qsync_plan[leaf], self)
            if may_be_computed:
                return held.dequantized() if torch.compiler.is_compiling() else ReadWeight.of(held)
            if torch.compiler.is_compiling():
                value = held.dequantized()
                is_handled = torch.compiler.is_dynamo_compiling()  # torch.export may run code by itself, and reads what there is
                return Handle.of(held, self._qsync_plan[leaf], self, value) if is_handled else value
            return UnreadWeight.of_call(held, self._qsync_plan[leaf], self)
        value = read(self)
        # What is computed, or cut out of a flat parameter, is none itself, and no operator of a trace.
        if type(value) is torch.Tensor and (value._base is not None or (not may_be_computed and value.grad_fn is not None)):
            return value
        return _handle(value, self._qsync_plan[leaf], self)

    def put(self: Any, value: Any) -> None:
        """Take what is no parameter: the older weight_norm computes one in each forward."""
        self.__dict__[leaf] = value

    def delete(self: Any) -> None:
        del self.__dict__[leaf]

    return property(get, put, delete)


def _stored(module: Any, leaf: str) -> Any:
    found = module.__dict__
    if leaf in found and leaf not in found["_parameters"]:
        return found[leaf]
    return nn.Module.__getattr__(module, leaf)  # where torch.fx waits for reads of parameters


def _handle(value: Any, call: OperatorCall, owner: nn.Module) -> Any:
    """The handle of a tensor.  A DTensor is a shard that waits to be gathered, and ``torch.fx`` has a proxy for a parameter."""
    if type(value) not in (torch.Tensor, nn.Parameter):
        return value
    return Handle.of(value, call, owner)


def _weight_of(module: Any) -> Any:
    """The weight of a module's own forward: the parameter, what is computed in its place, or what is stored of it."""
    held, weight = module.__dict__.get(STORED), module._parameters.get("weight")
    if held is not None and weight is None:
        if held.storage.is_quantized:
            return held
        if held.parameter.requires_grad:
            raise PlanError(untrainable(held))
        return held.parameter
    return plain(module.weight) if weight is None else weight


def _runs_planned(module: Any, call: OperatorCall, weight: Any) -> bool:
    """Whether the operator of the plan runs: not with a weight that a functional call gives in the place of a stored one."""
    held = module.__dict__.get(STORED)
    is_given = held is not None and held.storage.is_quantized and held is not weight
    return not is_given and call.is_on(module)


def _as_held(
    function: Callable[..., torch.Tensor],
    x: torch.Tensor,
    weight: Any,
    bias: torch.Tensor | None,
    kind: OperatorKind,
    settings: Settings = (),
) -> torch.Tensor:
    """A call in the format in which the script has the weight."""
    if not isinstance(weight, HeldWeight):
        return function(x, weight, bias, *settings)
    y = run_in_own_format(x, weight.tensors, weight.storage, weight.shape, weight.dtype, bias, kind, settings)
    return function(x, weight.dequantized(), bias, *settings) if y is None else y


class UnreadWeight(ReadWeight):
    """A stored weight as functional calls read it, ``F.linear(x, self.weight)`` of a layer that has its adapters beside it.

    The product is the plan's, as that of a module of PyTorch's own, also with the weight cast or turned for it
    (``self.weight.to(x.dtype)``); anything else reads the weight dequantized, and nothing is before: until then it is one number,
    expanded to the weight's shape.

    Attributes:
        call: what runs in the place of products with it.
        owner: the module it was read from.
        source: what those read.
        prepared: the functions that got it ready for a product.
        transposed: whether these turned it.
        value: what they make of the dequantized weight, once something has read that which may write there or keeps its address.
    """

    call: OperatorCall
    owner: nn.Module
    source: HeldWeight
    prepared: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = ()
    transposed = False
    value: torch.Tensor | None = None

    @classmethod
    def of_call(
        cls, held: HeldWeight, call: OperatorCall, owner: nn.Module, dtype: torch.dtype | None = None, *, transposed: bool = False
    ) -> UnreadWeight:
        """What a module's own code gets when it reads its weight, and what it makes of that for a product."""
        shape = held.shape[::-1] if transposed else held.shape
        unread = torch.empty((), dtype=dtype or held.dtype, device=held.device).expand(shape).as_subclass(cls)
        unread.held = unread.source = held
        unread.call, unread.owner, unread.transposed = call, owner, transposed
        return unread

    def read(self) -> torch.Tensor:
        """The dequantized weight, and what was made of it: a cast is a tensor of its own, which a script may change."""
        if self.value is not None:
            return self.value
        value: torch.Tensor = ReadWeight.of(self.held)
        for function in self.prepared:
            value = function(value)
        if self.prepared:
            self.value = value
        return value

    @ReadWeight.data.getter  # type: ignore[attr-defined,untyped-decorator]
    def data(self) -> torch.Tensor:
        """That of the dequantized weight."""
        return self.read().data

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run a product of the plan, or the function on the dequantized weight."""
        kwargs = kwargs or {}
        if func in _ASKED:
            with DisableTorchFunction():
                return func(*args, **kwargs)
        if (spelled := SPELLED.get(func)) is not None:
            place, name = spelled[1].place, spelled[1].name
            weight = args[place] if len(args) > place else kwargs.get(name)
            if isinstance(weight, cls) and weight.value is None and (y := weight._multiplied(*spelled, args, kwargs)) is not None:
                return y
        elif args and isinstance(args[0], cls) and args[0].value is None:
            if func in _PREPARING and (prepared := args[0]._prepared(func, args[1:], kwargs)) is not None:
                return prepared
            if func is _T.requires_grad_ and args[0].prepared:  # as nn.Parameter asks, which takes no other class
                raise PlanError(untrainable(args[0].held))
            if func is _T.data_ptr:  # of what is to be there as long as this is
                args[0].value = args[0].read()
        return func(*map(_dequantized, args), **{name: _dequantized(value) for name, value in kwargs.items()})

    def _multiplied(self, kind: OperatorKind, spelling: Spelling, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The product, as planned or as the script has it; None where this is none, and where the script's own is to run."""
        if self.call.is_on(self.owner):
            return multiplied(self, kind, spelling, args, kwargs)
        held = self.held
        is_cast_twice = self.dtype is not held.dtype and held.dtype is not torch.float32
        if spelling.transposed is not self.transposed or self.dim() != kind.weight_dimensions or is_cast_twice:
            return None
        read = spelling.read(args, kwargs, self)
        if read is None or type(read[0]) is not torch.Tensor:
            return None
        x, bias, settings = read
        return run_in_own_format(x, held.tensors, held.storage, held.shape, self.dtype, plain(bias), kind, settings)

    def _prepared(self, func: Any, others: tuple[Any, ...], kwargs: dict[str, Any]) -> UnreadWeight | None:
        """The same numbers in another format, which products cast once, or the transpose; None for anything else."""
        with DisableTorchFunction():
            small = torch.empty((1, 0) if self.transposed else (0, 1), dtype=self.dtype, device=self.device)
            made = func(small, *others, **kwargs)
        if made is small:
            return self
        if not isinstance(made, torch.Tensor) or made.device != small.device:
            return None
        held, function = self.held, lambda value: func(value, *others, **kwargs)
        if func in CASTING:
            if made.dtype is small.dtype or small.dtype is not held.dtype or made.dtype not in PRECISION:
                return None
            held, function = copy.copy(held), lambda value: value.to(made.dtype)  # of what is stored now
        unread = self.of_call(held, self.call, self.owner, made.dtype, transposed=made.shape == (1, 0))
        unread.prepared, unread.is_view = (*self.prepared, function), True
        return unread

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What comes here past classes' functions reads the dequantized weight too."""
        read = functools.partial(_dequantized, is_plain=True)
        return func(*map(read, args), **{name: read(value) for name, value in (kwargs or {}).items()})


def _dequantized(value: Any, is_plain: bool = False) -> Any:
    """A weight as it is read, of no class if that is wanted, also in lists and tuples; anything else as it is."""
    if isinstance(value, UnreadWeight):
        return value.read().as_subclass(torch.Tensor) if is_plain else value.read()
    return type(value)(_dequantized(one, is_plain) for one in value) if type(value) in (list, tuple) else value


_T = torch.Tensor
_PREPARING = frozenset({*CASTING, *TURNING, _T.detach})
_ASKED = frozenset(
    {
        *(_T.size, _T.dim, _T.numel, _T.is_floating_point),
        *(getattr(_T, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "grad_fn")),
    }
)
"""What asks for no values."""


def _forward_of(kind: OperatorKind) -> Callable[..., Any]:
    """What stands for the forward of a kind's class.  PyTorch's compiler keeps what it makes beside a function's code."""
    function, settings_of, inner = kind.function, kind.of_module, kind.methods[1:]

    def forward(module: Any, input: torch.Tensor) -> torch.Tensor:
        call, weight = module._qsync_plan["weight"], _weight_of(module)
        if not _runs_planned(module, call, weight):
            return _as_held(function, input, weight, module.bias, kind)
        result: torch.Tensor = call.run(input, weight, module.bias, kind)
        return result

    if settings_of is None:
        return forward

    def forward_with_settings(module: Any, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        call, weight = module._qsync_plan["weight"], _weight_of(module)
        for name in inner:
            if name in module.__dict__:
                raise PlanError(
                    f"{module} has another {name} than when the plan was applied, which would not run: change it before the "
                    "plan is made and applied"
                )
        read = settings_of(module, input, *args, **kwargs)  # not into ``input``: a compiler would name the node before by that
        if not _runs_planned(module, call, weight):
            return _as_held(function, read[0], weight, module.bias, kind, read[1])
        result: torch.Tensor = call.run(read[0], weight, module.bias, kind, read[1])
        return result

    forward_with_settings.__code__ = forward_with_settings.__code__.replace(co_name=f"{kind.name}_forward")
    return forward_with_settings


_FORWARDS = {name: _forward_of(kind) for name, kind in OPERATOR_KINDS.items()}
"""What stands for the forward of a kind's class, by the kind's name."""
