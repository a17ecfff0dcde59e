"""Gradients of a layer or RMS normalization in one pass over rows, and a tiny kernel that finishes the sums of γ's and β's.

With w = γ·g: ∂s = σ⁻¹·(w − mean(w) − x̂·mean(w·x̂)), ∂γ = Σ g·x̂, ∂β = Σ g.  Of an
RMS norm mean(w) is left out, and there is no β.  Each program adds up ∂γ and ∂β of its rows in registers
and leaves one partial sum a column: no atomics, so that the same operands give the same bits.  What limits is the way through one
group of rows, load, sums over rows, store; memory would take a third of the time (4 bytes read, 3 with x̂ in 8 bit, and 2 written).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
# Parameters of kernels have no Python types: Triton traces them.
from __future__ import annotations

import triton
import triton.language as tl

from qsync_kernels_triton.producers.layer_norm import vector_of


@triton.jit
def _tile(
    grad_ptr, x_ptr, weight_ptr, first, column, row, rows, length, mean, factor, WEIGHT: tl.constexpr, EIGHT_BIT: tl.constexpr
):  # fmt: skip
    """g, γ·g and x̂ of a tile, all 0 outside of the matrix; ``factor`` is σ⁻¹, or the scale of x̂ in 8 bit."""
    wanted = column < length
    inside = (row < rows)[:, None] & wanted[None, :]
    where = first[:, None] + column[None, :]
    g = tl.load(grad_ptr + where, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + where, mask=inside, other=0.0).to(tl.float32)
    if not EIGHT_BIT:
        x = tl.where(inside, x - mean[:, None], 0.0)
    return g, g * vector_of(weight_ptr, column, wanted, 1.0, WEIGHT), x * factor[:, None]


@triton.jit
def _write_gradient(w, x, grad_input_ptr, column, first, row, rows, length, mean_w, mean_product, rstd):
    gradient = (w - mean_w[:, None] - x * mean_product[:, None]) * rstd[:, None]
    inside = (row < rows)[:, None] & (column < length)[None, :]
    tl.store(grad_input_ptr + first[:, None] + column[None, :], gradient.to(grad_input_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "units"])
def layer_norm_gradient(
    grad_ptr, x_ptr, x_scale_ptr, mean_ptr, rstd_ptr, weight_ptr, grad_input_ptr, partial_ptr,
    rows: tl.int32, units: tl.int32,
    UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, HELD: tl.constexpr, WEIGHT: tl.constexpr,
    EIGHT_BIT: tl.constexpr, WRITE_INPUT: tl.constexpr, WRITE_SUMS: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """∂s, and partial sums (2, programs, length) of g·x̂ and (CENTERED: of a layer norm) g.

    Grid (programs,): each takes every programs-th group of ROWS rows.

    HELD tiles of BLOCK columns hold a row.  0: a row is walked, and a program's sums are in memory, which starts as zeros.
    """
    length, programs = units * UNIT, tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    at = partial_ptr + tl.program_id(0).to(tl.int64) * length
    kind = programs.to(tl.int64) * length
    products, totals = (), ()
    for _ in tl.static_range(HELD):
        zeros = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        products, totals = products + (zeros,), totals + (zeros,)  # noqa: RUF005  (Triton has no starred tuples)
    n = length.to(tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(rows, ROWS), programs):
        row = block * ROWS + tl.arange(0, ROWS)
        present = row < rows
        first = row.to(tl.int64) * length
        mean, rstd = tl.zeros((ROWS,), dtype=tl.float32), tl.load(rstd_ptr + row, mask=present, other=0.0)
        if CENTERED:
            mean = tl.load(mean_ptr + row, mask=present, other=0.0)
        factor = tl.load(x_scale_ptr + row, mask=present, other=0.0) if EIGHT_BIT else rstd
        sum_w, sum_product = tl.zeros((ROWS, BLOCK), dtype=tl.float32), tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        if HELD:
            ws, xs, with_products, with_totals = (), (), (), ()
            for part in tl.static_range(HELD):
                g, w, x = _tile(
                    grad_ptr, x_ptr, weight_ptr, first, part * BLOCK + columns, row, rows, length, mean, factor, WEIGHT, EIGHT_BIT
                )
                sum_w = sum_w + w if part else w
                sum_product = sum_product + w * x if part else w * x
                ws, xs = ws + (w,), xs + (x,)  # noqa: RUF005
                with_products, with_totals = with_products + (products[part] + g * x,), with_totals + (totals[part] + g,)  # noqa: RUF005
            products, totals = with_products, with_totals
        else:
            for begin in range(0, length, BLOCK):
                column = begin + columns
                g, w, x = _tile(grad_ptr, x_ptr, weight_ptr, first, column, row, rows, length, mean, factor, WEIGHT, EIGHT_BIT)
                sum_w += w
                sum_product += w * x
                if WRITE_SUMS:
                    wanted = column < length
                    product = tl.load(at + column, mask=wanted, other=0.0) + tl.sum(g * x, 0)
                    tl.store(at + column, product, mask=wanted)
                    if CENTERED:
                        total = tl.load(at + kind + column, mask=wanted, other=0.0) + tl.sum(g, 0)
                        tl.store(at + kind + column, total, mask=wanted)
        mean_w, mean_product = tl.zeros((ROWS,), dtype=tl.float32), tl.sum(sum_product, 1) / n
        if CENTERED:
            mean_w = tl.sum(sum_w, 1) / n
        if HELD:
            if WRITE_INPUT:
                for part in tl.static_range(HELD):
                    column = part * BLOCK + columns
                    _write_gradient(
                        ws[part], xs[part], grad_input_ptr, column, first, row, rows, length, mean_w, mean_product, rstd
                    )  # fmt: skip
        else:
            # The next rows' loads see what other threads of this program stored.
            tl.debug_barrier()
            if WRITE_INPUT:
                for begin in range(0, length, BLOCK):
                    column = begin + columns
                    g, w, x = _tile(grad_ptr, x_ptr, weight_ptr, first, column, row, rows, length, mean, factor, WEIGHT, EIGHT_BIT)
                    _write_gradient(w, x, grad_input_ptr, column, first, row, rows, length, mean_w, mean_product, rstd)
    if WRITE_SUMS:
        for part in tl.static_range(HELD):
            column = part * BLOCK + columns
            tl.store(at + column, tl.sum(products[part], 0), mask=column < length)
            if CENTERED:
                tl.store(at + kind + column, tl.sum(totals[part], 0), mask=column < length)
