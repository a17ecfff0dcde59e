"""The plugin: it offers the indicators to ``qsync indicate``, and what two of them read to ``qsync observe``."""

from __future__ import annotations

from typing import Any

from qsync_core.plugins.hooks import hookimpl


@hookimpl
def qsync_register_indicators() -> list[Any]:
    """Offer ``paper``, ``hessian`` and ``random``."""
    from qsync_indicators_example.hessian import Hessian
    from qsync_indicators_example.paper import Paper
    from qsync_indicators_example.random_scheme import RandomScheme

    return [Paper(), Hessian(), RandomScheme()]


@hookimpl
def qsync_register_collectors() -> list[Any]:
    """Offer the collectors ``paper`` and ``hessian``, which run where they are named; qsync-torch asks for them."""
    from qsync_indicators_example.observing_hessian import HessianCollector
    from qsync_indicators_example.observing_paper import PaperCollector

    return [PaperCollector(), HessianCollector()]
