"""What a model's own code gets when it reads a parameter that a plan names: a handle, with which products are the plan's.

``F.linear(x, self.w)``, ``x @ self.w.t()`` and attention's projections run as planned wherever they are called.  Any other function
takes the parameter itself, a slice or ``einsum`` too, and runs in full precision.  Products are those of the table of kinds
(:data:`qsync_torch.kinds.table.SPELLED`); what gets a weight ready for them is in :data:`_PREPARING`.

A handle is an ``nn.Parameter`` to code that asks, and has the parameter's attributes.  What keeps one gets the parameter in its
place: a module that it is assigned to (tied weights), and an optimizer in its first step.  Handles are made anew whenever they are
read: one that lived on would keep a node of autograd's graph alive, which remembers the parameter's shape.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_buffer_registration_hook, register_module_parameter_registration_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from qsync_core.errors import PlanError
from qsync_torch.dtypes import PRECISION
from qsync_torch.kinds.kind import OperatorKind, Settings, Spelling
from qsync_torch.kinds.table import SPELLED
from qsync_torch.torch_internals import DisableTorchFunction, running_node


class OperatorCall(Protocol):
    """Runs where a model calls an adjustable operator.

    Attributes:
        model: whose code calls it.
        forms: as which kind the parameter was multiplied with, and whether as that kind's function takes it, or as the transpose.
        follows_casts: whether products with what the model casts the parameter to are this operator's too.
        lowers: whether it takes PyTorch's place, or refuses; else products alone are looked at, and a script may read the weight.
        label: what it runs as, where that is not what the job does by itself; else empty.
    """

    model: nn.Module
    forms: set[tuple[str, bool]]
    follows_casts: bool
    lowers: bool

    @property
    def label(self) -> str:
        """Say for ``print(model)`` how it runs."""
        ...

    def is_on(self, owner: nn.Module) -> bool:
        """Whether it runs now, in place of PyTorch's operator."""
        ...

    def run(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kind: OperatorKind, settings: Settings = ()
    ) -> torch.Tensor:
        """Run the operator where the function of a kind was called."""
        ...


class Handle(torch.Tensor):
    """A planned parameter as a model's own code reads it.

    Attributes:
        call: what runs in the place of products with it.
        owner: the module it was read from.
        source: what products of the plan read: the parameter, or what a plan stores of it.
        value: what every other function takes: the parameter, or its transpose, or its cast.
        transposed: whether it stands for the transpose.
        is_own: whether the script has made a parameter of its own of it, which no plan names: ``nn.Parameter(w.detach())``.
    """

    call: OperatorCall
    owner: nn.Module
    source: Any
    value: torch.Tensor
    transposed: bool
    is_own: bool

    @classmethod
    def of(
        cls, source: Any, call: OperatorCall, owner: nn.Module, value: torch.Tensor | None = None, transposed: bool = False
    ) -> Handle:
        """The handle of a parameter, or of its transpose or cast; or of what is stored, with the weight that it is as ``value``."""
        value = source if value is None else value
        is_compiling = torch.compiler.is_compiling() and value is source and isinstance(value, nn.Parameter)
        handle = value.view_as(value).as_subclass(_CompiledHandle if is_compiling else cls)
        handle.call, handle.owner, handle.source, handle.value, handle.transposed = call, owner, source, value, transposed
        handle.is_own = False
        return handle

    @property
    def _is_param(self) -> bool:
        """Whether it is an ``nn.Parameter`` to ``isinstance``, by PyTorch's flag for tensors of other classes."""
        return self.is_own or (self.value is self.source and isinstance(self.value, nn.Parameter))

    @_is_param.setter
    def _is_param(self, is_one: bool) -> None:
        """Take it that PyTorch makes a parameter of this."""
        self.is_own = is_one

    def __getattr__(self, name: str) -> Any:
        """What a script has put on the parameter, such as ``w.no_decay = True``."""
        if (value := self.__dict__.get("value")) is not None:
            return getattr(value, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        """Put what a script puts here on the parameter, where others read it."""
        if name in _OF_HANDLE:
            object.__setattr__(self, name, value)
        else:
            setattr(self.value, name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of what it stands for."""
        return copy.deepcopy(self.kept(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A saved handle is what it stands for."""
        return self.kept().__reduce_ex__(protocol)

    def kept(self) -> torch.Tensor:
        """What takes its place where it is kept: the parameter, or a parameter of the script's own."""
        if self.is_own:
            return nn.Parameter(self.value.detach(), self.value.requires_grad)
        return self.value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run a product of the plan, or the function on the parameter itself."""
        kwargs = kwargs or {}
        if (spelled := SPELLED.get(func)) is not None:
            place, name = spelled[1].place, spelled[1].name
            weight = args[place] if len(args) > place else kwargs.get(name)
            if isinstance(weight, cls) and not weight.is_own and weight.call.is_on(weight.owner):
                found = multiplied(weight, *spelled, args, kwargs)
                if found is not None:
                    return found
        elif (known := _PREPARING.get(func)) is not None:
            name, prepared = known
            weight = args[0] if args else kwargs.get(name)
            if isinstance(weight, cls) and not weight.is_own and weight.call.lowers and weight.call.is_on(weight.owner):
                found = prepared(weight, func, args, kwargs)
                if found is not None:
                    return found
        if func is F.multi_head_attention_forward:
            return _OPEN_ATTENTION(*args, **kwargs)
        arguments, named = plain(args), {name: plain(value) for name, value in kwargs.items()}
        if func in _BACKWARD:  # in which forwards may run again, with handles of their own
            return func(*arguments, **named)
        with DisableTorchFunction():
            return func(*arguments, **named)


class _CompiledHandle(Handle, nn.Parameter):
    """A handle of a parameter, where a compiler reads, which asks a class alone whether it is one."""


_OF_HANDLE = frozenset({*Handle.__annotations__, "_is_param"})


def plain(value: Any) -> Any:
    """What a handle stands for, also in lists and tuples; anything else as it is."""
    if isinstance(value, Handle):
        return value.value
    return type(value)(map(plain, value)) if type(value) in (list, tuple) else value


def multiplied(w: Any, kind: OperatorKind, spelling: Spelling, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The product of a plan, with a weight as its kind's function takes it or the other way round; None where this is none.

    ``w`` is its handle, or has the same attributes; the ``source`` of one that a plan stores is no tensor, and has no transpose.

    A gradient formula in a backward pass multiplies with the weight in another way than the forward pass did, and no piece of a
    forward that runs again without gradients does (a reversible block).
    """
    if w.ndim != kind.weight_dimensions or (read := spelling.read(args, kwargs, w)) is None:
        return None
    x, bias, settings = read
    if isinstance(x, Handle) or not isinstance(x, torch.Tensor) or _is_stored(w.call.model, x):
        return None
    as_stored = w.transposed == spelling.transposed
    if not as_stored and not isinstance(w.source, torch.Tensor):
        return None
    if not torch.compiler.is_compiling():
        form = (kind.name, as_stored)
        if torch.is_grad_enabled() or not in_backward():
            w.call.forms.add(form)
        elif w.call.forms != {form}:
            return None
    return w.call.run(x, w.source if as_stored else w.source.t(), plain(bias), kind, settings)


def in_backward() -> bool:
    """Whether a backward pass runs in this thread."""
    return not torch.compiler.is_compiling() and running_node() is not None


_Prepared = Callable[[Handle, Any, tuple[Any, ...], dict[str, Any]], Any]


def _turned(w: Handle, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The transpose of a matrix, of which products are the plan's too."""
    named = [value for name, value in kwargs.items() if name != "input"]
    dims = [dim % 2 for part in (*args[1:], *named) for dim in (part if isinstance(part, (list, tuple)) else (part,))]
    if w.ndim != 2 or (dims and set(dims) != {0, 1}) or (len(dims) == 2 and dims != [1, 0] and func in _PERMUTATIONS):
        return None
    return Handle.of(w.source, w.call, w.owner, w.value.t(), not w.transposed)


def _same(w: Handle, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same numbers in another place of autograd's graph, as a checkpoint makes of its arguments, or in another format.

    ``weight.to(x.dtype)``, as in Whisper, stays the plan's: an operator makes the casts of its variant, from the parameter itself.
    """
    value = func(w.value, *plain(args[1:]), **kwargs)
    if value is w.value:
        return w
    if not isinstance(value, torch.Tensor) or value.shape != w.shape or value.dtype not in PRECISION:
        return value
    if value.dtype is not w.dtype and not w.call.follows_casts:
        return value
    source = w.source if value.dtype is not w.source.dtype else value.t() if w.transposed else value
    return Handle.of(source, w.call, w.owner, value, w.transposed)


_T = torch.Tensor
_BACKWARD = (torch.autograd.grad, torch.autograd.backward, _T.backward)
_PERMUTATIONS = (torch.permute, _T.permute)
TURNING = (
    *(torch.t, _T.t, torch.transpose, _T.transpose, torch.swapaxes, _T.swapaxes),
    *(_T.T.__get__, _T.mT.__get__),  # type: ignore[attr-defined]
    *_PERMUTATIONS,
)
"""Functions that make the transpose of a matrix."""
CASTING = (_T.to, _T.type, _T.type_as, _T.bfloat16, _T.half, _T.float)
"""Functions that make the same numbers in another format."""
_PREPARING: dict[Any, tuple[str, _Prepared]] = {
    **dict.fromkeys(TURNING, ("input", _turned)),
    **dict.fromkeys((_T.detach, _T.requires_grad_, _T.view_as, _T.contiguous, *CASTING), ("self", _same)),
}
"""Functions by which a planned weight, their first argument, is got ready for a product: its keyword, and what runs."""


def _open(function: Any) -> Callable[..., Any]:
    """A copy of a Python function of PyTorch that does not ask whether its arguments override it."""
    module_globals = {**function.__globals__, "has_torch_function": lambda _: False}
    copy = types.FunctionType(function.__code__, module_globals, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_OPEN_ATTENTION = _open(F.multi_head_attention_forward)


def _is_stored(model: nn.Module, x: torch.Tensor) -> bool:
    """Whether it is a parameter or buffer of a model, or a view of one: no operator of a plan is a product of such alone."""
    source = x if torch.compiler.is_compiling() or x._base is None else x._base
    if not source.is_leaf:
        return False
    own = model.parameters() if isinstance(source, nn.Parameter) else model.buffers()
    return any(source is tensor for tensor in own)


def _kept_by_module(module: nn.Module, name: str, tensor: Any) -> Any:
    """Give a module the parameter, where a handle is assigned to it."""
    return tensor.kept() if isinstance(tensor, Handle) else None


def _kept_by_optimizer(optimizer: Any, *_: Any) -> None:
    """Give an optimizer the parameters, where it was made with handles.

    Raises:
        PlanError: where it has a parameter both ways, and would step it twice.
    """
    if torch.compiler.is_compiling():
        return
    for group in optimizer.param_groups:
        for index, handle in enumerate(group["params"]):
            if type(handle) is not Handle:
                continue
            parameter = group["params"][index] = handle.kept()
            if handle in optimizer.state:
                optimizer.state[parameter] = optimizer.state.pop(handle)
            if sum(parameter is one for group in optimizer.param_groups for one in group["params"]) > 1:
                name = next((name for name, one in handle.owner.named_parameters() if one is parameter), "a parameter")
                raise PlanError(
                    f"the optimizer has {name!r} of {type(handle.owner).__name__} twice, and would step it twice: under a plan a "
                    "parameter that is read from its module is another object than in parameters(); take both from "
                    "named_parameters(), by their names"
                )


register_module_parameter_registration_hook(_kept_by_module)
register_module_buffer_registration_hook(_kept_by_module)
register_optimizer_step_pre_hook(_kept_by_optimizer)
