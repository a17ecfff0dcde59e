"""What PyTorch's own bfloat16 products take on this CPU, which tests of exact memory ask before they hold the model to it."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

from qsync_torch.profiling.memory import memory_rise


@cache
def products_take_copies() -> bool:
    """Whether products in bfloat16 take more memory than their results: copies or a workspace that they take on no GPU.

    Those of a CPU without oneDNN's bfloat16 do for gradients; of others a small one is asked.
    """
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return True
    x, weight = torch.randn(24, 130, dtype=torch.bfloat16), torch.randn(260, 130, dtype=torch.bfloat16)
    F.linear(x, weight)  # what is made once
    return memory_rise(lambda: F.linear(x, weight))[0] > 2 * 24 * 260
