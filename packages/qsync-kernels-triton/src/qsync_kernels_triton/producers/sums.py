"""The end of sums that many programs share: each leaves partial sums, and a second kernel adds them, always in one order."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Parameters of kernels have no Python types: Triton traces them.
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["programs", "columns"])
def finish_sums(
    partial_ptr, first_ptr, second_ptr, programs: tl.int32, columns: tl.int32, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Sums over programs of partials (2, programs, columns), the first into one vector, the second into another.

    Grid (blocks of columns, 2).
    """
    column, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, ROWS)
    wanted = column < columns
    base = partial_ptr + tl.program_id(1).to(tl.int64) * programs * columns + column[None, :]
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in range(0, programs, ROWS):
        inside = (start + row < programs)[:, None] & wanted[None, :]
        total += tl.load(base + (start + row).to(tl.int64)[:, None] * columns, mask=inside, other=0.0)
    if tl.program_id(1) == 0:
        tl.store(first_ptr + column, tl.sum(total, 0), mask=wanted)
    else:
        tl.store(second_ptr + column, tl.sum(total, 0), mask=wanted)
