"""``load_planned``: a model whose weights go straight from their checkpoint into the formats of a plan, one at a time.

The model is built on the meta device, where it takes no memory.  Each weight is read from safetensors files, put on the device and
stored, and the float one is gone before the next is read: the most memory is that of the plan and one weight.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from qsync_torch.apply.applied_plan import AppliedPlan
from qsync_torch.apply.apply import apply_for
from qsync_torch.apply.checkpoint_files import Checkpoint
from qsync_torch.caller import Caller
from qsync_torch.distributed.groups_present import run_folder_of


def load_planned(
    model: nn.Module,
    plan: Any,
    checkpoint: str | os.PathLike[str],
    *,
    device: torch.device | str = "cpu",
    rename: Callable[[str], str] | None = None,
    **options: Any,
) -> AppliedPlan:
    """Put a model under a plan, and load its weights straight into the formats in which the plan stores them.

    A call of all ranks, as :func:`~qsync_torch.apply.apply.apply_`, which ranks that have the memory may call in its place with the
    same weights: what one of them refuses is refused on all, and so are ranks that read other frozen weights.

    Args:
        model: its parameters on the meta device (``with torch.device("meta"): ...``); what is elsewhere already, adapters with
            values of their own and buffers say, is kept and moved.
        plan: as :func:`~qsync_torch.apply.apply.apply_` takes it.
        checkpoint: a safetensors file, a folder with one (``model.safetensors``) or with several and their index, or the index
            (``model.safetensors.index.json``).
        device: where the model is to run.
        rename: the name of a parameter in the checkpoint, from that in the model; by default the same, without what PEFT's
            adapters put into it (``base_model.model.`` and ``.base_layer``).
        options: of :func:`~qsync_torch.apply.apply.apply_`, such as ``group``.

    Returns:
        A handle, as of ``apply_``.  ``state_dict()`` holds stored weights as the checkpoint has them, in the
        model's format, while its files are there.

    Raises:
        PlanError: when a file is missing or cannot be read; when it lacks a weight or holds one of another shape or in a format
            that is no float of 16 or 32 bits; when a buffer is on the meta device; when ranks read different weights.
        QSyncError: as ``apply_``.
    """
    caller = Caller("apply_", run_folder_of(plan))
    return apply_for(caller, model, plan, checkpoint=Checkpoint(checkpoint, device, rename), **options)
