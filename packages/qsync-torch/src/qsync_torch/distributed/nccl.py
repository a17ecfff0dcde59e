"""What QSync tells NCCL's process groups."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

CHANNEL_VARIABLES = ("NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS")
"""Environment variables that stand above what a process group asks of NCCL."""


def nccl_options(max_ctas: int) -> Any:
    """``ProcessGroupNCCL.Options`` for collectives of at most so many CTAs; 0: NCCL's own choice."""
    options = dist.ProcessGroupNCCL.Options()
    if max_ctas:
        options.config.max_ctas = max_ctas
    return options
