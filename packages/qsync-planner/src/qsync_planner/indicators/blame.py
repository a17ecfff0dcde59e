"""Indicators are somebody else's code, too: whatever one raises becomes a sentence that names it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from qsync_core.errors import PluginError, QSyncError
from qsync_core.ir.observations import Observations
from qsync_planner.indicators.interface import Indicator

RUN = "run"
"""Not a collector: what a run writes of itself (its loss)."""


def observed_collectors(observations: Observations) -> list[str]:
    """Collectors that wrote anything, by name."""
    return sorted({series.collector for series in observations.series} - {RUN})


@contextmanager
def blamed(indicator: Indicator, observations: Observations | None) -> Iterator[None]:
    """Around whatever asks an indicator.

    Raises:
        PluginError: with its name, class, and type and text of what it raised; with what it could read, when that was a KeyError.
    """
    try:
        yield
    except QSyncError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:500]
        said = f"{type(error).__name__}: {text}" if text else type(error).__name__
        what_to_do = "mend its plugin, or choose another indicator"
        if isinstance(error, KeyError) and observations is not None:
            reads, holds = list(map(str, indicator.collectors)), observed_collectors(observations)
            said += f"; it reads terms of {', '.join(reads) or 'no collector'}, and the observations hold terms of "
            said += ", ".join(holds) or "no collector"
            if missing := [name for name in reads if name not in holds]:
                what_to_do = f"run 'qsync observe' with --collectors {','.join([*holds, *missing])}"
        owner = f"{type(indicator).__module__}.{type(indicator).__qualname__}"
        raise PluginError(f"indicator {indicator.name!r} ({owner}) failed with {said}; {what_to_do}") from error
