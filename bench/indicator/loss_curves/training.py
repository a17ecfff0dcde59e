"""One training run: the same weights, batches and dropout masks for every method of a seed; what comes out is its loss curve."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch.utils._pytree import tree_map_only

from indicator.loss_curves.methods import Which
from indicator.loss_curves.subjects import SUBJECTS
from indicator.measuring import FLOAT32
from qsync_core.errors import NumericsError
from qsync_core.ir.op_id import OpId
from qsync_core.ir.variant import Variant
from qsync_torch import apply_
from qsync_torch.job import Batch
from qsync_torch.observing.replaced_functions import PairedDropout

RISE_SHARE = 0.1
"""Of the updates: the learning rate rises over them, then falls linearly to 0."""
_LOOK_EVERY = 50
_MASKS = 1_000_003


@attrs.frozen
class How:
    """How every run is made.

    Attributes:
        updates: of each run.
        device: where.
        backend: of the kernels, as ``apply_`` takes it; None for what is fastest here.
    """

    updates: int
    device: str
    backend: str | None = None


def be_exact() -> None:
    """float32 means float32 in every run: TF32 is off for products and convolutions alike."""
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def learning_rate_share(update: int, updates: int) -> float:
    """Of the largest learning rate."""
    rise = max(1, round(RISE_SHARE * updates))
    return min((update + 1) / rise, (updates - update) / max(1, updates - rise))


def train(which: Which, plan: Mapping[OpId, Variant], how: How) -> dict[str, Any]:
    """Train once with all operators as planned, on every sample.

    Returns:
        ``losses`` in nats, one for each update, those after the first that is not finite left out; wall-clock ``seconds``.
    """
    be_exact()
    begin = time.perf_counter()
    job = SUBJECTS[which.model].job(which.seed)
    model = job.model.to(how.device).train()
    if any(variant != FLOAT32 for variant in plan.values()):
        apply_(model, dict(plan), seed=which.seed, backend=how.backend)
    optimizer = job.optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: learning_rate_share(update, how.updates))
    losses = torch.full((how.updates,), math.nan, device=how.device)
    try:
        for update in range(how.updates):
            batch = _upload(job.batch(update, job.batch_size), how.device)
            torch.manual_seed(_MASKS * (which.seed + 1) + update)
            with PairedDropout():
                loss = job.compute_loss(batch, model)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
            losses[update] = loss.detach()
            if update % _LOOK_EVERY == 0 and not losses[update].isfinite():
                break
    except NumericsError:
        pass  # diverged: what was learned until then is all there is
    found = losses.tolist()
    finite = next((i for i, loss in enumerate(found) if not math.isfinite(loss)), len(found))
    return {"losses": [round(loss, 6) for loss in found[:finite]], "seconds": round(time.perf_counter() - begin, 2)}


def _upload(batch: Batch, device: str) -> Batch:
    """On the device; the host does not wait for it."""
    if not device.startswith("cuda"):
        return batch.to(device)
    pinned = tree_map_only(torch.Tensor, torch.Tensor.pin_memory, (batch.args, batch.kwargs, batch.target))
    return Batch(*pinned).to(device, non_blocking=True)
