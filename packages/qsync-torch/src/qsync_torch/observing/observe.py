"""``observe``: train a job for its first updates and record what indicators need (DESIGN 6.1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from qsync_core.artifact import digest
from qsync_core.dag import PrecisionDag
from qsync_core.errors import ObservationError
from qsync_core.observations import Observations, Series
from qsync_core.op_id import OpId
from qsync_core.variant import Variant
from qsync_torch.job import Job
from qsync_torch.observing.collector import Collector, OperatorCall
from qsync_torch.observing.settled import SettledRule
from qsync_torch.observing.tap import tapped
from qsync_torch.profiling.software import parse_device
from qsync_torch.profiling.whole_step import StepRunner
from qsync_torch.same_model import check_same_model

STEPS = 50
"""Updates to observe at most, as in the paper."""
Key = tuple[OpId | None, Variant | None, str, str]
Update = Callable[[int, int, str], None]


def silent(done: int, total: int, what: str) -> None:
    """Report no progress."""


def default_collectors() -> list[Collector]:
    """The collectors of all installed plugins, QSync's own among them (hook ``qsync_register_collectors``)."""
    from qsync_core.registry import Registry

    return list(Registry.load().collect("qsync_register_collectors"))


def observe(
    job: Job,
    dag: PrecisionDag,
    variants: Sequence[Variant],
    *,
    steps: int = STEPS,
    batch_size: int | None = None,
    device: str | torch.device = "cpu",
    collectors: Sequence[Collector] | None = None,
    settled: SettledRule | None = SettledRule(),  # noqa: B008 (frozen)
    seed: int = 0,
    progress: Update = silent,
) -> Observations:
    """Train a copy of the job's model in float32 and collect numbers at every update.

    Args:
        job: what is trained.
        dag: its graph (``trace(job)``).
        variants: what the collectors are asked about: every ladder that a plan may use.
        steps: updates to observe at most.
        batch_size: samples per update; None for half the job's, as in the paper.
        device: where to train; the numbers do not depend on it.
        collectors: None for those of all installed plugins.
        settled: when to stop earlier; None to use all steps.
        seed: of dropout and whatever else the model draws.
        progress: told how far it is.

    Returns:
        One value per update of every term that a collector writes.

    Raises:
        ObservationError: naming the operator and the term when a value is NaN or infinite, or when the loss is, or when no gradient
            reaches any operator.
    """
    target = parse_device(str(device))
    check_same_model(job, dag)
    # Batch norm of a 1x1 image needs two samples.
    size = batch_size or max(job.batch_size // 2, min(2, job.batch_size))
    active = default_collectors() if collectors is None else list(collectors)
    runner = StepRunner.start(attrs.evolve(job, batch_size=size), target, batches=0)
    values: dict[Key, list[float]] = {}
    stopped = "budget"
    done = 0
    cuda = [target.index or 0] if target.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), tapped(runner.model, dag.adjustable) as tap:
        torch.manual_seed(seed)
        for step in range(steps):
            progress(step, steps, "update")
            loss = job.compute_loss(job.batch(step, size).to(target), runner.model)
            if not math.isfinite(value := loss.item()):
                raise ObservationError(f"the loss of {job.name} is {value} at update {step}; train with a smaller learning rate")
            loss.backward()
            found: dict[Key, float] = {(None, None, "run", "loss"): value}
            with torch.no_grad():
                for call in tap.calls():
                    found |= _collect(call, active, variants)
            _check(found, step, job.name)
            if values and found.keys() != values.keys():
                raise ObservationError(_changed(set(found) ^ set(values), step, job.name))
            for key, value in found.items():
                values.setdefault(key, []).append(value)
            runner.update()
            done = step + 1
            if settled is not None and done < steps and (reason := settled.reason(_rows(values))):
                stopped = reason
                break
    progress(steps, steps, "")
    return Observations(
        model=dag.model,
        dag_digest=digest(dag),
        iterations=tuple(range(done)),
        batch_size=size,
        stopped=stopped,
        series=tuple(Series(*key, tuple(series)) for key, series in values.items()),
        settings={"seed": str(seed), "device": target.type, "steps": str(steps), "collectors": ",".join(c.name for c in active)},
    )


def _collect(call: OperatorCall, collectors: Sequence[Collector], variants: Sequence[Variant]) -> dict[Key, float]:
    """All collectors' terms of one call."""
    found: dict[Key, float] = {}
    for collector in collectors:
        for (variant, term), value in collector.collect(call, variants).items():
            found[call.operator.op_id, variant, collector.name, term] = float(value)
    return found


def _check(found: Mapping[Key, float], step: int, model: str) -> None:
    if len(found) == 1:
        raise ObservationError(
            f"no gradient reached any linear or convolution operator of {model} at update {step}; is it trained?"
        )
    for (op_id, variant, collector, term), value in found.items():
        if not math.isfinite(value):
            where = f" for {variant.label}" if variant else ""
            raise ObservationError(
                f"{collector}.{term}{where} of operator {op_id} is {value} at update {step} of {model}; its activation, weight or "
                "gradient holds NaN or infinite values: train with a smaller learning rate, or look at this operator's inputs"
            )


def _changed(keys: set[Key], step: int, model: str) -> str:
    op_id, _, collector, term = sorted(keys, key=str)[0]
    return (
        f"{collector}.{term} of operator {op_id} of {model} was seen in some updates only (first difference at update {step}); "
        "every operator has to run in every step"
    )


def _rows(values: Mapping[Key, Sequence[float]]) -> dict[Any, list[list[float]]]:
    """For every (variant, collector, term) one row per iteration with the values of all operators."""
    columns: dict[Any, list[Sequence[float]]] = {}
    for (op_id, variant, collector, term), series in values.items():
        if op_id is not None:
            columns.setdefault((variant, collector, term), []).append(series)
    return {key: [list(row) for row in zip(*series, strict=True)] for key, series in columns.items()}
