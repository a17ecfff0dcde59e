"""How a job is to communicate: the ways that are considered, the fastest of them, and why (docs/design/allocator.md#communication).

A way is what DistributedDataParallel and NCCL are told.  None of them changes a gradient's value by more than the order in which
it is summed up, so a plan takes the way under which it is the fastest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from qsync_core.errors import PlanError
from qsync_core.ir.communication import (
    MOST_BUCKET_MB,
    PYTORCH_DEFAULTS,
    CollectiveCosts,
    CommunicationChoice,
    CommunicationSettings,
    PlannedCommunication,
    buckets_under,
)
from qsync_core.ir.dag import Bucket, PrecisionDag
from qsync_core.ir.profile import Profile
from qsync_core.units import format_ns
from qsync_planner.matching import Inputs
from qsync_planner.replayer.chains import Variants
from qsync_planner.replayer.replay import Replayer
from qsync_planner.replayer.step_timing import Condensed

NEEDS_COSTS = "communication settings need measured costs: run 'qsync communicate' on all ranks, and pass them with --communication"
"""What to say where a person names settings and no costs."""
ALIKE = 0.002
"""Periods that differ by less than this part are alike: steps are predicted to a quarter of a percent.

Where open collectives slow ranks down, T is that much later.  Without it uniform precision's fastest way, perhaps by a microsecond,
would rule out ways under which far more precision fits.
"""
BUCKET_CAPS_MB = (50.0, 100.0)
"""Tried beside the graph's own buckets and a single one."""
_MEBIBYTE = 1024 * 1024
_SYNTAX = "ctas=N,bucket=MIB|own,broadcast=on|off,view=on|off,static=on|off"
_SHORT = {"max_ctas": "ctas", "bucket_cap_mb": "bucket"}
_SWITCHES = {"broadcast": "broadcast_buffers", "view": "gradient_as_bucket_view", "static": "static_graph"}
Fixed = Mapping[str, Any]
"""Attributes of :class:`CommunicationSettings` that are decided already."""
AS_ASKED = "as asked for"
"""Who decided them, as a plan's reason says it: a person, who named them."""

Periods = Mapping[CommunicationSettings, int]
"""A plan's period in nanoseconds under every way that is considered."""


def parse_settings(text: str) -> Fixed:
    """``ctas=2,bucket=25,broadcast=off``: what is not named is left to the planner.

    ``bucket=own`` are the buckets that the graph was traced with.

    Raises:
        PlanError: with the syntax, the word that is wrong and why.
    """
    found: dict[str, Any] = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = word.partition("=")
        try:
            key, parsed = _setting(name, value)
            CommunicationSettings(**{key: parsed})
        except ValueError as error:
            raise PlanError(f"communication settings are written {_SYNTAX}, got {word!r}: {error}") from None
        if key in found:
            raise PlanError(f"the communication setting {name!r} is given twice in {text!r}")
        found[key] = parsed
    return found


def _setting(name: str, value: str) -> tuple[str, Any]:
    if name == "ctas":
        if not value.isdecimal():
            raise ValueError(f"the number of CTAs must be a whole number, 0 for NCCL's own choice, got {value!r}")
        return "max_ctas", int(value)
    if name == "bucket":
        if value == "own":
            return "bucket_cap_mb", None
        try:
            return "bucket_cap_mb", float(value)
        except ValueError:
            raise ValueError(f"the bucket cap must be in MiB, or 'own', got {value!r}") from None
    if name in _SWITCHES:
        if value not in ("on", "off"):
            raise ValueError(f"{name} is on or off, got {value!r}")
        return _SWITCHES[name], value == "on"
    raise ValueError(f"there is no setting {name!r}")


def ways_to_communicate(dag: PrecisionDag, costs: CollectiveCosts, fixed: Fixed) -> tuple[CommunicationSettings, ...]:
    """The ways that are considered, PyTorch's defaults last where nothing that is fixed differs from them.

    Every number of CTAs that was measured, with the graph's own buckets, larger ones and one for all, with and without the
    broadcast of buffers where the model has any; gradients live in the buckets, which saves half of their copies, and memory, and
    costs nothing.  So no way takes more memory than the first but PyTorch's defaults, and these are never faster than it.

    Raises:
        PlanError: for a number of CTAs that was not measured, or bucket sizes that the graph does not have.
    """
    measured = sorted(entry.max_ctas for entry in costs.measured)
    ctas = [int(fixed["max_ctas"] or 0)] if "max_ctas" in fixed else measured
    if missing := sorted(set(ctas) - set(measured)):
        raise PlanError(
            f"all-reduces with {_ctas(missing[0])} were not measured (the costs have {', '.join(map(_ctas, measured))}); "
            "measure them with 'qsync communicate', or leave ctas out of the communication settings"
        )
    broadcasts = [fixed["broadcast_buffers"]] if "broadcast_buffers" in fixed else [True, False][: 1 + bool(costs.broadcast_ns)]
    found = [
        CommunicationSettings(
            cap, number, bool(broadcast), bool(fixed.get("gradient_as_bucket_view", True)), bool(fixed.get("static_graph", False))
        )
        for broadcast in broadcasts
        for cap in _caps(dag, fixed)
        for number in ctas
    ]
    if 0 in measured and all(getattr(PYTORCH_DEFAULTS, name) == value for name, value in fixed.items()):
        found.append(PYTORCH_DEFAULTS)
    return tuple(dict.fromkeys(found))


def _ctas(number: int) -> str:
    return f"{number} CTAs" if number else "NCCL's own number of CTAs"


def _caps(dag: PrecisionDag, fixed: Fixed) -> list[float | None]:
    """Bucket caps of which no two give the same buckets."""
    if "bucket_cap_mb" in fixed:
        cap = fixed["bucket_cap_mb"]
        try:
            buckets_under(dag, cap)
        except ValueError as error:
            raise PlanError(f"{error}; leave bucket out of the communication settings") from None
        return [cap]
    one = float(math.ceil(sum(bucket.nbytes for bucket in dag.buckets) / _MEBIBYTE))
    found: dict[tuple[Bucket, ...], float | None] = {}
    for cap in (None, *BUCKET_CAPS_MB, *([one] if 0 < one <= MOST_BUCKET_MB else [])):
        try:
            found.setdefault(buckets_under(dag, cap), cap)
        except ValueError:
            break
    return list(found.values())


def fastest(times_ns: Periods) -> CommunicationSettings:
    """The way of the shortest period; of equal ones the first."""
    return min(times_ns, key=lambda way: times_ns[way])


def fastest_by_ctas(times_ns: Periods, limit_ns: int) -> list[CommunicationSettings]:
    """List the fastest way to communicate with each number of CTAs, where it keeps a limit; the fastest of all first."""
    found: dict[int, CommunicationSettings] = {}
    for way in sorted(times_ns, key=lambda way: times_ns[way]):
        if times_ns[way] <= limit_ns:
            found.setdefault(way.max_ctas, way)
    return list(found.values())


class Ways:
    """The replayers of one job, one for each way to communicate; a single one where nothing was measured.

    Args:
        inputs: of the job.
        fixed: what is decided already.
        as_said: by whom, as the plan's reason says it.

    Attributes:
        settings: the ways; PyTorch's defaults alone where nothing was measured.
    """

    def __init__(self, inputs: Inputs, fixed: Fixed, as_said: str = AS_ASKED) -> None:
        self.inputs, self.costs, self.fixed, self._as_said = inputs, inputs.communication, fixed, as_said
        costs = inputs.communication
        self.settings = (PYTORCH_DEFAULTS,) if costs is None else ways_to_communicate(inputs.dag, costs, fixed)
        self._replayers = {self.settings[0]: Replayer(inputs, settings=self.settings[0])}

    @property
    def first(self) -> Replayer:
        """The replayer under the first way."""
        return self._replayers[self.settings[0]]

    @property
    def alike(self) -> float:
        """Part of a period within which ways are alike; 0 where nothing is slowed down, and where there is a single way."""
        contends = self.costs is not None and any(c for entry in self.costs.measured for c in entry.slowdown.values())
        return ALIKE if contends and len(self.settings) > 1 else 0.0

    def at(self, way: CommunicationSettings) -> Replayer:
        """The replayer under one way."""
        if way not in self._replayers:
            self._replayers[way] = self.first.under(way)
        return self._replayers[way]

    def with_profiles(self, profiles: Mapping[str, Profile]) -> Ways:
        """The same ways with other profiles of the groups."""
        return Ways(self.inputs.with_profiles(profiles), self.fixed, self._as_said)

    def condensed(self, variants: Mapping[str, Variants]) -> dict[str, Condensed]:
        """What a plan's operators take by group, as far as its period under any of the ways depends on it."""
        first = self.first
        names = [group.name for group in first.cluster.groups]
        cuts = {cut for way in self.settings for cut in self.at(way).shape(names[0]).cuts}
        plan = {name: variants.get(name) or first.base_variants(name) for name in names}
        return {name: Condensed.of(first.mapper(name, plan[name]), cuts) for name in names}

    def periods_ns(self, variants: Mapping[str, Variants]) -> dict[CommunicationSettings, int]:
        """A plan's period under every way."""
        work = self.condensed(variants)
        return {way: self.at(way).period_ns(work) for way in self.settings}

    def planned(self, chosen: CommunicationSettings, periods_ns: Periods) -> PlannedCommunication | None:
        """What a plan says of the way that was chosen for it; nothing where nothing was measured."""
        if self.costs is None:
            return None
        order = sorted(periods_ns, key=lambda way: (way != chosen, periods_ns[way]))
        names = _SHORT | {attribute: name for name, attribute in _SWITCHES.items()}
        decided = f"with {_listed([names[attribute] for attribute in self.fixed])} {self._as_said}, " if self.fixed else ""
        reason = decided + _reason(self.inputs.dag, self.costs, periods_ns, chosen)
        return PlannedCommunication(chosen, reason, tuple(CommunicationChoice(way, periods_ns[way]) for way in order))


def _reason(
    dag: PrecisionDag,
    costs: CollectiveCosts,
    times_ns: Periods,
    chosen: CommunicationSettings,
) -> str:
    label = chosen.label
    if chosen.bucket_cap_mb is not None and len(buckets_under(dag, chosen.bucket_cap_mb)) == 1:
        label = label.replace(f"buckets of {chosen.bucket_cap_mb:g} MiB", f"one bucket ({chosen.bucket_cap_mb:g} MiB)")
    parts = [f"{label}: {format_ns(times_ns[chosen])}"]
    if chosen == PYTORCH_DEFAULTS:
        parts[0] += f", and no faster in the {_others(times_ns)}" if len(times_ns) > 1 else ""
    elif times_ns.get(PYTORCH_DEFAULTS) == times_ns[chosen]:
        parts[0] += ", as with PyTorch's defaults, which take more memory"
    elif PYTORCH_DEFAULTS in times_ns:
        parts[0] += f" instead of {format_ns(times_ns[PYTORCH_DEFAULTS])} with PyTorch's defaults{_contention(costs)}"
    elif len(times_ns) > 1:
        slowest = max(times_ns.values())
        parts[0] += f", and up to {format_ns(slowest)} in the {_others(times_ns)}"
    if not chosen.broadcast_buffers and costs.broadcast_ns:
        parts.append(
            f"without the broadcast of buffers ({format_ns(costs.broadcast_ns)} a step) rank 0, which evaluates and saves, "
            "computes the same bit for bit: its own are never overwritten"
        )
    return "; ".join(parts)


def _others(times_ns: Periods) -> str:
    return "1 other way" if len(times_ns) == 2 else f"{len(times_ns) - 1} other ways"


def _contention(costs: CollectiveCosts) -> str:
    """How much compute PyTorch's defaults take while all-reduces are open."""
    taken = [f"{c:.0%} of {name}'s" for name, c in costs.under(0).slowdown.items() if c > 0]
    if not taken:
        return ""
    return f", whose open all-reduces take {_listed(taken)} compute"


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def how_to_apply(communication: PlannedCommunication) -> tuple[str, ...]:
    """Lines of code and environment that apply a plan's settings."""
    lines = ["DistributedDataParallel(model, **applied.ddp_options())"]
    if ctas := communication.settings.max_ctas:
        options = "init_process_group(…, pg_options=qsync_torch.process_group_options(plan))"
        lines.append(f"NCCL_MAX_CTAS={ctas} in the environment of every rank, or {options}")
    return tuple(lines)
