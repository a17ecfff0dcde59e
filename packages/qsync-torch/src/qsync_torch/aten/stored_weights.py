"""Frozen weights in int8 or NF4, and what products read of them (docs/design/precision-semantics.md#stored-weights).

The reference for every device, in PyTorch's own operators.  Weights are worked through in parts, so that quantizing and
dequantizing one takes little memory beside what is read and written.

NF4 is what bitsandbytes 0.50 stores with double quantization: element and constant times the inverse of the largest magnitude of
their block, to the nearest code by the midpoints between codes; what is left over a whole number of blocks is divided instead.
(That library's kernel for a CPU takes the second nearest code for one constant in a thousand.)
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from qsync_core.errors import NumericsError
from qsync_core.ir.precision import INT8_BLOCK_COLUMNS, NF4_BLOCK, NF4_CONSTANTS, Precision, Storage
from qsync_core.kernels import nf4
from qsync_core.kernels.nf4 import NF4_CODES
from qsync_torch.aten.quantize import write_scale

_HALF_OF_CELLS = 128
"""Cells of a table of NF4's codes, a side of 0."""
_PART = 1 << 20
"""Elements that are worked on at once, a multiple of what shares a constant's scale."""
_SMALLEST = 1e-38
"""What the largest magnitude of an NF4 block counts at least."""


class StoredWeight(NamedTuple):
    """The tensors of a stored weight.

    Attributes:
        values: int8 of the weight's shape; of NF4 uint8 (⌈elements / 2⌉), the first of two elements in the upper bits.
        scale: float32: one a row (N); one a block (N, ⌈K / 128⌉); of NF4 one for each 256 constants.
        constants: of NF4, uint8 codes of the blocks' largest magnitudes less their mean.
        offset: of NF4, that mean: float32, no dimensions.
    """

    values: torch.Tensor
    scale: torch.Tensor
    constants: torch.Tensor | None = None
    offset: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(tensor.nbytes for tensor in self if tensor is not None)


def dynamic_codes(device: torch.device) -> torch.Tensor:
    """The values that codes of NF4's constants stand for, float32, on a device."""
    return _codes(8, device)[0]


@functools.cache
def _codes(storage_bits: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of a code, and the midpoints between them, on a device."""
    codes = torch.tensor(NF4_CODES if storage_bits == 4 else nf4.dynamic_codes(), dtype=torch.float32)
    return codes.to(device), ((codes[:-1] + codes[1:]) / 2).to(device)


@functools.cache
def _cells(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Give for each of 256 equal cells of [-1, 1], and for 1, NF4's code at the lower edge and the midpoint of two codes inside.

    No cell has two midpoints, and none has one nearer to an edge than 2e-4, so that rounding, which may take an element to the
    next cell, takes none to another code.  Where there is none it is infinite.
    """
    midpoints = _codes(4, torch.device("cpu"))[1]
    edges = torch.arange(-_HALF_OF_CELLS, _HALF_OF_CELLS + 1, dtype=torch.float32) / _HALF_OF_CELLS
    inside = torch.full_like(edges, math.inf)
    inside[((midpoints + 1) * _HALF_OF_CELLS).long()] = midpoints
    return torch.bucketize(edges, midpoints).to(device, torch.uint8), inside.to(device)


@functools.cache
def _pairs(device: torch.device) -> torch.Tensor:
    """The two elements of every byte of NF4: (256, 2)."""
    codes, byte = torch.tensor(NF4_CODES, dtype=torch.float32), torch.arange(256)
    return torch.stack([codes[byte >> 4], codes[byte & 15]], 1).to(device)


@torch.no_grad()
def quantize_weight(weight: torch.Tensor, storage: Storage) -> StoredWeight:
    """Quantize a weight to nearest.

    Args:
        weight: (N, ...) in a float format, output channels first, in any layout.
        storage: int8 by row or block, or NF4.

    Raises:
        NumericsError: when it holds NaN or infinity.
    """
    rows, columns = weight.shape[0], math.prod(weight.shape[1:])
    matrix = weight.detach().reshape(rows, columns)
    stored = _nf4(matrix.reshape(-1)) if storage is Storage.NF4 else _int8(matrix, storage)
    if not bool(stored.scale.isfinite().all()) or (stored.offset is not None and not bool(stored.offset.isfinite())):
        raise NumericsError(f"a weight of shape {list(weight.shape)} holds NaN or infinity, which {storage} cannot store")
    return stored if storage is Storage.NF4 else stored._replace(values=stored.values.view(weight.shape))


def empty_stored(shape: Sequence[int], storage: Storage, device: torch.device | str) -> StoredWeight:
    """The tensors of a stored weight of that shape, unset."""
    rows, columns = shape[0], math.prod(shape[1:])
    if storage is not Storage.NF4:
        scales = (rows,) if storage is Storage.INT8_ROW else (rows, -(-columns // INT8_BLOCK_COLUMNS))
        return StoredWeight(
            torch.empty(shape, dtype=torch.int8, device=device), torch.empty(scales, dtype=torch.float32, device=device)
        )
    constants = -(-rows * columns // NF4_BLOCK)
    return StoredWeight(
        torch.empty(-(-rows * columns // 2), dtype=torch.uint8, device=device),
        torch.empty(-(-constants // NF4_CONSTANTS), dtype=torch.float32, device=device),
        torch.empty(constants, dtype=torch.uint8, device=device),
        torch.empty((), dtype=torch.float32, device=device),
    )


def _int8(matrix: torch.Tensor, storage: Storage) -> StoredWeight:
    """int8 of (N, K), with scales as :func:`qsync_torch.aten.quantize.write_scale` has them."""
    rows, columns = matrix.shape
    block = columns if storage is Storage.INT8_ROW else INT8_BLOCK_COLUMNS
    stored = empty_stored(matrix.shape, storage, matrix.device)
    scales = stored.scale if stored.scale.ndim == 2 else stored.scale[:, None]
    if not columns:
        return stored._replace(scale=torch.ones_like(stored.scale))  # that of zeros, as rows have one without elements too
    for part in _parts(rows, max(1, _PART // columns)):
        wide = matrix[part].float()
        for index, first in enumerate(range(0, columns, block)):
            group = wide[:, first : first + block]
            scale = torch.empty(group.shape[0], dtype=torch.float32, device=matrix.device)
            write_scale(group.abs().amax(1), Precision.INT8, scale)
            scales[part, index] = scale
            stored.values[part, first : first + block] = (group / scale[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return stored


def _nf4(elements: torch.Tensor) -> StoredWeight:
    stored = empty_stored((1, elements.numel()), Storage.NF4, elements.device)
    assert stored.constants is not None
    assert stored.offset is not None
    largest = torch.empty(stored.constants.numel(), dtype=torch.float32, device=elements.device)
    for part in _parts(elements.numel(), _PART):
        codes, own = _nearest(elements[part].float(), NF4_BLOCK, 4)
        largest[part.start // NF4_BLOCK : part.start // NF4_BLOCK + own.numel()] = own
        if codes.numel() % 2:
            codes = torch.cat([codes, codes.new_full((1,), NF4_CODES.index(0.0))])
        stored.values[part.start // 2 : part.start // 2 + codes.numel() // 2] = (codes[::2] << 4) | codes[1::2]
    stored.offset.copy_(largest.mean() if largest.numel() else largest.new_zeros(()))
    codes, scale = _nearest(largest - stored.offset, NF4_CONSTANTS, 8)
    stored.constants.copy_(codes)
    stored.scale.copy_(scale)
    return stored


def _nearest(values: torch.Tensor, block: int, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest codes (uint8) of float32 elements over the largest magnitude of their block, and these magnitudes."""
    whole = values.numel() - values.numel() % block
    blocks, rest = values[:whole].view(-1, block), values[whole:]
    largest = blocks.abs().amax(1) if whole else values.new_empty(0)
    scaled = (blocks * (1.0 / largest.clamp(min=_SMALLEST))[:, None]).view(-1)
    if rest.numel():
        last = rest.abs().amax().clamp(min=_SMALLEST)
        largest, scaled = torch.cat([largest, last[None]]), torch.cat([scaled, rest / last])
    scaled.clamp_(-1, 1).nan_to_num_()  # whose block's magnitude is refused
    if bits == 8:
        return torch.bucketize(scaled, _codes(bits, values.device)[1], out_int32=True).to(torch.uint8), largest
    lower, midpoint = _cells(values.device)  # a quarter of the time of looking among the midpoints
    cell = (scaled * _HALF_OF_CELLS).add_(_HALF_OF_CELLS).to(torch.int32)
    above = scaled > midpoint.index_select(0, cell)
    return lower.index_select(0, cell).add_(above.view(torch.uint8)), largest


def _parts(count: int, size: int) -> Iterator[slice]:
    return (slice(first, min(first + size, count)) for first in range(0, count, size))


def dequantize_weight(stored: StoredWeight, storage: Storage, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The weight that products read: code times scale in float32, rounded once to ``dtype``.

    Args:
        stored: as :func:`quantize_weight` gives it.
        storage: how.
        shape: of the weight.
        dtype: a float format.
    """
    out = torch.empty(tuple(shape), dtype=dtype, device=stored.values.device)
    _write(stored, storage, out)
    return out


def build_dequantize(storage: Storage) -> Callable[..., None]:
    """The kernel ``dequantize(values, scale, constants, mean, out)`` of :func:`dequantize_weight`, into a contiguous ``out``."""

    def dequantize(
        values: torch.Tensor, scale: torch.Tensor, constants: torch.Tensor | None, mean: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        stored = StoredWeight(values, scale, constants, mean)
        if storage is Storage.NF4 and values.is_cuda and out.numel() and _has_bitsandbytes():
            _write_by_bitsandbytes(stored, out)
        else:
            _write(stored, storage, out)

    return dequantize


@functools.cache
def _has_bitsandbytes() -> bool:
    """Whether its kernels can be asked: they compute the same numbers in three passes over a GPU's memory, this file in nine."""
    try:
        importlib.import_module("bitsandbytes")
    except Exception:  # which raises what it likes where its library of CUDA kernels is another one
        return False
    library = torch.ops.bitsandbytes
    known = all(hasattr(library, name) for name in ("dequantize_4bit", "dequantize_blockwise"))
    return known and "out" in library.dequantize_4bit.overloads()


def _write_by_bitsandbytes(stored: StoredWeight, out: torch.Tensor) -> None:
    library, codes = torch.ops.bitsandbytes, dynamic_codes(out.device)
    largest = library.dequantize_blockwise(stored.constants, stored.scale, codes, NF4_CONSTANTS, torch.float32) + stored.offset
    library.dequantize_4bit.out(stored.values, largest, NF4_BLOCK, "nf4", list(out.shape), out.dtype, out=out)


def _write(stored: StoredWeight, storage: Storage, out: torch.Tensor) -> None:
    if storage is Storage.NF4:
        _write_nf4(stored, out.view(-1))
    elif out.numel():
        rows = out.shape[0]
        _write_int8(stored.values.reshape(rows, -1), stored.scale.view(rows, -1), out.view(rows, -1))


def _write_int8(values: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    rows, columns = values.shape
    block = max(1, columns) if scales.shape[1] == 1 else INT8_BLOCK_COLUMNS
    for part in _parts(rows, max(1, _part_on(out.device) // max(1, columns))):
        _write_blocks(values[part], scales[part], block, out[part])


def _write_nf4(stored: StoredWeight, out: torch.Tensor) -> None:
    assert stored.constants is not None
    assert stored.offset is not None
    count, pairs = stored.constants.numel(), _pairs(out.device)
    largest = dynamic_codes(out.device)[stored.constants.int()]
    largest = (_in_blocks(largest, NF4_CONSTANTS) * stored.scale[:, None]).view(-1)[:count] + stored.offset
    for part in _parts(out.numel(), _part_on(out.device)):
        packed = stored.values[part.start // 2 : -(-part.stop // 2)]
        codes = pairs.index_select(0, packed.int()).view(-1)[: part.stop - part.start]
        constants = largest[part.start // NF4_BLOCK : -(-part.stop // NF4_BLOCK)]
        _write_blocks(codes[None], constants[None], NF4_BLOCK, out[None, part])


def _part_on(device: torch.device) -> int:
    """Elements that are dequantized at once: on a GPU, where each part is a launch or three, more of them."""
    return _PART << 2 if device.type == "cuda" else _PART


def _write_blocks(codes: torch.Tensor, scales: torch.Tensor, block: int, out: torch.Tensor) -> None:
    """Write blocks of columns, of which the last may be shorter, times their scales."""
    whole, blocks = codes.shape[1] - codes.shape[1] % block, (-1, block)
    if whole:
        wide, target = codes[:, :whole].unflatten(1, blocks), out[:, :whole].unflatten(1, blocks)
        _write_scaled(wide, scales[:, : whole // block, None], target)
    if whole < codes.shape[1]:
        _write_scaled(codes[:, whole:], scales[:, -1:], out[:, whole:])


def _write_scaled(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """Multiply in float32 and round once; a GPU does it in one pass, where a CPU would hold two copies in float32."""
    if out.is_cuda:
        torch.mul(codes, scales, out=out)
    else:
        out.copy_(codes.float().mul_(scales))


def _in_blocks(values: torch.Tensor, block: int) -> torch.Tensor:
    """(blocks, block), the last one filled up with zeros."""
    if missing := -values.numel() % block:
        values = torch.cat([values, values.new_zeros(missing)])
    return values.view(-1, block)
