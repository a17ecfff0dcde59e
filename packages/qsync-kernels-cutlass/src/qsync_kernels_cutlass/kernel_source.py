"""One kernel as CUDA source text, before it is compiled."""

from __future__ import annotations

import re

import attrs

_NAME = re.compile(r"[a-z][a-z0-9_]{0,80}")


def _check_name(source: object, attribute: object, value: str) -> None:
    if not _NAME.fullmatch(value):
        raise ValueError(f"a kernel's name is lower-case letters, digits and '_', at most 81, got {value!r}")


@attrs.frozen
class KernelSource:
    """Source text that exports ``qsync_<name>`` and ``qsync_<name>_workspace`` (see ``templates/abi.h``).

    Attributes:
        name: lower-case letters, digits and underscores.
        text: CUDA C++; ``#include "x.cuh"`` finds the package's templates.
        arch: architecture to compile for (``sm_90a``).
        defines: further preprocessor definitions, ``NAME`` or ``NAME=VALUE``.
    """

    name: str = attrs.field(validator=_check_name)
    text: str
    arch: str
    defines: tuple[str, ...] = ()

    @property
    def symbol(self) -> str:
        """The exported function that runs the kernel."""
        return f"qsync_{self.name}"

    @property
    def workspace_symbol(self) -> str:
        """The exported function that returns the bytes of workspace."""
        return f"qsync_{self.name}_workspace"
