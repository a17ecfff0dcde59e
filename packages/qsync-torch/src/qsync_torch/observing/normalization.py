"""Batch norm and layer norm whose second derivatives take few passes over memory.

PyTorch composes their double backward of some thirty elementwise functions, each a pass over the activation.  With x̂ the normalized
activation, r the inverse of the standard deviation, sums and means over the N elements that are normalized together, and
P(z) = r·(z - mean z - x̂·mean(z·x̂)), which is symmetric, the backward is grad_x = P(γ·g), grad_γ = Σ g·x̂, grad_β = Σ g.  For
J = ⟨v, grad_x⟩ + ⟨a, grad_γ⟩ + ⟨b, grad_β⟩ then

    ∂J/∂g = γ·P(v) + a·x̂ + b,    ∂J/∂γ = Σ g·P(v),
    ∂J/∂x = P(a·g - r/N·(γ·g·Σ v·x̂ + v·Σ γ·g·x̂)) - r/N·⟨γ·g, P(v)⟩·x̂,

the last term by r, the first by x̂.  (What is summed over is a channel for batch norm and a row for layer norm; γ belongs to a
channel in the first case, to a column in the second.)
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from qsync_torch.observing.replaced_functions import ReplacedFunctions


def _batch_norm(
    x: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    if not training or weight is None or bias is None or x.dim() != 4 or not x.requires_grad:
        return F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    return _BatchNorm.apply(x, weight, bias, eps)  # type: ignore[no-any-return,no-untyped-call]


def _layer_norm(
    x: torch.Tensor,
    normalized_shape: Any,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    if weight is None or bias is None or len(normalized_shape) != 1 or not x.requires_grad:
        return F.layer_norm(x, normalized_shape, weight, bias, eps)
    return _LayerNorm.apply(x, weight, bias, eps)  # type: ignore[no-any-return,no-untyped-call]


class LeanNorms(ReplacedFunctions):
    """While active, norms of float32 activations in training mode have cheap second derivatives; running statistics stay."""

    replacements: ClassVar = {F.batch_norm: _batch_norm, F.layer_norm: _layer_norm}


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        y, mean, r = torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, eps)
        ctx.save_for_backward(x, weight, mean, r)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, mean, r = ctx.saved_tensors
        return *_BatchNormBackward.apply(grad, x, weight, mean, r), None  # type: ignore[no-untyped-call]


class _BatchNormBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor, r: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        grad_x, g_xhat, g_sum = _Channels(x, mean, r).gradients(grad, weight)
        ctx.save_for_backward(grad, x, weight, mean, r, g_sum, g_xhat)
        return grad_x, g_xhat, g_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
        grad, x, weight, mean, r, g_sum, g_xhat = ctx.saved_tensors
        over = _Channels(x, mean, r)
        share = 1 / over.count
        v_sum, v_xhat = over.sums(v)
        by_weight = (over.dot(v, grad) - (g_sum * v_sum).addcmul_(g_xhat, v_xhat).mul_(share)).mul_(r)
        scale = weight * r
        of_xhat = torch.addcmul(a, scale, v_xhat, value=-share)
        constant = torch.addcmul(b, scale, v_sum, value=-share)
        by_grad = over.minus(over.normalized(of_xhat, constant), v, -scale)
        # What by_x has of -g and of -v; P of either is the rest of them, in x̂ and in the constant.
        of_g, of_v = of_xhat.mul_(r).neg_(), (scale * share).mul_(r).mul_(g_xhat)
        of_xhat = (of_g * g_xhat).addcmul_(of_v, v_xhat).addcmul_(scale, by_weight, value=-1).mul_(share)
        constant = (of_g * g_sum).addcmul_(of_v, v_sum).mul_(share)
        by_x = over.minus(over.minus(over.normalized(of_xhat, constant), grad, of_g), v, of_v)
        return by_grad, by_x, by_weight, None, None


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        y, mean, r = torch.native_layer_norm(x, weight.shape, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, r)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, mean, r = ctx.saved_tensors
        return *_LayerNormBackward.apply(grad, x, weight, mean, r), None  # type: ignore[no-untyped-call]


class _LayerNormBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor, r: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(grad, x, weight, mean, r)
        found: tuple[torch.Tensor, ...] = torch.ops.aten.native_layer_norm_backward(
            grad, x, weight.shape, mean, r, weight, weight, [True, True, True]
        )
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
        grad, x, weight, mean, r = ctx.saved_tensors

        def projected(z: torch.Tensor) -> torch.Tensor:
            found: tuple[torch.Tensor, ...] = torch.ops.aten.native_layer_norm_backward(
                z, x, weight.shape, mean, r, None, None, [True, False, False]
            )
            return found[0]

        p_v = projected(v)
        xhat = (x - mean).mul_(r)
        weighted = grad * weight
        scale = r / x.shape[-1]
        v_xhat = torch.linalg.vecdot(v, xhat).unsqueeze_(-1)
        g_xhat = torch.linalg.vecdot(weighted, xhat).unsqueeze_(-1)
        by_r = torch.linalg.vecdot(weighted, p_v).unsqueeze_(-1)
        inner = (grad * a).addcmul_(weighted, scale * v_xhat, value=-1).addcmul_(v, scale * g_xhat, value=-1)
        by_x = projected(inner).addcmul_(xhat, scale * by_r, value=-1)
        by_weight = (grad * p_v).reshape(-1, x.shape[-1]).sum(dim=0)
        by_grad = torch.addcmul(b, xhat, a).addcmul_(p_v, weight)
        return by_grad, by_x, by_weight, None, None


class _Channels:
    """Sums over the channels of an image, and images combined with a factor per channel, in one pass over memory each.

    On a GPU they are the kernels of PyTorch's synchronized batch norm: functions that broadcast a factor per channel take three
    times as long there.  z and t are tensors of the shape of x.

    Args:
        x: (N, C, H, W), float32.
        mean, r: (C,), the mean and the inverse of the standard deviation by which x is normalized to x̂.

    Attributes:
        count: elements of a channel.
    """

    def __init__(self, x: torch.Tensor, mean: torch.Tensor, r: torch.Tensor) -> None:
        self._layout = torch.channels_last if x.is_contiguous(memory_format=torch.channels_last) else torch.contiguous_format
        self._x, self._mean, self._r = self._laid_out(x), mean, r
        self.count = x.numel() // x.shape[1]

    def gradients(self, grad: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute the gradients of batch norm: by x, by its weight (Σ grad·x̂) and by its bias (Σ grad)."""
        if not grad.is_cuda:
            found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.aten.native_batch_norm_backward(
                grad, self._x, weight, None, None, self._mean, self._r, True, 0.0, [True, True, True]
            )
            return found
        grad = self._laid_out(grad)
        z_sum, dot, by_weight, by_bias = torch.batch_norm_backward_reduce(
            grad, self._x, self._mean, self._r, weight, True, True, True
        )
        count = _count(self.count, grad.device)
        by_x = torch.batch_norm_backward_elemt(grad, self._x, self._mean, self._r, weight, z_sum, dot, count)
        return by_x, by_weight, by_bias

    def sums(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Σ z and Σ z·x̂, (C,) each."""
        if not z.is_cuda:
            found = torch.ops.aten.native_batch_norm_backward(
                z, self._x, None, None, None, self._mean, self._r, True, 0.0, [False, True, True]
            )
            return found[2], found[1]
        # Only whether there is a weight matters; the sums that it would be multiplied with are not computed.
        found = torch.batch_norm_backward_reduce(self._laid_out(z), self._x, self._mean, self._r, self._r, False, True, True)
        return found[3], found[2]

    def dot(self, z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """Σ z·t, (C,)."""
        if not z.is_cuda:
            return (z * t).sum(dim=(0, 2, 3))
        zeros, ones, _ = _constants(len(self._mean), z.dtype, z.device)
        found: torch.Tensor = torch.batch_norm_backward_reduce(
            self._laid_out(z), self._laid_out(t), zeros, ones, None, True, False, False
        )[1]
        return found

    def normalized(self, factor: torch.Tensor, constant: torch.Tensor) -> torch.Tensor:
        """factor·x̂ + constant."""
        if not self._x.is_cuda:
            slope = factor * self._r
            return torch.addcmul(_by_channel(constant - slope * self._mean), self._x, _by_channel(slope))
        return torch.batch_norm_elemt(self._x, factor, constant, self._mean, self._r, 0.0)

    def minus(self, t: torch.Tensor, z: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """t - factor·z; overwrites t."""
        if not t.is_cuda:
            return t.addcmul_(z, _by_channel(factor), value=-1)
        zeros, ones, one = _constants(len(factor), t.dtype, t.device)
        # (t - 0 - (z - 0)·1²·factor/1)·1
        return torch.batch_norm_backward_elemt(t, self._laid_out(z), zeros, ones, None, zeros, factor, one)

    def _laid_out(self, z: torch.Tensor) -> torch.Tensor:
        return z.contiguous(memory_format=self._layout)


def _by_channel(values: torch.Tensor) -> torch.Tensor:
    return values.view(1, -1, 1, 1)


@functools.cache
def _constants(channels: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Zeros and ones for every channel, and a count of 1."""
    zeros = torch.zeros(channels, dtype=dtype, device=device)
    return zeros, torch.ones_like(zeros), _count(1, device)


@functools.lru_cache(maxsize=256)
def _count(elements: int, device: torch.device) -> torch.Tensor:
    """The number as PyTorch's kernels take it."""
    return torch.full((1,), elements, dtype=torch.int32, device=device)
