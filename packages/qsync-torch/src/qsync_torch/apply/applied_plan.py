"""A plan in force on a model: its operators, what every forward checks, and what becomes of copies of the model."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager
from multiprocessing.reduction import ForkingPickler
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from qsync_core.errors import BackendError, PlanError
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment, PrecisionPlan
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_torch.apply.buffers import before_forward, buffers_of, share_buffers
from qsync_torch.apply.communication import check_communication, check_reducer, ddp_options
from qsync_torch.apply.first_step import LOW_BASES, check_autocast, device_of, float32_outputs
from qsync_torch.apply.functional_calls import RefusedCall
from qsync_torch.apply.installation import Forward, Installation
from qsync_torch.apply.job_settings import check_settings, job_differences
from qsync_torch.apply.kernel_check import check_backends, first_named, prebuild
from qsync_torch.apply.lag import LagWatch
from qsync_torch.apply.local_batches import FLAG, LocalBatches
from qsync_torch.apply.lowered_call import LoweredCall, StepCounter, WeightBatch
from qsync_torch.apply.plan_fit import Assigned, assignments_of, check_weights, locate, unplanned
from qsync_torch.apply.recomputation import is_recording
from qsync_torch.apply.sharded_parameters import check_sharding, check_whole_model
from qsync_torch.apply.step_times import ScalarLog, Scaler, StepTime, StepTimes, WriteScalar
from qsync_torch.aten.random_bits import stream_key
from qsync_torch.devices import number_settings
from qsync_torch.distributed.ranks import together
from qsync_torch.distributed.uneven_batches import UnevenBatchSampler
from qsync_torch.dtypes import LOW_FLOATS, TORCH_DTYPE
from qsync_torch.elastic.job_ranks import JobRanks
from qsync_torch.elastic.resizing import MicroBatch, Resize, step_batches
from qsync_torch.kernels.selection import default_backend
from qsync_torch.sharing.job_check import check_job

MARK = "_qsync_applied"
"""Attribute of a model that has a plan: its :class:`AppliedPlan`."""


@attrs.frozen
class Planned:
    """What a caller of ``apply_`` wants every operator to run as.

    Attributes:
        entries: a plan, or variants or assignments by operator.
        group: which group of a plan.
        backend: instead of every planned backend.
        base: the format of the job: float32, or what it trains under autocast to.
        allow_flags: settings that may differ from those of a plan.
    """

    entries: PrecisionPlan | Mapping[OpId, Variant | Assignment]
    group: str | None = None
    backend: str | None = None
    base: Precision = Precision.FLOAT32
    allow_flags: tuple[str, ...] = ()

    @property
    def plan(self) -> PrecisionPlan | None:
        """The whole plan, where there is one."""
        return self.entries if isinstance(self.entries, PrecisionPlan) else None

    def on(self, device: torch.device) -> dict[OpId, Assigned]:
        """Variant and kernels of every operator on a device."""
        return assignments_of(self.entries, self.group, self.backend, default_backend(device))


class AppliedPlan(Installation):
    """A plan in force on a model.  ``remove()`` restores the model exactly.

    Copies of the model (``copy.deepcopy``, ``pickle``, ``torch.save``) are plain models without a plan, and say so.

    Attributes:
        variants: what every named operator runs as.
        group: the device group, where a plan was applied.
        lower_eval: whether the plan is in force in eval mode too.
        base: the format of the job: where it has 16 bits, the model runs under autocast to it.
    """

    def __init__(self, model: nn.Module, planned: Planned, *, seed: int, lower_eval: bool) -> None:
        super().__init__(model)
        self._planned = planned
        self._addressed = locate(model, planned.on(device_of(model)), planned.plan)
        check_weights(model, self._addressed, planned.plan)
        self.variants = {op_id: entry.variant for op_id, entry in self._addressed.entries.items()}
        self.group, self.lower_eval, self.base = planned.group, lower_eval, planned.base
        self._seed = seed
        self._rank_seed = stream_key(seed, _rank_in_job())
        self._training: tuple[int, ...] = ()  # where rank 0 does not train: those that do
        self._steps = StepCounter()
        self._weights = WeightBatch(())
        self._lowered: dict[OpId, LoweredCall] = {}
        self._placed_on: torch.device | None = None
        self._has_met = planned.plan is None
        self._settings: dict[str, str] | None = None
        self._awaits_calls = True
        self._step_times: StepTimes | None = None
        self._lag_watch: LagWatch | None = None
        self._as_planned = True
        self._job: JobRanks | None = None
        self.know_ranks({})

    @property
    def step(self) -> int:
        """How many forwards the model has run under the plan; it picks the random numbers.

        Set it when training resumes from a checkpoint.
        """
        return self._steps.step

    @step.setter
    def step(self, value: int) -> None:
        self._steps.step = value

    @property
    def place(self) -> str:
        """This process's place in its job, such as ``infer/0``: its group, and how many ranks of it come before.

        Random numbers and samples follow it, not the rank, which torchrun gives anew at each start.
        """
        if self._job is None:
            return f"rank/{_rank_in_job()}"
        group, index = self._job.place(dist.get_rank()) if _in_job() else (self.group, _rank_in_job())
        return f"{group}/{index}"

    def share_buffers(self) -> None:
        """Give all ranks the buffers (BatchNorm's statistics) of the first training rank; call it on every rank.

        After that each rank evaluates and saves what a training rank would.  Without it ranks may differ: each has updated its
        buffers in the last step by its own batch, in its own precisions (docs/training.md#whose-batchnorm-statistics).
        """
        share_buffers(self.model, self._training)

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint keeps of a plan in force: ``step`` and ``seed`` of its random numbers, equal on all ranks.

        With it, steps run again as they ran before, also where ranks have other numbers, or another plan is in force since.
        """
        return {"step": self.step, "seed": self._seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on after the step of a checkpoint.

        Raises:
            PlanError: when it was written under another seed, or is not what :meth:`state_dict` gave.
        """
        if set(state) != {"step", "seed"} or not all(isinstance(value, int) and value >= 0 for value in state.values()):
            raise PlanError(f"the state of a plan in force is its step and its seed, got {dict(state)!r}")
        if state["seed"] != self._seed:
            raise PlanError(
                f"the checkpoint was written under seed {state['seed']}, and this run rounds with seed {self._seed}: call "
                f"apply_(..., seed={state['seed']}), or set applied.step alone to go on with other random numbers"
            )
        self.step = state["step"]

    @property
    def plan(self) -> PrecisionPlan | None:
        """The whole plan, of all groups; None where variants by operator were applied."""
        return self._planned.plan

    def watch_lag(self, on: bool) -> None:
        """Whether to warn, once, where steps take longer than the plan predicts (docs/training.md#slower-than-predicted).

        It is on from ``apply_`` on: a sample of steps is timed now and then.
        """
        if self._lag_watch is not None:
            self._lag_watch.stop()
            self._lag_watch = None
        plan, group = self._planned.plan, self._planned.group
        if on and plan is not None and group is not None and self._job is not None:
            self._lag_watch = LagWatch(self.model, plan, group, self._job.groups, self._differs)

    def _differs(self) -> bool:
        """Whether this process has other settings than its group's profile, or communicates otherwise; both were said."""
        plan, group = self._planned.plan, self._planned.group
        assert plan is not None
        assert group is not None
        return not self._as_planned or bool(job_differences(plan, group, plan.group(group).device, self.model))

    def ddp_options(self) -> dict[str, Any]:
        """How the plan wants its job to communicate: ``DistributedDataParallel(model, **applied.ddp_options())``, on all ranks.

        Empty where the plan says nothing of that; :func:`qsync_torch.process_group_options` has what the process group is told.
        """
        options = ddp_options(self._planned.plan)
        if options and self._batches.most_passes > 1:
            options["static_graph"] = False  # PyTorch fails where such a job begins under no_sync(), as accumulation does
        return options

    def know_ranks(self, groups: Mapping[int, str], whole: PrecisionPlan | None = None, resize: Resize | None = None) -> None:
        """Note the device group of every rank of the job, as all have told each other, before the operators are installed.

        Random numbers follow a rank's place in its group, so that a restart that numbers the ranks otherwise draws the same.

        Args:
            groups: by rank; empty where the rank alone was asked.
            whole: the plan for all groups of the cluster, whose global batch is the planned one; by default this plan.
            resize: what stays where the job has other ranks than planned.

        Raises:
            PlanError: as :func:`qsync_torch.elastic.resizing.step_batches`.
        """
        planned, plan = self._planned, self._planned.plan
        resized = None
        if plan is not None and planned.group is not None and groups:
            job = self._job = JobRanks.of(plan, groups)
            self.watch_lag(True)
            group, index = job.place(dist.get_rank()) if _in_job() else (planned.group, _rank_in_job())
            self._rank_seed = stream_key(self._seed, *group.encode(), index)
            training = job.training_ranks
            self._training = training if training and min(groups) not in training and buffers_of(self.model) else ()
            if _in_job() or resize is not None:
                resized = step_batches(plan, whole or plan, job, resize)
        by_script = FLAG in planned.allow_flags
        self._batches = LocalBatches(plan, planned.group, groups, by_script=by_script, resized=resized)

    @property
    def local_batch(self) -> int | None:
        """Samples that this rank trains on in a step; None where no plan was applied, or one that does not say.

        It is what the plan has it take, and with ``resize="keep-global"`` its share of the planned global batch.
        """
        return self._batches.own

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """:attr:`local_batch` of every rank, in rank order; empty where that is not known."""
        return self._batches.by_rank

    @property
    def batch_weight(self) -> float | None:
        """What a mean over this rank's local batch counts in the mean over the global batch; None where that is not known."""
        return self._batches.share

    def batch_sampler(self, dataset: Sized, **options: Any) -> UnevenBatchSampler:
        """Batches of this rank: ``DataLoader(dataset, batch_sampler=applied.batch_sampler(dataset))``.

        Args:
            dataset: what all ranks train on together.
            options: ``shuffle``, ``seed``, ``drop_last`` and ``join`` of :class:`qsync_torch.UnevenBatchSampler`.

        Raises:
            PlanError: where the plan does not say how large batches are, or as the sampler does.
        """
        if not self.batch_sizes:
            raise PlanError(
                "no plan says how large local batches are: apply a plan, or use UnevenBatchSampler(dataset, batch_sizes)"
            )
        if self._job is None:
            return UnevenBatchSampler(dataset, self.batch_sizes, **options)
        order = self._job.in_order  # so that a rank takes the same samples whatever its number is
        return UnevenBatchSampler(
            dataset, [self.batch_sizes[rank] for rank in order], order.index(dist.get_rank() if _in_job() else 0), **options
        )

    @property
    def global_batch(self) -> int | None:
        """Samples of a step on all ranks of this job; None where that is not known."""
        return sum(self.batch_sizes) or None

    @property
    def planned_batch(self) -> int | None:
        """Samples of a step on all ranks that were planned, those that are not there included; None where that is not known.

        A script that keeps local batches may scale its learning rate by ``global_batch / planned_batch``.
        """
        return self._batches.planned

    def micro_batches(self, ddp: nn.Module, samples: int | None = None) -> Iterator[MicroBatch]:
        """The parts in which this rank takes its batch of one step, each what one forward pass was planned with::

            for part in applied.micro_batches(ddp, len(x)):
                loss = criterion(ddp(x[part.rows]), y[part.rows])
                (loss * part.weight).backward()

        It is one part, of weight 1, unless the job keeps its global batch with fewer ranks.  All but the last run under
        ``ddp.no_sync()``.

        Args:
            ddp: the wrapper of this model.
            samples: of this batch; :attr:`local_batch` by default.

        Raises:
            PlanError: where neither says how many samples there are.
        """
        before = self.step
        yield from self._batches.micro_batches(ddp, samples)
        # Ranks with fewer passes leave numbers out, so that a checkpoint of any rank holds for all.
        self.step = max(self.step, before + self._batches.most_passes)

    def weight_gradients(self, ddp: DistributedDataParallel, **options: Any) -> None:
        """Weight gradients by samples, as a plan with local batches of different sizes asks for; on all ranks, before training.

        Args:
            ddp: the wrapper of this model.
            options: ``reduction``, ``count``, ``hook`` and ``state`` of :func:`qsync_torch.weight_gradients`.

        Raises:
            PlanError: as that does; in the first step also where a rank sees another batch than :attr:`local_batch`.
        """
        self._batches.weight_gradients(ddp, **options)

    def each_step(self, call: Callable[[StepTime], None]) -> None:
        """From now on, call ``call`` with the time of every training step (:class:`qsync_torch.apply.step_times.StepTime`).

        On a GPU it is called some steps late, because nothing waits for the device; what it raises comes out of a ``backward()``.
        """
        if self._step_times is None:
            self._step_times = StepTimes(self.model, lambda: self.step)
        self._step_times.listeners.append(call)

    def log_scalars(self, write: WriteScalar, *, every: int = 10, scaler: Scaler | None = None) -> None:
        """From now on, write this rank's step times, in milliseconds: medians of every ``every`` training steps.

        ``qsync/step_ms`` is the whole step, ``qsync/wait_ms`` what this rank waits for gradients in it
        (:class:`qsync_torch.apply.step_times.StepTime`), and ``qsync/predicted_step_ms`` the plan's prediction of the whole step.

        Args:
            write: takes name, value and step: TensorBoard's ``writer.add_scalar``; for W&B
                ``lambda name, value, step: wandb.log({name: value, "step": step})``.
            every: steps of one point.
            scaler: the job's GradScaler, whose scale is ``qsync/loss_scale``.

        Raises:
            ValueError: when ``every`` is not positive.
        """
        if every < 1:
            raise ValueError(f"every is a number of steps, got {every}")
        plan = self._planned.plan
        self.each_step(ScalarLog(write, every, None if plan is None else plan.predicted_iteration_ns, scaler))

    @property
    def _changes_nothing(self) -> bool:
        """All operators run as without a plan, under autocast; in float32 they are installed all the same, for their checks."""
        return self.base in LOW_BASES and all(variant == Variant.plain(self.base) for variant in self.variants.values())

    def check_parameters(self, device: torch.device) -> None:
        """Refuse parameters of which this rank has a part, where operators cannot run with them; scripts shard before and after.

        Raises:
            PlanError: naming a module or an operator.
        """
        check_whole_model(self.model)
        check_sharding(self._addressed, device, self._planned.allow_flags)

    def check_kernels(self) -> None:
        """Ask the backends for every kernel, unless the model is still to be moved to where they run.

        Raises:
            BackendError: when a planned backend is missing, or refuses a kernel that an operator needs.
        """
        device = device_of(self.model)
        if self._changes_nothing or device.type == "meta":
            return
        try:
            check_backends(self._addressed, device)
        except BackendError:
            if not _may_move_from(device):
                raise
        else:
            self._placed_on = device

    def lower(self) -> None:
        """Install the operators in their variants; where all run in the base, only what a forward meets is checked.

        Raises:
            BackendError: when a kernel cannot be built.
        """
        if self._changes_nothing:
            self._placed_on = device_of(self.model)
            self.replace_forward(self.model, functools.partial(self._entry, True))
            return
        addressed, plan = self._addressed, self._planned.plan
        if self._placed_on is not None:
            prebuild(addressed, self._placed_on)
        modules, entries = dict(addressed.modules), addressed.entries
        self._lowered = {
            op_id: LoweredCall(op_id, entries[op_id], self._rank_seed, self._steps, self.cache, modules.get(op_id), self.base)
            for op_id in addressed.planned
        }
        self._weights = WeightBatch([(self._lowered[op_id], module) for op_id, module in addressed.modules])
        # Where every operator gives float32, formats cannot mix; under autocast it is autocast that mends them.
        sixteen_bit = any(TORCH_DTYPE[entry.variant.output] in LOW_FLOATS for entry in entries.values())
        unnamed, weights = ([], []) if plan is None else unplanned(self.model, addressed, plan)
        self.install(addressed, self._lowered, promote=sixteen_bit and self.base not in LOW_BASES, refused=weights)
        for fqn, module in unnamed:
            self.replace_forward(module, functools.partial(self._refuse, RefusedCall(fqn)))

    def is_on(self, module: nn.Module) -> bool:
        """In training, and in eval mode where that was asked for.

        A part that is called by itself may share no mode with the model: a feature extractor made of its layers, in evaluation.
        With gradients a part in eval mode trains (its BatchNorm is frozen), and a reentrant checkpoint runs it without them first.
        """
        if self.lower_eval or (self.model.training and module.training):
            return True
        return self.model.training and (torch.is_grad_enabled() or is_recording())

    def start_forward(self, whole: bool) -> None:
        """Checks, new random numbers, and the copies of this step's weights."""
        device = device_of(self.model)
        if torch.compiler.is_compiling():
            check_autocast(self.base, device)
            check_reducer()
            self._batches.check_weighted()
        elif self._has_met:
            self._check_settings(device)
            self._meet(device)
        else:
            self._has_met = True
            self._meet_ranks(device)
        if self._awaits_calls and self._lowered and not torch.compiler.is_compiling():
            self._refuse_compiled_parts()
        if whole and self._training and torch.is_grad_enabled():
            if torch.compiler.is_compiling():
                torch.ops.qsync.share_buffers(buffers_of(self.model), self._training)
            else:
                before_forward(buffers_of(self.model), self._training)
        self._steps.advance()
        if whole:
            if self._lag_watch is not None and not torch.compiler.is_compiling():
                self._lag_watch.started()
            self._weights.prepare()

    def _run(self, whole: bool, replaced: Forward, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if whole and self._lag_watch is not None and not torch.compiler.is_compiling():
            self._lag_watch.forward((args, kwargs))
        return super()._run(whole, replaced, module, args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _meet_ranks(self, device: torch.device) -> None:
        """The first forward: what one rank refuses, all refuse, also where the compiler has given up on that forward."""
        what = "the first step under a plan"
        plan, group = self._planned.plan, self._planned.group
        with together(what, {"whether gradients are weighted": "yes" if self._batches.is_weighted else "no"}):
            self._check_settings(device)
            self._meet(device)
            check_reducer()
        self._batches.check_weighted()  # which is the same on all ranks
        if plan is not None and group is not None:  # by now the model is on its GPU
            check_job(what, plan, group, self.model, self._planned.allow_flags, warn=False)
        self._as_planned = check_communication(plan, self.model, device)

    def _check_settings(self, device: torch.device) -> None:
        """Settings of a plan's profile may have changed since ``apply_``, or since the last forward.

        Raises:
            PlanError: when one that changes numbers is not that of the profile.
        """
        plan, group = self._planned.plan, self._planned.group
        if plan is None or group is None or (found := number_settings(device)) == self._settings:
            return
        check_settings(plan, group, self.model, self._planned.allow_flags, warn=False)
        self._settings = found

    def _meet(self, device: torch.device) -> None:
        """What every forward meets must be what the plan was made for.

        Raises:
            PlanError: when autocast is not the plan's, or the model is on the meta device still.
            BackendError: when the model has been moved to a device that does not run the planned kernels.
        """
        if device.type == "meta":
            raise PlanError("a model under a plan runs on a device, and this one is on meta: move it with to_empty before it runs")
        check_autocast(self.base, device)
        if self._awaits_calls:
            self.check_parameters(device)
        if device == self._placed_on:
            return
        self._addressed = locate(self.model, self._planned.on(device), self._planned.plan)
        check_backends(self._addressed, device)
        prebuild(self._addressed, device)
        for op_id, call in self._lowered.items():
            call.assign(self._addressed.entries[op_id])
        self._placed_on = device

    def _refuse_compiled_parts(self) -> None:
        """PyTorch's compiler fails on a part that is called while functions are intercepted.

        Raises:
            PlanError: naming the part.
        """
        for name, module in self.model.named_modules():
            if name and is_compiled(module):
                raise PlanError(
                    f"module {name!r} is compiled by itself, and inside a model under a plan PyTorch cannot compile parts: compile "
                    "the whole model, with torch.compile(model) after apply_"
                )

    def end_forward(self) -> None:
        """Free unused copies of weights."""
        self._weights.release()

    def finish(self, output: Any, whole: bool) -> Any:
        """The loss reads float32; under autocast it takes what autocast gives."""
        if whole and self._awaits_calls:
            self._name_missing_calls()
        return output if self.base in LOW_BASES else float32_outputs(output)

    def _name_missing_calls(self) -> None:
        """Say after the first step which lowered operators it did not run; compiled code does not tell."""
        self._awaits_calls = False
        if torch.compiler.is_compiling() or any(is_compiled(module) for module in self.model.modules()):
            return
        missing = [op_id for op_id, call in self._lowered.items() if not call.has_run and call.is_lowered]
        if missing:
            warnings.warn(
                f"the plan lowers {first_named(missing)}, which the first step did not run as a linear or "
                "convolution: they keep their precision; trace the model as it runs in training if that is not meant",
                stacklevel=6,
            )

    def position(self) -> int | None:
        """The step."""
        return self._steps.step

    def at_position(self, position: int) -> AbstractContextManager[None]:
        """Round as in that step."""
        return self._steps.at(position)

    def _refuse(self, call: RefusedCall, owner: nn.Module, inner: Callable[..., Any]) -> Callable[..., Any]:
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return call.linear() if self.running and module is owner else inner(module, *args, **kwargs)

        return forward

    def remove(self) -> None:
        """Take every change back, the mark of an applied plan included.

        Raises:
            PlanError: when a forward was replaced again since; take that replacement back first.
        """
        super().remove()
        self.watch_lag(False)
        self.model.__dict__.pop(MARK, None)
        if self._step_times is not None:
            self._step_times.close()
            self._step_times = None

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the model has no plan."""
        _say_plain("the copy of a model that runs under a plan")

    def __reduce__(self) -> Any:
        """A saved model has no plan, and needs no QSync to be loaded."""
        _say_plain("the saved form of a model that runs under a plan, once loaded,")
        return type(None), ()


def _in_job() -> bool:
    return dist.is_available() and dist.is_initialized()


def _rank_in_job() -> int:
    """As ``torch.distributed`` or torchrun has it; 0 where neither says."""
    return dist.get_rank() if _in_job() else int(os.environ.get("RANK", "0"))


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` runs a module."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _may_move_from(device: torch.device) -> bool:
    """Trainers move a model to its GPU after they have made it."""
    return device.type == "cpu" and torch.cuda.is_available()


def _say_plain(what: str) -> None:
    warnings.warn(f"{what} runs in full precision; call qsync_torch.apply_ on it to train it under a plan", stacklevel=4)


def _refuse_to_send(applied: AppliedPlan) -> Any:
    raise PlanError(
        "a model that runs under a plan cannot be sent to another process, where it would run in full precision: send the model "
        "without a plan, and call apply_ in the process that trains it"
    )


ForkingPickler.register(AppliedPlan, _refuse_to_send)
