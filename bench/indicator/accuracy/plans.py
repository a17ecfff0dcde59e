"""The plans that are compared: the real allocator on roofline costs, at equal time or at equal memory.

**Time.** One strong device and one weak one, by the rates of V100 and T4 with bfloat16 in float16's place; the weak one may run its
operators in the setting's low variant or in float32.  The limit is the allocator's: the step time of uniform low precision, which
here is what the strong device takes in float32, so that part of the weak one's operators can stay high.  These models are far
smaller than what such devices train.  Rates are therefore those of devices slower by so much that launches do not count, with
bandwidth lowered less than arithmetic, as though every width were :data:`WIDER` times what it is.

**Memory.** Without a time limit, within full precision's predicted peak less 60% of what the leanest plan saves of it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import attrs
from qsync_indicators_example.random_scheme import RandomScheme

import allocator  # noqa: F401  (puts synthetic on the path)
from indicator.accuracy.methods import FULL, HALF, INDICATORS, RANDOM, SETTINGS, UNIFORM, Setting, Task
from indicator.measuring import BFLOAT16, FLOAT32
from indicator.published import named
from qsync_core.artifacts.files import digest
from qsync_core.ir.cluster import Cluster, DeviceGroup, Link
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.observations import Observations
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import PrecisionPlan, Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import Profile
from qsync_core.ir.variant import Variant
from qsync_planner.allocator.allocate import allocate
from qsync_planner.allocator.request import Request
from qsync_planner.indicate import indicate
from qsync_planner.matching import Inputs
from qsync_planner.replayer.replay import Replayer

WIDER = 24
"""From a width of 32 to one of 768."""
_SLOWER = 10_000
SAVED = 0.6
"""Of the largest possible saving of memory (the paper's cluster B)."""
_ANY_TIME = 1000.0
WEAK = "weak"


@attrs.frozen
class Planned:
    """What every operator runs as, and the weak device's predicted step relative to full precision's and its peak."""

    variants: Mapping[OpId, Variant]
    time_share: float
    memory_share: float
    low_flops: float

    @property
    def text(self) -> str:
        """For the results."""
        low = sum(variant not in (FLOAT32, BFLOAT16) for variant in self.variants.values())
        half = sum(variant == BFLOAT16 for variant in self.variants.values())
        kinds = f"{low} low" + (f", {half} bfloat16" if half else "")
        return (
            f"{kinds} of {len(self.variants)} operators, {self.low_flops:.0%} of the arithmetic below float32, "
            f"weak device's step {self.time_share:.3f} and peak {self.memory_share:.3f} of full precision's"
        )


class Planner:
    """Plans of one model from what was observed on it.

    Args:
        dag, observed: its graph, and what indicators need.
        wider: as though every width were so many times what it is; 1 for a model of real size.
    """

    def __init__(self, dag: PrecisionDag, observed: Observations, wider: float = WIDER) -> None:
        self.dag, self.observed, self._wider = dag, observed, wider
        self._known: dict[tuple[str, ...], Planned] = {}

    def plan(self, task: Task) -> Planned:
        """What a task runs; random plans are drawn anew for every seed, the others are the model's."""
        setting = SETTINGS[task.setting]
        if task.method in (FULL, HALF, UNIFORM):
            variant = {FULL: FLOAT32, HALF: BFLOAT16, UNIFORM: setting.low}[task.method]
            return self._described({operator.op_id: variant for operator in self.dag.adjustable})
        key = (str(setting.low), str(setting.memory), task.method, str(task.seed) if task.method == RANDOM else "")
        if key not in self._known:
            self._known[key] = self._planned(setting, task)
        return self._known[key]

    def _planned(self, setting: Setting, task: Task) -> Planned:
        name = INDICATORS[task.method]
        indicator = RandomScheme(task.seed) if task.method == RANDOM else named(name)
        sensitivity = indicate(None if task.method == RANDOM else self.observed, self.dag, setting.ladder, indicator)
        cluster, profiles = self._job(setting.ladder)
        if setting.memory:
            cluster = self._with_budget(cluster, profiles)
        tolerance = _ANY_TIME if setting.memory else 0.0
        plan = allocate(Inputs(self.dag, cluster, profiles, sensitivity), Request(tolerance=tolerance))
        return self._described(_weak_variants(plan))

    @functools.cache  # noqa: B019 (a planner lives as long as the script)
    def _job(self, ladder: tuple[Variant, ...]) -> tuple[Cluster, dict[str, Profile]]:
        from synthetic import Chip, roofline_profile

        def chip(name: str, float32: float, bfloat16: float, int8: float, bandwidth_gbs: float) -> Chip:
            rates = {Precision.FLOAT32: float32, Precision.BFLOAT16: bfloat16, Precision.INT8: int8}
            slowed = {precision: rate / _SLOWER for precision, rate in rates.items()}
            return Chip(name, slowed, bandwidth_gbs * self._wider / _SLOWER)

        strong, weak = chip("strong", 15.7, 125.0, 125.0, 900.0), chip("weak", 8.1, 65.0, 130.0, 300.0)
        groups = (
            DeviceGroup("strong", "strong", 1, Role.TRAIN, Precision.FLOAT32, (FLOAT32,)),
            DeviceGroup(WEAK, "weak", 1, Role.INFER, Precision.FLOAT32, ladder),
        )
        profiles = {
            "strong": roofline_profile(self.dag, strong, (FLOAT32,)),
            WEAK: roofline_profile(self.dag, weak, ladder),
        }
        profiles = {name: attrs.evolve(profile, dag_digest=digest(self.dag)) for name, profile in profiles.items()}
        return Cluster("accuracy", groups, (Link(("strong", WEAK), 1_000.0, 0.01),)), profiles

    def _with_budget(self, cluster: Cluster, profiles: Mapping[str, Profile]) -> Cluster:
        replayer = Replayer(Inputs(self.dag, cluster, profiles))
        group = cluster.group(WEAK)
        full = replayer.memory(WEAK, dict.fromkeys((o.op_id for o in self.dag.adjustable), FLOAT32)).peak_bytes
        anything = indicate(None, self.dag, group.ladder, RandomScheme(0))
        leanest = allocate(Inputs(self.dag, cluster, profiles, anything), Request(objective="memory", tolerance=_ANY_TIME))
        least = next(entry.predicted_peak_bytes for entry in leanest.groups if entry.group == WEAK)
        budget = full - round(SAVED * (full - least))
        return attrs.evolve(
            cluster, groups=tuple(attrs.evolve(g, memory_bytes=budget) if g.name == WEAK else g for g in cluster.groups)
        )

    def _described(self, variants: Mapping[OpId, Variant]) -> Planned:
        ladder = sorted({*variants.values(), FLOAT32}, key=lambda variant: (variant == FLOAT32, variant == BFLOAT16, str(variant)))
        cluster, profiles = self._job(tuple(ladder))
        replayer = Replayer(Inputs(self.dag, cluster, profiles))
        full, own = (replayer.replay({WEAK: plan}).groups[WEAK] for plan in (replayer.base_variants(WEAK), variants))
        flops = {operator.op_id: operator.flops for operator in self.dag.adjustable}
        low = sum(flops[op_id] for op_id, variant in variants.items() if variant != FLOAT32)
        return Planned(
            dict(variants), own.busy_ns / full.busy_ns, own.peak_bytes / full.peak_bytes, low / max(sum(flops.values()), 1)
        )


def _weak_variants(plan: PrecisionPlan) -> dict[OpId, Variant]:
    group = next(group for group in plan.groups if group.group == WEAK)
    return {op_id: assignment.variant for op_id, assignment in group.assignments.items()}
