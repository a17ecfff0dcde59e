"""A kernel backend whose kernels do nothing: what is left of a step's time is QSync's and PyTorch's own.

It is found as a plugin (:mod:`structure.host_time` makes its entry point) and names no module of QSync, so that it also runs on an
older arrangement of the source.
"""

from __future__ import annotations

import sys
from typing import Any

import pluggy

NAME = "null"


def _of_core(name: str) -> Any:
    """Something of qsync-core's backend interface, from the module of it that is loaded when a backend is asked."""
    of_core = (module for key, module in list(sys.modules.items()) if key.startswith("qsync_core"))
    return next(vars(module)[name] for module in of_core if name in vars(module))


class NullBackend:
    """Accepts every request."""

    name = NAME
    offset_tensors = reports_launches = True

    @property
    def api_version(self) -> int:
        return int(_of_core("BACKEND_API_VERSION"))

    def kernel_specs(self) -> list[Any]:
        return []

    def unsupported_reasons(self, request: Any) -> list[str]:
        return []

    def candidate_configs(self, request: Any) -> list[Any]:
        return [_of_core("KernelConfig")()]

    def build(self, request: Any, config: Any) -> Any:
        return nothing


def nothing(*operands: Any) -> None:
    """Leaves the outputs as they were allocated."""


@pluggy.HookimplMarker("qsync")
def qsync_register_backends() -> list[NullBackend]:
    return [NullBackend()]
