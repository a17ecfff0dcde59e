"""What a forward meets: the device of the parameters, autocast; and what it hands to the loss."""

from __future__ import annotations

import functools
import types
from collections.abc import Generator, Iterator, ValuesView
from typing import Any

import torch
from torch import nn

from qsync_core.errors import PlanError
from qsync_core.ir.precision import Precision
from qsync_torch.caller import BY_HAND, Caller
from qsync_torch.dtypes import LOW_FLOATS, PRECISION
from qsync_torch.torch_internals import pytree

LOW_BASES = frozenset(PRECISION[dtype] for dtype in LOW_FLOATS)
"""Bases of jobs that run under autocast."""


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's first parameter; the CPU for a model without parameters."""
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def autocast_now(device_type: str) -> Precision:
    """What ``torch.autocast`` makes of operators on a device now: float32 where it is not active."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return Precision.FLOAT32
    return PRECISION.get(torch.get_autocast_dtype(device_type), Precision.FLOAT32)


def check_autocast(
    base: Precision, device: torch.device, where: str = "the model", caller: Caller = BY_HAND, *, held: bool = False
) -> None:
    """Compare what autocast does with what a plan was made for.

    Args:
        held: weights of the model are in the base themselves: operators run alike with autocast and without.

    Raises:
        PlanError: with both, and what to do.
    """
    found = autocast_now(device.type)
    if found is base or (held and found is Precision.FLOAT32):
        return
    if base is Precision.FLOAT32:
        raise PlanError(
            f"{where} runs under torch.autocast to {found}, but its plan is for a job in float32: leave autocast out, or "
            f"{caller.plan_again} for a job under autocast to bfloat16 ({caller.with_amp('bfloat16')})"
        )
    active = "without torch.autocast" if found is Precision.FLOAT32 else f"under torch.autocast to {found}"
    raise PlanError(
        f"{where} runs {active}, but its plan is for a job under autocast to {base}, or with weights in {base}: run forward and "
        f"loss under torch.autocast({device.type!r}, torch.{base}), load the weights in torch.{base} where that was planned, or "
        f"{caller.plan_again} for a job with neither"
    )


def too_deep(output: Any) -> PlanError:
    """What is said of an output in which Python's recursion ends."""
    return PlanError(
        f"the {type(output).__name__} that the model returns nests deeper than Python walks (some hundred objects in objects); "
        "under a plan what it holds is turned to float32: return its tensors in a flat list or dictionary"
    )


def float32_outputs(output: Any) -> Any:
    """An output whose 16-bit tensors are float32, also in containers, dataclasses, objects of other classes and functions.

    Containers are made anew; objects keep their identity and get new attributes, functions new variables.

    Raises:
        PlanError: where it is nested too deeply.
    """
    if isinstance(output, torch.Tensor):
        return output.to(torch.float32) if output.dtype in LOW_FLOATS else output
    done: _Done = {}
    try:
        return pytree.tree_map(lambda part: _float32(part, done), output)
    except RecursionError:
        raise too_deep(output) from None


_Done = dict[int, tuple[Any, Any]]
"""Objects that were met, and what took their place, by their ``id``: each is met once, however many ways lead to it."""


def _float32(leaf: Any, done: _Done) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.to(torch.float32) if leaf.dtype in LOW_FLOATS else leaf
    if not _holds_attributes(leaf):
        return leaf
    if id(leaf) in done:
        return done[id(leaf)][1]
    if _is_iterator(leaf):
        return _InFloat32(leaf)
    if isinstance(leaf, (*_FUNCTIONS, *_MADE_ANEW)):
        is_low = _is_low(leaf, done, set())
        done[id(leaf)] = leaf, leaf
        if is_low:
            done[id(leaf)] = leaf, (_made_anew(leaf, done) if isinstance(leaf, _MADE_ANEW) else _function(leaf, done))
        return done[id(leaf)][1]
    done[id(leaf)] = leaf, leaf
    if isinstance(leaf, (dict, list)):  # of a class of the user's
        for key, value in list(leaf.items() if isinstance(leaf, dict) else enumerate(leaf)):
            leaf[key] = pytree.tree_map(lambda part: _float32(part, done), value)
    for name in _attribute_names(leaf):
        value = getattr(leaf, name, None)
        met: set[int] = set()
        if any(_is_low(part, done, met) for part in pytree.tree_leaves(value)):
            # Also in frozen dataclasses.
            object.__setattr__(leaf, name, pytree.tree_map(lambda part: _float32(part, done), value))
    return leaf


def _is_iterator(leaf: Any) -> bool:
    """Generators and what Python itself iterates with: what they give is not there yet."""
    return isinstance(leaf, Generator) or (isinstance(leaf, Iterator) and type(leaf).__module__ in ("builtins", "itertools"))


class _InFloat32(Iterator[Any]):
    """What an iterator gives, in float32."""

    __slots__ = ("_given",)

    def __init__(self, given: Any) -> None:
        self._given = given

    def __next__(self) -> Any:
        return float32_outputs(next(self._given))


_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinMethodType, functools.partial)


def _values_of(function: Any) -> list[Any]:
    """What a function keeps."""
    if isinstance(function, functools.partial):
        return [function.func, function.args, function.keywords]
    if isinstance(function, types.FunctionType):
        return [function.__defaults__, function.__kwdefaults__, *(cell.cell_contents for cell in _cells(function))]
    return [getattr(function, "__self__", None)]


def _cells(function: types.FunctionType) -> list[types.CellType]:
    """Variables that it takes from where it was made; those that have no value yet have no contents."""
    found = []
    for cell in function.__closure__ or ():
        try:
            cell.cell_contents  # noqa: B018
        except ValueError:
            continue
        found.append(cell)
    return found


def _function(function: Any, done: _Done) -> Any:
    def map_low(value: Any) -> Any:
        return pytree.tree_map(lambda part: _float32(part, done), value)

    if isinstance(function, functools.partial):
        return functools.partial(map_low(function.func), *map_low(function.args), **map_low(function.keywords))
    if isinstance(function, types.FunctionType):
        function.__defaults__, function.__kwdefaults__ = map_low(function.__defaults__), map_low(function.__kwdefaults__)
        for cell in _cells(function):
            cell.cell_contents = map_low(cell.cell_contents)
        return function
    return getattr(map_low(function.__self__), function.__name__)


_MADE_ANEW = (tuple, set, frozenset, types.MappingProxyType, ValuesView)
"""Containers that PyTorch does not know, as of tuples the user's classes, and whose contents cannot be exchanged in place."""


def _made_anew(leaf: Any, done: _Done) -> Any:
    if isinstance(leaf, types.MappingProxyType):
        return types.MappingProxyType(pytree.tree_map(lambda part: _float32(part, done), dict(leaf)))
    if isinstance(leaf, ValuesView):
        return dict(enumerate(pytree.tree_map(lambda part: _float32(part, done), list(leaf)))).values()
    parts = [pytree.tree_map(lambda part: _float32(part, done), value) for value in leaf]
    made = tuple.__new__(type(leaf), parts) if isinstance(leaf, tuple) else type(leaf)(parts)
    for name, value in getattr(leaf, "__dict__", {}).items():
        object.__setattr__(made, name, pytree.tree_map(lambda part: _float32(part, done), value))
    return made


_HOLD_VALUES = (list, tuple, set, frozenset, ValuesView)


def _is_low(leaf: Any, done: _Done, met: set[int]) -> bool:
    """Whether something is to be changed in an object, or in what it refers to; ``met`` have been asked."""
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype in LOW_FLOATS
    if id(leaf) in met or not _holds_attributes(leaf):
        return False
    if id(leaf) in done:
        return done[id(leaf)][1] is not leaf
    met.add(id(leaf))
    if _is_iterator(leaf):
        return True
    values = _values_of(leaf) if isinstance(leaf, _FUNCTIONS) else []
    values += [getattr(leaf, name, None) for name in _attribute_names(leaf)]
    values += leaf.values() if isinstance(leaf, (dict, types.MappingProxyType)) else leaf if isinstance(leaf, _HOLD_VALUES) else []
    return any(_is_low(part, done, met) for value in values for part in pytree.tree_leaves(value))


def _holds_attributes(leaf: Any) -> bool:
    """True for objects that a model may put its outputs into; modules and classes are not."""
    if leaf is None or isinstance(leaf, (_InFloat32, str, bytes, int, float, complex, type, nn.Module, torch.dtype, torch.device)):
        return False
    return not isinstance(leaf, types.ModuleType)


def _attribute_names(leaf: Any) -> list[str]:
    slots = []
    for cls in type(leaf).__mro__:
        names = cls.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            is_private = name.startswith("__") and not name.endswith("__")
            slots.append(f"_{cls.__name__.lstrip('_')}{name}" if is_private else name)
    return [*getattr(leaf, "__dict__", ()), *slots]
