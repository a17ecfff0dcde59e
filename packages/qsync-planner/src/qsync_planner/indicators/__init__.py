"""Indicators: how much an operator's precision disturbs the model's weight gradients (docs/design/indicator.md).

What needs autograd is collected elsewhere; everything here is arithmetic on Observations.
"""

from qsync_planner.indicators.interface import Indicator
from qsync_planner.indicators.registry import available_indicators, get_indicator

__all__ = ["Indicator", "available_indicators", "get_indicator"]
