"""The plugin: it offers both indicators to ``qsync indicate``."""

from __future__ import annotations

from typing import Any

from qsync_core.plugins.hooks import hookimpl


@hookimpl
def qsync_register_indicators() -> list[Any]:
    """Offer ``paper`` and ``hessian``."""
    from qsync_indicators_example.hessian import Hessian
    from qsync_indicators_example.paper import Paper

    return [Paper(), Hessian()]
