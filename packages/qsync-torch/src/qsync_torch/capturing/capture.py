"""``capture``: a job of the live objects of a training script, so that nothing is written twice."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from qsync_core.errors import JobError
from qsync_core.ir.precision import Precision
from qsync_torch.apply.first_step import autocast_now, device_of
from qsync_torch.capturing.batches import KeptBatches, Loader, as_batch, check_samples_first, first_batches
from qsync_torch.capturing.losses import Loss, loss_of
from qsync_torch.capturing.optimizer import Optimizers, maker_of
from qsync_torch.job import Job, check_accumulate, check_shapes


def capture(
    model: nn.Module,
    optimizer: Optimizers,
    loss_fn: Loss | None,
    loader: Loader,
    *,
    name: str | None = None,
    amp: str | None = None,
    accumulate: int = 1,
) -> Job:
    """What a training script trains, as a :class:`~qsync_torch.job.Job` (docs/your-script.md).

    The script goes on as if this had not been called: nothing is run, model and optimizer are only looked at, and the random state
    and the loader's generators are put back after the first batches have been read.

    Args:
        model: as the loop calls it; the model inside a DistributedDataParallel or ``torch.compile`` is taken out.  The job has this
            very model; measurements train copies of it.
        optimizer: the script's, whose class, groups and hyper-parameters are taken as they are now, or a list of those that its
            loop steps, or a function that makes one from parameters.
        loss_fn: ``loss_fn(output, target)`` as the loop calls it, with more targets where it takes more; None where the model
            returns its own loss (as its output, in ``output.loss``, or first).
        loader: what the loop iterates over, or a function that makes it; :func:`qsync_torch.capturing.batches.as_batch` says what
            its elements may be.  The first 16 batches are kept, or as many as have 256 MiB; the first one's size is the job's batch
            size.
        name: of the job in files and messages; the model's class by default.
        amp: ``"bfloat16"`` where the loop trains under ``torch.autocast`` in that format; by default what autocast is around this
            call.
        accumulate: batches whose gradients the loop adds up for each step of its optimizer.

    Raises:
        JobError: when one of them is not what it should be, with what to pass instead; when the loader is an iterator, which would
            lose the batches that are read here; under autocast in float16.
    """
    if isinstance(loader, Iterator):
        raise JobError(
            f"the loader is a {type(loader).__name__}, which gives each batch only once, so that the script would miss those that "
            "are read here; pass what the iterator is made from, such as the DataLoader"
        )
    return job_of(model, optimizer, loss_fn, loader, name=name, amp=amp, accumulate=accumulate)


def job_of(
    model: nn.Module,
    optimizer: Optimizers,
    loss_fn: Loss | None,
    loader: Loader,
    *,
    name: str | None = None,
    amp: str | None = None,
    accumulate: int = 1,
) -> Job:
    """:func:`capture`, also from an iterator, whose first batches are then gone."""
    if not isinstance(model, nn.Module):
        raise JobError(f"the model is a {type(model).__name__}; pass the torch.nn.Module that is trained")
    model = unwrapped(model)
    name = name or type(model).__name__
    check_accumulate(name, accumulate)
    check_shapes(name, model)
    if loss_fn is not None and not callable(loss_fn):
        raise JobError(
            f"the loss_fn of {name} is a {type(loss_fn).__name__}; pass the function of output and target, or None where the model "
            "returns its own loss"
        )
    make_optimizer = maker_of(name, model, optimizer, loss_fn)
    batches = [as_batch(name, model, loss_fn, given) for given in first_batches(name, loader)]
    check_samples_first(name, batches[0])
    if amp is None:
        active = autocast_now(device_of(model).type)
        amp = None if active is Precision.FLOAT32 else str(active)
    return Job(name, model, KeptBatches.of(name, batches), loss_of(name, loss_fn), make_optimizer, batches[0].size, amp, accumulate)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, DataParallel and ``torch.compile``."""
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), torch.nn.Module):
            model = inner
        else:
            return model
