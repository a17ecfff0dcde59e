"""The same matrix in different memory layouts, and random 8-bit operands."""

from __future__ import annotations

import torch

LAYOUTS = ("row-major", "column-major", "padded rows", "every other column")


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
