"""What can be differentiated twice, and how an error says that something can not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from qsync_core.ir.op_id import OpId
from qsync_torch.observing.step_collector import CollectorUnavailable

_SIGNS = ("is not implemented", "differentiate twice", "once_differentiable", "double backward", "derivative for")


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """Attention by plain products inside: fused kernels give the same values and have no second derivative."""
    with sdpa_kernel([SDPBackend.MATH]):
        yield


def no_second_derivative(error: BaseException) -> str:
    """What lacks a second derivative, where that is what an error says; "" for any other error."""
    text = str(error).splitlines()[0] if str(error) else ""
    return text if any(sign in str(error) for sign in _SIGNS) else ""


def refuse_checkpointing(op_id: OpId) -> None:
    """For collectors that change what an operator reads: the second run of its forward would not come by them.

    Raises:
        CollectorUnavailable: inside activation checkpointing.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        raise CollectorUnavailable(
            f"operator {op_id} runs under activation checkpointing or other saved-tensor hooks, and would be seen twice; observe "
            "the model without them"
        )
