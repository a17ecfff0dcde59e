"""What producers check of their operands, and how their kernels are cut to a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import attrs
import torch
import triton
from torch import Tensor

from qsync_kernels_triton.config import ProducerConfig
from qsync_kernels_triton.launching import signed_words
from qsync_kernels_triton.quantize.single import FORMAT_CODE, SOURCES

SUM_STRIP = 64
"""Channels of a tile of a kernel that sums over positions: a line of the cache in 16 bit.  Wider strips leave more partial sums."""
_LANE_OF_ODD = 8
_NARROWEST = 128
"""Columns, at least, of each tile where a row has several."""
MOST_PARTIALS = 1024
"""Partial sums, or maxima, that one program takes in at a time."""


def matrix_problems(names: str, tensors: Sequence[Tensor | None], shape: tuple[int, ...]) -> Iterator[str]:
    """Float tensors that are not float32, float16 or bfloat16 of the shape of the first, each a sentence."""
    for name, tensor in zip(names.split(), tensors, strict=True):
        if tensor is not None and (tensor.dtype not in SOURCES or tensor.shape != shape):
            yield f"{name} must be float32, float16 or bfloat16 of shape {shape}, got {tensor.dtype} {tuple(tensor.shape)}"


def vector_problems(names: str, tensors: Sequence[Tensor | None], length: int) -> Iterator[str]:
    """Vectors that are not ``length`` float32, each a sentence."""
    for name, tensor in zip(names.split(), tensors, strict=True):
        if tensor is not None and (tensor.dtype is not torch.float32 or tensor.numel() != length):
            yield f"{name} must be {length} float32, got {tensor.dtype} {tuple(tensor.shape)}"


def copy_problems(name: str, copy: Tensor | None, scale: Tensor | None, shape: tuple[int, ...], scales: str) -> Iterator[str]:
    """An 8-bit copy of another type or shape than the kernels write, or one that lacks its scales."""
    if copy is not None and (copy.dtype not in FORMAT_CODE or copy.shape != shape):
        yield f"{name} must be int8 or float8 of shape {shape}, got {copy.dtype} {tuple(copy.shape)}"
    if (copy is None) != (scale is None):
        yield f"{name} and {scales} come together, and one of them is None"


def saved_problems(x: Tensor, x_scale: Tensor | None, scales: int) -> Iterator[str]:
    """What the forward kept is neither floats, nor 8 bit with its scales."""
    if (x.dtype in FORMAT_CODE) != (x_scale is not None):
        yield f"x_scale goes with an x of 8 bit and with no other, and x is {x.dtype}"
    elif x.dtype not in FORMAT_CODE and x.dtype not in SOURCES:
        yield f"x must be float32, float16, bfloat16 or 8 bit, got {x.dtype}"
    yield from vector_problems("x_scale", [x_scale], scales)


def layout_problems(names: str, tensors: Sequence[Tensor | None], layout: torch.memory_format) -> Iterator[str]:
    """Outputs that are not dense in the layout, each a sentence."""
    said = "channels-last" if layout is torch.channels_last else "contiguous"
    for name, tensor in zip(names.split(), tensors, strict=True):
        if tensor is not None and not tensor.is_contiguous(memory_format=layout):
            yield f"{name} must be {said}, and has shape {tuple(tensor.shape)} with strides {tensor.stride()}"


def maxima_problems(
    name: str, maxima: Tensor | None, gradient: Tensor | None, multiplier: Tensor | None, columns: int
) -> Iterator[str]:
    """Where maxima of a gradient go, and what it is multiplied with for them."""
    if maxima is not None:
        if gradient is None:
            yield f"{name} is of a gradient that is not written"
        if maxima.dtype is not torch.float32 or maxima.ndim != 2 or maxima.shape[0] != 2 or not maxima.is_contiguous():
            yield f"{name} must be contiguous float32 of shape (2, P), got {maxima.dtype} {tuple(maxima.shape)}"
    if multiplier is not None and not multiplier.is_contiguous():
        yield f"a multiplier must be contiguous, and has strides {multiplier.stride()}"
    yield from vector_problems("multiplier", (multiplier,), columns)


def random_streams(seed: int, x_seed: int, offset: int | Tensor) -> tuple[Tensor | int | None, ...]:
    """The offset where it is a tensor, which kernels read when they run, and low and high words of both seeds and of the offset."""
    if isinstance(offset, Tensor):
        return (offset, *signed_words(seed), *signed_words(x_seed), 0, 0)
    return (None, *signed_words(seed), *signed_words(x_seed), *signed_words(offset))


class Cut(NamedTuple):
    """A matrix in memory, cut into tiles.

    Attributes:
        unit: 8 where rows begin at multiples of 8, so that loads are wide and calls of the generator are shared; else 1.
        rows, block: of a tile.
        tiles: groups of rows; strips: tiles beside each other.
        warps: of a program.
        held: tiles beside each other that a program has in registers, a whole row; 0 where it does not.
    """

    unit: int
    rows: int
    block: int
    tiles: int
    strips: int
    warps: int
    held: int

    @property
    def constants(self) -> dict[str, int]:
        """Constants that every kernel takes."""
        return {"UNIT": self.unit, "ROWS": self.rows, "BLOCK": self.block}

    @property
    def aligned(self) -> dict[str, bool]:
        """The constant of kernels that draw random numbers."""
        return {"ALIGNED": self.unit == 8}


def cut_freely(rows: int, length: int, widest: int, config: ProducerConfig) -> Cut:
    """Tiles of ``config.block`` elements, at most ``widest`` wide, and narrower where less of the last strip is empty so."""
    block = max(8, min(widest, config.block, triton.next_power_of_2(length)))
    while block > 32 and triton.cdiv(length, block) * block > length + length // 8:
        block //= 2
    tall = max(1, min(config.block // block, triton.next_power_of_2(rows)))
    return _cut(rows, length, tall, block, config)


def cut_by_rows(rows: int, length: int, longest: int, config: ProducerConfig) -> Cut:
    """Groups of whole rows, several where they are short; chunks of ``config.block`` of rows longer than ``longest``.

    A row that is held is one tile or, where less is empty so, three or five beside each other: 768 is three times 256.
    """
    if length > longest:
        return _cut(rows, length, 1, min(triton.next_power_of_2(length), config.block), config)
    widths = {held: max(_NARROWEST, triton.next_power_of_2(triton.cdiv(length, held))) for held in (3, 5)}
    widths[1] = max(8, triton.next_power_of_2(length))
    held = min(widths, key=lambda count: (count * widths[count], count))
    tall = max(1, min(_power_of_2(config.block // (held * widths[held])), triton.next_power_of_2(rows)))
    return _cut(rows, length, tall, widths[held], config, held)


def _cut(rows: int, length: int, tall: int, block: int, config: ProducerConfig, held: int = 0) -> Cut:
    unit = 8 if length % 8 == 0 else 1
    # Where each element has a call of the generator to itself, more of them do not fit the registers of a thread.
    lane = config.lane if unit == 8 else min(config.lane, _LANE_OF_ODD)
    warps = attrs.evolve(config, lane=lane).warps_of(tall * block * max(held, 1))
    return Cut(unit, tall, block, triton.cdiv(rows, tall), triton.cdiv(length, block), warps, held)


def _power_of_2(count: int) -> int:
    """The largest that is not above ``count``, at least 1."""
    return 1 << max(count, 1).bit_length() - 1


def programs_for(cut: Cut, per_multiprocessor: int, device: torch.device, strips: int | None = None) -> int:
    """Programs along the rows: so many to a multiprocessor in all, at most one a tile.  0: one a tile."""
    if per_multiprocessor == 0:
        return cut.tiles
    # Programs of fewer than eight warps leave room for as many more.
    wanted = multiprocessors(device) * per_multiprocessor * max(1, 8 // cut.warps)
    return max(1, min(cut.tiles, wanted // (cut.strips if strips is None else strips)))


def multiprocessors(device: torch.device) -> int:
    """Count the multiprocessors of a GPU; 1 elsewhere, where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
