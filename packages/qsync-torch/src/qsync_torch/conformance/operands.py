"""What kernels get and what they write into: operands in every memory layout, and outputs inside memory that must not change."""

from __future__ import annotations

import math

import torch

LAYOUTS = ("row-major", "column-major", "padded rows", "every other column")
STRIDES_OF_ONES = (0, 1, 7, 1 << 20)
"""What the stride of a dimension of size 1 may be: ``is_contiguous()`` is true whatever it is."""
_MARGIN = 1 << 10
"""Elements before and after an output; a multiple of every alignment that kernels ask for."""
_SENTINEL = 96
"""A value that every output format holds."""


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """A matrix with the values of ``x`` and other strides; operands may come with any."""
    if layout == "row-major":
        return x.contiguous()
    if layout == "column-major":
        return x.t().contiguous().t()
    rows, columns = x.shape
    if layout == "padded rows":
        wide = torch.zeros((rows, columns + 16), dtype=x.dtype, device=x.device)
        wide[:, :columns] = x
        return wide[:, :columns]
    spread = torch.zeros((rows, columns, 2), dtype=x.dtype, device=x.device)
    spread[:, :, 0] = x
    return spread[:, :, 0]


def with_ones_of_stride(x: torch.Tensor, stride: int) -> torch.Tensor:
    """The values of a dense tensor, whose dimensions of size 1 have that stride, in memory between other numbers."""
    memory = torch.full((x.numel() + 2 * _MARGIN,), _SENTINEL, dtype=torch.float32, device=x.device).to(x.dtype)
    strides = [stride if size == 1 else own for size, own in zip(x.shape, x.stride(), strict=True)]
    return memory.as_strided(x.shape, strides, _MARGIN).copy_(x)


def described(x: torch.Tensor) -> str:
    """Format, shape and strides, all that is needed to make such an operand."""
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)} of strides {x.stride()}"


def dense(x: torch.Tensor) -> torch.Tensor:
    """The tensor as kernels get it where strides are not theirs to choose: row-major, images and filters channels-last."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if x.dim() > 2 else x


def integers(shape: tuple[int, ...], device: torch.device, seed: int) -> torch.Tensor:
    """int8 values over the whole symmetric range, its ends included."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)
    flat = x.view(-1)
    if flat.numel():
        flat[0], flat[-1] = 127, -127
    return x.to(device)


def large_integers(shape: tuple[int, ...], device: torch.device, seed: int) -> torch.Tensor:
    """int8 values of one sign, 64..127: their sums of products grow with every term, soon beyond what float32 holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(64, 128, shape, generator=generator, dtype=torch.int8).to(device)


def floats(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    """Standard normal values."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def powers_of_two(count: int, device: torch.device) -> torch.Tensor:
    """Scales whose products with integers are exact in float32."""
    return torch.exp2((torch.arange(count) % 7 - 3).to(torch.float32)).to(device)


def between_others(x: torch.Tensor) -> torch.Tensor:
    """A vector with the values of ``x`` and a stride of 3: a column of a matrix whose other columns hold other numbers."""
    spread = torch.full((x.numel(), 3), 1e6, dtype=x.dtype, device=x.device)
    spread[:, 0] = x
    return spread[:, 0]


def is_untouched(x: torch.Tensor) -> bool:
    """Whether an output holds what it was filled with."""
    return bool(x.numel()) and bool((x.to(torch.float32) == _SENTINEL).all())


class Outputs:
    """Allocates outputs, and checks afterwards that nothing around them changed."""

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
        batch, channels, *image = shape
        return part.view(batch, *image, channels).movedim(-1, 1)

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
