"""The demo's outcome: one row per method, the figures that the requirements are about, and what they say in words."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from typing import Any

import attrs

from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.plan import PrecisionPlan
from qsync_core.units import format_bytes
from qsync_torch.demo.measuring import MethodResult
from qsync_torch.demo.planning import INFER, Plans, infer_variants, local_batches, recovered_share
from qsync_torch.demo.stored_profiles import Stored
from qsync_torch.demo.workloads import Evaluation
from qsync_torch.timing import relative_spread

LAST_STEPS = 10
"""The final loss is the mean over this many last steps."""
_PRECISION_ORDER = ("int8", "float8_e4m3fn", "float16", "bfloat16", "float32")
_BUSY_BELOW = 0.95
"""Share of a core below which another process must be running on it."""
TITLES = {"full": "full precision", "uniform": "uniform low precision", "dynamic-batch": "dynamic batch", "qsync": "QSync"}


@attrs.frozen
class Row:
    """One method of training, as predicted and as measured.

    Attributes:
        name: as in files; title: as the table and the report show it.
        predicted_ns, measured_ns: iteration time (the measured one is a median); spread: interquartile range over it.
        operators: operators of the weak worker by precision; local_batches: samples a step, by group.
        gradient_error: relative error of the weak worker's weight gradients; None for probes.
        loss: mean of the last steps; evaluation: on held-out data, None for probes.
        predicted_peak_bytes, peak_bytes: the weak worker's peak memory.
        over_budget: whether its measured peak exceeds the budget.
    """

    name: str
    title: str
    predicted_ns: int
    measured_ns: int
    spread: float
    operators: Mapping[str, int]
    local_batches: Mapping[str, int]
    loss: float
    evaluation: Evaluation | None
    predicted_peak_bytes: int
    peak_bytes: int
    over_budget: bool
    gradient_error: float | None = None

    @classmethod
    def of(cls, name: str, plan: PrecisionPlan, result: MethodResult, dag: PrecisionDag, budget: int) -> Row:
        """Put a method's plan and what was measured of it together; ``budget`` is the weak worker's in bytes, 0 for none."""
        return cls(
            name=name,
            title=TITLES.get(name, name),
            predicted_ns=plan.predicted_iteration_ns,
            measured_ns=round(statistics.median(result.iteration_ns)),
            spread=relative_spread(result.iteration_ns),
            operators=Counter(str(variant.compute) for variant in infer_variants(plan).values()),
            local_batches=local_batches(plan, dag.batch_size),
            loss=statistics.fmean(result.losses[-LAST_STEPS:]),
            evaluation=result.evaluation,
            predicted_peak_bytes=plan.group(INFER).predicted_peak_bytes,
            peak_bytes=result.peak_bytes[INFER],
            over_budget=0 < budget < result.peak_bytes[INFER],
            gradient_error=result.gradient_error,
        )

    @property
    def error(self) -> float:
        """Relative error of the predicted iteration time."""
        return abs(self.predicted_ns - self.measured_ns) / self.measured_ns

    @property
    def cells(self) -> dict[str, str]:
        """The row as a table shows it, by column."""
        sizes = self.local_batches.values()  # the strong worker's first
        return {
            "method": self.title if len(set(sizes)) == 1 else f"{self.title}, {' + '.join(map(str, sizes))}",
            "iteration, measured": f"{self.measured_ns / 1e6:,.0f} ms ± {self.spread * self.measured_ns / 2e6:.0f}",
            "predicted": f"{self.predicted_ns / 1e6:,.0f} ms",
            "off by": f"{self.error:.1%}",
            "weak worker's operators": format_operators(self.operators),
            "gradient error": "" if self.gradient_error is None else f"{self.gradient_error:.2%}",
            "final loss": f"{self.loss:.3f}",
            "held-out accuracy": f"{self.evaluation.accuracy:.1%}" if self.evaluation else "",
            "weak worker's peak": format_bytes(self.peak_bytes) + (" (over budget)" if self.over_budget else ""),
            "peak, predicted": format_bytes(self.predicted_peak_bytes),
        }

    @property
    def figures(self) -> dict[str, Any]:
        """The row as JSON has it."""
        return {**attrs.asdict(self), "operators": dict(self.operators), "error": self.error}


def format_operators(operators: Mapping[str, int]) -> str:
    """``2 bfloat16, 7 float32``."""
    return ", ".join(f"{operators[p]} {p}" for p in _PRECISION_ORDER if operators.get(p))


@attrs.frozen
class Outcome:
    """All rows, and how they compare.

    Attributes:
        weakness: how the weak worker was weak; step_ratio: its float32 step over the strong one's.
        budget_bytes: the weak worker's memory budget, 0 for none.
        rows: the compared methods; probes: configurations that were only timed.
        recovered: share of uniform's low-precision compute that QSync runs in float32.
        room: share of what uniform precision saves the weak worker that it does not need to keep up: about as much can come back.
        strong_core_share: share of its core that the strong worker really got.
        notes: what was made smaller or left out, and why.
        saves_time: whether the plan is to save time; otherwise it saves memory.
        stored: what plans do on GPUs, replayed.
    """

    model: str
    data: str
    steps: int
    weakness: str
    step_ratio: float
    budget_bytes: int
    rows: tuple[Row, ...]
    probes: tuple[Row, ...]
    recovered: float
    room: float
    strong_core_share: float
    seconds: float
    notes: tuple[str, ...] = ()
    saves_time: bool = True
    stored: Stored | None = None

    @classmethod
    def of(cls, plans: Plans, trained: Mapping[str, MethodResult], dag: PrecisionDag, **told: Any) -> Outcome:
        """Put together what was planned and measured; ``told`` are the fields that neither says."""
        budget, compared = plans.cluster.group(INFER).memory_bytes, plans.compared
        full_ns, uniform_ns = (compared[name].group(INFER).predicted_busy_ns for name in ("full", "uniform"))
        rows, probes = (
            tuple(Row.of(name, plan, trained[name], dag, budget) for name, plan in named.items())
            for named in (compared, plans.probes)
        )
        return cls(
            steps=len(trained["full"].losses),
            budget_bytes=budget,
            rows=rows,
            probes=probes,
            recovered=recovered_share(dag, compared["uniform"], compared["qsync"]),
            room=room(full_ns, uniform_ns, compared["qsync"].time_limit_ns),
            **told,
        )

    def row(self, name: str) -> Row:
        """The row of a method."""
        return next(row for row in self.rows if row.name == name)

    def over(self, name: str) -> float:
        """QSync's measured iteration time over another method's."""
        return self.row("qsync").measured_ns / self.row(name).measured_ns

    @property
    def prediction_errors(self) -> Mapping[str, float]:
        """Relative errors of full precision and of the probes; empty without probes."""
        return {row.title: row.error for row in (self.row("full"), *self.probes)} if self.probes else {}

    @property
    def trained(self) -> str:
        """What was trained, and on what, as a sentence."""
        budget = f", memory budget {format_bytes(self.budget_bytes)}" if self.budget_bytes else ""
        return (
            f"{self.model} on {self.data}: {self.steps} steps with each method.  The weak worker has {self.weakness}; its float32 "
            f"step takes {self.step_ratio:.2f} times the strong one's{budget}."
        )

    @property
    def conclusions(self) -> list[str]:
        """What the figures say, in words."""
        found = []
        uniform, qsync, full = (self.row(name) for name in ("uniform", "qsync", "full"))
        if self.budget_bytes:
            fits = ["exceeds" if row.over_budget else "fits" for row in (qsync, full)]
            found.append(
                f"The weak worker may use {format_bytes(self.budget_bytes)}: QSync's plan {fits[0]} that with a measured peak of "
                f"{format_bytes(qsync.peak_bytes)}, full precision {fits[1]} it with {format_bytes(full.peak_bytes)}."
            )
        found.append(
            f"QSync's step takes {self.over('full'):.2f} of full precision's and {self.over('uniform'):.2f} of uniform low "
            f"precision's, with {self.recovered:.0%} of uniform's low-precision compute back in float32"
            + (f" (this machine has time for about {self.room:.0%})." if self.saves_time else ".")
        )
        if uniform.gradient_error and qsync.gradient_error is not None:
            found.append(
                f"The weak worker's weight gradients are off by {qsync.gradient_error:.2%} under QSync's plan and by "
                f"{uniform.gradient_error:.2%} in uniform low precision."
            )
        if errors := sorted(self.prediction_errors.values()):
            found.append(
                f"The predicted iteration time was off by {errors[len(errors) // 2]:.1%} in the median of {len(errors)} "
                f"configurations, {errors[-1]:.1%} at worst."
            )
        if self.strong_core_share < _BUSY_BELOW:
            found.append(
                f"Other processes were running: the strong worker got only {self.strong_core_share:.0%} of its core, so expect "
                "these figures to scatter; run the demo again when the machine is idle."
            )
        return found

    @property
    def summary(self) -> dict[str, Any]:
        """Everything in the table and in the sentences under it, as JSON has it; times in ns, memory in bytes."""
        told = attrs.asdict(self, filter=lambda field, _: field.name not in ("rows", "probes", "stored", "recovered", "data"))
        stored = self.stored and {
            "what": self.stored.what,
            "methods": [{**attrs.asdict(row), "operators": dict(row.operators)} for row in self.stored.rows],
        }
        return {
            **told,
            "notes": list(self.notes),
            "qsync_over_uniform": self.over("uniform"),
            "qsync_over_full": self.over("full"),
            "recovered_share": self.recovered,
            "prediction_errors": dict(self.prediction_errors),
            "methods": [row.figures for row in self.rows],
            "probes": [row.figures for row in self.probes],
            "stored": stored,
        }


def room(full_ns: int, uniform_ns: int, limit_ns: int) -> float:
    """Share (0..1) of the time that lower precision saves a worker that it may spend again before it misses the limit.

    A machine where low precision is s times as fast and whose weak worker takes r times the strong one's step leaves at most
    (1 - r / s) / (r - r / s): 0.36 for s = 2.1, r = 1.5.

    Args:
        full_ns, uniform_ns: its step alone in full and in uniform low precision; limit_ns: the iteration time to keep.
    """
    saved_ns = full_ns - uniform_ns
    return min(1.0, max(0.0, (limit_ns - uniform_ns) / saved_ns)) if saved_ns > 0 else 0.0
