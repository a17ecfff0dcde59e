"""In which format a weight that is not trained lies in memory, and how many bytes that takes.

A stored weight is a matrix with a row for each output channel, (N, K) of a linear and (O, C / groups · taps) of a convolution.  It
is quantized once, to nearest, so that its error is the same in every step (docs/design/precision-semantics.md#stored-weights).
How products read it is in :mod:`qsync_core.ir.semantics`.
"""

from __future__ import annotations

import enum

INT8_BLOCK_COLUMNS = 128
"""Columns of a row that share a scale in ``int8-block``."""
NF4_BLOCK = 64
"""Consecutive elements, over the ends of rows, that share a constant (their largest magnitude) in ``nf4``."""
NF4_CONSTANTS = 256
"""Consecutive constants that share a scale, as those of ``nf4`` are quantized in turn."""
_FLOAT32_BYTES = 4


class Storage(enum.StrEnum):
    """How a frozen weight is stored.  The value is what plans and people write, ``;store=nf4``."""

    AS_IS = "as-is"
    """In the format in which the script has it."""
    INT8_ROW = "int8-row"
    """int8 in -127..127, with a float32 scale for each row; an int8 product reads it as its operand."""
    INT8_BLOCK = "int8-block"
    """int8 in -127..127, with a float32 scale for each 128 columns of a row."""
    NF4 = "nf4"
    """4 bits, the normal quantiles of QLoRA (Dettmers et al. 2023, section 3 and appendix E), with a constant for each 64 elements,
    which are stored as 8-bit codes with a float32 scale for each 256 and one float32 offset: what bitsandbytes calls ``nf4`` with
    double quantization."""

    @property
    def is_quantized(self) -> bool:
        """Whether it differs from what the script has."""
        return self is not Storage.AS_IS

    def nbytes(self, rows: int, columns: int, element_bytes: int) -> int:
        """Bytes of a stored weight with its scales and constants; tables that all weights share are not counted.

        Args:
            rows, columns: of the matrix.
            element_bytes: of the format in which the script has it.
        """
        numel = rows * columns
        match self:
            case Storage.INT8_ROW:
                return numel + _FLOAT32_BYTES * rows
            case Storage.INT8_BLOCK:
                return numel + _FLOAT32_BYTES * rows * -(-columns // INT8_BLOCK_COLUMNS)
            case Storage.NF4:
                constants = -(-numel // NF4_BLOCK)
                return -(-numel // 2) + constants + _FLOAT32_BYTES * (-(-constants // NF4_CONSTANTS) + 1)
            case Storage.AS_IS:
                return numel * element_bytes
