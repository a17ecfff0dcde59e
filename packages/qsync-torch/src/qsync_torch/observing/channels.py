"""Sums over the channels of an image, and images that are combined with a factor per channel, in one pass over memory each.

On a GPU they are the kernels of PyTorch's synchronized batch norm: functions that broadcast a factor per channel take three times
as long there.
"""

from __future__ import annotations

import functools

import torch


class Channels:
    """What batch norm's derivatives are made of, for one activation; z and t are other tensors of its shape.

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
        """Those of batch norm: by x, by its weight (Σ grad·x̂) and by its bias (Σ grad)."""
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
        # Only whether there is a weight matters; the sums that it would be multiplied with are not asked for.
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
        """t - factor·z; t is of this object's making, and not needed any more."""
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
    """As PyTorch's kernels take it."""
    return torch.full((1,), elements, dtype=torch.int32, device=device)
