"""All curves that there are, by model, method and seed."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path

import attrs

from indicator.accuracy.methods import FULL
from indicator.accuracy.paired import Difference, paired
from indicator.loss_curves.curves import Curve, Gap, at, final, largest_gap
from indicator.loss_curves.methods import METHODS, Which
from indicator.loss_curves.subjects import SUBJECTS


@attrs.frozen
class Finished:
    """Curves of runs of ``updates`` each on a device, and the plans behind them in words."""

    curves: Mapping[Which, Curve]
    plans: Mapping[Which, str]
    updates: int
    device: str

    def save(self, path: Path) -> None:
        """As JSON."""
        runs = [attrs.asdict(which) | {"plan": self.plans[which], "losses": list(curve)} for which, curve in self.curves.items()]
        path.write_text(json.dumps({"updates": self.updates, "device": self.device, "runs": runs}), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Finished:
        """What was saved."""
        stored = json.loads(path.read_text(encoding="utf-8"))
        runs = {Which(run["model"], run["method"], run["seed"]): run for run in stored["runs"]}
        curves, plans = ({which: run[what] for which, run in runs.items()} for what in ("losses", "plan"))
        return cls(curves, plans, stored["updates"], stored["device"])

    @property
    def models(self) -> list[str]:
        """Those with at least one full-precision run."""
        found = {which.model for which in self.curves if which.method == FULL}
        return [name for name in SUBJECTS if name in found]

    def methods(self, model: str) -> list[str]:
        """Those that were run, full precision first."""
        found = {which.method for which in self.curves if which.model == model}
        return [name for name in METHODS if name in found]

    def by_seed(self, model: str, method: str) -> dict[int, Curve]:
        """The curves of one method."""
        found = {which.seed: curve for which, curve in self.curves.items() if (which.model, which.method) == (model, method)}
        return dict(sorted(found.items()))

    def final(self, model: str, method: str) -> dict[int, float]:
        """Final training loss by seed, without runs that diverged."""
        found = {seed: final(curve, self.updates) for seed, curve in self.by_seed(model, method).items()}
        return {seed: loss for seed, loss in found.items() if loss is not None}

    def diverged(self, model: str, method: str) -> int:
        """How many runs ended without a finite loss."""
        return len(self.by_seed(model, method)) - len(self.final(model, method))

    def ratios(self, model: str, method: str) -> dict[int, float]:
        """Final loss over full precision's of the same seed."""
        full = self.final(model, FULL)
        return {seed: loss / full[seed] for seed, loss in self.final(model, method).items() if seed in full}

    def over_full(self, model: str, method: str) -> Difference | None:
        """The ratio less 1."""
        ratios = self.ratios(model, method)
        return paired(ratios, dict.fromkeys(ratios, 1.0))

    def less(self, model: str, method: str, other: str) -> Difference | None:
        """The ratio less another method's."""
        return paired(self.ratios(model, method), self.ratios(model, other))

    def gap(self, model: str, method: str) -> Gap | None:
        """From full precision's curve."""
        return largest_gap(self.by_seed(model, method), self.by_seed(model, FULL), self.updates)

    def loss_at(self, model: str, method: str, share: float) -> float | None:
        """Smoothed loss along training, mean over the seeds; None where one of them diverged before."""
        found = [at(curve, self.updates, share) for curve in self.by_seed(model, method).values()]
        known = [loss for loss in found if loss is not None]
        return statistics.fmean(known) if known and len(known) == len(found) else None

    def plan(self, model: str, method: str) -> str:
        """Of the first seed."""
        return next(plan for which, plan in self.plans.items() if (which.model, which.method) == (model, method))
