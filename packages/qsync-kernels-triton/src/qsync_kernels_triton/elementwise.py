"""What is done to 8-bit copies besides multiplying them: matrices are transposed, saved copies are dequantized.

PyTorch moves one byte at a time, and took a fifth of a whole ResNet50 step on an H200 to dequantize so; these kernels move 16.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Parameters of kernels have no Python types: Triton traces them.
from __future__ import annotations

import torch
import triton
import triton.language as tl

from qsync_kernels_triton.launching import Launch

_TILE = 128
_BLOCK = 8192


@triton.jit
def _transpose(x_ptr, out_ptr, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """out[c, r] = x[r, c] for contiguous matrices; grid (tiles,)."""
    across = tl.cdiv(columns, COLUMNS)
    row = (tl.program_id(0) // across) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    inside_row, inside_column = row < rows, column < columns
    x = tl.load(
        x_ptr + row.to(tl.int64)[:, None] * columns + column[None, :], mask=inside_row[:, None] & inside_column[None, :], other=0
    )
    mask = inside_column[:, None] & inside_row[None, :]
    tl.store(out_ptr + column.to(tl.int64)[:, None] * rows + row[None, :], tl.trans(x), mask=mask)


@triton.jit
def dequantize(q_ptr, scale_ptr, out_ptr, numel, BLOCK: tl.constexpr):
    """out[i] = scale * q[i] in memory order; grid (blocks,)."""
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < numel
    value = tl.load(q_ptr + position, mask=inside, other=0.0).to(tl.float32) * tl.load(scale_ptr)
    tl.store(out_ptr + position, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def dequantize_rows(
    q_ptr, scale_ptr, column_ptr, out_ptr, rows, length, ROWS: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr
):
    """out[r, i] = scale[r] * q[r, i] for rows that follow each other in memory; grid (blocks of rows, blocks of a row).

    COLUMNS: times one number for each i.
    """
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    position = row.to(tl.int64)[:, None] * length + column[None, :]
    inside = (row < rows)[:, None] & (column < length)[None, :]
    scale = tl.load(scale_ptr + row, mask=row < rows, other=0.0)
    value = tl.load(q_ptr + position, mask=inside, other=0.0).to(tl.float32) * scale[:, None]
    if COLUMNS:
        value *= tl.load(column_ptr + column, mask=column < length, other=0.0)[None, :]
    tl.store(out_ptr + position, value.to(out_ptr.dtype.element_ty), mask=inside)


_ROW_BLOCK = 256
_LAUNCH_TRANSPOSE = Launch(_transpose, {"ROWS": _TILE, "COLUMNS": _TILE}, num_warps=8)
_LAUNCH_DEQUANTIZE = Launch(dequantize, {"BLOCK": _BLOCK}, num_warps=8)
_LAUNCH_DEQUANTIZE_ROWS, _LAUNCH_DEQUANTIZE_BOTH = (
    Launch(dequantize_rows, {"ROWS": _BLOCK // _ROW_BLOCK, "BLOCK": _ROW_BLOCK, "COLUMNS": columns}, num_warps=8)
    for columns in (False, True)
)


def transpose_bytes(x: torch.Tensor, out: torch.Tensor) -> None:
    """Write the transpose of a contiguous matrix of one-byte elements into a contiguous matrix, on the current stream.

    Args:
        x: (R, C), contiguous.
        out: (C, R), contiguous, of the same dtype.
    """
    rows, columns = x.shape
    if x.numel() == 0:
        return
    x, out = x.view(torch.int8), out.view(torch.int8)
    grid = (triton.cdiv(rows, _TILE) * triton.cdiv(columns, _TILE), 1, 1)
    key = (x.device.index, rows % 16 == 0, columns % 16 == 0, rows == 1, columns == 1)
    _LAUNCH_TRANSPOSE(grid, key, (x, out), (rows, columns))


def transposed_bytes(x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of ``x.t()`` for a contiguous matrix of one-byte elements."""
    out = torch.empty((x.shape[1], x.shape[0]), dtype=x.dtype, device=x.device)
    transpose_bytes(x, out)
    return out


def dequantized(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, column_scale: torch.Tensor | None = None) -> torch.Tensor:
    """``scale * q`` in ``dtype`` with the strides of ``q``, which must fill its memory; the product is rounded once.

    Args:
        q: int8 or float8, dense in any order of dimensions; with a scale for each index of the first one, that is the outermost.
        scale: float32, dense: one, or as many as the first dimension has.
        dtype: float32, float16 or bfloat16.
        column_scale: float32, dense, as many as the second dimension of a matrix has: multiplied too.
    """
    if column_scale is not None:
        q, scale = q.contiguous(), scale.expand(q.shape[0]).contiguous()
    out = torch.empty_like(q, dtype=dtype)
    numel, rows = q.numel(), scale.numel()
    if numel and (rows > 1 or column_scale is not None):
        length = numel // rows
        key = (q.device.index, q.dtype, dtype, rows % 16 == 0, length % 16 == 0, length == 1)
        grid = (triton.cdiv(rows, _BLOCK // _ROW_BLOCK), triton.cdiv(length, _ROW_BLOCK), 1)
        launch, columns = (_LAUNCH_DEQUANTIZE_ROWS, scale) if column_scale is None else (_LAUNCH_DEQUANTIZE_BOTH, column_scale)
        launch(grid, key, (q, scale, columns, out), (rows, length))
    elif numel:
        key = (q.device.index, q.dtype, dtype, numel % 16 == 0, numel == 1, numel > 2**31 - 1)
        _LAUNCH_DEQUANTIZE((triton.cdiv(numel, _BLOCK), 1, 1), key, (q, scale, out), (numel,))
    return out
