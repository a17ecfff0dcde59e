"""The adjustable operators in any variant, with the casts around them; norms; casts that consumers share."""

import functools
from collections.abc import Callable

import torch

from qsync_torch.kinds.table import OPERATOR_KINDS
from qsync_torch.operators.products import lowered


def _in_a_variant(name: str) -> Callable[..., torch.Tensor]:
    kind = OPERATOR_KINDS[name]
    return functools.update_wrapper(functools.partial(lowered, kind), kind.function)


linear = _in_a_variant("linear")
"""``F.linear`` in a variant (:func:`~qsync_torch.operators.products.lowered`)."""
conv2d = _in_a_variant("conv2d")
"""``F.conv2d`` in a variant."""

__all__ = ["conv2d", "linear", "lowered"]
