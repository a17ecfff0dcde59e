"""Floating-point operations of a forward pass: a multiplication and an addition count as two."""

from __future__ import annotations

import math
from collections.abc import Sequence

Shape = Sequence[int]


def linear_flops(output_shape: Shape, weight_shape: Shape) -> int:
    """Output (…, N), weight (N, K): 2·M·N·K with M the product of the leading dimensions."""
    return 2 * math.prod(output_shape) * weight_shape[1]


def conv2d_flops(output_shape: Shape, weight_shape: Shape) -> int:
    """Output (B, O, H, W), weight (O, I/groups, R, S): each output element takes I/groups·R·S products."""
    return 2 * math.prod(output_shape) * math.prod(weight_shape[1:])


def attention_flops(query: Shape, key: Shape, value: Shape) -> int:
    """Scaled dot-product attention: scores (…, L, S) from E features, and their product with (S, Ev) values."""
    *batch, length, features = query
    return 2 * math.prod(batch) * length * key[-2] * (features + value[-1])


def other_flops(name: str, input_shapes: Sequence[Shape], output_shape: Shape) -> int:
    """Operators without weights: products of two activations by their size, all else one operation an output element."""
    if name == "scaled_dot_product_attention" and len(input_shapes) >= 3:
        return attention_flops(*input_shapes[:3])
    if name in ("matmul", "mm", "bmm", "baddbmm", "addmm") and len(input_shapes) >= 2:
        return 2 * math.prod(output_shape) * input_shapes[-2][-1]
    return math.prod(output_shape)
