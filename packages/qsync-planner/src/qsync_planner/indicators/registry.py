"""Indicators by name: the built-in ones and those that plugins register through ``qsync_register_indicators``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from qsync_core.errors import ObservationError, PluginError, QSyncError
from qsync_core.ir import observations as terms
from qsync_core.ir.observations import Observations
from qsync_core.plugins.guard import guard, origin
from qsync_core.plugins.registry import Registry
from qsync_planner.indicators.hutchinson import Hutchinson
from qsync_planner.indicators.interface import Indicator
from qsync_planner.indicators.lossvar import LossVar

AUTO = "auto"
"""Not an indicator: the first of :data:`BUILT_IN` that was observed."""
BUILT_IN: tuple[Indicator, ...] = (Hutchinson(), LossVar())
"""The indicators of this package, least true error of plans made from them first (rows ``I-equal-time-…`` of
docs/results/indicator.json)."""


def observed_collectors(observations: Observations) -> list[str]:
    """Collectors that wrote anything, by name."""
    return sorted({series.collector for series in observations.series} - {terms.RUN})


def guarded(indicator: Indicator, observations: Observations | None) -> guard:
    """The guard around what an indicator answers; its errors are a PluginError that names it and its class.

    Where it read a term that is not there, the error lists the collectors that it reads and those that ran.
    """

    def failed(sentence: str, error: BaseException) -> NoReturn:
        advice = "fix its plugin, or choose another indicator"
        if isinstance(error, KeyError) and observations is not None:
            reads, holds = list(map(str, indicator.collectors)), observed_collectors(observations)
            sentence += f"; it reads terms of {', '.join(reads) or 'no collector'}, and the observations hold terms of "
            sentence += ", ".join(holds) or "no collector"
            if missing := [name for name in reads if name not in holds]:
                advice = f"run 'qsync observe' with --collectors {','.join([*holds, *missing])}"
        raise PluginError(f"{sentence}; {advice}") from error

    return guard(f"indicator {indicator.name!r} ({origin(indicator)})", failed, passing=(QSyncError,))


def available_indicators(
    registry: Registry | None = None, announce: Callable[[str], None] = lambda text: None
) -> dict[str, Indicator]:
    """All indicators by name.

    Args:
        registry: whose plugins to ask; None loads every installed plugin.
        announce: receives a line for each plugin that offers none, or one that lacks part of the interface, with the reason.

    Raises:
        PluginError: when a plugin's indicator has a name that is taken.
    """
    found = {indicator.name: indicator for indicator in BUILT_IN}
    return found | (registry or Registry.load()).collect_named(
        "qsync_register_indicators", "indicator", _lacks, taken=found, announce=announce
    )


def _lacks(offered: Any) -> str:
    if (
        isinstance(offered, Indicator)
        and (callable(offered.omega) and callable(offered.notes) and isinstance(offered.summary, str))
        and (isinstance(offered.collectors, tuple | list) and all(isinstance(name, str) for name in offered.collectors))
    ):
        return ""
    return (
        "it lacks part of an indicator's interface (name, collectors, summary, omega, notes; see "
        "qsync_planner.indicators.Indicator)"
    )


def get_indicator(name: str, registry: Registry | None = None) -> Indicator:
    """The indicator of that name; plugins are loaded only for names that are not built in.

    Raises:
        ObservationError: when there is none; lists those there are.
    """
    for indicator in BUILT_IN:
        if indicator.name == name:
            return indicator
    disabled: list[str] = []
    known = available_indicators(registry, disabled.append)
    if name not in known:
        raise ObservationError("; ".join((f"there is no indicator {name!r}; choose one of {', '.join(sorted(known))}", *disabled)))
    return known[name]


def automatic(observations: Observations | None) -> tuple[Indicator, tuple[str, ...]]:
    """The best indicator that observations allow, and what a reader must know of the choice.

    Raises:
        ObservationError: when they allow none of :data:`BUILT_IN`; lists what was observed and which indicators that allows.
    """
    if observations is None:
        return BUILT_IN[0], ()
    observed = observed_collectors(observations)
    best = BUILT_IN[0]
    for indicator in BUILT_IN:
        if set(observed).issuperset(indicator.collectors):
            if indicator is best:
                return indicator, ()
            reason = observations.settings.get(
                f"without {best.name}", f"the observations hold nothing of collector {', '.join(best.collectors)}"
            )
            return indicator, (f"{indicator.name} in place of {best.name}: {reason}",)
    allowed = sorted(name for name, other in available_indicators().items() if set(observed).issuperset(other.collectors))
    allow = f"they allow --indicator {' or '.join(allowed)}, and " if allowed else ""
    truth = (
        "; as a measured truth they go to --truth, beside the observations of an indicator" if terms.MONTECARLO in observed else ""
    )
    raise ObservationError(
        f"the observations of {observations.model} hold terms of {', '.join(observed) or 'no collector'}, and the default "
        f"indicators ({', '.join(indicator.name for indicator in BUILT_IN)}) read none of these; "
        f"{allow}'qsync observe' with the collector {best.name} makes those of the best one{truth}"
    )
