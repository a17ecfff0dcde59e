"""Whose kernels run an operator, as values and as the text that plans and profiles store.

``backend`` of an :class:`~qsync_core.ir.plan.Assignment` names backends joined by ``+`` (the first that supports an operator runs
it); ``config`` pins operators to one of them with a configuration::

    linear.output=cutlass/t128x256x64;s4&quantize=triton/block=4096;warps=8

An operator that the text does not name, or names with an empty configuration, runs with its backend's first candidate.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

import attrs

from qsync_core.errors import BackendError
from qsync_core.kernels.backend import Op

AUTO_BACKEND = "auto"
"""What stands for a backend's name: the backend that measured fastest for the shapes at hand, through ``qsync_select_backend``."""
FLOAT_BACKEND = "aten"
"""Operators in float formats run PyTorch's own kernels, through autograd, and no other backend's."""
QUANTIZE_WEIGHT = "quantize.weight"
"""Pins the quantization of the weight apart from the activation's (``quantize``)."""
QUANTIZE_GRADIENT = "quantize.gradient"
"""Pins the quantization of the output's gradient (8-bit backward products)."""

BACKEND_NAME = re.compile(r"[A-Za-z0-9_.-]+")
"""A backend's name in a plan."""
_KNOWN = (*Op.CHOSEN, QUANTIZE_WEIGHT, QUANTIZE_GRADIENT)
_CONFIG = re.compile(r"[A-Za-z0-9_.,;:=x-]*")


@attrs.frozen
class OpChoice:
    """The backend that runs one kernel, and its configuration (empty: its first candidate)."""

    backend: str
    config: str = ""

    def __attrs_post_init__(self) -> None:
        if not BACKEND_NAME.fullmatch(self.backend):
            raise BackendError(f"a backend's name has letters, digits, '_', '.' and '-' only, got {self.backend!r}")
        if not _CONFIG.fullmatch(self.config):
            raise BackendError(
                f"a configuration's text has letters, digits and _.,;:=- only, got {self.config!r} of backend {self.backend}"
            )


def _by_role(pins: Iterable[tuple[str, OpChoice]]) -> tuple[tuple[str, OpChoice], ...]:
    return tuple(sorted(dict(pins).items()))


@attrs.frozen(cache_hash=True)
class KernelChoice:
    """Whose kernels run an operator.

    Attributes:
        chain: backends in the order in which they are asked; ``("auto",)`` takes the one that measured fastest.
        pins: single kernels that one backend runs, by role (a name of :class:`~qsync_core.kernels.backend.Op`, or one of the
            roles of ``quantize``), in alphabetical order.
    """

    chain: tuple[str, ...] = (FLOAT_BACKEND,)
    pins: tuple[tuple[str, OpChoice], ...] = attrs.field(default=(), converter=_by_role)

    def __attrs_post_init__(self) -> None:
        for role, _ in self.pins:
            if role not in _KNOWN:
                raise BackendError(f"a choice of kernels is for one of {', '.join(_KNOWN)}; got {role!r}")

    @property
    def backend(self) -> str:
        """The chain as plans store it: names joined by ``+``."""
        return "+".join(self.chain)

    @property
    def config(self) -> str:
        """The pins as plans store them: the canonical text, empty where nothing is pinned."""
        return "&".join(f"{role}={choice.backend}/{choice.config}" for role, choice in self.pins)

    @classmethod
    def parse(cls, backend: str = FLOAT_BACKEND, config: str = "") -> KernelChoice:
        """Read what a plan stores, or a person types.

        Raises:
            BackendError: when a text is not of its form.
        """
        return _parse(backend, config)

    def of(self, role: str) -> OpChoice | None:
        """What pins a kernel, None where it is left to the chain."""
        return next((choice for pinned, choice in self.pins if pinned == role), None)

    def asked_for(self, role: str) -> tuple[tuple[str, ...], OpChoice | None]:
        """The backends that are asked for a kernel, in order, and the choice that pins it to one of them, if there is one."""
        pinned = self.of(role)
        return (self.chain, None) if pinned is None else ((pinned.backend,), pinned)

    @property
    def backends(self) -> tuple[str, ...]:
        """Every backend that it names, the chain's first."""
        return tuple(dict.fromkeys((*self.chain, *(choice.backend for _, choice in self.pins))))


@functools.lru_cache(maxsize=4096)
def _parse(backend: str, config: str) -> KernelChoice:
    pins: dict[str, OpChoice] = {}
    for entry in filter(None, config.split("&")):
        role, equals, chosen = entry.partition("=")
        name, slash, knobs = chosen.partition("/")
        if not (equals and slash):
            raise BackendError(
                f"not a choice of kernels: {entry!r} in {config!r}; one is written 'operator=backend/configuration', "
                "several are joined by '&'"
            )
        if role in pins:
            raise BackendError(f"not a choice of kernels: {config!r} names {role} twice")
        pins[role] = OpChoice(name, knobs)
    return KernelChoice(split_chain(backend), tuple(pins.items()))


ATEN = KernelChoice()
"""PyTorch's own kernels."""


def split_chain(names: str) -> tuple[str, ...]:
    """The backends of ``a+b``, in the order in which they are asked.

    Raises:
        BackendError: when a name is empty, is not a backend's name, or occurs twice.
    """
    chain = tuple(names.split("+"))
    for name in chain:
        if not BACKEND_NAME.fullmatch(name):
            raise BackendError(
                f"not a kernel backend: {name!r} in {names!r}; write names such as 'aten', or 'triton+aten' for both"
            )
    if len(set(chain)) < len(chain):
        raise BackendError(f"{names!r} names a kernel backend twice")
    if AUTO_BACKEND in chain and len(chain) > 1:
        raise BackendError(f"'{AUTO_BACKEND}' stands alone, it asks every backend already; got {names!r}")
    return chain
