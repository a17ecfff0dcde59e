"""The incoming gradient of an operator in the formats that its backward products read (site GRAD_OUTPUT of core's table).

With G the incoming gradient (..., N), w_q (N, K) and x_q (M, K) the saved copies with scales s_w[n] and s_x, a product in int8
needs one scale for everything that it sums.  ``grad_input`` sums over the output channels n, along which the weight's scales lie,
so G is multiplied by them before it is quantized: s_g · g_q = G · s_w.  Then

* grad_input[m, k] = s_g · Σ_n g_q[m, n] · w_q[n, k], and
* grad_weight[n, k] = (s_g · s_x / s_w[n]) · Σ_m g_q[m, n] · x_q[m, k],

the same quantized copy in both.  Where the weight has one scale, or ``grad_input`` is computed in a float format, G is quantized as
it is.  Stochastic rounding draws independently of the operands' rounding, so both products stay unbiased.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from qsync_torch.kernels.quantize import Offset, quantize, quantize_transposed
from qsync_torch.operators.bindings import OperatorBinding

Needs = tuple[bool, bool, bool]
"""Whether activation, weight and bias want a gradient."""


class Gradient(NamedTuple):
    """An incoming gradient and its copies.

    Attributes:
        incoming: as autograd delivers it.
        wide: in the operator's float gradient format; None where no product reads one.
        quantized: 8-bit values, of a linear operator as (M, N); ``scale``: their one scale; None where no product reads them.
        transposed: the 8-bit values as (N, M), where the product for the weight's gradient wants them so.
        channel_scale: the weight's scales, if the gradient was multiplied by them first.
    """

    incoming: torch.Tensor
    wide: torch.Tensor | None = None
    quantized: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    transposed: torch.Tensor | None = None
    channel_scale: torch.Tensor | None = None

    def grad_input_scale(self, w_scale: torch.Tensor) -> torch.Tensor:
        """The one scale of an 8-bit product with the weight."""
        assert self.scale is not None
        return self.scale if self.channel_scale is not None else self.scale * w_scale

    def grad_weight_scale(self, x_scale: torch.Tensor) -> torch.Tensor:
        """The scale, or one per output channel, of an 8-bit product with the activation."""
        assert self.scale is not None
        scale = self.scale * x_scale
        return scale if self.channel_scale is None else scale / self.channel_scale

    def bias_gradient(self) -> torch.Tensor:
        """The copy whose sum is the bias's gradient: the float one where there is one."""
        return self.incoming if self.wide is None else self.wide


def cast_gradient(
    grad: torch.Tensor, w_scale: torch.Tensor | None, binding: OperatorBinding, needs: Needs, seed: int, offset: Offset
) -> Gradient:
    """Make the copies that the backward products of ``needs`` read.

    Args:
        grad: in the output's shape and format.
        w_scale: the weight's scales, one or one per output channel; needed for an 8-bit gradient of the activation only.
        binding: how the operator runs.
        needs: which gradients are wanted.
        seed, offset: which random numbers the stochastic rounding takes.
    """
    need_x, need_w, _ = needs
    dtype = binding.grad_float if need_x else binding.grad_float_weight_only
    wide = grad if grad.dtype is dtype else None if dtype is None else grad.to(dtype)
    for_input, for_weight = need_x and binding.grad_input_quantized, need_w and binding.grad_weight_quantized
    if not for_input and not for_weight:
        return Gradient(grad, wide)
    multiplier = w_scale if for_input and w_scale is not None and w_scale.numel() > 1 else None
    transpose = for_weight and binding.wants_transposed and grad.device.type == "cuda"
    text = binding.grad_texts[multiplier is not None][transpose]
    # The channels that the multiplier counts are the last dimension of a matrix, and dimension 1 of four.
    source = grad.reshape(-1, grad.shape[-1]) if binding.is_linear else grad
    if transpose:
        q, scale, transposed = quantize_transposed(source, text, seed, offset, multiplier)
        return Gradient(grad, wide, q, scale, transposed, multiplier)
    q, scale = quantize(source, text, seed, offset, multiplier)
    return Gradient(grad, wide, q, scale, None, multiplier)
