"""Which backend and configuration run each operator of a call, as the text that plans and profiles store.

``backend`` of an :class:`~qsync_core.ir.plan.Assignment` names backends joined by ``+`` (the first that supports an operator runs
it);
``config`` pins operators to one of them with a configuration::

    linear.output=cutlass/t128x256x64;s4&quantize=triton/block=4096;warps=8

An operator that the text does not name, or names with an empty configuration, runs with its backend's first candidate.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import attrs

from qsync_core.errors import BackendError
from qsync_core.kernels.backend import Op

AUTO_BACKEND = "auto"
"""In place of a backend's name: whoever measured fastest for the shapes at hand, through ``qsync_select_backend``."""
FLOAT_BACKEND = "aten"
"""Operators in float formats run PyTorch's own kernels, through autograd; no other backend is asked for them."""
QUANTIZE_WEIGHT = "quantize.weight"
"""Pins the quantization of the weight apart from the activation's (``quantize``)."""
QUANTIZE_GRADIENT = "quantize.gradient"
"""Pins the quantization of the output's gradient (8-bit backward products)."""

BACKEND_NAME = re.compile(r"[A-Za-z0-9_.-]+")
"""What plans can name a backend."""
_KNOWN = (*Op.ALL, QUANTIZE_WEIGHT, QUANTIZE_GRADIENT)
_CONFIG = re.compile(r"[A-Za-z0-9_.,;:=x-]*")


@attrs.frozen
class OpChoice:
    """Who runs one operator: a backend's name, and its configuration (empty: its first candidate)."""

    backend: str
    config: str = ""

    def __attrs_post_init__(self) -> None:
        if not BACKEND_NAME.fullmatch(self.backend):
            raise BackendError(f"a backend's name has letters, digits, '_', '.' and '-' only, got {self.backend!r}")
        if not _CONFIG.fullmatch(self.config):
            raise BackendError(
                f"a configuration's text has letters, digits and _.,;:=- only, got {self.config!r} of backend {self.backend}"
            )


@attrs.frozen
class KernelChoice:
    """Backend and configuration by operator: a name of :class:`~qsync_core.kernels.backend.Op`, or one of ``quantize``'s roles."""

    ops: Mapping[str, OpChoice] = attrs.field(factory=dict, hash=False)

    def __attrs_post_init__(self) -> None:
        for op in self.ops:
            if op not in _KNOWN:
                raise BackendError(f"a choice of kernels is for one of {', '.join(_KNOWN)}; got {op!r}")

    def __str__(self) -> str:
        """Canonical text: operators in alphabetical order."""
        return "&".join(f"{op}={choice.backend}/{choice.config}" for op, choice in sorted(self.ops.items()))

    @classmethod
    def parse(cls, text: str) -> KernelChoice:
        """Read the text of a choice; the empty text chooses nothing.

        Raises:
            BackendError: when the text is not of that form.
        """
        ops: dict[str, OpChoice] = {}
        for entry in filter(None, text.split("&")):
            op, equals, chosen = entry.partition("=")
            backend, slash, config = chosen.partition("/")
            if not (equals and slash):
                raise BackendError(
                    f"not a choice of kernels: {entry!r} in {text!r}; one is written 'operator=backend/configuration', "
                    "several are joined by '&'"
                )
            if op in ops:
                raise BackendError(f"not a choice of kernels: {text!r} names {op} twice")
            ops[op] = OpChoice(backend, config)
        return cls(ops)

    def of(self, op: str) -> OpChoice | None:
        """The choice for an operator, None where it is left to the chain of backends."""
        return self.ops.get(op)


def split_chain(names: str) -> tuple[str, ...]:
    """The backends of ``a+b``, in the order in which they are asked.

    Raises:
        BackendError: when a name is empty, no name at all, or stands there twice.
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
