"""What every adapter does with a plan: it applies it, refuses what its trainer would do otherwise, and says what is planned."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import attrs
from torch import nn

from qsync_core.errors import PlanError
from qsync_core.ir.plan import PrecisionPlan
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import STORED, Variant
from qsync_core.run_folder import RunFolder
from qsync_torch.apply.applied_plan import AppliedPlan
from qsync_torch.apply.apply import apply_for
from qsync_torch.caller import Caller
from qsync_torch.distributed.ranks import together

Run = PrecisionPlan | RunFolder | str | os.PathLike[str]
"""What ``apply_`` takes: a plan, or the path of a plan or of a run folder."""


@attrs.frozen
class TrainerSettings:
    """What a trainer was told of precision, in its own words.

    Attributes:
        now: the setting as it is, such as ``mixed_precision='bf16'``.
        autocast: the format of its autocast; float32 where it has none.
        wanted: by the base of a plan, the setting that fits it.
    """

    trainer: str
    now: str
    autocast: Precision
    wanted: Mapping[Precision, str]

    @property
    def amp(self) -> str | None:
        """The ``amp`` of the job that is trained so; None for float32."""
        return None if self.autocast is Precision.FLOAT32 else str(self.autocast)


@attrs.frozen(eq=False)
class PlannedTraining:
    """A plan in force on a trainer's model."""

    applied: AppliedPlan
    plan: PrecisionPlan

    @property
    def needs_loss_scaling(self) -> bool:
        """Some rank's gradients pass through float16, so all ranks scale their losses."""
        return any(group.needs_loss_scaling for group in self.plan.groups)

    def metrics(self) -> dict[str, float]:
        """Return numbers for a trainer's logger: the predicted step, and operators by group, precision and storage."""
        counts = {
            f"qsync/{group}/{precision}": float(count)
            for group, precisions in self._precisions().items()
            for precision, count in precisions.items()
        }
        return {"qsync/predicted_step_ms": self.plan.predicted_iteration_ns / 1e6, **counts}

    def _precisions(self) -> dict[str, Counter[str]]:
        def named(variant: Variant) -> str:
            return f"{variant.compute}{STORED}{variant.storage}" if variant.storage.is_quantized else str(variant.compute)

        return {group.group: Counter(named(entry.variant) for entry in group.assignments.values()) for group in self.plan.groups}


def apply_for_trainer(
    model: nn.Module, run: Run, settings: TrainerSettings | None, options: Mapping[str, Any], caller: Caller
) -> PlannedTraining:
    """``apply_``, with the trainer's settings held against the plan; a call of all ranks.

    Args:
        model: before it is wrapped.
        run: a plan, or the path of one or of a run folder.
        settings: of the trainer, on this rank; None where they are not known, and the first step alone compares autocast.
        options: keyword arguments of ``apply_``.

    Raises:
        PlanError: on every rank, when a rank's trainer has another autocast than the plan's; the model is as it was.
        QSyncError: whatever ``apply_`` raises.
    """
    if isinstance(run, Mapping):
        raise PlanError("a trainer trains under a whole plan, got variants by operator: give the path of a plan or of a run folder")
    applied = apply_for(caller, model, run, **options)
    with ExitStack() as undo:
        undo.callback(applied.remove)
        with together("qsync_torch.integrations, comparing the trainer's settings"):
            if settings is not None:
                _check_autocast(applied, settings, caller)
        undo.pop_all()
    applied.announce()
    assert applied.plan is not None
    return PlannedTraining(applied, applied.plan)


def refuse_loss_scaling(planned: PlannedTraining, trainer: str, caller: Caller) -> None:
    """Refuse a plan that needs loss scaling, for trainers that cannot scale losses so.

    Raises:
        PlanError: naming the groups, after the plan was taken back.
    """
    if not planned.needs_loss_scaling:
        return
    planned.applied.remove()
    groups = ", ".join(group.group for group in planned.plan.groups if group.needs_loss_scaling)
    raise PlanError(
        f"gradients of group {groups} pass through float16 and need a loss scaling that all ranks share, which {trainer} does not "
        f"have: {caller.plan_again} with bfloat16 in place of float16 in the ladder, or train with Accelerate, with Lightning, or "
        "in a loop of your own with qsync_torch.InStepGradScaler"
    )


def _check_autocast(applied: AppliedPlan, settings: TrainerSettings, caller: Caller) -> None:
    base = applied.base
    if settings.autocast is base or (applied.in_model.holds_base and settings.autocast is Precision.FLOAT32):
        return
    found, planned = (
        "without autocast" if precision is Precision.FLOAT32 else f"under autocast to {precision}"
        for precision in (settings.autocast, base)
    )
    raise PlanError(
        f"{settings.trainer} is set to {settings.now} and trains {found}, but the plan is for a job {planned}: set "
        f"{settings.wanted[base]}, or {caller.plan_again} for a job {found}"
    )
