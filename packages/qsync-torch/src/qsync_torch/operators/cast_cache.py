"""Casts of activations, shared among those who read one in the same format (Q, K and V).

A cast is kept as long as the activation it was made from, and is of no meaning for the result: made again, it has the same bits.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Hashable
from typing import Any

import torch

from qsync_core.ir.profile import CastKey
from qsync_torch.dtypes import PRECISION
from qsync_torch.torch_internals import transforms_are_active, version_of


@functools.lru_cache(maxsize=64)
def float_key(source: torch.dtype, target: torch.dtype) -> CastKey:
    """The kind of a cast between two float formats; operators and promotion of mixed operands share such casts."""
    return CastKey(PRECISION[source], PRECISION[target])


class CachedCast(weakref.ref[torch.Tensor]):
    """A cast of an activation, to which this is a weak reference.

    Attributes:
        value: the cast; None where it is still to be made.
        mark: of the random numbers it was made with.
        history: what a gradient of the cast reaches, as :func:`_history` says of the activation.
    """

    __slots__ = ("address", "grad_enabled", "history", "mark", "place", "value", "version")

    address: int
    place: tuple[int, Hashable]
    value: Any
    version: int
    grad_enabled: bool
    history: object
    mark: Hashable


def _history(x: torch.Tensor) -> object:
    """What a gradient that arrives at ``x`` now reaches: a node of autograd's graph, a leaf (True), or nothing.

    It changes without a new version of the tensor: ``requires_grad_()`` makes a leaf of it, ``detach_()`` cuts it off.
    """
    return (x.grad_fn or True) if x.requires_grad else None


class CastCache:
    """Casts of activations, by the tensor's identity and version and the kind of cast.

    A cast through which a gradient would take another way than through its activation as it is now is made again.  A change that
    leaves a tensor's version and memory as they were (``x.data.mul_``) is not seen here, as autograd does not see it.
    """

    def __init__(self) -> None:
        entries: dict[tuple[int, Hashable], CachedCast] = {}

        def forget(entry: CachedCast) -> None:
            entries.pop(entry.place, None)

        self._entries, self._forget = entries, forget

    def applies_to(self, x: torch.Tensor) -> bool:
        """False under ``torch.compile`` and ``torch.func``, and in inference mode, where changes of a tensor go unnoticed.

        A compiler shares equal casts itself.  A cast that is made in inference mode cannot be kept for backward by a consumer
        outside of it.
        """
        if torch.compiler.is_compiling() or x.is_inference() or torch.is_inference_mode_enabled():
            return False
        return not transforms_are_active()

    def find(self, x: torch.Tensor, key: Hashable, mark: Hashable = None) -> CachedCast:
        """The entry for ``x`` and that kind of cast; the caller makes the cast where its ``value`` is None.

        A caller who makes the cast itself spares the call of a function that would make it, once per operator.

        Args:
            x: the activation; :meth:`applies_to` must be true of it.
            key: what kind of cast.
            mark: of the random numbers that it takes now.
        """
        place = (id(x), key)
        version, grad_enabled = version_of(x), torch.is_grad_enabled()
        history = _history(x) if grad_enabled else None
        entry, address = self._entries.get(place), x.data_ptr()
        if entry is None or entry() is not x or entry.version != version or entry.address != address:
            entry = self._entries[place] = CachedCast(x, self._forget)
            entry.place, entry.version, entry.address, entry.value = place, version, address, None
        elif entry.grad_enabled != grad_enabled or entry.history is not history or entry.mark != mark:
            entry.value = None
        entry.grad_enabled, entry.history, entry.mark = grad_enabled, history, mark
        return entry

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)
