"""What a model and a loss hold beside parameters, put back after they have run on fake tensors or for a measurement."""

from __future__ import annotations

import collections
import functools
import itertools
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset

from qsync_torch.failures import is_users
from qsync_torch.torch_internals import version_of

_MOST_ELEMENTS = 1000
"""Lists, tuples, deques, sets and dictionaries of more are data: the samples that a trainer's object holds."""
_CLOSED = (types.ModuleType, torch.optim.Optimizer, Dataset, DataLoader, str, bytes, int, float, complex, type(None))
"""What no loss keeps its state in."""


@contextmanager
def held_state(*holders: Any, fakes: Iterable[torch.Tensor] = ()) -> Iterator[None]:
    """Puts back what is reached from functions and objects: attributes, elements, closures, globals and the tensors' values.

    A loss may keep a running mean, by assignment (DINO's centre) or in place.  Followed are modules, objects with attributes, their
    classes' functions, lists, deques, sets, dictionaries, closures, ``functools.partial`` and the globals that a user's functions
    name.  Not followed are optimizers and data.  Parameters are neither copied nor put back.

    Args:
        fakes: tensors whose values need no copy, because an export has fake ones instead.
    """
    undo: list[Callable[[], None]] = []
    for value in _held(holders, undo, seen={id(fake): fake for fake in fakes}):
        if isinstance(value, torch.Tensor) and _has_values(value):
            undo.append(functools.partial(_put_values_back, value, value.detach().clone(), version_of(value)))
    try:
        yield
    finally:
        for back in undo:
            back()


def held_parameters(holder: Any) -> list[torch.nn.Parameter]:
    """Finds the parameters that a function or object reaches, by the ways that :func:`held_state` follows."""
    return [value for value in _held([holder], [], seen={}) if isinstance(value, torch.nn.Parameter)]


def _held(holders: Iterable[Any], undo: list[Callable[[], None]], seen: dict[int, Any]) -> Iterator[Any]:
    """What is reached from ``holders``, each once; how to put back what holds it is added to ``undo``."""
    waiting = list(holders)
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value  # which keeps it alive, and its id its own
        yield value
        if not isinstance(value, (torch.Tensor, *_CLOSED)):
            waiting += _parts(value, undo)


def _parts(value: Any, undo: list[Callable[[], None]]) -> list[Any]:
    """What an object holds; how to put it back is added to ``undo``."""
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.FunctionType):
        return _parts_of_function(value, undo) if is_users(value.__code__.co_filename) or value.__closure__ else []
    if isinstance(value, type):
        held = {name: part for name, part in vars(value).items() if isinstance(part, torch.Tensor)}
        undo += (functools.partial(setattr, value, name, part) for name, part in held.items())
        return [*held.values(), *(part for part in vars(value).values() if isinstance(part, types.FunctionType))]
    if isinstance(value, tuple):
        return list(value) if len(value) <= _MOST_ELEMENTS else []
    if isinstance(value, (list, set, collections.deque)):
        if len(value) > _MOST_ELEMENTS:
            return []
        undo.append(functools.partial(_put_elements_back, value, list(value)))
        return list(value)
    if isinstance(value, dict):
        return _parts_of_dict(value, undo)
    slots = {name: getattr(value, name) for name in _slots_of(type(value)) if hasattr(value, name)}
    undo += (functools.partial(object.__setattr__, value, name, part) for name, part in slots.items())
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict):
        return [*slots.values(), *(type(value).__mro__ if slots else ())]
    return [attributes, *slots.values(), *type(value).__mro__]


def _slots_of(kind: type) -> Iterator[str]:
    for owner in kind.__mro__:
        slots = vars(owner).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if isinstance(vars(owner).get(name), types.MemberDescriptorType):
                yield name


def _put_elements_back(value: list[Any] | set[Any] | collections.deque[Any], elements: list[Any]) -> None:
    value.clear()
    if isinstance(value, set):
        value.update(elements)
    else:
        value.extend(elements)


def _parts_of_dict(value: dict[Any, Any], undo: list[Callable[[], None]]) -> list[Any]:
    if len(value) > _MOST_ELEMENTS:
        return []
    before = dict(value)

    def back() -> None:
        if len(value) != len(before) or any(key not in before or before[key] is not part for key, part in value.items()):
            value.clear()
            value.update(before)

    undo.append(back)
    return list(before.values())


def _parts_of_function(function: types.FunctionType, undo: list[Callable[[], None]]) -> list[Any]:
    parts: list[Any] = [function.__dict__, function.__defaults__, function.__kwdefaults__]
    for cell in function.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:  # not yet bound
            continue
        undo.append(functools.partial(setattr, cell, "cell_contents", content))
        parts.append(content)
    if is_users(function.__code__.co_filename):
        names = function.__globals__
        for name in _names_in(function.__code__) & names.keys():
            undo.append(functools.partial(names.__setitem__, name, names[name]))
            parts.append(names[name])
    return parts


def _names_in(code: types.CodeType) -> set[str]:
    """Names of globals (and of attributes) in a function and those inside it."""
    inside = (_names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(itertools.chain(code.co_names, *inside))


def _has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values can be copied and put back: not of parameters, which only an optimizer changes."""
    if isinstance(tensor, torch.nn.Parameter) or is_lazy(tensor) or tensor.is_inference() or tensor.layout is not torch.strided:
        return False
    return not any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _put_values_back(tensor: torch.Tensor, values: torch.Tensor, version: int) -> None:
    if version_of(tensor) != version or not torch.equal(tensor, values):  # what is written by way of .data has the same version
        with torch.no_grad():
            tensor.copy_(values)
