"""What the demo's parent asks of its workers and what they answer: JSON files in the run's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import attrs
import cattrs

from qsync_torch.demo.weak_worker import Weakness
from qsync_torch.demo.workload import Evaluation

GROUPS = ("train", "infer")
"""Device group of each rank; rank 0 is the strong worker."""
TRAIN, INFER = GROUPS

T = TypeVar("T")

_CONVERTER = cattrs.Converter(forbid_extra_keys=True)


@attrs.frozen
class MeasureTask:
    """Calibrate the weak worker, profile both groups at once, observe.

    Attributes:
        model, tiny: the workload; folder: where files go; dag: the traced graph.
        prefer: how to make the weak worker weak, ``quota`` or ``load``.
        observe_steps: updates to observe at most.
        quick: profile with the fewest repetitions (tests).
    """

    model: str
    tiny: bool
    folder: str
    dag: str
    prefer: str
    observe_steps: int
    quick: bool = False


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
    path.write_text(json.dumps(_CONVERTER.unstructure(value), indent=1) + "\n")


def read_json(path: Path, kind: type[T]) -> T:
    """Read what :func:`write_json` wrote."""
    return _CONVERTER.structure(json.loads(path.read_text()), kind)
