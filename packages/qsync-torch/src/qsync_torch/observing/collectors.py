"""Which collectors there are, and which run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from qsync_core.dag import PrecisionDag
from qsync_core.errors import ObservationError
from qsync_core.variant import Variant
from qsync_torch.observing.collector import Collector
from qsync_torch.observing.step_collector import StepCollector

AnyCollector = Collector | StepCollector


def installed_collectors() -> dict[str, AnyCollector]:
    """The collectors of all installed plugins, QSync's own among them (hook ``qsync_register_collectors``), by name."""
    from qsync_core.registry import Registry

    return {collector.name: collector for collector in Registry.load().collect("qsync_register_collectors")}


def default_collectors() -> list[AnyCollector]:
    """Those that run unless others are asked for: all but the ones that say ``by_default = False`` because they take long."""
    return [collector for collector in installed_collectors().values() if getattr(collector, "by_default", True)]


def collectors_named(names: Iterable[str]) -> list[AnyCollector]:
    """The collectors of these names.

    Raises:
        ObservationError: for a name that nobody offers.
    """
    installed = installed_collectors()
    wanted = list(dict.fromkeys(names))
    if unknown := [name for name in wanted if name not in installed]:
        raise ObservationError(f"there is no collector {unknown[0]!r}; installed are {', '.join(sorted(installed))}")
    return [installed[name] for name in wanted]


def passes(collector: Any, dag: PrecisionDag, variants: Sequence[Variant]) -> float:
    """What a step collector says that one step costs, in forward and backward passes over the batch; 0 where it does not say."""
    estimate = getattr(collector, "passes", None)
    return float(estimate(dag, variants)) if estimate is not None else 0.0
