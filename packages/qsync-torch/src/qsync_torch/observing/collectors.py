"""Which collectors there are, and which run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from qsync_core.errors import ObservationError
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.variant import Variant
from qsync_core.plugins.contributions import contributed, ignore
from qsync_core.plugins.registry import Registry
from qsync_torch.observing.collector import Collector
from qsync_torch.observing.step_collector import StepCollector

AnyCollector = Collector | StepCollector


def installed_collectors(announce: Callable[[str], None] = ignore) -> dict[str, AnyCollector]:
    """The collectors of all installed plugins, QSync's own among them (hook ``qsync_register_collectors``), by name.

    Args:
        announce: told of each plugin that offers none, or one that lacks part of the interface, and why.

    Raises:
        PluginError: for two of one name.
    """
    return contributed(Registry.load(), "qsync_register_collectors", "collector", _lacks, announce=announce)


def _lacks(offered: Any) -> str:
    functions = [getattr(offered, name, None) for name in ("collect", "collect_step")]
    if isinstance(offered, Collector | StepCollector) and any(map(callable, functions)):
        return ""
    return "it lacks part of a collector's interface (name, and collect or collect_step)"


def default_collectors(announce: Callable[[str], None] = ignore) -> list[AnyCollector]:
    """Those that run unless others are asked for: all but the ones that say ``by_default = False`` because they take long."""
    return [collector for collector in installed_collectors(announce).values() if getattr(collector, "by_default", True)]


def collectors_named(names: Iterable[str]) -> list[AnyCollector]:
    """The collectors of these names.

    Raises:
        ObservationError: for a name that nobody offers, and for none.
    """
    disabled: list[str] = []
    installed = installed_collectors(disabled.append)
    wanted = list(dict.fromkeys(names))
    if not wanted:
        raise ObservationError(
            f"no collector is named, so that nothing would be observed; installed are {', '.join(sorted(installed))}"
        )
    if unknown := [name for name in wanted if name not in installed]:
        raise ObservationError(
            "; ".join((f"there is no collector {unknown[0]!r}; installed are {', '.join(sorted(installed))}", *disabled))
        )
    return [installed[name] for name in wanted]


def passes(collector: Any, dag: PrecisionDag, variants: Sequence[Variant]) -> float:
    """What a collector says that one update costs, in forward and backward passes over the batch; 0 where it does not say."""
    estimate = getattr(collector, "passes", None)
    return float(estimate(dag, variants)) if estimate is not None else 0.0
