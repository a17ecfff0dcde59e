"""Lightning: a DDP strategy whose module runs under a plan."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_warn

from qsync_core.errors import JobError, PlanError
from qsync_core.ir.precision import Precision
from qsync_torch.apply.applied_plan import AppliedPlan
from qsync_torch.caller import Caller
from qsync_torch.capturing.capture import job_of
from qsync_torch.capturing.script import hand_over, is_wanted
from qsync_torch.distributed.groups_present import run_folder_of
from qsync_torch.distributed.loss_scaling import InStepGradScaler
from qsync_torch.integrations.planned_training import PlannedTraining, Run, TrainerSettings, apply_for_trainer
from qsync_torch.job import Batch, Job

_CALLER = Caller("HybridStrategy", None, "plan_options=dict({})", "{}", own_loop=False)
_AUTOCAST = {"32-true": Precision.FLOAT32, "bf16-mixed": Precision.BFLOAT16, "16-mixed": Precision.FLOAT16}
_WANTED = {base: f"Trainer(precision={name!r})" for name, base in _AUTOCAST.items()}
_KEY = "qsync"
"""The key of the rounding step in a checkpoint."""


class HybridStrategy(DDPStrategy):
    """``Trainer(strategy=HybridStrategy("run"))``: DistributedDataParallel under a plan.

    Under ``qsync prepare`` the script ends in ``fit``, and what would be trained becomes the job that is planned: the module with
    its ``training_step``, its optimizer, the training data, and the trainer's ``accumulate_grad_batches``.

    In training the plan is applied after ``setup`` and ``configure_model`` have made the module and it is on its device, and before
    it is wrapped.  Its options for DistributedDataParallel stand above those given here; checkpoints keep the rounding step; the
    trainer's loggers are told once what is planned.  A plan that needs loss scaling gets it.  Validation and testing run without a
    plan.

    Args:
        run: a plan, or the path of one or of a run folder.
        module: the attribute of the LightningModule that the plan was made for, such as ``net``; empty: the LightningModule itself,
            as ``qsync prepare`` has it.
        name: of the job that is planned; the module's class by default.
        plan_options: keyword arguments of :func:`qsync_torch.apply_`.
        ddp: keyword arguments of Lightning's ``DDPStrategy``.

    Raises:
        PlanError: in ``fit``, on every rank: the trainer's precision is not what the plan is for, or there is no such attribute.
        JobError: under ``qsync prepare``, in ``fit``: the module optimizes by hand or with several optimizers, or ``module`` is
            given.
        QSyncError: whatever ``apply_`` raises.
    """

    def __init__(
        self,
        run: Run = "run",
        *,
        module: str = "",
        name: str | None = None,
        plan_options: Mapping[str, Any] | None = None,
        **ddp: Any,
    ) -> None:
        super().__init__(**ddp)
        self._run, self._part, self._name, self._plan_options = run, module, name, dict(plan_options or {})
        self._planned: PlannedTraining | None = None

    @property
    def applied(self) -> AppliedPlan | None:
        """What ``apply_`` returned; None before ``fit`` has set the module up."""
        return None if self._planned is None else self._planned.applied

    def configure_ddp(self) -> None:
        """Apply the plan, then wrap."""
        if is_wanted():
            hand_over(self._job(), _CALLER)
        if self._planned is not None:  # an earlier fit's, which may have been of another module
            self._planned.applied.remove()
        module = self.lightning_module
        try:
            model = module.get_submodule(self._part)
        except AttributeError:
            what = type(module).__name__
            raise PlanError(f"{what} has no module {self._part!r}: HybridStrategy(..., module=...) names one") from None
        caller = attrs.evolve(_CALLER, run=run_folder_of(self._run))
        self._planned = planned = apply_for_trainer(model, self._run, self._settings(), self._plan_options, caller)
        planned.applied.in_model.meet_accumulation(module.trainer.accumulate_grad_batches)
        self._ddp_kwargs |= planned.applied.ddp_options()
        if planned.needs_loss_scaling:
            self.precision_plugin = LossScaling(self.root_device.type)
        super().configure_ddp()

    def setup(self, trainer: Trainer) -> None:
        """Set up the strategy, and tell the loggers of the plan."""
        before = self._planned
        super().setup(trainer)
        if self._planned is not None and self._planned is not before:
            for logger in trainer.loggers:
                logger.log_metrics(self._planned.metrics(), step=trainer.global_step)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a training step, after a look at the first one's batch where the plan is for the whole step."""
        if self._planned is not None and not self._part:
            self._planned.applied.in_model.meet_batch(args, kwargs)
        return super().training_step(*args, **kwargs)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a checkpoint with the rounding step in it."""
        if self._planned is not None:
            checkpoint[_KEY] = self._planned.applied.state_dict()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state with the buffers of a training rank; all ranks call it."""
        self._share_buffers()
        state: dict[str, Any] = super().lightning_module_state_dict()
        return state

    def on_validation_start(self) -> None:
        """All ranks evaluate with the buffers of a training rank."""
        self._share_buffers()

    def on_train_end(self) -> None:
        """All ranks leave with the buffers of a training rank."""
        self._share_buffers()

    def _share_buffers(self) -> None:
        if self._planned is not None:
            self._planned.applied.share_buffers()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Training resumes: with the rounding step."""
        super().load_optimizer_state_dict(checkpoint)
        if self._planned is None:
            return
        if _KEY in checkpoint:
            self._planned.applied.load_state_dict(checkpoint[_KEY])
        else:
            rank_zero_warn("the checkpoint has no rounding step, because it was written without a plan: rounding begins anew")

    def _job(self) -> Job:
        """What ``fit`` is about to train; the module is no trainer's afterwards."""
        module, settings = self.lightning_module, self._settings()
        if self._part:
            raise JobError(
                f"qsync prepare plans the whole training_step of {type(module).__name__}, whose operators a plan for its "
                f"{self._part!r} would name otherwise: leave module={self._part!r} out of HybridStrategy"
            )
        self.setup_optimizers(module.trainer)
        if not module.automatic_optimization or len(self.optimizers) != 1:
            raise JobError(
                f"{type(module).__name__} optimizes by hand, or with several optimizers, and a job has one: write a job function, "
                "and run qsync prepare with file.py:function"
            )
        module.trainer.fit_loop.setup_data()
        loader = (Batch((given,)) for given in module.trainer.train_dataloader)
        accumulate = module.trainer.accumulate_grad_batches
        module.trainer = None  # a copy of the module would copy it
        module.__class__ = _whose_forward_is_its_step(type(module))
        name = self._name or type(module).__name__
        return job_of(module, self.optimizers[0], None, loader, name=name, amp=settings.amp, accumulate=accumulate)

    def _settings(self) -> TrainerSettings:
        """Raises PlanError for weights in other formats than float32."""
        precision = str(self.precision_plugin.precision)
        if precision not in _AUTOCAST:
            raise PlanError(
                f"a plan is for parameters in float32, and the trainer has precision={precision!r}: set one of "
                f"{', '.join(_AUTOCAST)}"
            )
        return TrainerSettings("the trainer", f"precision={precision!r}", _AUTOCAST[precision], _WANTED)


def _whose_forward_is_its_step(kind: type[LightningModule]) -> type[LightningModule]:
    """A LightningModule that is called with a batch and returns its loss; inside its step its forward is its own."""
    numbered = len(inspect.signature(kind.training_step).parameters) > 2  # self, batch and its number

    class Step(kind):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if self.__dict__.get("_in_step"):
                return super().forward(*args, **kwargs)
            self.__dict__["_in_step"] = True
            try:
                return self.training_step(*args, *([0] if numbered else []))
            finally:
                del self.__dict__["_in_step"]

    Step.__name__ = Step.__qualname__ = kind.__name__
    return Step


class LossScaling(MixedPrecision):
    """Loss scaling that all ranks share, without autocast."""

    def __init__(self, device: str) -> None:
        super().__init__("16-mixed", device, scaler=InStepGradScaler(device))
        self.precision = "32-true"

    def autocast_context_manager(self) -> AbstractContextManager[Any]:
        """None: the plan says what runs in float16."""
        return nullcontext()
