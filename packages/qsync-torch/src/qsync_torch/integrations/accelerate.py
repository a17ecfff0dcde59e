"""Accelerate: a plan for the model that ``accelerator.prepare`` wraps."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, DynamoBackend
from torch import nn

from qsync_core.errors import PlanError
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import Compiled
from qsync_torch.apply.applied_plan import AppliedPlan
from qsync_torch.caller import Caller
from qsync_torch.capturing.capture import job_of
from qsync_torch.capturing.losses import Loss
from qsync_torch.capturing.optimizer import Optimizers
from qsync_torch.capturing.script import hand_over, is_wanted
from qsync_torch.distributed.communication import BUFFERS
from qsync_torch.distributed.groups_present import run_folder_of
from qsync_torch.distributed.loss_scaling import InStepGradScaler
from qsync_torch.integrations.planned_training import PlannedTraining, Run, TrainerSettings, apply_for_trainer

_CALLER = Caller("hybrid", arguments="accelerator, ..., run={}")
_AUTOCAST = {"no": Precision.FLOAT32, "bf16": Precision.BFLOAT16, "fp16": Precision.FLOAT16}
_OTHER_PARALLELISM = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


def hybrid(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizers,
    loss_fn: Loss | None,
    loader: Iterable[Any],
    *,
    run: Run = "run",
    name: str | None = None,
    **options: Any,
) -> AppliedPlan:
    """:func:`qsync_torch.hybrid` for Accelerate; call it on all ranks, before ``accelerator.prepare`` wraps the model.

    Under ``qsync prepare`` the script ends here, and what it passes becomes the job that is planned.  In training the model is put
    under the plan: its options for DistributedDataParallel are given to the accelerator, ``save_state`` and ``load_state`` keep the
    rounding step, and the former the buffers of a training rank, and the trackers that were initialised are told once what is
    planned.  A plan that needs loss scaling gets it (:class:`~qsync_torch.InStepGradScaler`), in ``backward``,
    ``clip_grad_norm_`` and the prepared optimizer.

    Args:
        accelerator: made, and not yet asked to prepare this model.  Its ``gradient_accumulation_steps`` are the job's.
        model, optimizer, loss_fn, loader, name: as :func:`qsync_torch.hybrid` takes them, not yet prepared.  Only ``qsync prepare``
            looks at the last four.
        run: a plan, or the path of one or of a run folder.
        options: keyword arguments of :func:`qsync_torch.apply_`.

    Returns:
        What ``apply_`` returns.

    Raises:
        PlanError: on every rank, when the accelerator's mixed precision or kind of parallelism is not what the plan is for, or it
            has prepared the model already.
        JobError: under ``qsync prepare``, when what is passed makes no job.
        QSyncError: whatever ``apply_`` raises.
    """
    settings = accelerator_settings(accelerator)
    check_accelerator(accelerator, model)
    steps = accelerator.gradient_accumulation_steps
    if is_wanted():
        job = job_of(model, optimizer, loss_fn, loader, name=name, amp=settings.amp, accumulate=steps)
        hand_over(attrs.evolve(job, compiles=compiles(accelerator)), _CALLER)
    planned = plan_accelerator(accelerator, model, run, settings, options, _CALLER)
    applied = planned.applied
    applied.in_model.meet_accumulation(steps)
    accelerator.register_for_checkpointing(applied)
    accelerator.register_save_state_pre_hook(lambda *_: applied.share_buffers())
    accelerator.log(planned.metrics(), step=0)
    return applied


def accelerator_settings(accelerator: Accelerator) -> TrainerSettings:
    """What an accelerator was told of precision.

    Raises:
        PlanError: for 8-bit floats, which are another library's.
    """
    mode = str(accelerator.mixed_precision)
    if mode not in _AUTOCAST:
        raise PlanError(f"a plan chooses each operator's precision itself, and mixed_precision={mode!r} would as well: set 'no'")
    wanted = {base: f"mixed_precision={name!r}" for name, base in _AUTOCAST.items()}
    return TrainerSettings("Accelerate", f"mixed_precision={mode!r}", _AUTOCAST[mode], wanted)


def compiles(accelerator: Accelerator) -> Compiled | None:
    """How an accelerator compiles its model, whoever told it so: a Trainer's arguments, ``accelerate launch``."""
    plugin = accelerator.state.dynamo_plugin
    if plugin is None or plugin.backend == DynamoBackend.NO:
        return None
    return Compiled(around_ddp=True, backend=plugin.backend.value.lower())


def check_accelerator(accelerator: Accelerator, model: nn.Module) -> None:
    """What no plan is for, whatever it says.

    Raises:
        PlanError: as :func:`hybrid`.
    """
    if accelerator.distributed_type in _OTHER_PARALLELISM:
        raise PlanError(
            f"a plan is for data parallelism with DistributedDataParallel, and this accelerator is configured for "
            f"{accelerator.distributed_type.value}: launch it with torchrun, or with accelerate launch --multi_gpu"
        )
    if accelerator.num_processes == 1 < (ranks := _ranks()):
        raise PlanError(
            f"this is one of {ranks} processes, and its accelerator trains alone: on CPUs set ACCELERATE_USE_CPU=1, or write "
            "Accelerator(cpu=True) or TrainingArguments(use_cpu=True)"
        )
    prepared = any(model is accelerator.unwrap_model(other) for other in accelerator._models)
    if prepared or getattr(model, "_is_accelerate_prepared", False):
        raise PlanError("accelerator.prepare has wrapped this model already: call hybrid before it")


def plan_accelerator(
    accelerator: Accelerator, model: nn.Module, run: Run, settings: TrainerSettings, given: Mapping[str, Any], caller: Caller
) -> PlannedTraining:
    """Apply a plan, and tell an accelerator how its job communicates and scales losses.

    Raises:
        QSyncError: as :func:`hybrid`.
    """
    planned = apply_for_trainer(model, run, settings, given, attrs.evolve(caller, run=run_folder_of(run)))
    if options := planned.applied.ddp_options():
        accelerator.ddp_handler = _PlannedOptions(accelerator.ddp_handler or DistributedDataParallelKwargs(), options)
    if planned.needs_loss_scaling:
        _scale_losses(accelerator)
    return planned


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


class _PlannedOptions(DistributedDataParallelKwargs):
    """What a script has set for DistributedDataParallel, and above it what a plan says, by the names of this PyTorch."""

    def __init__(self, given: DistributedDataParallelKwargs, planned: dict[str, Any]) -> None:
        super().__init__(**vars(given))
        self._given, self._planned = given, planned

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments for DistributedDataParallel."""
        given: dict[str, Any] = self._given.to_kwargs()
        if BUFFERS in self._planned:
            given.pop("broadcast_buffers", None)  # the same under its older name
        return given | self._planned


def _scale_losses(accelerator: Accelerator) -> None:
    """Loss scaling without autocast to float16, which is the only one that Accelerate unscales gradients for."""
    scaler = accelerator.scaler = InStepGradScaler(accelerator.device.type)

    def unscale_gradients(optimizer: Any = None) -> None:
        optimizers = accelerator._optimizers if optimizer is None else optimizer
        for found in optimizers if isinstance(optimizers, (tuple, list)) else [optimizers]:
            while isinstance(found, AcceleratedOptimizer):
                found = found.optimizer
            scaler.unscale_(found)

    accelerator.unscale_gradients = unscale_gradients
