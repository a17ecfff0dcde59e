"""The workers' second task: train the job under every plan, in turns, and measure."""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from qsync_core.artifacts.files import load, save
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import PrecisionPlan
from qsync_core.ir.timeline import Timeline
from qsync_core.ir.variant import Variant
from qsync_torch.apply.apply import apply_
from qsync_torch.demo.measuring import measure_step_ratio
from qsync_torch.demo.messages import GROUPS, INFER, Method, MethodResult, Rendezvous, Trained, TrainTask, report, write_json
from qsync_torch.demo.weak_worker import WeakWorker
from qsync_torch.demo.workloads import Evaluation, Workload, load_workload
from qsync_torch.job import Batch
from qsync_torch.profiling.measured_timeline import measured_timeline
from qsync_torch.profiling.memory import memory_rise, storage_bytes
from qsync_torch.profiling.whole_step import StepRunner

T = TypeVar("T")
_GRADIENT_BATCHES = 2
_RECORDING_S = 20.0
"""Seconds after the time for training: no timeline is recorded later than this."""
LAST_LEARNING_RATE = 0.02
"""Learning rate after the last step over the first one's; it falls linearly."""


def train(task: TrainTask, rendezvous: Rendezvous, core: int) -> None:
    """Leaves ``trained.json`` and a measured timeline for each of ``task.timelines`` in the task's folder."""
    weak = WeakWorker(core, task.weakness) if rendezvous.rank else None
    try:
        _keep_weakness(task, rendezvous, weak)
        with rendezvous.process_group():
            _train(task, rendezvous)
    finally:
        if weak:
            weak.close()


def _keep_weakness(task: TrainTask, rendezvous: Rendezvous, weak: WeakWorker | None) -> None:
    runner = StepRunner.start(load_workload(task.model, tiny=task.tiny, batch_size=task.batch_size).job(), torch.device("cpu"))

    def measure_ratio() -> float:
        return measure_step_ratio(runner, rendezvous, quick=task.tiny).ratio

    if weak is not None:
        weak.keep(measure_ratio, task.step_ratio)
        return
    for done in range(WeakWorker.KEEP_ROUNDS):
        report(done, WeakWorker.KEEP_ROUNDS, "making the weak worker as weak as it was profiled")
        measure_ratio()


def _train(task: TrainTask, rendezvous: Rendezvous) -> None:
    workload = load_workload(task.model, tiny=task.tiny, batch_size=task.batch_size)
    dag = load(Path(task.folder) / "dag.qsync", PrecisionDag)
    methods = (*task.compared, *task.probes)
    trainees = [_Trainee(workload, m, rendezvous.rank, load(Path(m.plan), PrecisionPlan), task.steps) for m in methods]
    turns = _turns(len(trainees), task.steps, task.block)
    started, round_ended = time.monotonic(), 0.0
    for done, (index, first, count) in enumerate(turns):
        if done and done % len(trainees) == 0:  # every method has had its turn
            elapsed = time.monotonic() - started
            if _gather(bool(task.seconds) and elapsed + (elapsed - round_ended) > task.seconds)[0]:
                break
            round_ended = elapsed
        if rendezvous.rank == 0:
            report(done, len(turns), f"training, in turns: {methods[index].name}, steps {first + 1} to {first + count}")
        trainees[index].run(first, count)
    results = {}
    for trainee in trainees:
        name = trainee.method.name
        if rendezvous.rank == 0:
            report(len(turns), len(turns), f"evaluating {name}")
        results[name] = result = trainee.result(task.held_out_share if trainee.method in task.compared else 0.0)
        if (
            name in task.timelines
            and not _gather(bool(task.seconds) and time.monotonic() - started > task.seconds + _RECORDING_S)[0]
        ):
            if rendezvous.rank == 0:
                report(len(turns), len(turns), f"recording a step of {name}")
            timeline = trainee.record_step(dag, GROUPS[rendezvous.rank], result)
            if rendezvous.rank == 0:
                save(timeline, Path(task.folder) / f"measured-{name}.qsync")
    for name, error in _gradient_errors(task, workload, trainees).items():
        results[name] = attrs.evolve(results[name], gradient_error=error)
    if rendezvous.rank == 0:
        write_json(Trained(results), Path(task.folder) / "trained.json")


def _gradient_errors(task: TrainTask, workload: Workload, trainees: Sequence[_Trainee]) -> dict[str, float]:
    """The weak worker's, at the weights that training in full precision led to; every rank must call it."""
    reference = next((t.model for t in trainees if t.method.name == "full"), None)
    errors: dict[str, float] = {}
    if reference is not None and dist.get_rank() == GROUPS.index(INFER):
        batches = [workload.part(step, workload.batch_size, 0, workload.batch_size) for step in range(_GRADIENT_BATCHES)]
        lowered = {t.method.name: t.model for t in trainees if t.method in task.compared and t.model is not reference}
        errors = {"full": 0.0} | gradient_errors(lowered, reference, batches, workload.loss)
    return _gather(errors)[GROUPS.index(INFER)]


def _turns(methods: int, steps: int, block: int) -> list[tuple[int, int, int]]:
    """(method, first step, steps) in an order in which every method comes equally often, early and late in its round."""
    turns = []
    for round_, first in enumerate(range(0, steps, block)):
        order = [(round_ + offset) % methods for offset in range(methods)]
        turns += [(index, first, min(block, steps - first)) for index in order]
    return turns


@attrs.frozen
class _Step:
    """One step of this rank: when it ended (system-wide monotonic clock, ns), its place in its turn, its loss."""

    end_ns: int
    position: int
    loss: float


class _Trainee:
    """The model, optimizer and DDP wrapper of one method on this rank."""

    def __init__(
        self, workload: Workload, method: Method, rank: int, plan: PrecisionPlan | Mapping[OpId, Variant], steps: int
    ) -> None:
        self.method = method
        self._workload = workload
        sizes = [method.local_batches[group] for group in GROUPS]
        self._global_batch, self._start, self._size = sum(sizes), sum(sizes[:rank]), sizes[rank]
        self.model = copy.deepcopy(workload.model).train()
        applied = apply_(self.model, plan)
        self._ddp = DistributedDataParallel(self.model)
        if len(set(sizes)) > 1:
            applied.weight_gradients(self._ddp)
        self._optimizer = workload.optimizer(self.model.parameters())
        # Down to almost nothing at the end, or the last few updates would decide the accuracy.
        self._schedule = torch.optim.lr_scheduler.LinearLR(self._optimizer, 1.0, LAST_LEARNING_RATE, steps)
        self._steps: list[_Step] = []

    def run(self, first: int, count: int) -> None:
        """Train for some steps; batches are made and garbage is collected before the clock starts."""
        batches = [self.batch(step) for step in range(first, first + count)]
        gc.collect()
        dist.barrier()
        for position, batch in enumerate(batches):
            loss = self.step(batch)
            self._schedule.step()
            self._steps.append(_Step(time.perf_counter_ns(), position, loss))

    def batch(self, step: int) -> Batch:
        """This rank's part of the global batch of a step."""
        return self._workload.part(step, self._global_batch, self._start, self._size)

    def step(self, batch: Batch) -> float:
        """One training step; its local loss."""
        loss = self._workload.loss(self._ddp(*batch.args, **batch.kwargs), batch)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    def result(self, held_out_share: float) -> MethodResult:
        """What was measured (on that share of held-out data only on rank 0); every rank must call it."""
        peaks = _gather(self._peak_bytes())
        steps = _gather(self._steps)
        weights = [self.method.local_batches[group] / self._global_batch for group in GROUPS]
        losses = tuple(sum(w * s.loss for w, s in zip(weights, row, strict=True)) for row in zip(*steps, strict=True))
        evaluation: Evaluation | None = None
        if held_out_share and dist.get_rank() == 0:
            evaluation = self._workload.evaluate(self.model, held_out_share)
        return MethodResult(_periods(steps), losses, evaluation, dict(zip(GROUPS, peaks, strict=True)))

    def record_step(self, dag: PrecisionDag, group: str, result: MethodResult) -> Timeline:
        """Both ranks' timeline of one step; the iteration time is what was measured without the recorder."""
        batch = self.batch(0)
        timeline = measured_timeline(self.model, dag, lambda: self.step(batch), group=group, steps=1)
        return attrs.evolve(timeline, iteration_ns=round(statistics.median(result.iteration_ns)), peak_bytes=result.peak_bytes)

    def _peak_bytes(self) -> int:
        batch = self.batch(0)
        state = [t for entry in self._optimizer.state.values() for t in entry.values() if isinstance(t, torch.Tensor)]
        buckets = sum(parameter.nbytes for parameter in self.model.parameters())
        resident = storage_bytes([*self.model.parameters(), *self.model.buffers(), *state]) + buckets + batch.nbytes
        return resident + memory_rise(lambda: self.step(batch))[0]


def _periods(steps: Sequence[Sequence[_Step]]) -> tuple[int, ...]:
    """Times from the end of one step to that of the next, on whichever rank is later, within turns.

    The first step of a turn only starts the clock: it finds another model's data in the caches.
    """
    ends = [max(s.end_ns for s in row) for row in zip(*steps, strict=True)]
    positions = [step.position for step in steps[0]]
    return tuple(later - earlier for earlier, later, position in zip(ends, ends[1:], positions[1:], strict=False) if position > 0)


def _gather(value: T) -> list[T]:
    """Every rank's value, in rank order."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def gradient_errors(
    models: Mapping[str, nn.Module], reference: nn.Module, batches: Sequence[Batch], loss: Callable[[Any, Batch], Tensor]
) -> dict[str, float]:
    """‖g − g_ref‖ / ‖g_ref‖ over all weight gradients of some batches, every model at the reference's weights.

    The square of this is what Ω estimates (docs/design/indicator.md#omega).

    Args:
        models: run under plans, by name; they are left as they were found.
        reference: the same model in full precision; left as it was found.
        batches: what all see; dropout draws the same masks in all.
        loss: of an output and its batch.
    """
    initial = {name: copy.deepcopy(model.state_dict()) for name, model in models.items()}
    at = copy.deepcopy(reference.state_dict())
    differences, norm = dict.fromkeys(models, 0.0), 0.0
    try:
        for seed, batch in enumerate(batches):
            reference.load_state_dict(at)
            expected = _gradients_at(reference, batch, loss, seed)
            norm += sum(float(e.square().sum()) for e in expected)
            for name, model in models.items():
                model.load_state_dict(at)
                got = _gradients_at(model, batch, loss, seed)
                differences[name] += sum(float((g - e).square().sum()) for g, e in zip(got, expected, strict=True))
    finally:
        for name, model in models.items():
            model.load_state_dict(initial[name])
        reference.load_state_dict(at)
    return {name: (difference / norm) ** 0.5 if norm else 0.0 for name, difference in differences.items()}


def _gradients_at(model: nn.Module, batch: Batch, loss: Callable[[Any, Batch], Tensor], seed: int) -> list[Tensor]:
    """Asked for directly, because a backward pass into ``.grad`` would start DDP's all-reduces."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        value = loss(model(*batch.args, **batch.kwargs), batch)
    found = torch.autograd.grad(value, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g.to(torch.float32) for p, g in zip(parameters, found, strict=True)]
