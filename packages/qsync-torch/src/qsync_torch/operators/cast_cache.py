"""Shared casts: consumers that read one activation in the same format (Q, K and V) share one cast of it.

An entry lives as long as the activation it was made from, and its cast no longer than the model's forward: nothing is kept alive by
the cache.  What outlasts the forward is only the seed of the random numbers, so that gradient checkpointing, which runs
parts of the forward again, rounds the same way.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch

from qsync_core.ir.profile import CastKey
from qsync_torch.dtypes import PRECISION


@functools.lru_cache(maxsize=64)
def float_key(source: torch.dtype, target: torch.dtype) -> CastKey:
    """The kind of a cast between two float formats; operators and promotion of mixed operands share such casts."""
    return CastKey(PRECISION[source], PRECISION[target])


class _Entry:
    __slots__ = ("grad_enabled", "seed", "source", "value", "version")

    def __init__(self, source: weakref.ref[torch.Tensor], version: int, grad_enabled: bool, seed: int, value: Any) -> None:
        self.source, self.version, self.grad_enabled, self.seed, self.value = source, version, grad_enabled, seed, value


class CastCache:
    """Casts of activations, by the tensor's identity and version and the kind of cast."""

    def __init__(self) -> None:
        self._entries: dict[tuple[int, Hashable], _Entry] = {}

    def applies_to(self, x: torch.Tensor) -> bool:
        """False under ``torch.compile`` and in inference mode, where changes of a tensor go unnoticed.

        A compiler shares equal float casts itself; 8-bit ones of different consumers draw different random numbers there.
        """
        return not torch.compiler.is_compiling() and not x.is_inference()

    def cast(self, x: torch.Tensor, key: Hashable, seed: int, make: Callable[[int], Any]) -> Any:
        """The cast of ``x`` of that kind: an earlier one of this forward where there is one, else ``make(seed)``.

        Args:
            x: the activation; :meth:`applies_to` must be true of it.
            key: what kind of cast.
            seed: of the random numbers, used if nobody cast ``x`` before.
            make: does the cast.
        """
        place = (id(x), key)
        version, grad_enabled = x._version, torch.is_grad_enabled()
        entry = self._entries.get(place)
        if entry is not None and entry.source() is x and entry.version == version:
            seed = entry.seed
            if entry.value is not None and entry.grad_enabled == grad_enabled:
                return entry.value
        value = make(seed)
        entries = self._entries

        def forget(_: object) -> None:
            entries.pop(place, None)

        entries[place] = _Entry(weakref.ref(x, forget), version, grad_enabled, seed, value)
        return value

    def end_forward(self) -> None:
        """Let go of every cast tensor."""
        if torch.compiler.is_compiling():
            return
        # A cast that goes may take its source along, and with it the entry.
        for entry in list(self._entries.values()):
            entry.value = None

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def held_casts(self) -> int:
        """How many cast tensors it holds now."""
        return sum(entry.value is not None for entry in self._entries.values())
