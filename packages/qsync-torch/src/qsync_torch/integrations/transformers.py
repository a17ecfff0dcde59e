"""Hugging Face's Trainer: a plan for its model, by one call between making the trainer and ``trainer.train()``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import attrs
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_callback import ExportableState

from qsync_core.errors import PlanError
from qsync_core.ir.precision import Precision
from qsync_torch.apply.applied_plan import AppliedPlan, applied_to
from qsync_torch.caller import Caller
from qsync_torch.capturing.capture import job_of
from qsync_torch.capturing.losses import Loss
from qsync_torch.capturing.script import hand_over, is_wanted
from qsync_torch.integrations.accelerate import accelerator_settings, check_accelerator, compiles, plan_accelerator
from qsync_torch.integrations.planned_training import PlannedTraining, Run, TrainerSettings
from qsync_torch.job import Job

_CALLER = Caller("hybrid", arguments="trainer, run={}", own_loop=False)
_WANTED = {
    Precision.FLOAT32: "TrainingArguments(bf16=False, fp16=False)",
    Precision.BFLOAT16: "TrainingArguments(bf16=True)",
}


def hybrid(trainer: Trainer, *, run: Run = "run", name: str | None = None, **options: Any) -> AppliedPlan:
    """:func:`qsync_torch.hybrid` for a trainer; call it on all ranks, before ``trainer.train()``.

    Under ``qsync prepare`` the script ends here, and what the trainer would train becomes the job that is planned: its model,
    optimizer, training data, loss and ``gradient_accumulation_steps``.  In training its model is put under the plan.

    The plan's options for DistributedDataParallel go to the trainer's accelerator, checkpoints keep the rounding step (in
    ``trainer_state.json``), and ``trainer.log`` is told once what is planned.  Evaluation, ``save_model`` and
    ``load_best_model_at_end`` are those of the model without a plan.  A plan that needs loss scaling gets it.

    Args:
        trainer: of this class or a subclass, made with ``model``.
        run: a plan, or the path of one or of a run folder.
        name: of the job that is planned; the model's class by default.
        options: keyword arguments of :func:`qsync_torch.apply_`.

    Returns:
        What ``apply_`` returns.

    Raises:
        PlanError: on every rank, when the trainer's precision or kind of parallelism is not what the plan is for, it makes its
            model in ``train()`` (``model_init``), or has wrapped it already.
        JobError: under ``qsync prepare``, when what is trained makes no job.
        QSyncError: whatever ``apply_`` raises.
    """
    if trainer.model_init is not None:
        raise PlanError("the trainer makes a new model in train(), which would have no plan: give it model=..., not model_init=...")
    if trainer.args.n_gpu > 1:
        raise PlanError(
            "the trainer would run this process on several GPUs with nn.DataParallel: start one process for each GPU, with torchrun"
        )
    settings = _settings(trainer)
    check_accelerator(trainer.accelerator, trainer.model)
    if is_wanted():
        hand_over(attrs.evolve(_job(trainer, name, settings.amp), compiles=compiles(trainer.accelerator)), _CALLER)
    planned = plan_accelerator(trainer.accelerator, trainer.model, run, settings, options, _CALLER)
    planned.applied.in_model.meet_accumulation(trainer.args.gradient_accumulation_steps)
    trainer.add_callback(PlanCallback(planned, trainer.log))
    return planned.applied


def _settings(trainer: Trainer) -> TrainerSettings:
    found, args = accelerator_settings(trainer.accelerator), trainer.args
    return TrainerSettings("the trainer", f"bf16={args.bf16}, fp16={args.fp16}", found.autocast, _WANTED)


def _job(trainer: Trainer, name: str | None, amp: str | None) -> Job:
    _checkpoint_layers(trainer)
    optimizer, loader = trainer.create_optimizer(), trainer.get_train_dataloader()
    steps = trainer.args.gradient_accumulation_steps
    job = job_of(trainer.model, optimizer, _loss(trainer), loader, name=name, amp=amp, accumulate=steps)
    return attrs.evolve(job, reads_loss=trainer.args.logging_nan_inf_filter)


def _checkpoint_layers(trainer: Trainer) -> None:
    """Let layers be checkpointed where ``train()`` would have them so: it makes that the model's own setting when it begins."""
    if not trainer.args.gradient_checkpointing:
        return
    keywords = dict(trainer.args.gradient_checkpointing_kwargs or {})
    own = {name: keywords.pop(name) for name in ("every_n_layers", "offload") if name in keywords}  # the others are PyTorch's
    trainer.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=keywords or None, **own)


def _loss(trainer: Trainer) -> Loss | None:
    """What stands in a trainer's ``compute_loss``; None where that is the model's own loss."""
    if trainer.compute_loss_func is not None:
        return lambda output, labels: trainer.compute_loss_func(output, labels, num_items_in_batch=None)
    if trainer.label_smoother is not None:
        shifts = type(trainer.model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        return lambda output, labels: trainer.label_smoother(output, labels, shift_labels=shifts)
    if type(trainer).compute_loss is not Trainer.compute_loss:
        warnings.warn(
            f"{type(trainer).__name__} has a compute_loss of its own, which cannot be captured: the plan is made for the loss that "
            "the model itself returns; where that is another, write a job function (docs/flow.md)",
            stacklevel=3,
        )
    return None


class PlanCallback(TrainerCallback, ExportableState):
    """Keeps the rounding step in a trainer's checkpoints, shares buffers before they are saved or evaluated, and logs once;
    :func:`hybrid` adds it.

    A trainer that restores its callbacks makes this one anew, without arguments; it then finds the plan on the model.
    """

    def __init__(self, planned: PlannedTraining | None = None, log: Callable[[dict[str, float]], None] | None = None) -> None:
        self._applied = None if planned is None else planned.applied
        self._metrics = {} if planned is None else planned.metrics()
        self._log = log
        self.rounding: dict[str, int] = {}

    def state(self) -> dict[str, Any]:
        """What ``trainer_state.json`` keeps."""
        return {"args": {}, "attributes": {"rounding": self.rounding if self._applied is None else self._applied.state_dict()}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: nn.Module, **_: Any
    ) -> None:
        """Take up the rounding step of the checkpoint that the trainer has read by now, and log once.

        Raises:
            PlanError: when the trainer trains another model than the one that has the plan, or its checkpoint was written under
                another seed of the rounding.
        """
        self._applied = applied = applied_to(model)
        if applied is None:
            raise PlanError("the trainer trains another model than the one that hybrid gave a plan: call hybrid again")
        stored = state.stateful_callbacks.get(type(self).__name__)
        if stored is None:
            warnings.warn(
                "the checkpoint has no rounding step, because it was written without a plan: rounding begins with that of step "
                f"{applied.step}",
                stacklevel=2,
            )
            state.stateful_callbacks[type(self).__name__] = self.state()
        else:
            applied.load_state_dict(stored["attributes"]["rounding"])
        if self._log is not None and self._metrics:
            self._log(self._metrics)
            self._metrics = {}

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The trainer's own callback has said by now whether it evaluates or saves."""
        if self._applied is not None and (control.should_evaluate or control.should_save):
            self._applied.share_buffers()

    on_epoch_end = on_step_end

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """What is saved after training has the buffers of a training rank."""
        if self._applied is not None:
            self._applied.share_buffers()
