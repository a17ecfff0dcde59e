"""Outputs that kernels write into, surrounded by memory that they must leave alone."""

from __future__ import annotations

import math

import torch

_MARGIN = 1 << 10
"""Elements before and after an output; a multiple of every alignment that kernels ask for."""
_SENTINEL = 96
"""A value that every output format holds."""


class Outputs:
    """Allocates outputs, and afterwards tells whether anything around them changed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._guarded: list[tuple[torch.Tensor, int]] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, *, channels_last: bool = False) -> torch.Tensor:
        """An output: dense, row-major or channels-last, filled with values that no kernel writes by chance."""
        numel = math.prod(shape)
        memory = torch.full((numel + 2 * _MARGIN,), _SENTINEL, dtype=torch.float32, device=self._device).to(dtype)
        self._guarded.append((memory, numel))
        part = memory[_MARGIN : _MARGIN + numel]
        if not channels_last:
            return part.view(shape)
        batch, channels, height, width = shape
        return part.view(batch, height, width, channels).permute(0, 3, 1, 2)

    def like(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """An output with the shape and the strides of a dense tensor."""
        part = self.empty((x.numel(),), dtype)
        return part.as_strided(x.shape, x.stride(), part.storage_offset())

    def check(self) -> None:
        """Fail where a kernel wrote outside its output."""
        for memory, numel in self._guarded:
            around = torch.cat([memory[:_MARGIN], memory[_MARGIN + numel :]])
            changed = int((around.to(torch.float32) != _SENTINEL).sum())
            assert not changed, f"the kernel wrote {changed} elements outside its output"
