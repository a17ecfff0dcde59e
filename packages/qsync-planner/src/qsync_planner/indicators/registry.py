"""Indicators by name: the built-in ones and those that plugins register through ``qsync_register_indicators``."""

from __future__ import annotations

from qsync_core import terms
from qsync_core.errors import ObservationError, PluginError
from qsync_core.observations import Observations
from qsync_core.registry import Registry
from qsync_planner.indicators.hessian import Hessian
from qsync_planner.indicators.hutchinson import Hutchinson
from qsync_planner.indicators.interface import Indicator
from qsync_planner.indicators.lossvar import LossVar
from qsync_planner.indicators.paper import Paper
from qsync_planner.indicators.random_scheme import RandomScheme

AUTO = "auto"
"""Not an indicator: ``hutchinson`` where it was observed, else ``lossvar``."""


def builtin_indicators() -> list[Indicator]:
    """The indicators of this package."""
    return [Hutchinson(), LossVar(), Paper(), RandomScheme(), Hessian()]


def available_indicators(registry: Registry | None = None) -> dict[str, Indicator]:
    """All indicators by name.

    Args:
        registry: whose plugins to ask; None loads every installed plugin.

    Raises:
        PluginError: when a plugin's indicator has a name that is taken, or lacks part of the interface.
    """
    found = {indicator.name: indicator for indicator in builtin_indicators()}
    for offered in (registry or Registry.load()).collect("qsync_register_indicators"):
        name = getattr(offered, "name", None)
        if not isinstance(name, str) or not isinstance(offered, Indicator):
            raise PluginError(
                f"a plugin registers {type(offered).__name__} as an indicator, but it lacks part of the interface "
                "(name, collectors, summary, omega, notes; see qsync_planner.indicators.Indicator)"
            )
        if name in found:
            raise PluginError(f"two indicators are called {name!r}; uninstall the plugin with the second, or rename it")
        found[name] = offered
    return found


def get_indicator(name: str, registry: Registry | None = None) -> Indicator:
    """The indicator of that name; plugins are loaded only for names that are not built in.

    Raises:
        ObservationError: when there is none; lists those there are.
    """
    for indicator in builtin_indicators():
        if indicator.name == name:
            return indicator
    known = available_indicators(registry)
    if name not in known:
        raise ObservationError(f"there is no indicator {name!r}; choose one of {', '.join(sorted(known))}")
    return known[name]


def automatic(observations: Observations | None) -> tuple[Indicator, tuple[str, ...]]:
    """The best indicator that observations allow, and what a reader must know of the choice."""
    if observations is None or any(series.collector == terms.HUTCHINSON for series in observations.series):
        return Hutchinson(), ()
    reason = observations.settings.get(f"without {terms.HUTCHINSON}", "the observations hold nothing of collector hutchinson")
    return LossVar(), (f"lossvar in place of hutchinson: {reason}",)
