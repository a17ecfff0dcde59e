"""Whole plans: drawn at random, and how far each really moves the gradients of all parameters."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
import torch

from indicator.measuring import BFLOAT16, FLOAT32, INT8, SETS, Kept, Task
from indicator.models import SUBJECTS
from qsync_core.artifacts.files import load, save
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.observations import Observations
from qsync_core.ir.op_id import OpId
from qsync_core.ir.variant import Variant
from qsync_torch.apply.apply import apply_
from qsync_torch.aten.random_bits import stream_key
from qsync_torch.observing.collector import ObservedStep, StepTerm
from qsync_torch.observing.montecarlo import is_random, squared_norm, step_gradients, whole_plan
from qsync_torch.observing.observe import ObserveRequest, observe

Plan = Mapping[OpId, Variant]
"""What runs in another variant than float32."""
MEASURED = (INT8, BFLOAT16)


@attrs.frozen
class PlanEffort:
    """How much is measured: passes over each of ``steps`` batches, from the first that the truth was measured at on."""

    steps: int = 8
    draws: int = 4


def drawn_plans(dag: PrecisionDag, count: int, seed: int) -> list[Plan]:
    """All operators in int8, all in bfloat16, and mixtures: how many are lowered, and how many of those to int8, is drawn anew for
    each; every third one lowers a stretch of the model that hangs together.
    """
    draw = random.Random(f"{dag.model} plans {seed}")
    names = [operator.op_id for operator in dag.adjustable]
    plans: list[Plan] = [dict.fromkeys(names, variant) for variant in MEASURED]
    while len(plans) < count:
        lowered, low_share = draw.uniform(0.1, 1.0), draw.choice((0.0, draw.random(), draw.random(), 1.0))
        size = max(1, round(lowered * len(names)))
        start = draw.randrange(len(names) - size + 1)
        chosen = names[start : start + size] if len(plans) % 3 == 0 else draw.sample(names, size)
        plans.append({name: INT8 if draw.random() < low_share else BFLOAT16 for name in chosen})
    return plans


class PlanErrors:
    """A step collector: ‖Δ∂L/∂θ‖² of each plan, the mean over the draws; term ``plan N``."""

    name = "plans"
    by_default = False

    def __init__(self, plans: Sequence[Plan], draws: int) -> None:
        self.plans, self.draws = [{k: v for k, v in plan.items() if v != FLOAT32} for plan in plans], draws

    def collect_step(self, step: ObservedStep, variants: Sequence[Variant]) -> Mapping[StepTerm, float]:
        """One number for each plan."""
        undisturbed = step_gradients(step)
        return {(None, None, f"plan {i}"): self._error(step, plan, undisturbed) for i, plan in enumerate(self.plans)}

    def _error(self, step: ObservedStep, plan: Plan, undisturbed: Sequence[torch.Tensor | None]) -> float:
        if not plan:
            return 0.0
        applied = apply_(step.model, whole_plan(step, plan), seed=stream_key(step.seed, step.update), base=step.dag.base)
        draws = self.draws if any(map(is_random, plan.values())) else 1
        total = 0.0
        try:
            for _ in range(draws):
                total += squared_norm(step_gradients(step), undisturbed)
                applied.advance()
        finally:
            applied.remove()
        return total / draws


def plan_errors(task: Task, dag: PrecisionDag, plans: Sequence[Plan], kept: Kept, effort: PlanEffort) -> list[tuple[float, ...]]:
    """True error of every plan, a number per batch; measured where the folder does not hold it.

    The batches, the parameters and the dropout masks are those that the truth of single operators was measured with.
    """
    path = _path(task, plans, kept, effort)
    if not path.exists():
        torch.set_num_threads(1)
        job = SUBJECTS[task.model].job(task.seed)
        asked = ObserveRequest(
            SETS["ladder"],
            warmup=kept.effort.warmup,
            steps=effort.steps,
            collectors=[PlanErrors(plans, effort.draws)],
            settled=None,
            seed=task.seed,
        )
        save(observe(job, dag, asked), path)
    found = load(path, Observations)
    return [tuple(found.values(PlanErrors.name, f"plan {i}")) for i in range(len(plans))]


def _path(task: Task, plans: Sequence[Plan], kept: Kept, effort: PlanEffort) -> Path:
    text = "\n".join(" ".join(sorted(f"{op_id}={variant}" for op_id, variant in plan.items())) for plan in plans)
    which = hashlib.sha256(text.encode()).hexdigest()[:12]
    return kept.folder / f"{task}-after{kept.effort.warmup}-steps{effort.steps}-draws{effort.draws}.plans-{which}.qsync"
