"""The binding of an operator together with what its backward needs, worked out once."""

from __future__ import annotations

import torch

from qsync_core.ir.precision import Granularity
from qsync_core.ir.semantics import gradient_precisions
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import Op
from qsync_core.kernels.choice import QUANTIZE_GRADIENT, KernelChoice
from qsync_torch.dtypes import TORCH_DTYPE
from qsync_torch.kernels.binding import Attributes, Binding, parse_binding, quantization_text
from qsync_torch.kernels.selection import DEFAULT_BACKEND, parse_choice

MULTIPLIED = ("multiplier", "channel")
"""Attribute of a quantization that first multiplies the tensor by one factor per channel."""
TRANSPOSED = ("transposed", "true")
"""Attribute of a quantization that also writes the transposed copy."""


class OperatorBinding(Binding):
    """A :class:`~qsync_torch.kernels.binding.Binding` and the casts of the gradient that it implies.

    Everything is a plain string, number or dtype: ``torch.compile`` follows calls through them.

    Attributes:
        is_linear: the operator has no geometry.
        grad_input_quantized, grad_weight_quantized: that product reads the quantized copy of the incoming gradient.
        grad_float, grad_float_weight_only: format of the incoming gradient's float copy (None: no product reads one), with and
            without a gradient of the input.
        grad_texts: quantization texts of the incoming gradient: ``grad_texts[multiplied][transposed]``.
        x_kind: what operators that share one cast of an activation have in common.
        x_transposed_text: quantization text of an activation whose transposed copy is wanted too.
        wants_transposed: the product for the weight's gradient sums over rows in 8 bit, and integer tensor cores read operands
            whose summed dimension is contiguous.
    """

    def __init__(self, variant: Variant, backend: str = DEFAULT_BACKEND, config: str = "", attributes: Attributes = ()) -> None:
        super().__init__(variant, backend, config, attributes)
        self.grad_input_quantized = variant.grad_input.needs_scale
        self.grad_weight_quantized = variant.grad_weight.needs_scale
        self.grad_float = _float_format(variant, True)
        self.grad_float_weight_only = _float_format(variant, False)
        self.x_kind = f"{variant.compute} {variant.x_granularity} {variant.rounding}"
        self.is_linear = not attributes
        self.wants_transposed = self.grad_weight_quantized and self.is_linear
        x = parse_binding(self.x_text)
        self.x_transposed_text = Binding(x.variant, x.backend, x.config, (TRANSPOSED,)).text
        self.grad_texts = _gradient_texts(variant, backend, config)


def _gradient_texts(variant: Variant, backend: str, config: str) -> tuple[tuple[str, str], tuple[str, str]]:
    precision = variant.grad_input if variant.grad_input.needs_scale else variant.grad_weight
    if not precision.needs_scale:
        return ("", ""), ("", "")
    pinned = parse_choice(config).of(QUANTIZE_GRADIENT)
    chain, choice = (backend, "") if pinned is None else (pinned.backend, str(KernelChoice({Op.QUANTIZE: pinned})))
    plain = parse_binding(quantization_text(precision, Granularity.PER_TENSOR, variant.rounding, chain, choice))

    def text(*attributes: tuple[str, str]) -> str:
        return Binding(plain.variant, plain.backend, plain.config, attributes).text

    return (text(), text(TRANSPOSED)), (text(MULTIPLIED), text(MULTIPLIED, TRANSPOSED))


def _float_format(variant: Variant, input_gradient: bool) -> torch.dtype | None:
    floats = [p for p in gradient_precisions(variant, input_gradient) if not p.needs_scale]
    return TORCH_DTYPE[floats[0]] if floats else None
