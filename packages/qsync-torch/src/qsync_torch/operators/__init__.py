"""The adjustable operators: one module each, plus the casts of their operands."""

from qsync_torch.operators.conv2d import conv2d, conv2d_backward, conv2d_binding, conv2d_product
from qsync_torch.operators.linear import linear, linear_backward, linear_binding, linear_product
from qsync_torch.operators.operands import Seeds, cast_input, cast_weight, seeds_of

__all__ = [
    "Seeds",
    "cast_input",
    "cast_weight",
    "conv2d",
    "conv2d_backward",
    "conv2d_binding",
    "conv2d_product",
    "linear",
    "linear_backward",
    "linear_binding",
    "linear_product",
    "seeds_of",
]
