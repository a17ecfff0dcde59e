"""Whole plans against what is predicted from their operators one by one: rows I-plans."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from indicator.measuring import Measured
from indicator.plans import MEASURED, Plan
from qsync_core.ir import observations as terms
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.observations import Observations
from qsync_core.ir.op_id import OpId
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.variant import Variant
from qsync_planner.allocator.verdict import plan_error
from qsync_planner.indicate import indicate
from qsync_planner.indicator_check.agreement import kendall_tau
from qsync_planner.indicators.series import UpdateMean

Row = dict[str, Any]
Omega = Mapping[OpId, Mapping[Variant, float]]


def measured_omega(truth: Observations, dag: PrecisionDag, updates: int | None = None) -> Omega:
    """The true error of every operator alone, over the first so many updates."""
    found: dict[OpId, dict[Variant, float]] = {}
    averaged = UpdateMean.of(truth).over(slice(updates))
    for operator in dag.adjustable:
        for variant in MEASURED:
            halves = [truth.values(terms.MONTECARLO, t, operator.op_id, variant) for t in (terms.FIRST_HALF, terms.SECOND_HALF)]
            by_update = [(a + b) / 2 for a, b in zip(*halves, strict=True)][:updates]
            found.setdefault(operator.op_id, {})[variant] = averaged.mean(by_update)
    return found


def mean_error(measured: Measured, by_update: Sequence[float]) -> float:
    """The true error of a plan over the first of the updates that the truth was measured at, averaged as Ω is."""
    return UpdateMean.of(measured.truth).over(slice(len(by_update))).mean(by_update)


def sensitivity_on(measured: Measured, updates: int) -> Sensitivity:
    """By the default indicator, over the first so many of its updates: those that plans were measured at."""
    observed = measured.observed
    series = tuple(attrs.evolve(one, values=one.values[:updates]) for one in observed.series)
    observed = attrs.evolve(observed, iterations=observed.iterations[:updates], series=series)
    return indicate(observed, measured.dag, MEASURED, "hutchinson")


def with_true_omega(sensitivity: Sensitivity, omega: Omega) -> Sensitivity:
    """Measured Ω with the indicator's shares of flips in it: what is left of an error is then that Ω is not additive."""
    flips = {
        op_id: {v: omega[op_id][v] * (part / sensitivity.omega[op_id][v]) for v, part in by_variant.items()}
        for op_id, by_variant in sensitivity.flips.items()
    }
    return attrs.evolve(sensitivity, omega=omega, flips=flips)


def total(sensitivity: Sensitivity, plan: Plan) -> float:
    """Σ Ω."""
    return sum(sensitivity.omega[op_id][variant] for op_id, variant in plan.items())


@attrs.frozen
class Fit:
    """Predicted beside true errors of several plans."""

    ratios: tuple[float, ...]
    tau: float

    @classmethod
    def of(cls, predicted: Sequence[float], truth: Sequence[float]) -> Fit:
        """One entry a plan."""
        return cls(tuple(p / t for p, t in zip(predicted, truth, strict=True)), kendall_tau(predicted, truth) or 0.0)

    @property
    def median(self) -> float:
        """Of predicted over true."""
        return statistics.median(self.ratios)

    @property
    def worst(self) -> float:
        """The ratio that is farthest from 1, by its logarithm."""
        return max(self.ratios, key=lambda ratio: abs(math.log(ratio)))

    @property
    def scatter(self) -> float:
        """Standard deviation of the logarithm of the ratios: what is left where a common factor does not matter."""
        return statistics.pstdev(map(math.log, self.ratios))

    def __str__(self) -> str:
        return f"median {self.median:.2f}, worst {self.worst:.2f}, scatter {self.scatter:.2f}, τ {self.tau:.3f}"


def plan_rows(model: str, measured: Measured, plans: Sequence[Plan], errors: Sequence[Sequence[float]], seed: int) -> Iterator[Row]:
    """For one model: predictions by Σ Ω and by the correction, from the indicator's Ω and from the measured one."""
    truth = [mean_error(measured, by_update) for by_update in errors]
    estimated = sensitivity_on(measured, len(errors[0]))
    exact = with_true_omega(estimated, measured_omega(measured.truth, measured.dag, len(errors[0])))
    name = f"I-plans-{model}" + (f"-seed{seed}" if seed else "")
    parts = [sum(v for by in s.values() for v in by.values()) for s in (estimated.flips, estimated.omega)]
    what = f"{model}, predicted over true error of {len(plans)} whole plans, median"
    rows: tuple[tuple[str, str, Callable[[Sensitivity, Plan], float], Sensitivity], ...] = (
        ("", "corrected for shared masks, Ω by hutchinson", plan_error, estimated),
        ("-sum", "Σ Ω, Ω by hutchinson", total, estimated),
        ("-measured", "corrected for shared masks, Ω measured operator by operator", plan_error, exact),
        ("-measured-sum", "Σ Ω, Ω measured operator by operator", total, exact),
    )
    for suffix, how, predict, sensitivity in rows:
        fit = Fit.of([predict(sensitivity, plan) for plan in plans], truth)
        spread = f"{fit}; flips are {parts[0] / parts[1]:.0%} of Σ Ω" if not suffix else str(fit)
        yield _row(f"{name}{suffix}", f"{what}: {how}", fit.median, "reported", spread, "ratio")


def _row(name: str, what: str, value: float, target: str, spread: str, unit: str) -> Row:
    return {"id": name, "what": what, "value": round(value, 4), "unit": unit, "spread": spread, "target": target}
