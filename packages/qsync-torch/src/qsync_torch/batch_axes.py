"""Which dimension of a model's arguments is the batch: found where a job is traced, and looked at where it trains."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import nn


def batch_axes(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], size: int) -> dict[str, int]:
    """The first dimension of ``size`` elements of every tensor that a model is called with, by its name.

    An argument without a name is ``*0``, ``*1``, …; the parts of lists and dictionaries are ``batch.0`` and ``batch.pixels``.
    """
    names = _positional_names(model)
    given = {names[i] if i < len(names) else f"*{i}": value for i, value in enumerate(args)} | dict(kwargs)
    tensors = (entry for name, value in given.items() for entry in _tensors(name, value))
    return {name: list(tensor.shape).index(size) for name, tensor in tensors if size in tensor.shape}


@attrs.frozen
class BatchAxis:
    """One entry of :func:`batch_axes`, as a call of the model has it.

    Attributes:
        position: among the positional arguments; -1 where it is never one.
        name: among the others.
        path: from the argument to the tensor.
        axis: the tensor's dimension.
    """

    position: int
    name: str
    path: tuple[str, ...]
    axis: int

    def samples(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
        """How many samples a call has; None where it has no such tensor."""
        value: Any = kwargs.get(self.name)
        if value is None and 0 <= self.position < len(args):
            value = args[self.position]
        for key in self.path:
            if isinstance(value, (list, tuple)):
                value = value[int(key)] if key.isdigit() and int(key) < len(value) else None
            else:
                value = value.get(key) if isinstance(value, Mapping) else None
        return value.shape[self.axis] if isinstance(value, torch.Tensor) and value.dim() > self.axis else None


def axes_of_calls(model: nn.Module, axes: Mapping[str, int]) -> tuple[BatchAxis, ...]:
    """The places at which calls of a model have what :func:`batch_axes` found, the first argument first."""
    names = _positional_names(model)
    found = []
    for whole, axis in axes.items():
        name, *path = whole.split(".")
        unnamed = name.startswith("*") and name[1:].isdigit()
        position = int(name[1:]) if unnamed else names.index(name) if name in names else -1
        found.append(BatchAxis(position, name, tuple(path), axis))
    return tuple(sorted(found, key=lambda entry: entry.position if entry.position >= 0 else len(names)))


def _positional_names(model: nn.Module) -> list[str]:
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [it.name for it in parameters if it.kind in (it.POSITIONAL_ONLY, it.POSITIONAL_OR_KEYWORD)]


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (list, tuple, Mapping)):
        parts = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, part in parts:
            if isinstance(key, (int, str)) and "." not in str(key):
                yield from _tensors(f"{name}.{key}", part)
