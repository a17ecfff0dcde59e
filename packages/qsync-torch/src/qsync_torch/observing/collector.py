"""What a collector is: it turns one observed call of an operator into numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Protocol, runtime_checkable

import attrs
import torch

from qsync_core.ir.dag import Operator
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_torch.observing.element_variance import element_variance
from qsync_torch.observing.geometry import Geometry

_LINEAR = Geometry()


@attrs.frozen(eq=False, slots=False)
class OperatorCall:
    """One forward call of an adjustable operator, with the gradient that came back to it.

    Attributes:
        operator: its entry in the PrecisionDag.
        x: the activation input (N×…×K, or N×C×H×W), float32.
        weight: the weight, float32.
        bias: the bias, or None.
        grad_output: gradient of the loss with respect to the output, float32.
        geometry: strides, padding, dilation and groups of a convolution; neutral for linear.
    """

    operator: Operator
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    grad_output: torch.Tensor
    geometry: Geometry = _LINEAR

    @cached_property
    def output(self) -> torch.Tensor:
        """The output, computed anew: the one of the forward pass may have been overwritten in place since."""
        return self.geometry.product(self.x, self.weight, self.bias)

    @cached_property
    def _gradients(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.weight.dim() == 2:
            flat = self.grad_output.reshape(-1, self.grad_output.shape[-1])
            return self.grad_output @ self.weight, flat.t() @ self.x.reshape(-1, self.x.shape[-1])
        g = self.geometry
        grad_x, grad_weight, _ = torch.ops.aten.convolution_backward(
            self.grad_output, self.x, self.weight, None, g.stride, g.padding, g.dilation,
            False, [0, 0], g.groups, [True, True, False],
        )  # fmt: skip
        return grad_x, grad_weight

    @property
    def grad_x(self) -> torch.Tensor:
        """Gradient with respect to this operator's own copy of its activation (other readers do not contribute)."""
        return self._gradients[0]

    @property
    def grad_weight(self) -> torch.Tensor:
        """This call's contribution to the gradient of the weight."""
        return self._gradients[1]

    def is_finite(self) -> bool:
        """Whether its tensors are; what is computed of others is not the fault of who computes it."""
        tensors = (self.x, self.weight, self.bias, self.grad_output)
        return all(bool(tensor.isfinite().all()) for tensor in tensors if tensor is not None)

    @cached_property
    def _variances(self) -> dict[tuple[str, Precision, Granularity, Rounding], torch.Tensor]:
        return {}

    def variance(self, operand: str, precision: Precision, granularity: Granularity, rounding: Rounding) -> torch.Tensor:
        """Element variances of ``x``, ``weight`` or ``output`` (the operand's name) in a format; computed once per call."""
        key = (operand, precision, granularity, rounding)
        if key not in self._variances:
            self._variances[key] = element_variance(getattr(self, operand), precision, granularity, rounding)
        return self._variances[key]


Term = tuple[Variant | None, str]
"""A number's name within an operator: the variant it is for (None where it depends on none) and the term."""


@runtime_checkable
class Collector(Protocol):
    """Writes terms for every observed call.  Offered by the hook ``qsync_register_collectors``.

    ``name`` names it in Observations.  ``collect`` is called once per operator and iteration, without autograd, and returns a 0-d
    tensor (or a float) per term: always the same terms for one operator.  It must not change the tensors it is given.
    """

    name: str

    def collect(self, call: OperatorCall, variants: Sequence[Variant]) -> Mapping[Term, torch.Tensor | float]:
        """The terms of one call."""
        ...


def low_precision(variants: Iterable[Variant]) -> Iterator[Variant]:
    """The variants that lose anything against float32."""
    for variant in variants:
        if variant != Variant.plain(Precision.FLOAT32):
            yield variant
