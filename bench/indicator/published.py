"""The indicators that the rows compare: qsync-planner's, and those of the example plugin, which need not be installed."""

from __future__ import annotations

from qsync_indicators_example.hessian import Hessian
from qsync_indicators_example.paper import Paper
from qsync_indicators_example.random_scheme import RandomScheme

from qsync_planner.indicators import Indicator, get_indicator
from qsync_planner.indicators.hutchinson import Hutchinson
from qsync_planner.indicators.lossvar import LossVar

INDICATORS: tuple[Indicator, ...] = (Hutchinson(), LossVar(), Paper(), Hessian())


def named(name: str) -> Indicator:
    """The indicator of that name."""
    return next((indicator for indicator in (*INDICATORS, RandomScheme()) if indicator.name == name), None) or get_indicator(name)
