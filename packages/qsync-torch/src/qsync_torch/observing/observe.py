"""``observe``: train a job for its first updates and record what indicators need (DESIGN 6.1)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from qsync_core.artifact import digest
from qsync_core.dag import PrecisionDag
from qsync_core.errors import ObservationError
from qsync_core.observations import Observations
from qsync_core.op_id import OpId
from qsync_core.variant import Variant
from qsync_torch.job import Batch, Job
from qsync_torch.observing.collector import Collector
from qsync_torch.observing.collectors import AnyCollector, default_collectors, passes
from qsync_torch.observing.record import LOSS, RANKED_TERMS, Key, Record
from qsync_torch.observing.settled import SettledRule
from qsync_torch.observing.step_collector import CollectorUnavailable, ObservedStep, StepCollector
from qsync_torch.observing.tap import Tap, tapped
from qsync_torch.profiling.software import parse_device
from qsync_torch.profiling.whole_step import StepRunner
from qsync_torch.same_model import check_same_model

WARMUP = 10
"""Updates before the first that is observed: the ranking is not stable in them (DESIGN 6.1)."""
STEPS = 12
"""Updates to observe at most."""
_STEP_SEED = 1_000_003
"""Steps of one run draw differently, and runs of different seeds do."""
Update = Callable[[int, int, str], None]


def silent(done: int, total: int, what: str) -> None:
    """Report no progress."""


def observe(
    job: Job,
    dag: PrecisionDag,
    variants: Sequence[Variant],
    *,
    warmup: int = WARMUP,
    steps: int = STEPS,
    batch_size: int | None = None,
    device: str | torch.device = "cpu",
    collectors: Sequence[AnyCollector] | None = None,
    settled: SettledRule | None = SettledRule(),  # noqa: B008 (frozen)
    seed: int = 0,
    earlier: Observations | None = None,
    checkpoint: Callable[[Observations], None] | None = None,
    announce: Callable[[str], None] | None = None,
    progress: Update = silent,
) -> Observations:
    """Train a copy of the job's model in float32 and collect numbers at every update after a warm-up.

    Args:
        job: what is trained.
        dag: its graph (``trace(job)``).
        variants: what the collectors are asked about: every ladder that a plan may use.
        warmup: updates before the first that is observed.
        steps: updates to observe at most.
        batch_size: samples per update; None for half the job's, as in the paper.
        device: where to train; the numbers do not depend on it.
        collectors: None for those of all installed plugins, but those that take long.
        settled: when to stop earlier; None to use all steps.
        seed: of dropout and whatever else the model draws.
        earlier: what an interrupted run of the same settings handed to ``checkpoint`` last; its updates are trained again, which
            costs little, and not observed again.
        checkpoint: told everything so far after each observed update.
        announce: told the cost in passes and seconds before observing starts, and of collectors that can not work here.
        progress: told how far it is.

    Returns:
        One value per observed update of every term that a collector writes.

    Raises:
        ObservationError: naming the operator and the term when a value is NaN or infinite, or when the loss is, or when it
            depends on no parameter, or no gradient reaches any operator, or no collector can work here, or ``earlier`` is of other
            settings.
    """
    run = _Run(
        job=attrs.evolve(
            job, batch_size=batch_size or max(job.batch_size // 2, min(2, job.batch_size)), loss=_differentiable_loss(job)
        ),
        dag=dag,
        variants=tuple(variants),
        warmup=warmup,
        steps=steps,
        seed=seed,
        target=parse_device(str(device)),
        active=default_collectors() if collectors is None else list(collectors),
        announce=announce or (lambda text: None),
    )
    check_same_model(job, dag)
    return run.observe(settled, earlier, checkpoint, progress)


def _differentiable_loss(job: Job) -> Callable[[Any, Batch], torch.Tensor]:
    """The job's loss, refused where it depends on nothing; whoever asks for it first, collectors too, says the same."""

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
    variants: Sequence[Variant]
    warmup: int
    steps: int
    seed: int
    target: torch.device
    active: list[AnyCollector]
    announce: Callable[[str], None]
    unavailable: dict[str, str] = attrs.field(factory=dict)

    def observe(
        self,
        settled: SettledRule | None,
        earlier: Observations | None,
        checkpoint: Callable[[Observations], None] | None,
        progress: Update,
    ) -> Observations:
        asked = self._settings()
        record = Record(self.dag.model) if earlier is None else self._continued(earlier, asked)
        done = 0 if earlier is None else len(earlier.iterations)
        first, last = self.warmup + done, self.warmup + self.steps
        stopped = "budget"
        runner = StepRunner.start(self.job, self.target, batches=0)
        cuda = [self.target.index or 0] if self.target.type == "cuda" else []
        with torch.random.fork_rng(devices=cuda):
            torch.manual_seed(self.seed)
            started = time.perf_counter()
            for update in range(last):
                progress(update, last, "warm-up" if update < self.warmup else "update")
                if update == 1:  # the first one prepares what later ones find
                    started = time.perf_counter()
                observed = update >= first
                if observed and update == first:
                    self._announce_cost(last - first, self._seconds(started, update - 1))
                if not observed:
                    self._train(runner, update)
                    runner.update()
                    continue
                record.add(self._observe_update(runner, update, record), update)
                done += 1
                runner.update()
                if settled is not None and update + 1 < last and (reason := settled.reason(record.rankings(RANKED_TERMS))):
                    stopped = reason
                    break
                if checkpoint is not None:
                    checkpoint(self._observations(record, done, "interrupted", asked))
        progress(last, last, "")
        return self._observations(record, done, stopped, asked)

    def _observe_update(self, runner: StepRunner, update: int, record: Record) -> dict[Key, float]:
        """All numbers of one update, whose gradients are then in place."""
        found = self._run_step_collectors(runner, update, record)
        if any(isinstance(collector, Collector) for collector in self.active):
            with tapped(runner.model, self.dag.adjustable) as tap:
                found[LOSS] = self._train(runner, update)
                found |= self._collect_calls(tap)
        else:
            found[LOSS] = self._train(runner, update)
        if len(found) == 1:
            raise ObservationError(
                f"no gradient reached any linear or convolution operator of {self.dag.model} at update {update}; is it trained?"
            )
        return found

    def _train(self, runner: StepRunner, update: int) -> float:
        """Forward and backward; the loss."""
        batch = self.job.batch(update, self.job.batch_size).to(self.target)
        loss = self.job.compute_loss(batch, runner.model)
        value = loss.item()
        if not math.isfinite(value):
            raise ObservationError(f"the loss of {self.job.name} is {value} at update {update}; train with a smaller learning rate")
        loss.backward()
        return value

    def _run_step_collectors(self, runner: StepRunner, update: int, record: Record) -> dict[Key, float]:
        found: dict[Key, float] = {}
        batch = self.job.batch(update, self.job.batch_size).to(self.target)
        step = ObservedStep(self.job, runner.model, self.dag, batch, update, self.seed * _STEP_SEED + update)
        for collector in [c for c in self.active if isinstance(c, StepCollector)]:
            try:
                numbers = collector.collect_step(step, self.variants)
            except CollectorUnavailable as reason:
                if record.reached(collector.name):
                    raise ObservationError(
                        f"collector {collector.name} fails at update {update} of {self.dag.model}: {reason}"
                    ) from None
                self._leave_out(collector, str(reason))
                continue
            for (op_id, variant, term), value in numbers.items():
                found[op_id, variant, collector.name, term] = float(value)
        return found

    def _collect_calls(self, tap: Tap) -> dict[Key, float]:
        found: dict[Key, float] = {}
        with torch.no_grad():
            for call in tap.calls():
                for collector in self.active:
                    if isinstance(collector, Collector):
                        for (variant, term), value in collector.collect(call, self.variants).items():
                            found[call.operator.op_id, variant, collector.name, term] = float(value)
        return found

    def _leave_out(self, collector: AnyCollector, reason: str) -> None:
        """Go on without a collector."""
        self.active.remove(collector)
        self.unavailable[collector.name] = reason
        if not self.active:
            raise ObservationError(f"collector {collector.name} can not observe {self.dag.model}: {reason}")
        rest = ", ".join(other.name for other in self.active)
        self.announce(f"without {collector.name}: {reason}; observing goes on with {rest}")

    def _seconds(self, started: float, updates: int) -> float | None:
        """Of a training update, measured over the warm-up; None where there was none to measure."""
        if updates < 1:
            return None
        if self.target.type == "cuda":
            torch.cuda.synchronize(self.target)
        return (time.perf_counter() - started) / updates

    def _announce_cost(self, steps: int, update_s: float | None) -> None:
        extra = sum(passes(collector, self.dag, self.variants) for collector in self.active)
        each = 1 + extra
        time_text = "" if update_s is None else f", about {steps * each * update_s:.0f} s"
        names = ", ".join(collector.name for collector in self.active)
        self.announce(
            f"at most {steps} observed updates of {self.job.batch_size} samples, each about {each:.0f} forward and backward passes "
            f"({names}){time_text}"
        )

    def _settings(self) -> dict[str, str]:
        """What decides the numbers, besides the model and the batch size."""
        return {
            "seed": str(self.seed),
            "device": self.target.type,
            "warmup": str(self.warmup),
            "steps": str(self.steps),
            "collectors": ",".join(collector.name for collector in self.active),
            "variants": " ".join(sorted(map(str, self.variants))),
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
                    f"the interrupted observation can not be continued: its {name} is {theirs.get(name)!r}, now {value!r}; "
                    "start anew (qsync observe --fresh)"
                )
        for name, reason in theirs.items():
            if name.startswith("without "):
                self._leave_out(next(c for c in self.active if f"without {c.name}" == name), reason)
        return Record.of(earlier)

    def _observations(self, record: Record, done: int, stopped: str, asked: Mapping[str, str]) -> Observations:
        unreached = self._unreached(record)
        return Observations(
            model=self.dag.model,
            dag_digest=digest(self.dag),
            iterations=tuple(range(self.warmup, self.warmup + done)),
            batch_size=self.job.batch_size,
            stopped=stopped,
            series=record.series(),
            settings={
                **asked,
                **{f"without {name}": reason for name, reason in self.unavailable.items()},
                **({"unreached": " ".join(map(str, unreached))} if unreached else {}),
            },
        )

    def _unreached(self, record: Record) -> list[OpId]:
        """Operators that a per-call collector saw no gradient of."""
        per_call = [collector.name for collector in self.active if isinstance(collector, Collector)]
        if not per_call:
            return []
        reached = set[OpId]().union(*(record.reached(name) for name in per_call))
        return [operator.op_id for operator in self.dag.adjustable if operator.op_id not in reached]
