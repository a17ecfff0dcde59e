"""Transposition of a matrix of bytes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qsync_kernels_triton.launching import Launch


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


_TILE = 128
_LAUNCH = Launch(_transpose, {"ROWS": _TILE, "COLUMNS": _TILE}, num_warps=8)


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
    _LAUNCH(grid, key, (x, out), (rows, columns))


def transposed_bytes(x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of ``x.t()`` for a contiguous matrix of one-byte elements."""
    out = torch.empty((x.shape[1], x.shape[0]), dtype=x.dtype, device=x.device)
    transpose_bytes(x, out)
    return out
