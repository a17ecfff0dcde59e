"""The adjustable operators: one module each, plus the casts of their operands."""

from qsync_torch.operators.bindings import OperatorBinding
from qsync_torch.operators.conv2d import conv2d, conv2d_backward, conv2d_binding, conv2d_product
from qsync_torch.operators.gradient import Gradient, cast_gradient
from qsync_torch.operators.linear import linear, linear_backward, linear_binding, linear_product
from qsync_torch.operators.operands import Operand, Seeds, cast_input, cast_weight, seeds_of
from qsync_torch.operators.quantized_operator import Saved

__all__ = [
    "Gradient",
    "Operand",
    "OperatorBinding",
    "Saved",
    "Seeds",
    "cast_gradient",
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
