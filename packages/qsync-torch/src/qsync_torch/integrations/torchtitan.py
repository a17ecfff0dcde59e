"""torchtitan: a model converter (its ``ModelConverter`` protocol, up to release 0.2), which needs no torchtitan to be imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from qsync_core.errors import JobError, PlanError
from qsync_core.ir.precision import Precision
from qsync_torch.apply.applied_plan import AppliedPlan
from qsync_torch.caller import Caller
from qsync_torch.capturing.script import is_wanted
from qsync_torch.distributed.groups_present import run_folder_of
from qsync_torch.integrations.planned_training import PlannedTraining, Run, TrainerSettings, apply_for_trainer, refuse_loss_scaling

_AUTOCAST = {"float32": Precision.FLOAT32, "bfloat16": Precision.BFLOAT16}
_WANTED = {base: f"training.mixed_precision_param = {name!r}" for name, base in _AUTOCAST.items()}
_OTHER_PARALLELISM = ("dp_shard", "cp", "tp", "pp", "ep")


class HybridConverter:
    """Applies a plan where torchtitan converts its model: after it is made, on the meta device, and before it is parallelized.

    ::

        converter = HybridConverter("run")
        register_model_converter(converter, "qsync")        # and converters = ["qsync"] under [model]
        trainer = Trainer(job_config)
        trainer.checkpointer.states["qsync"] = converter     # checkpoints keep the rounding step
        trainer.train()

    Any loop that calls ``convert(model)`` before it wraps the model may use it.

    Args:
        run: a plan, or the path of one or of a run folder.
        options: keyword arguments of :func:`qsync_torch.apply_`.
    """

    def __init__(self, run: Run = "run", **options: Any) -> None:
        self._run, self._options = run, options
        self._settings: TrainerSettings | None = None
        self._planned: PlannedTraining | None = None

    def __call__(self, job_config: Any, parallel_dims: Any) -> HybridConverter:
        """torchtitan makes its converters so; this one stays the same, so that a checkpoint can have it.

        Raises:
            PlanError: when the job does not train with replicated data parallelism alone, or keeps its parameters in 16 bits.
        """
        other = [name for name in _OTHER_PARALLELISM if getattr(parallel_dims, name) > 1]
        if other:
            degrees = ", ".join(f"{name}={getattr(parallel_dims, name)}" for name in other)
            raise PlanError(
                f"a plan is for replicated data parallelism, and this job has {degrees}: set "
                "parallelism.data_parallel_replicate_degree to the number of ranks and every other degree to 1"
            )
        training = job_config.training
        if training.dtype != "float32":
            raise PlanError(f"a plan is for parameters in float32, and training.dtype is {training.dtype!r}: set 'float32'")
        mixed = training.mixed_precision_param
        now = f"training.mixed_precision_param = {mixed!r}"
        self._settings = TrainerSettings("torchtitan", now, _AUTOCAST[mixed], _WANTED)
        return self

    @property
    def applied(self) -> AppliedPlan | None:
        """What ``apply_`` returned; None before ``convert``."""
        return None if self._planned is None else self._planned.applied

    def convert(self, model: nn.Module) -> None:
        """Apply the plan, in place; a call of all ranks.

        Raises:
            PlanError: on every rank, when the plan is for another autocast than the job's, or needs loss scaling, which torchtitan
                does not have.
            JobError: under ``qsync prepare``.
        QSyncError: whatever ``apply_`` raises.
        """
        if is_wanted():
            raise JobError(
                "torchtitan gives its converters the model alone, of which no job can be captured: write a job function, and run "
                "qsync prepare with file.py:function"
            )
        caller = Caller("HybridConverter", run_folder_of(self._run), arguments="{}", own_loop=False)
        self._planned = apply_for_trainer(model, self._run, self._settings, self._options, caller)
        refuse_loss_scaling(self._planned, "torchtitan", caller)

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Nothing: parameters are plain float32 ones, of which a plan keeps no statistics."""

    def state_dict(self) -> dict[str, int]:
        """The rounding step, for a checkpoint."""
        return self._in_force().applied.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the random numbers of the rounding where a checkpoint left them."""
        self._in_force().applied.load_state_dict(state)

    def _in_force(self) -> PlannedTraining:
        if self._planned is None:
            raise PlanError("no plan is in force yet: name this converter in the job's model.converters, or call convert(model)")
        return self._planned
