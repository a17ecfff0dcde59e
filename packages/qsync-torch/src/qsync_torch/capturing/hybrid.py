"""``hybrid``: the one line in a script, which says what is trained when a plan is prepared, and applies the plan in training."""

from __future__ import annotations

import os
import warnings
from typing import Any

import attrs
from torch import nn

from qsync_core.errors import JobError
from qsync_torch.apply.applied_plan import AppliedPlan
from qsync_torch.apply.apply import apply_for
from qsync_torch.caller import Caller
from qsync_torch.capturing.batches import Loader, begins_to_read
from qsync_torch.capturing.capture import job_of
from qsync_torch.capturing.losses import Loss
from qsync_torch.capturing.optimizer import Optimizers
from qsync_torch.capturing.script import hand_over, is_wanted
from qsync_torch.distributed.groups_present import run_folder_of
from qsync_torch.job import check_accumulate

HYBRID = Caller("qsync.hybrid", arguments="..., run={}")
"""The line, in messages."""


def hybrid(
    model: nn.Module,
    optimizer: Optimizers,
    loss_fn: Loss | None,
    loader: Loader,
    *,
    run: str | os.PathLike[str] = "run",
    name: str | None = None,
    amp: str | None = None,
    accumulate: int = 1,
    compiles: bool | None = None,
    **options: Any,
) -> AppliedPlan:
    """Train ``model`` under the plan of a run folder: the one line that a script needs (docs/your-script.md).

    Under ``qsync prepare train.py -o run`` the script ends here, and what it passes becomes the job that is planned, as
    :func:`~qsync_torch.capturing.capture.capture` takes it.  In training it is ``apply_(model, run)``, and of the other arguments
    ``accumulate`` alone is looked at, because the plan's predictions are of as many micro-batches.  It stands before the training
    loop, after ``init_process_group`` and before ``torch.compile``; best also before DistributedDataParallel, so that the wrapper
    can be given what the plan says of communication.

    Args:
        model, optimizer, loss_fn, loader, name, amp, accumulate: as :func:`~qsync_torch.capturing.capture.capture` takes them; the
            loader may be an iterator, and is best a function where it makes something else of the script's batches.
        run: the run folder, or the path of a plan.
        compiles: whether the script compiles its model behind the line, where its text leaves that open (``if args.compile:``); by
            default it does where the text has a call that does.
        options: of :func:`~qsync_torch.apply.apply.apply_`, such as ``allow_flags``.

    Returns:
        A handle: ``DistributedDataParallel(model, **applied.ddp_options())`` communicates as the plan wants it.

    Raises:
        JobError: under ``qsync prepare``, when what is passed makes no job; when ``accumulate`` is no number of micro-batches.
        QSyncError: in training, what ``apply_`` raises.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):  # which calls the module inside, whatever its forward is by then
        model = model.module
    if isinstance(model, nn.DataParallel) or hasattr(model, "_orig_mod"):
        wrapped = "DataParallel" if isinstance(model, nn.DataParallel) else "torch.compile"
        raise JobError(f"the model of qsync.hybrid is wrapped in {wrapped}; call it on the model itself, before that")
    check_accumulate(name or type(model).__name__, accumulate)
    if is_wanted():
        job = job_of(model, optimizer, loss_fn, loader, name=name, amp=amp, accumulate=accumulate)
        hand_over(attrs.evolve(job, compiles=compiles), HYBRID, says_compiled=compiles is not None)
    if begins_to_read(loader):
        warnings.warn(
            "the generator in the line has begun to read its DataLoader, which draws a random number: what is random behind the "
            "line is not as without it; write it as a function, lambda: (... for ... in loader)",
            stacklevel=2,
        )
    applied = apply_for(attrs.evolve(HYBRID, run=run_folder_of(run)), model, run, **options)
    applied.in_model.meet_accumulation(accumulate)
    applied.announce()
    return applied
