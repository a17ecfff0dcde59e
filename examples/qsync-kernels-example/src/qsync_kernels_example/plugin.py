"""The hook of this package.  It is imported whenever ``qsync`` starts, so it imports neither torch nor anything that is slow."""

from __future__ import annotations

from qsync_core.kernels.backend import KernelBackend
from qsync_core.plugins.hooks import hookimpl
from qsync_kernels_example.backend import ExampleBackend


@hookimpl
def qsync_register_backends() -> list[KernelBackend]:
    """The backend ``example``."""
    return [ExampleBackend()]
