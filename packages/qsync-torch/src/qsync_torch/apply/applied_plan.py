"""A plan in force on a model, as a script sees it: its steps, batches and checkpoints, and what becomes of copies of the model."""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from multiprocessing.reduction import ForkingPickler
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from qsync_core.errors import PlanError
from qsync_core.ir.variant import Variant
from qsync_core.printable import tell
from qsync_core.units import format_ns
from qsync_torch.apply.planned_model import PlannedModel
from qsync_torch.apply.step_times import ScalarLog, Scaler, StepTime, StepTimer, WriteScalar
from qsync_torch.distributed.buffers import share_buffers
from qsync_torch.distributed.communication import ddp_options
from qsync_torch.distributed.process_group import own_rank
from qsync_torch.distributed.uneven_batches import UnevenBatchSampler
from qsync_torch.elastic.resizing import MicroBatch, Resize
from qsync_torch.operators.channel_factors import is_text
from qsync_torch.operators.step_key import LARGEST_STEP
from qsync_torch.watching.compare import Slowest

MARK = "_qsync_applied"
"""Attribute of a model that has a plan: its :class:`AppliedPlan`."""


class AppliedPlan:
    """A plan in force on a model.  ``remove()`` restores the model exactly.

    Copies of the model (``copy.deepcopy``, ``pickle``, ``torch.save``) are plain models without a plan, and say so.

    Attributes:
        in_model: what the plan has put into the model; no part of what scripts rely on.
        variants: what every named operator runs as.
        group: the device group, where a plan was applied.
        base: the format of the job: where it has 16 bits, the model runs under autocast to it.
        plan: the whole plan, of all groups; None where variants by operator were applied.
    """

    def __init__(self, in_model: PlannedModel, seed: int) -> None:
        self.in_model, self.model, self.plan = in_model, in_model.model, in_model.planned.plan
        self.variants, self.group, self.base = in_model.variants, in_model.group, in_model.base
        self._seed = seed
        self._step_times: StepTimer | None = None

    @property
    def step(self) -> int:
        """How many steps of the model's optimizers there were under the plan; it picks the random numbers.

        PyTorch's optimizers count by themselves, also in compiled code and in replays of CUDA graphs; a loop without one calls
        :meth:`advance`.  Set it when training resumes from a checkpoint.  Reading it waits for a GPU.

        Raises:
            PlanError: when it is set to what is no number of steps.
        """
        return self.in_model.key.step

    @step.setter
    def step(self, value: int) -> None:
        if type(value) is not int or not 0 <= value <= LARGEST_STEP:
            raise PlanError(f"step is the number of optimizer steps so far, an integer in 0..{LARGEST_STEP}, got {value!r}")
        self.in_model.key.step = value

    def advance(self) -> None:
        """Say that an optimizer step has ended, in a loop that has no optimizer of PyTorch's."""
        self.in_model.key.advance()

    @property
    def place(self) -> str:
        """This process's place in its job, such as ``infer/0``: its group, and how many ranks of it come before.

        Random numbers and samples follow it, not the rank, which torchrun gives anew at each start.
        """
        return self.in_model.place.name

    def share_buffers(self) -> None:
        """Give all ranks the buffers (BatchNorm's statistics) of the first training rank; call it on every rank.

        After that each rank evaluates and saves what a training rank would.  Without it ranks may differ: each has updated its
        buffers in the last step by its own batch, in its own precisions (docs/training.md#whose-batchnorm-statistics).
        """
        share_buffers(self.model, self.in_model.place.training)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of a plan in force: ``step`` and ``seed`` of its random numbers, equal on all ranks.

        With it, steps run again as they ran before, also where ranks have other numbers, or another plan is in force since.  Where
        operators have channel factors there are also ``factors``, this rank's own: another rank that goes on with them trains as
        well, but not with the same bits, and an operator that finds none begins with 1.
        """
        factors = self.in_model.key.factors.state()
        return {"step": self.step, "seed": self._seed} | ({"factors": factors} if factors else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the step of a checkpoint.

        Raises:
            PlanError: when it was written under another seed, or is not what :meth:`state_dict` gave.
        """
        numbers, factors = {name: value for name, value in state.items() if name != "factors"}, state.get("factors", {})
        if set(numbers) != {"step", "seed"} or not all(isinstance(value, int) and value >= 0 for value in numbers.values()):
            raise PlanError(f"the state of a plan in force is its step and its seed, got {dict(state)!r}")
        if not isinstance(factors, Mapping) or not all(map(is_text, factors.values())):
            raise PlanError(f"the factors of a plan in force are a text for each operator, got {factors!r}")
        if state["seed"] != self._seed:
            exception = self.in_model.planned.caller.with_option(f"seed={state['seed']}")
            raise PlanError(
                f"the checkpoint was written under seed {state['seed']}, and this run rounds with seed {self._seed}: call "
                f"{exception}, or set applied.step alone to go on with other random numbers"
            )
        self.step = state["step"]
        self.in_model.key.factors.load(factors)

    def watch_lag(self, on: bool) -> None:
        """Whether to warn, once, where steps take longer than the plan predicts (docs/training.md#slower-than-predicted).

        It is on from ``apply_`` on: a sample of steps is timed now and then, and the phases of all steps are compared among ranks.
        """
        self.in_model.watch_lag(on)

    def slowest(self) -> Slowest | None:
        """The rank that the others wait for, its phase, and by how much more than the plan expects; None where no rank is slow.

        It is of the last 24 steps that were summed up, and None before there are any (docs/slow-ranks.md).
        """
        watch = self.in_model.lag_watch
        return None if watch is None or watch.ranks is None else watch.ranks.slowest()

    def ddp_options(self) -> dict[str, Any]:
        """How the plan wants its job to communicate: ``DistributedDataParallel(model, **applied.ddp_options())``, on all ranks.

        Empty where the plan says nothing of that; :func:`qsync_torch.process_group_options` has what the process group is told.
        """
        options = ddp_options(self.plan)
        if options and (self.in_model.place.batches.most_passes > 1 or self.in_model.accumulate > 1):
            options["static_graph"] = False  # PyTorch fails where such a job begins under no_sync(), as accumulation does
        return options

    @property
    def local_batch(self) -> int | None:
        """Samples that this rank trains on in a step; None where no plan was applied, or one that does not say.

        It is what the plan has it take, and with ``resize="keep-global"`` its share of the planned global batch.
        """
        return self.in_model.place.batches.own

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """:attr:`local_batch` of every rank, in rank order; empty where that is not known."""
        return self.in_model.place.batches.by_rank

    @property
    def batch_weight(self) -> float | None:
        """What a mean over this rank's local batch counts in the mean over the global batch; None where that is not known."""
        return self.in_model.place.batches.share

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
        job = self.in_model.place.job
        if job is None:
            return UnevenBatchSampler(dataset, self.batch_sizes, **options)
        order = job.in_order  # so that a rank takes the same samples whatever its number is
        return UnevenBatchSampler(dataset, [self.batch_sizes[rank] for rank in order], order.index(own_rank()), **options)

    @property
    def global_batch(self) -> int | None:
        """Samples of a step on all ranks of this job; None where that is not known."""
        return sum(self.batch_sizes) or None

    @property
    def planned_batch(self) -> int | None:
        """Samples of a step on all ranks that were planned, those that are not there included; None where that is not known.

        A script that keeps local batches may scale its learning rate by ``global_batch / planned_batch``.
        """
        return self.in_model.place.batches.planned

    @property
    def resize(self) -> Resize | None:
        """What the script has said is to stay where the job has other ranks than planned."""
        return self.in_model.place.resize

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
        yield from self.in_model.place.batches.micro_batches(ddp, samples)

    def weight_gradients(self, ddp: DistributedDataParallel, **options: Any) -> None:
        """Weight gradients by samples, as a plan with local batches of different sizes asks for; on all ranks, before training.

        Args:
            ddp: the wrapper of this model.
            options: ``reduction``, ``count``, ``hook`` and ``state`` of :func:`qsync_torch.weight_gradients`.

        Raises:
            PlanError: as that does; in the first step also where a rank sees another batch than :attr:`local_batch`.
        """
        self.in_model.place.batches.weight_gradients(ddp, **options)

    def each_step(self, call: Callable[[StepTime], None]) -> None:
        """Call ``call`` with the time of every training step from now on (:class:`qsync_torch.apply.step_times.StepTime`).

        On a GPU it is called some steps late, because nothing waits for the device; what it raises comes out of a ``backward()``.
        """
        if self._step_times is None:
            self._step_times = StepTimer(self.model, self.in_model.key.later, self.in_model.accumulate)
        self._step_times.listeners.append(call)

    def log_scalars(self, write: WriteScalar, *, every: int = 10, scaler: Scaler | None = None) -> None:
        """Write this rank's step times from now on, in milliseconds: medians of every ``every`` training steps.

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
        plan = self.plan
        self.each_step(ScalarLog(write, every, None if plan is None else plan.predicted_iteration_ns, scaler))

    def summary(self) -> str:
        """What is in force, for people: the operators of every group by what they run as, and what the plan predicts."""
        plan = self.plan
        if plan is None:
            return f"{type(self.model).__name__} under variants by operator: {_counted(self.variants.values())}"
        groups = "; ".join(
            f"{entry.group} ({entry.count} × {entry.device.name}): "
            f"{_counted(assigned.variant for assigned in entry.assignments.values())}"
            for entry in plan.groups
        )
        run = self.in_model.planned.caller.run
        report = f", report {run.report}" if run is not None and run.report.is_file() else ""
        return f"{plan.model} under a plan: {groups}; predicted step {format_ns(plan.predicted_iteration_ns)}{report}"

    def announce(self) -> None:
        """Rank 0 prints what is in force, to standard error."""
        if own_rank() == 0:
            tell(self.summary())

    def __repr__(self) -> str:
        """Which group's plan it is, and how many operators run as what."""
        group = "" if self.group is None else f"group={self.group!r}, "
        return f"{type(self).__name__}({group}operators: {_counted(self.variants.values())})"

    def remove(self) -> None:
        """Take every change back, the mark of an applied plan included.

        Raises:
            PlanError: when the class of a module was changed since; take that change back first.
        """
        self.in_model.remove()
        self.in_model.watch_lag(False)
        self.model.__dict__.pop(MARK, None)
        if self._step_times is not None:
            self._step_times.close()
            self._step_times = None

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the model has no plan; an average of weights, which is one, is to have none.

        Raises:
            PlanError: where PyTorch's average would pair its parameters with others.
        """
        if not any(frame.f_globals.get("__name__") == AveragedModel.__module__ for frame, _ in traceback.walk_stack(None)):
            _say_plain("the copy of a model that runs under a plan", self.in_model.stores_weights)
        elif self.in_model.stores_weights:
            raise PlanError(
                "AveragedModel pairs parameters with the model's by their order, and the weights that the plan stores are none of "
                "the model's: average those that are trained, by name"
            )

    def __reduce__(self) -> Any:
        """A saved model has no plan, and needs no QSync to be loaded."""
        _say_plain("the saved form of a model that runs under a plan, once loaded,")
        return type(None), ()


def applied_to(model: nn.Module) -> AppliedPlan | None:
    """The plan that a model runs under, also of one that is compiled or wrapped in DistributedDataParallel; None without."""
    return next((part.__dict__[MARK] for part in model.modules() if MARK in part.__dict__), None)


def _counted(variants: Iterable[Variant]) -> str:
    """How many operators run as what, the most first."""
    counts = Counter(variant.label for variant in variants)
    return ", ".join(f"{count} {label}" for label, count in counts.most_common()) or "none"


def _say_plain(what: str, stores: bool = False) -> None:
    pairs = "; the weights that the plan stores are parameters of it and not of the model: pair the two by name, not in their order"
    text = f"{what} runs in full precision; apply the plan to it to train it under the plan{pairs if stores else ''}"
    warnings.warn(text, stacklevel=4)


def _refuse_to_send(applied: AppliedPlan) -> Any:
    raise PlanError(
        "a model that runs under a plan cannot be sent to another process, where it would run in full precision: send the model "
        "without a plan, and apply it in the process that trains it"
    )


ForkingPickler.register(AppliedPlan, _refuse_to_send)
