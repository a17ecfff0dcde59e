"""What the demo's processes say to each other.

The parent's tasks and the workers' answers are JSON files in the run's folder; workers report progress as marked lines of output;
the two workers meet over torchrun's store, so that neither spins or waits inside a measurement.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import attrs
import torch.distributed as dist

from qsync_core.artifacts.codec import from_plain, to_plain
from qsync_torch.demo.weak_worker import Weakness
from qsync_torch.demo.workloads import Evaluation
from qsync_torch.distributed.bounded_store import collective_timeout
from qsync_torch.distributed.ranks import members_to_be

GROUPS = ("train", "infer")
"""Device group of each rank; rank 0 is the strong worker."""
TRAIN, INFER = GROUPS

T = TypeVar("T")

_MARK = "@qsync-demo "
_PAUSE_S = 0.05


@attrs.frozen
class MeasureTask:
    """Calibrate the weak worker, profile both groups at once, observe.

    Attributes:
        model, tiny: the workload; folder: where files go; dag: the traced graph.
        prefer: how to make the weak worker weak, ``quota`` or ``load``.
        observe_steps: updates to observe at most.
        ladder: rungs of the weak group, as text.
        batch_size: samples a step and rank.
        effort: how thoroughly to profile: ``whole``, ``short`` where the demo's time is limited, ``least`` (tests).
    """

    model: str
    tiny: bool
    folder: str
    dag: str
    prefer: str
    observe_steps: int
    ladder: tuple[str, ...]
    batch_size: int
    effort: str = "whole"


@attrs.frozen
class Measured:
    """Answer to a :class:`MeasureTask`.

    Attributes:
        weakness: how the weak worker is weak; ratio: by which factor; step_ns: the medians behind it, by group.
        strong_core_share: share of its core that the strong worker really got; below 1 where something else runs on this machine.
    """

    weakness: Weakness
    ratio: float
    step_ns: Mapping[str, int]
    strong_core_share: float


@attrs.frozen
class Method:
    """One way to run the job: a plan file and each group's local batch size."""

    name: str
    plan: str
    local_batches: Mapping[str, int]


@attrs.frozen
class TrainTask:
    """Train every method for the same number of steps, in turns of ``block`` steps.

    Attributes:
        compared: methods trained to the end and evaluated; ``probes`` are only timed.
        timelines: methods of which one step is recorded operator by operator.
        step_ratio: the weak worker's float32 step over the strong one's when the profiles were made.
        batch_size: samples a step and rank.
        held_out_share: share (0..1] of the held-out data to evaluate on.
        seconds: how long to train; no round of turns begins that is expected to end later, 0 for no limit.
    """

    model: str
    tiny: bool
    folder: str
    weakness: Weakness
    step_ratio: float
    steps: int
    block: int
    compared: tuple[Method, ...]
    probes: tuple[Method, ...] = ()
    timelines: tuple[str, ...] = ()
    batch_size: int | None = None
    held_out_share: float = 1.0
    seconds: float = 0.0


@attrs.frozen
class MethodResult:
    """What was measured of one method.

    Attributes:
        iteration_ns: time from the end of one step to the end of the next, on the slower rank, step by step.
        losses: of the global batch, step by step.
        evaluation: on held-out data; None for probes.
        peak_bytes: peak memory of a rank of each group: weights, optimizer state, buckets and one step.
        gradient_error: relative error of the weak worker's weight gradients against full precision; None for probes.
    """

    iteration_ns: tuple[int, ...]
    losses: tuple[float, ...]
    evaluation: Evaluation | None
    peak_bytes: Mapping[str, int]
    gradient_error: float | None = None


@attrs.frozen
class Trained:
    """Answer to a :class:`TrainTask`, by method."""

    methods: Mapping[str, MethodResult]


def write_json(value: Any, path: Path) -> None:
    """Write an attrs value as JSON."""
    path.write_text(json.dumps(to_plain(value), indent=1) + "\n", encoding="utf-8")


def read_json(path: Path, kind: type[T]) -> T:
    """Read what :func:`write_json` wrote."""
    return from_plain(json.loads(path.read_text(encoding="utf-8")), kind)


def report(done: int, total: int, what: str) -> None:
    """Print the progress of this worker's task for the parent; everything else that a worker prints goes to the log."""
    print(_MARK + json.dumps([done, total, what]), flush=True)


def report_error(sentence: str) -> None:
    """Print for the parent why this worker gives up."""
    print(_MARK + json.dumps({"error": sentence}), flush=True)


def parse(line: str) -> Any:
    """What a line says, or None for an ordinary one: ``[done, total, what]`` or ``{"error": sentence}``."""
    at = line.find(_MARK)
    if at < 0:
        return None
    try:
        # Libraries print to the same stream from other threads, without a line of their own.
        return json.JSONDecoder().raw_decode(line[at + len(_MARK) :])[0]
    except ValueError:
        return None


class Rendezvous:
    """The workers' store: exchange small values, and ask without waiting whether the other has finished.

    A worker that waits for the other one ends where that is frozen or has failed, because they watch each other
    (:func:`~qsync_torch.distributed.watch.watched`).
    """

    def __init__(self) -> None:
        members = members_to_be("demo")
        assert members is not None  # torchrun starts two
        self.members, self.rank, self.world_size = members, members.rank, len(members.ranks)
        self._store = members.store
        self._calls = 0

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order; all ranks must call it equally often."""
        self._calls += 1
        self._store.set(f"gather/{self._calls}/{self.rank}", json.dumps(value))
        keys = [f"gather/{self._calls}/{rank}" for rank in range(self.world_size)]
        while not self._store.check(keys):
            time.sleep(_PAUSE_S)
        return [json.loads(value) for value in self._store.multi_get(keys)]

    def announce(self, what: str) -> None:
        """Tell the others that this rank has finished something."""
        self._store.set(f"{what}/{self.rank}", "1")

    def all_announced(self, what: str) -> bool:
        """Whether every rank has."""
        return bool(self._store.check([f"{what}/{rank}" for rank in range(self.world_size)]))

    @contextmanager
    def process_group(self) -> Iterator[None]:
        """A gloo process group of all workers."""
        self._calls += 1
        store = self._store.under(f"group/{self._calls}").store
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size, timeout=collective_timeout())
        try:
            yield
        finally:
            # A DistributedDataParallel that outlives its process group can abort the process at its end.
            gc.collect()
            dist.destroy_process_group()
