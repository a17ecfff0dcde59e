"""Which collectors are installed, and those of one run: called at each update, restored when it continues, named when they fail."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch

from qsync_core.errors import ObservationError, PluginError, QSyncError
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.variant import Variant
from qsync_core.plugins.guard import described, guard, origin
from qsync_core.plugins.registry import Registry
from qsync_torch.observing.call_hooks import GradientCapture
from qsync_torch.observing.collector import (
    Collector,
    CollectorUnavailable,
    ObservedStep,
    OperatorCall,
    RestoredCollector,
    StepCollector,
)
from qsync_torch.observing.record import JobFault, Key, Record

AnyCollector = Collector | StepCollector


def installed_collectors(announce: Callable[[str], None] = lambda text: None) -> dict[str, AnyCollector]:
    """The collectors of all installed plugins, QSync's own among them (hook ``qsync_register_collectors``), by name.

    Args:
        announce: receives a sentence on each plugin that offers none, or one that lacks part of the interface.

    Raises:
        PluginError: for two of one name.
    """
    return Registry.load().collect_named("qsync_register_collectors", "collector", _lacks, announce=announce)


def _lacks(offered: Any) -> str:
    functions = [getattr(offered, name, None) for name in ("collect", "collect_step")]
    if isinstance(offered, Collector | StepCollector) and any(map(callable, functions)):
        return ""
    return "it lacks part of a collector's interface (name, and collect or collect_step)"


def default_collectors(announce: Callable[[str], None] = lambda text: None) -> list[AnyCollector]:
    """List the collectors that run where none is named: all but those that say ``by_default = False`` because they take long."""
    return [collector for collector in installed_collectors(announce).values() if getattr(collector, "by_default", True)]


def collectors_named(names: Iterable[str]) -> list[AnyCollector]:
    """The collectors of these names.

    Raises:
        ObservationError: for a name that no plugin offers, and for no name.
    """
    disabled: list[str] = []
    installed = installed_collectors(disabled.append)
    wanted = list(dict.fromkeys(names))
    if not wanted:
        raise ObservationError(
            f"no collector is named, so that nothing would be observed; installed are {', '.join(sorted(installed))}"
        )
    if unknown := [name for name in wanted if name not in installed]:
        sentence = f"there is no collector {unknown[0]!r}; installed are {', '.join(sorted(installed))}"
        raise ObservationError("; ".join((sentence, *disabled)))
    return [installed[name] for name in wanted]


@attrs.define
class RunningCollectors:
    """The collectors that observe a model.

    Attributes:
        asked_for: the user named them, so that one that fails ends the run; otherwise it is left out.
        announce: receives a sentence on each that is left out.
        unavailable: why each of those is left out.
    """

    model: str
    variants: Sequence[Variant]
    active: list[AnyCollector]
    asked_for: bool
    announce: Callable[[str], None]
    unavailable: dict[str, str] = attrs.field(factory=dict)
    _restored: set[str] = attrs.field(factory=set)

    @property
    def names(self) -> list[str]:
        """The names of the collectors that run."""
        return [collector.name for collector in self.active]

    @property
    def read_calls(self) -> bool:
        """Whether any of them reads the calls of operators."""
        return any(isinstance(collector, Collector) for collector in self.active)

    def of_step(self, step: ObservedStep, record: Record) -> dict[Key, float]:
        """What step collectors write of an update that is about to be made.

        Raises:
            JobFault: what a collector found wrong with the job.
            ObservationError: when one that the user named cannot go on, or none is left.
            PluginError: when one that the user named fails.
        """
        found: dict[Key, float] = {}
        for collector in [c for c in self.active if isinstance(c, StepCollector)]:
            with self._guarded(collector, step.update, record):
                numbers = collector.collect_step(step, self.variants)
                found |= _keyed(collector, ((op_id, v, term, value) for (op_id, v, term), value in numbers.items()), step)
        return found

    def of_calls(self, capture: GradientCapture, update: int, record: Record) -> dict[Key, float]:
        """What per-call collectors write of an update whose backward pass is over.

        Raises:
            As :meth:`of_step`.
        """
        found: dict[Key, float] = {}
        with torch.no_grad():
            for call in capture.calls():
                op_id = call.operator.op_id
                for collector in [c for c in self.active if isinstance(c, Collector)]:
                    with self._guarded(collector, update, record):
                        numbers = collector.collect(call, self.variants)
                        found |= _keyed(collector, ((op_id, v, term, value) for (v, term), value in numbers.items()), call)
        return {key: value for key, value in found.items() if key[2] not in self.unavailable}

    def restore(self, model: torch.nn.Module, update: int, record: Record) -> None:
        """Hand collectors that ask for it what they wrote of the last observed update, before a run is continued."""
        for collector in [c for c in self.active if isinstance(c, RestoredCollector)]:
            with self._guarded(collector, update, record):
                collector.restore(model, update, self.variants, record.last(collector.name))
                self._restored.add(collector.name)

    def cost(self, dag: PrecisionDag, update: int, record: Record) -> tuple[float, float]:
        """Forward and backward passes besides those of training: of each observed update, and more of the first one.

        A collector estimates its own with ``passes``; one without that counts as 0.
        """
        each = first = 0.0
        for collector in list(self.active):
            with self._guarded(collector, update, record):
                passes = getattr(collector, "passes", None)
                estimate = 0.0 if passes is None else float(passes(dag, self.variants))
                if not getattr(collector, "measures_once", False):
                    each += estimate
                elif collector.name not in self._restored:
                    first += estimate
        return each, first

    def leave_out(self, name: str, reason: str) -> None:
        """Go on without a collector.

        Raises:
            ObservationError: when none is left.
        """
        self.active = [collector for collector in self.active if collector.name != name]
        self.unavailable[name] = reason
        if not self.active:
            raise ObservationError(f"collector {name} cannot observe {self.model}: {reason}")
        self.announce(f"without {name}: {reason}; observing goes on with {', '.join(self.names)}")

    @contextmanager
    def _guarded(self, collector: AnyCollector, update: int, record: Record) -> Iterator[None]:
        """Surround a call of a collector: one that fails is named and left out, or ends the run of a user who named it."""

        def failed(sentence: str, error: BaseException) -> None:
            what = f"failed at update {update} of {self.model} with {described(error)}"
            if self.asked_for:
                raise PluginError(
                    f"collector {collector.name} ({origin(collector)}) {what}; name others with --collectors, or fix it"
                ) from error
            record.forget(collector.name)
            self.leave_out(collector.name, f"it {what}")

        with guard(f"collector {collector.name}", failed, passing=(QSyncError,)):
            try:
                yield
            except CollectorUnavailable as reason:
                if self.asked_for and record.wrote(collector.name):
                    raise ObservationError(
                        f"collector {collector.name} fails at update {update} of {self.model}: {reason}"
                    ) from None
                record.forget(collector.name)
                self.leave_out(collector.name, str(reason))
            except JobFault:
                raise
            except ObservationError as error:
                raise JobFault(str(error)) from error


def _keyed(
    collector: AnyCollector, numbers: Iterator[tuple[OpId | None, Variant | None, str, Any]], seen: ObservedStep | OperatorCall
) -> Mapping[Key, float]:
    """A collector's numbers as a record takes them.

    Raises:
        ValueError: when a plugin's collector makes a number that is not finite of tensors that are.  (All others are the job's
            fault, which the record reports.)
    """
    found = {(op_id, variant, collector.name, term): float(value) for op_id, variant, term, value in numbers}
    if not origin(collector).startswith("qsync_torch."):
        wrong = next(((*key, value) for key, value in found.items() if not math.isfinite(value)), None)
        if wrong is not None and seen.is_finite():
            op_id, _, _, term, value = wrong
            raise ValueError(f"{term} of {'the model' if op_id is None else op_id} is {value}")
    return found
