"""Trace, profile, observe and run QSync precision plans in PyTorch."""

from importlib.metadata import version as _version
from typing import Any as _Any

from qsync_core.plugins.compat import check_installed as _check_installed

__version__ = _version("qsync-torch")
_check_installed("qsync-torch")

_PUBLIC = {
    "AppliedPlan": "qsync_torch.apply.apply",
    "Checkpoints": "qsync_torch.elastic.checkpoints",
    "InStepGradScaler": "qsync_torch.distributed.loss_scaling",
    "UnevenBatchSampler": "qsync_torch.distributed.uneven_batches",
    "applied_to": "qsync_torch.apply.applied_plan",
    "apply_": "qsync_torch.apply.apply",
    "capture": "qsync_torch.capturing.capture",
    "compile": "qsync_torch.compiling.compile",
    "check_ranks_agree": "qsync_torch.distributed.ranks",
    "green_share": "qsync_torch.sharing.share",
    "hybrid": "qsync_torch.capturing.hybrid",
    "load_planned": "qsync_torch.apply.apply",
    "process_group_options": "qsync_torch.distributed.nccl",
    "use_share": "qsync_torch.sharing.share",
    "watch": "qsync_torch.apply.watch_ranks",
    "weight_gradients": "qsync_torch.distributed.weighted_gradients",
    "which_group": "qsync_torch.distributed.ranks",
}
"""Names that are imported on first use: importing this package (which plugin discovery does) must not import torch."""


def __getattr__(name: str) -> _Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
