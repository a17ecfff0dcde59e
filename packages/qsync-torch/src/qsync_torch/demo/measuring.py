"""What is measured of models trained under several plans: step times, peaks, gradient errors, held-out data, a timeline."""

from __future__ import annotations

import copy
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from qsync_core.artifacts.codec import from_plain, to_plain
from qsync_core.artifacts.files import load, save
from qsync_core.ir.dag import PrecisionDag
from qsync_core.progress import ProgressCallback
from qsync_torch.apply.applied_plan import AppliedPlan
from qsync_torch.demo.workloads import Evaluation, Workload, loss
from qsync_torch.profiling.measured_timeline import measured_timeline
from qsync_torch.profiling.memory import memory_rise, storage_bytes

T = TypeVar("T")
_GRADIENT_BATCHES = 2


@attrs.frozen
class Step:
    """One step of this rank: when it ended (system-wide monotonic clock, ns), its place in its turn, its loss."""

    end_ns: int
    position: int
    loss: float


class Trainee(Protocol):
    """A model that the script has trained, and what trains it."""

    name: str
    workload: Workload
    model: nn.Module
    optimizer: torch.optim.Optimizer
    applied: AppliedPlan
    batches: Iterator[tuple[Tensor, Tensor]]
    steps: list[Step]

    def step(self, batch: tuple[Tensor, Tensor]) -> float:
        """Train on a batch; its loss."""


@attrs.frozen
class MethodResult:
    """What was measured of one method.

    Attributes:
        iteration_ns: time from the end of one step to the end of the next, on the slower rank, step by step.
        losses: of the global batch, step by step.
        peak_bytes: peak memory of a rank of each group: weights, optimizer state, buckets and one step.
        evaluation: on held-out data; None where the method was only timed.
        gradient_error: relative error of the weak worker's weight gradients against full precision; None likewise.
    """

    iteration_ns: tuple[int, ...]
    losses: tuple[float, ...]
    peak_bytes: Mapping[str, int]
    evaluation: Evaluation | None = None
    gradient_error: float | None = None


def read_results(path: Path) -> dict[str, MethodResult]:
    """Read what :func:`measure` wrote, by method."""
    return {name: from_plain(plain, MethodResult) for name, plain in json.loads(path.read_text(encoding="utf-8")).items()}


def measure(
    trainees: Sequence[Trainee],
    compared: Sequence[Trainee],
    held_out: float,
    path: Path,
    timeline: tuple[str, str, str] | None,
    progress: ProgressCallback,
) -> None:
    """Write what there is to say of each trainee; every rank calls it.

    Args:
        compared: those to evaluate, on that share (0..1] of ``held_out`` data; the first one trained in full precision.
        timeline: a trainee's name, the file of its graph, and where the timeline of one of its steps goes.
    """
    groups = gather(trainees[0].applied.group or "")
    errors = gather(_own_gradient_errors(compared))[-1]  # the weak worker is the last one
    results = {}
    for done, trainee in enumerate(trainees):
        progress(done, len(trainees), f"evaluating {trainee.name}")
        peaks, steps = gather(_peak_bytes(trainee)), gather(trainee.steps)
        weights = [size / sum(trainee.applied.batch_sizes) for size in trainee.applied.batch_sizes]
        losses = tuple(sum(w * s.loss for w, s in zip(weights, row, strict=True)) for row in zip(*steps, strict=True))
        evaluated = trainee in compared and dist.get_rank() == 0
        results[trainee.name] = MethodResult(
            periods(steps),
            losses,
            dict(zip(groups, peaks, strict=True)),
            trainee.workload.evaluate(trainee.model, held_out) if evaluated else None,
            errors.get(trainee.name),
        )
    if dist.get_rank() == 0:
        path.write_text(json.dumps({name: to_plain(result) for name, result in results.items()}, indent=1), encoding="utf-8")
    if timeline is not None:
        name, dag, file = timeline
        progress(len(trainees), len(trainees), f"recording a step of {name}")
        trainee = next(trainee for trainee in trainees if trainee.name == name)
        batch = next(trainee.batches)
        found = measured_timeline(
            trainee.model, load(Path(dag), PrecisionDag), lambda: trainee.step(batch), group=trainee.applied.group or "", steps=1
        )
        # The recorder takes its time: the iteration is what was measured without it.
        result = results[name]
        found = attrs.evolve(found, iteration_ns=round(statistics.median(result.iteration_ns)), peak_bytes=result.peak_bytes)
        if dist.get_rank() == 0:
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            save(found, Path(file))


def turns(methods: int, steps: int, block: int) -> list[tuple[int, int, int]]:
    """(method, first step, steps) in an order in which every method comes equally often, early and late in its round."""
    found = []
    for round_, first in enumerate(range(0, steps, block)):
        order = [(round_ + offset) % methods for offset in range(methods)]
        found += [(index, first, min(block, steps - first)) for index in order]
    return found


def periods(steps: Sequence[Sequence[Step]]) -> tuple[int, ...]:
    """Times from the end of one step to that of the next, on whichever rank is later, within turns.

    The first step of a turn only starts the clock: it finds another model's data in the caches.
    """
    ends = [max(s.end_ns for s in row) for row in zip(*steps, strict=True)]
    positions = [step.position for step in steps[0]]
    return tuple(later - earlier for earlier, later, position in zip(ends, ends[1:], positions[1:], strict=False) if position > 0)


def gather(value: T) -> list[T]:
    """Every rank's value, in rank order."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _peak_bytes(trainee: Trainee) -> int:
    batch = next(trainee.batches)
    state = [t for entry in trainee.optimizer.state.values() for t in entry.values() if isinstance(t, Tensor)]
    buckets = sum(parameter.nbytes for parameter in trainee.model.parameters())
    resident = storage_bytes([*trainee.model.parameters(), *trainee.model.buffers(), *state, *batch]) + buckets
    return resident + memory_rise(lambda: trainee.step(batch))[0]


def _own_gradient_errors(compared: Sequence[Trainee]) -> dict[str, float]:
    """Gradient errors of this rank, at the weights that training in full precision led to."""
    if dist.get_rank() != dist.get_world_size() - 1:
        return {}
    full, *lowered = compared
    size = full.applied.local_batch or 1
    batches = [full.workload.training[step * size : (step + 1) * size] for step in range(_GRADIENT_BATCHES)]
    return {full.name: 0.0} | gradient_errors({trainee.name: trainee.model for trainee in lowered}, full.model, batches, loss)


def gradient_errors(
    models: Mapping[str, nn.Module],
    reference: nn.Module,
    batches: Sequence[tuple[Tensor, Tensor]],
    loss: Callable[[Tensor, Tensor], Tensor],
) -> dict[str, float]:
    """‖g − g_ref‖ / ‖g_ref‖ over all weight gradients of some batches, every model at the reference's weights.

    The square of this is what Ω estimates (docs/design/indicator.md#omega).

    Args:
        models: run under plans, by name; they are left as they were found.
        reference: the same model in full precision; left as it was found.
        batches: inputs and targets that all see; dropout draws the same masks in all.
        loss: of an output and its targets.
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


def _gradients_at(
    model: nn.Module, batch: tuple[Tensor, Tensor], loss: Callable[[Tensor, Tensor], Tensor], seed: int
) -> list[Tensor]:
    """Asked for directly, because a backward pass into ``.grad`` would start DDP's all-reduces."""
    inputs, targets = batch
    parameters = [p for p in model.parameters() if p.requires_grad]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        value = loss(model(inputs), targets)
    found = torch.autograd.grad(value, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g.to(torch.float32) for p, g in zip(parameters, found, strict=True)]
