"""Plans by every indicator at equal predicted time, compared by their true gradient error: rows I-equal-time.

A T4 helps a V100 in float32, whose step is the time limit: about the middle of the T4's in 16 bit and in float32.  Or it helps an
A100 in TF32, and may take a tenth of the way from its own fastest step to float32's.  Or it is one without 16-bit products.

Rates are those of data sheets with bfloat16 in float16's place (observations on a CPU know no float16).  The models are far smaller
than what such devices train, so rates are those of devices slower by so much that launches do not count, and bandwidth is lowered
less than arithmetic, as though widths were :data:`WIDER` times what they are.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
from qsync_indicators_example.random_scheme import RandomScheme

from allocator.hardware import CHIPS
from indicator.additivity import Omega, measured_omega, with_true_omega
from indicator.measuring import BFLOAT16, FLOAT32, INT8, Measured
from indicator.plans import MEASURED, Plan
from indicator.published import INDICATORS
from qsync_core.artifacts.files import digest
from qsync_core.ir.cluster import Cluster, DeviceGroup, Link
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.plan import PrecisionPlan, Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import Profile
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.variant import Variant
from qsync_planner.allocator import Inputs, Request, allocate
from qsync_planner.allocator.verdict import noise_at_masks, plan_error
from qsync_planner.indicate import indicate
from qsync_planner.indicators.series import geometric_mean

Row = dict[str, Any]
RANDOM_SEEDS = 5
TRUTH, CORRECTED = "measured", "measured-corrected"
"""Plans by the measured Ω: by its sum, as the allocator does, and by its sum corrected for shared masks."""
UNIFORM = "uniform"
WIDER = 24
_SLOWER = 10_000
LADDER = (INT8, BFLOAT16, FLOAT32)


@attrs.frozen
class Setting:
    """What helps what, and the time allowed.

    Attributes:
        suffix: of its rows' ids.
        strong: the chip that trains.
        ladder: of the T4.
        way: from uniform precision's time to full precision's.
    """

    suffix: str
    strong: str
    ladder: tuple[Variant, ...]
    way: float

    @property
    def text(self) -> str:
        """In words."""
        low = "" if self.ladder == LADDER else " without bfloat16"
        return f"T4{low} beside {self.strong} at uniform precision's time" + (
            f" and {self.way:.0%} of the way up" if self.way else ""
        )


SETTINGS = (
    Setting("", "V100", LADDER, 0.0),
    Setting("-tight", "A100", LADDER, 0.1),
    Setting("-int8", "V100", (INT8, FLOAT32), 0.0),
)
_REWEIGHTED = 4
"""Times that the corrected objective is made linear anew around the plan before."""


def a_job(dag: PrecisionDag, setting: Setting) -> tuple[Cluster, dict[str, Profile]]:
    """A chip that trains and a T4 that helps."""
    from synthetic import Chip, roofline_profile

    def slowed(chip: Chip) -> Chip:
        rates = {Precision.BFLOAT16 if p is Precision.FLOAT16 else p: rate / _SLOWER for p, rate in chip.tera.items()}
        return Chip(chip.name, rates, chip.bandwidth_gbs * WIDER / _SLOWER)

    groups = (
        DeviceGroup("train", setting.strong, 1, Role.TRAIN, Precision.FLOAT32, (FLOAT32,)),
        DeviceGroup("infer", "T4", 1, Role.INFER, Precision.FLOAT32, setting.ladder),
    )
    profiles = {
        "train": roofline_profile(dag, slowed(CHIPS[setting.strong]), (FLOAT32,)),
        "infer": roofline_profile(dag, slowed(CHIPS["T4"]), setting.ladder),
    }
    profiles = {name: attrs.evolve(profile, dag_digest=digest(dag)) for name, profile in profiles.items()}
    return Cluster(f"T4 beside {setting.strong}", groups, (Link(("train", "infer"), 20_000.0, 0.25),)), profiles


def variants_of(plan: PrecisionPlan) -> Plan:
    """What the T4 lowers."""
    return {op_id: a.variant for op_id, a in plan.group("infer").assignments.items() if a.variant != FLOAT32}


@attrs.frozen
class Planned:
    """Plans of one model at one time.

    Attributes:
        limit_ns, uniform_ns, full_ns: step times: allowed, of uniform low precision, of full precision.
        plans: by indicator; random's are ``random/0`` and so on.
    """

    limit_ns: int
    uniform_ns: int
    full_ns: int
    plans: Mapping[str, Plan]


def planned(measured: Measured, setting: Setting) -> Planned:
    """The plans by every indicator, proven optimal for it."""
    dag = measured.dag
    cluster, profiles = a_job(dag, setting)
    rated = {one.name: indicate(measured.observed, dag, setting.ladder, one) for one in INDICATORS}
    for seed in range(RANDOM_SEEDS):
        rated[f"random/{seed}"] = indicate(None, dag, setting.ladder, RandomScheme(seed))
    base = allocate(Inputs(dag, cluster, profiles), Request("uniform"))
    uniform, full = base.baselines["uniform"], base.baselines["full"]
    tolerance = setting.way * (full / uniform - 1)

    def best(sensitivity: Sensitivity) -> PrecisionPlan:
        return allocate(Inputs(dag, cluster, profiles, sensitivity), Request("exact", tolerance=tolerance))

    found = {name: best(sensitivity) for name, sensitivity in rated.items()}
    truth = with_true_omega(rated["hutchinson"], {o: {**v, FLOAT32: 0.0} for o, v in _omega(measured).items()})
    found[TRUTH] = best(truth)
    plans = {name: variants_of(plan) for name, plan in found.items()} | {UNIFORM: variants_of(base)}
    plans[CORRECTED] = plans[TRUTH]
    for _ in range(_REWEIGHTED if truth.flips else 0):
        again = variants_of(best(_linear_around(truth, plans[CORRECTED])))
        if plan_error(truth, again) >= plan_error(truth, plans[CORRECTED]):
            break
        plans[CORRECTED] = again
    return Planned(found[TRUTH].time_limit_ns, uniform, full, plans)


def _omega(measured: Measured) -> Omega:
    return measured_omega(measured.truth, measured.dag)


def _linear_around(sensitivity: Sensitivity, plan: Plan) -> Sensitivity:
    """Ω whose sum is least where the whole is, near a plan: made linear in the squares of the parts of flips."""
    masks = sensitivity.masks
    parts = {op_id: sensitivity.flips.get(op_id, {}).get(variant, 0.0) for op_id, variant in plan.items() if op_id in masks}
    stretches = list(noise_at_masks((masks[op_id], part / masks[op_id]) for op_id, part in parts.items()))
    omega = {}
    for op_id, by_variant in sensitivity.omega.items():
        part, slope = sensitivity.flips.get(op_id, {}), _slope(masks[op_id], stretches) if op_id in masks else 0.0
        omega[op_id] = {v: value - part.get(v, 0.0) + slope * part.get(v, 0.0) ** 2 for v, value in by_variant.items()}
    return attrs.evolve(sensitivity, omega=omega, flips={}, masks={})


def _slope(masks: float, stretches: Sequence[tuple[float, float]]) -> float:
    """By how much the whole rises with the square of an operator's part, given the masks behind it; masks that nothing reaches are
    left out.
    """
    slope, left = 0.0, masks
    for width, variance in reversed(stretches):
        if variance > 0:
            slope += min(width, left) / (2 * math.sqrt(variance) * masks**2)
        left -= min(width, left)
    return slope


@attrs.frozen
class Compared:
    """Plans of one seed of a model at one time, and the true error of each."""

    at: Planned
    errors: Mapping[str, float]

    def over(self, name: str, other: str) -> float:
        """True error over another's; random's is the mean over its draws."""
        if name == "random":
            return statistics.fmean(self.over(f"random/{seed}", other) for seed in range(RANDOM_SEEDS))
        return self.errors[name] / self.errors[other]


def equal_time_rows(model: str, setting: Setting, seeds: Sequence[Compared]) -> Iterator[Row]:
    """The default indicator's true error over that of the plan by measured Ω, and every other's over the default's: the geometric
    mean over the model's seeds."""
    prefix, what = f"I-equal-time-{model}{setting.suffix}", f"{model}, {setting.text}"
    for name, over in (
        ("hutchinson", TRUTH), *((one.name, "hutchinson") for one in INDICATORS[1:]), (CORRECTED, TRUTH), ("random", "hutchinson"),
    ):  # fmt: skip
        ratios = [seed.over(name, over) for seed in seeds]
        text = "seeds " + ", ".join(f"{ratio:.2f}" for ratio in ratios)
        if name != "random":
            text += "; " + ", ".join(_counts(seed.at.plans[name]) for seed in seeds)
        if name == "hutchinson":
            at = seeds[0].at
            uniform = ", ".join(f"{seed.over(UNIFORM, name):.2f}" for seed in seeds)
            text += (
                f"; T {at.limit_ns / at.uniform_ns:.2f} of uniform's, full precision {at.full_ns / at.uniform_ns:.2f}; uniform "
                f"precision's true error over its own {uniform}"
            )
        row_id = prefix if name == "hutchinson" else f"{prefix}-{name}"
        yield _row(row_id, f"{what}: true error by {name} over that by {over}", geometric_mean(ratios), text)


def _counts(plan: Plan) -> str:
    names = {INT8: "int8", BFLOAT16: "bfloat16"}
    return " and ".join(f"{sum(v == variant for v in plan.values())} {names[variant]}" for variant in MEASURED)


def _row(name: str, what: str, value: float, spread: str) -> Row:
    return {"id": name, "what": what, "value": round(value, 4), "unit": "ratio", "spread": spread, "target": "reported"}
