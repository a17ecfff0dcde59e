"""One training run: the same weights, batches and dropout masks for every method of a seed."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from indicator.accuracy.fake_quantization import FakeQuantized
from indicator.accuracy.methods import SETTINGS, Task
from indicator.measuring import FLOAT32
from indicator.models import SUBJECTS, Subject
from qsync_core.errors import NumericsError
from qsync_core.ir.op_id import OpId
from qsync_core.ir.variant import Variant
from qsync_torch import apply_
from qsync_torch.job import Job

BATCH = {"relu-cnn": 24, "transformer": 16}
UPDATES = 300
_RISE = 20
"""Updates over which the learning rate rises; then it falls linearly to 0, so that the end does not depend on the last batches."""
_STATISTICS = 20
"""Training batches from which BatchNorm's statistics are taken anew."""
_EVALUATION_CHUNK = 120
_LAST = 20


class Lowered(Protocol):
    """A model with low operators."""

    def remove(self) -> None:
        """Give the model back."""


def train(task: Task, plan: Mapping[OpId, Variant], updates: int = UPDATES) -> dict[str, Any]:
    """Train once with all operators as planned, on every sample, and evaluate on held-out data.

    Returns:
        ``loss`` and ``accuracy`` of the parameters in float32, with BatchNorm statistics of float32 passes, which is what rank 0 of
        a QSync job (always a training device) would save; ``loss_as_trained`` and ``accuracy_as_trained`` with the plan in force;
        ``training_loss``, mean of the last 20 updates; processor ``seconds``.  Losses are None after divergence.
    """
    torch.set_num_threads(1)
    begin = time.process_time()
    subject = SUBJECTS[task.model]
    job, size = subject.job(task.seed), BATCH[task.model]
    lowered = _lower(job.model, task, plan)
    torch.manual_seed(task.seed)
    optimizer = job.optimizer(job.model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / _RISE, (updates - step) / updates))
    losses: list[float] = []
    found: dict[str, Any] = {}
    try:
        for step in range(updates):
            loss = job.compute_loss(job.batch(step, size), job.model.train())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                raise NumericsError("the loss is not finite")
        found["loss_as_trained"], found["accuracy_as_trained"] = evaluate(subject, job)
        if lowered is not None:
            lowered.remove()
        _take_statistics(job, updates, size)
        found["loss"], found["accuracy"] = evaluate(subject, job)
        found["training_loss"] = sum(losses[-_LAST:]) / len(losses[-_LAST:])
    except NumericsError:
        found = dict.fromkeys(("loss", "accuracy", "loss_as_trained", "accuracy_as_trained", "training_loss"))
    return found | {"seconds": round(time.process_time() - begin, 2)}


def _lower(model: nn.Module, task: Task, plan: Mapping[OpId, Variant]) -> Lowered | None:
    """Nothing for full precision."""
    setting = SETTINGS[task.setting]
    low = {op_id: variant for op_id, variant in plan.items() if variant != FLOAT32}
    if not low:
        return None
    if setting.bits < 8:
        return FakeQuantized(model, sorted({op_id.fqn for op_id in low}), setting.bits, setting.rounding, task.seed)
    return apply_(model, dict(plan), seed=task.seed)


def evaluate(subject: Subject, job: Job) -> tuple[float, float]:
    """Mean loss in nats and accuracy (0..1) on the held-out data."""
    batch = subject.held_out()
    inputs = batch.args[0]
    with torch.no_grad():
        logits = torch.cat([job.model.eval()(part) for part in inputs.split(_EVALUATION_CHUNK)])
    right = (logits.argmax(-1) == batch.target).float().mean()
    return float(job.loss(logits, batch)), float(right)


def _take_statistics(job: Job, updates: int, size: int) -> None:
    """BatchNorm's running statistics as plain means over training batches."""
    norms = [module for module in job.model.modules() if isinstance(module, nn.BatchNorm2d)]
    if not norms:
        return
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    job.model.train()
    with torch.no_grad():
        for step in range(updates, updates + _STATISTICS):
            job.model(*job.batch(step, size).args)
