"""Reading a loader so that the script which goes on with it notices nothing."""

from __future__ import annotations

import copy
import inspect
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch.utils.data import DataLoader

_DEPTH = 4
"""How far generators are looked for: a function that makes the loader, loader, batch sampler, sampler, generator."""
_LIST = 64
"""Longer lists and dictionaries are data."""


@contextmanager
def as_without(loader: Any) -> Iterator[Any]:
    """Put back, in the end, what reading a loader changes, and give the loader to read.

    The random state of torch (on all CUDA devices where CUDA has started), of ``random``, and of NumPy where it is loaded; and the
    generators that the loader, its data set and its samplers hold.  Persistent workers, whose iterator the loader would begin anew,
    are left alone: a loader that has any is read through a copy with workers of its own.  A data set that changes itself when it is
    read has been read.
    """
    with ExitStack() as undo:
        with warnings.catch_warnings():  # what is deprecated warns when it is looked at, as torch.distributed.reduce_op does
            warnings.simplefilter("ignore")
            generators = _generators(loader)
        for put_back in [*_global_states(), *map(_state_of, generators)]:
            undo.callback(put_back)
        yield _with_own_workers(loader) if isinstance(loader, DataLoader) and loader.persistent_workers else loader


def _with_own_workers(loader: Any) -> Any:
    """The same loader with workers that end with their iterator; PyTorch sets no such thing once a loader is made."""
    own = copy.copy(loader)
    own.__class__ = type(type(loader).__name__, (type(loader),), {"persistent_workers": property(lambda _: False)})
    return own


def _global_states() -> list[Callable[[], object]]:
    found: list[Callable[[], object]] = [
        partial(random.setstate, random.getstate()),
        partial(torch.set_rng_state, torch.get_rng_state()),
    ]
    if torch.cuda.is_initialized():
        found.append(partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    if numpy := sys.modules.get("numpy"):
        found.append(partial(numpy.random.set_state, numpy.random.get_state()))
    return found


def _state_of(generator: Any) -> Callable[[], object]:
    """What sets a generator back to its present state."""
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    if hasattr(generator, "bit_generator"):  # NumPy's present ones; its older ones are like torch's
        return partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    return partial(generator.set_state, generator.get_state())


def _generators(root: Any) -> list[Any]:
    """Generators of random numbers that an object holds, a few steps deep."""
    numpy = sys.modules.get("numpy")
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    if numpy is not None:
        kinds = (*kinds, numpy.random.Generator, numpy.random.RandomState)
    found: dict[int, Any] = {}
    seen: set[int] = set()
    level = [root]
    for _ in range(_DEPTH + 1):
        below: list[Any] = []
        for value in level:
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, kinds) and not isinstance(value, random.SystemRandom):
                found[id(value)] = value
            elif isinstance(value, (list, tuple, dict)):
                if len(value) <= _LIST:
                    below.extend(value.values() if isinstance(value, dict) else value)
            elif isinstance(value, FunctionType):
                names = inspect.getclosurevars(value)
                below.extend([*names.nonlocals.values(), *names.globals.values()])
            elif not isinstance(value, (type, torch.Tensor, torch.nn.Module)):
                below.extend(getattr(value, "__dict__", {}).values())
        level = below
    return list(found.values())
