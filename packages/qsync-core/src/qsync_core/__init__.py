"""The QSync precision IR, artifacts, plugin registry and command line; no torch.

Import what you need from its modules (``qsync_core.artifacts.files``, ``qsync_core.ir.dag``, ``qsync_core.ir.plan``, …); this one
is empty, so
importing it costs nothing.
"""

from __future__ import annotations


def __getattr__(name: str) -> str:
    if name == "__version__":
        from importlib.metadata import version  # 40 ms, for those who ask

        return version("qsync-core")
    raise AttributeError(f"module 'qsync_core' has no attribute {name!r}")
