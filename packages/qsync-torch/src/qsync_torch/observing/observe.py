"""``observe``: train a job for its first updates and record what indicators need (docs/design/indicator.md#omega)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from qsync_core.artifacts.files import digest
from qsync_core.errors import JobError, ObservationError, QSyncError
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.observations import Observations
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant, ladder_under
from qsync_core.progress import ProgressCallback, silent
from qsync_core.settings import SETTINGS
from qsync_torch.devices import parse_device, software_versions
from qsync_torch.failures import first_line
from qsync_torch.job import Batch, Job, check_same_model, describe_optimizer
from qsync_torch.observing.call_hooks import GradientCapture, hooked_calls
from qsync_torch.observing.collector import ObservedStep, low_precision
from qsync_torch.observing.collectors import AnyCollector, RunningCollectors, default_collectors, installed_collectors
from qsync_torch.observing.montecarlo import squared_norm
from qsync_torch.observing.record import GRADIENT_SQ_NORM, LOSS, JobFault, Key, Record, SettledRule
from qsync_torch.profiling.whole_step import StepRunner
from qsync_torch.tracing.held_state import held_state
from qsync_torch.tracing.in_float32 import holds_16_bits, run_in_float32, widen

WARMUP = 10
"""Updates before the first that is observed: the ranking is not stable in them (docs/design/indicator.md#averages-over-updates)."""
STEPS = 12
"""Updates to observe at most."""
_STEP_SEED = 1_000_003
"""Steps of one run draw differently, and runs of different seeds do."""
_SAME_LOSS = {"cpu": 1e-3, "cuda": 2e-2}
"""The part of the largest recorded loss by which an update trained again may differ: a GPU adds in another order each time."""


@attrs.frozen
class ObserveRequest:
    """What is observed, and how.

    Attributes:
        variants: what the collectors are asked about: every ladder that a plan may use.
        warmup: updates before the first that is observed.
        steps: updates to observe at most.
        batch_size: samples per update; None for half the job's, as in the paper, or all where the loss does not take half.
        device: where to train; the numbers do not depend on it.
        collectors: None for those of all installed plugins, but those that take long.
        settled: when to stop earlier; None to use all steps.
        seed: of dropout and whatever else the model draws.
    """

    variants: Sequence[Variant]
    warmup: int = WARMUP
    steps: int = STEPS
    batch_size: int | None = None
    device: torch.device = attrs.field(default=torch.device("cpu"), converter=parse_device)
    collectors: Sequence[AnyCollector] | None = None
    settled: SettledRule | None = SettledRule()  # noqa: RUF009 (frozen)
    seed: int = 0


def observe(
    job: Job,
    dag: PrecisionDag,
    asked: ObserveRequest,
    *,
    earlier: Observations | None = None,
    checkpoint: Callable[[Observations], None] = lambda so_far: None,
    announce: Callable[[str], None] = lambda text: None,
    progress: ProgressCallback = silent,
) -> Observations:
    """Train a copy of the job's model in float32 and collect numbers at every update after a warm-up.

    A job under AMP is observed in float32 too (docs/decisions/observing-under-amp.md), and asked about what is below its base.  So
    is a model that holds 16 bits: its weights keep their values, and trained ones are updated in float32.  One that does not run so
    is observed in its own format.

    Args:
        dag: its graph (``trace(job)``).
        asked: what is observed.
        earlier: what an interrupted run of the same settings handed to ``checkpoint`` last; its updates are trained again, which
            costs little, and not observed again.
        checkpoint: receives everything so far after each observed update.
        announce: receives the cost in passes and seconds before observing starts, and which collectors cannot work here.

    Returns:
        One value per observed update of every term that a collector writes.

    Raises:
        ObservationError: naming the operator and the term when a value is NaN or infinite, or when the loss is, or when it
            depends on no parameter, or no gradient reaches any operator, or no collector can work here, or ``earlier`` is of other
            settings or of a job that trains otherwise.  A :class:`JobFault` says that it is of no use to continue.
        PluginError: when one of the collectors asked for fails; one of the default collectors is left out instead.
    """
    active = default_collectors(announce) if asked.collectors is None else list(asked.collectors)
    if not active:
        raise ObservationError(
            f"no collector is named, so that nothing would be observed; installed are {', '.join(sorted(installed_collectors()))}"
        )
    ladder, _ = ladder_under(dag.base, asked.variants)
    if dag.base is not Precision.FLOAT32:
        ladder = ladder[:-1]
    if not low_precision(ladder):
        raise ObservationError(
            f"only {dag.base} is asked about, which rounds nothing beyond the job's base; name at least one lower precision"
        )
    half = max(job.batch_size // 2, min(2, job.batch_size))
    if earlier is not None and earlier.batch_size == job.batch_size:
        half = job.batch_size
    check_same_model(job, dag)
    sizes = [half] if asked.batch_size is not None or half == job.batch_size else [half, job.batch_size]
    ways = [(size, wide) for wide in ([True, False] if holds_16_bits(job.model) else [True]) for size in sizes]
    for index, (size, wide) in enumerate(ways):
        of_run = widen(job) if wide else job
        run = _Run(
            job=attrs.evolve(of_run, batch_size=asked.batch_size or size, loss=_differentiable_loss(of_run), amp=None),
            dag=dag,
            asked=asked,
            collectors=RunningCollectors(dag.model, ladder, active, asked_for=asked.collectors is not None, announce=announce),
            widened=wide,
        )
        try:
            with held_state(job.loss):
                return run.observe(earlier, checkpoint, progress)
        except Exception as error:
            # What comes later than the first update is no matter of size and format: data that is gone, say.
            ours = isinstance(error, QSyncError) and not isinstance(error, JobError)
            if ours or run.ended or index == len(ways) - 1:
                raise
            said = error if isinstance(error, JobError) else f"{job.name} does not run on these ({first_line(error)})"
            if ways[index + 1][1] is wide:  # as of a model of graphs, whose edges name rows that half of the batch has not
                announce(f"updates of {job.batch_size} samples are observed instead of {half}: {said}")
            else:  # as of a model that asks for its format, or whose kernels take no other
                announce(f"updates in {dag.base} are observed instead of float32, which sees the errors less sharply: {said}")
    raise AssertionError("the last way returns or raises")


def _differentiable_loss(job: Job) -> Callable[[Any, Batch], torch.Tensor]:
    """The job's loss; raises ObservationError where it depends on no parameter, in collectors as in training."""

    def loss(output: Any, batch: Batch) -> torch.Tensor:
        value = job.loss(output, batch)
        if torch.is_grad_enabled() and not value.requires_grad:
            raise ObservationError(
                f"the loss of {job.name} depends on no trainable parameter, so that there is nothing to observe; check that the "
                "job's loss uses the model's output and that parameters require gradients"
            )
        return value

    return loss


@attrs.define
class _Run:
    job: Job
    dag: PrecisionDag
    asked: ObserveRequest
    collectors: RunningCollectors
    widened: bool
    """Whether a model that holds 16 bits is observed in float32."""
    ended: int = 0
    """Updates, those of the warm-up included."""

    def observe(
        self, earlier: Observations | None, checkpoint: Callable[[Observations], None], progress: ProgressCallback
    ) -> Observations:
        settings, settled = self._settings(), self.asked.settled
        record = Record(self.dag.model) if earlier is None else self._continued(earlier, settings)
        done = 0 if earlier is None else len(earlier.iterations)
        first, last = self.asked.warmup + done, self.asked.warmup + self.asked.steps
        stopped = "budget"
        runner = StepRunner.start(self.job, self.asked.device, batches=0, widened=self.widened)
        if self.widened and holds_16_bits(self.job.model):
            run_in_float32(runner.model)
        if earlier is not None:
            self.collectors.restore(runner.model, first - 1, record)
        cuda = [self.asked.device.index or 0] if self.asked.device.type == "cuda" else []
        with torch.random.fork_rng(devices=cuda):
            torch.manual_seed(self.asked.seed)
            started = time.perf_counter()
            for update in range(last):
                progress(update, last, "warm-up" if update < self.asked.warmup else "update")
                if update == 1:  # the first one prepares what later ones find
                    started = time.perf_counter()
                if update == first:
                    self._announce_cost(last - first, self._seconds(started, update - 1), update, record)
                if update < first:
                    self._train(runner, update, record)
                else:
                    record.add(self._observe_update(runner, update, record), update)
                    done += 1
                runner.update()
                self.ended += 1
                if update < first:
                    continue
                if settled is not None and update + 1 < last and (reason := settled.reason(record.rankings())):
                    stopped = reason
                    break
                checkpoint(self._observations(record, done, "interrupted", settings))
        progress(last, last, "")
        return self._observations(record, done, stopped, settings)

    def _observe_update(self, runner: StepRunner, update: int, record: Record) -> dict[Key, float]:
        """All numbers of one update, whose gradients are then in place."""
        batch = self.job.batch(update, self.job.batch_size).to(self.asked.device)
        step = ObservedStep(self.job, runner.model, self.dag, batch, update, self.asked.seed * _STEP_SEED + update)
        found = self.collectors.of_step(step, record)
        if self.collectors.read_calls:
            capture = GradientCapture(self.dag.adjustable)
            with hooked_calls(runner.model, self.dag.adjustable, capture):
                found[LOSS] = self._train(runner, update)
                found |= self.collectors.of_calls(capture, update, record)
        else:
            found[LOSS] = self._train(runner, update)
        if found.keys() == {LOSS}:
            if not self.dag.adjustable:
                raise ObservationError(f"{self.dag.model} has no linear or convolution operator that a plan could lower")
            raise ObservationError(
                f"no gradient reached {self.dag.adjustable[0].op_id} or any other linear or convolution operator of "
                f"{self.dag.model} at update {update}; is it trained, and does a copy.deepcopy of it run its own modules?"
            )
        found[GRADIENT_SQ_NORM] = squared_norm([parameter.grad for parameter in runner.model.parameters()])
        return found

    def _train(self, runner: StepRunner, update: int, record: Record | None = None) -> float:
        """Forward and backward; the loss.

        Args:
            record: given where the update is not observed: one of the warm-up, or one that was observed before an interruption.

        Raises:
            ObservationError: when the loss is not finite (a :class:`JobFault` where it is observed), or not the recorded one.
        """
        batch = self.job.batch(update, self.job.batch_size).to(self.asked.device)
        loss = self.job.compute_loss(batch, runner.model)
        value: float = loss.item()
        if record is not None and self.asked.warmup <= update:
            recorded = record.losses[update - self.asked.warmup]
            allowed = _SAME_LOSS.get(self.asked.device.type, _SAME_LOSS["cuda"]) * max(map(abs, record.losses))
            if not abs(value - recorded) <= allowed:  # also where it is not finite
                raise ObservationError(
                    f"the interrupted observation cannot be continued: the loss of {self.job.name} at update {update} was "
                    f"{recorded:.6g} and is now {value:.6g}, so its model, data or optimizer has changed; start anew "
                    "(qsync observe --fresh)"
                )
        if not math.isfinite(value):
            fault = JobFault if record is None else ObservationError
            # Infinite elements may be a mask's; a model that takes NaN for what is missing has a finite loss.
            given = any(bool(tensor.isnan().any()) for tensor in batch.tensors)
            advice = (
                "its batch has NaN: leave such samples out of what the job or the line's loader gives, as a loop does that skips "
                "these steps"
                if given
                else "train with a smaller learning rate"
            )
            raise fault(f"the loss of {self.job.name} is {value} at update {update}; {advice}")
        torch.autograd.backward(loss)
        return value

    def _seconds(self, started: float, updates: int) -> float | None:
        """Return the seconds of a training update, measured over the warm-up; None where there was none to measure."""
        if updates < 1:
            return None
        if self.asked.device.type == "cuda":
            torch.cuda.synchronize(self.asked.device)
        return (time.perf_counter() - started) / updates

    def _announce_cost(self, steps: int, update_s: float | None, update: int, record: Record) -> None:
        extra, first = self.collectors.cost(self.dag, update, record)
        each = 1 + extra
        time_text = "" if update_s is None else f", about {(steps * each + first) * update_s:.0f} s"
        at_first = f", at the first {first:.0f} more" if first else ""
        self.collectors.announce(
            f"at most {steps} observed updates of {self.job.batch_size} samples, each about {each:.0f} forward and backward passes "
            f"({', '.join(self.collectors.names)}){at_first}{time_text}"
        )

    def _settings(self) -> dict[str, str]:
        """What decides the numbers, besides the model and the batch size."""
        return {
            "seed": str(self.asked.seed),
            "device": self.asked.device.type,
            "warmup": str(self.asked.warmup),
            "steps": str(self.asked.steps),
            "collectors": ",".join(self.collectors.names),
            "variants": " ".join(sorted(map(str, self.collectors.variants))),
            "optimizer": describe_optimizer(self.job),
            **{
                name: value
                for name, value in software_versions(self.asked.device).items()
                if name in SETTINGS and (SETTINGS[name].changes_numbers or name == "torch")
            },
        }

    def _continued(self, earlier: Observations, asked: Mapping[str, str]) -> Record:
        """The record of an interrupted run, if it was this one.

        Raises:
            ObservationError: naming what differs.
        """
        mine = {**asked, "batch_size": str(self.job.batch_size), "model": digest(self.dag)}
        theirs = {**earlier.settings, "batch_size": str(earlier.batch_size), "model": earlier.dag_digest}
        for name, value in mine.items():
            if theirs.get(name) != value:
                raise ObservationError(
                    f"the interrupted observation cannot be continued: its {name} is {theirs.get(name)!r}, now {value!r}; "
                    "start anew (qsync observe --fresh)"
                )
        for name, reason in theirs.items():
            if name.startswith("without "):
                self.collectors.leave_out(name.removeprefix("without "), reason)
        record = Record.of(earlier)
        if record.values and GRADIENT_SQ_NORM not in record.values:
            raise ObservationError(
                "the interrupted observation cannot be continued: an older version made it, without the gradient's norm of each "
                "update; start anew (qsync observe --fresh)"
            )
        return record

    def _observations(self, record: Record, done: int, stopped: str, settings: Mapping[str, str]) -> Observations:
        return Observations(
            model=self.dag.model,
            dag_digest=digest(self.dag),
            iterations=tuple(range(self.asked.warmup, self.asked.warmup + done)),
            batch_size=self.job.batch_size,
            stopped=stopped,
            series=record.series(),
            settings={
                **settings,
                **{f"without {name}": reason for name, reason in self.collectors.unavailable.items()},
            },
        )
