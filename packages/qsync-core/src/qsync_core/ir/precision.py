"""The precision lattice: which number formats operators can run in, and how they promote.

The order is ``int8 < float8_e4m3fn < {float16, bfloat16} < float32``.  float16 and bfloat16 are not comparable: neither
represents the other's values, so their join is float32 (as in ``torch.promote_types``).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

MAX_CONTRACTION = (2**31 - 1) // 127**2
"""Longest contraction of int8 values in -127..127 whose int32 sum cannot overflow."""


class Precision(enum.StrEnum):
    """A number format.  The value is the name that torch, plans and people use."""

    INT8 = "int8"
    FLOAT8_E4M3FN = "float8_e4m3fn"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"

    @property
    def nbytes(self) -> int:
        """Bytes an element takes in memory."""
        return _FACTS[self].nbytes

    @property
    def is_fixed_point(self) -> bool:
        """True for int8: values are ``scale * integer``."""
        return self is Precision.INT8

    @property
    def needs_scale(self) -> bool:
        """True for the 8-bit formats: casting to them needs the tensor's range first."""
        return self in (Precision.INT8, Precision.FLOAT8_E4M3FN)

    @property
    def mantissa_bits(self) -> int:
        """Stored mantissa bits k of a floating-point format (10 for float16, not the paper's 9).

        See docs/design/indicator.md#element-variance.

        Raises:
            ValueError: for int8, which has no mantissa.
        """
        if self.is_fixed_point:
            raise ValueError("int8 is a fixed-point format and has no mantissa")
        return _FACTS[self].mantissa_bits

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number; below it the spacing of values stays constant (subnormals)."""
        if self.is_fixed_point:
            raise ValueError("int8 is a fixed-point format and has no exponent")
        return _FACTS[self].min_exponent


class _Facts(NamedTuple):
    nbytes: int
    level: int
    """The place in the lattice's order."""
    mantissa_bits: int = 0
    min_exponent: int = 0


_FACTS = {
    Precision.INT8: _Facts(1, 0),
    Precision.FLOAT8_E4M3FN: _Facts(1, 1, 3, -6),
    Precision.BFLOAT16: _Facts(2, 2, 7, -126),
    Precision.FLOAT16: _Facts(2, 2, 10, -14),
    Precision.FLOAT32: _Facts(4, 3, 23, -126),
}


def join(a: Precision, b: Precision) -> Precision:
    """The narrowest format that is at least as wide as both (the lattice's least upper bound)."""
    if a is b:
        return a
    if _FACTS[a].level == _FACTS[b].level:
        return Precision.FLOAT32
    return a if _FACTS[a].level > _FACTS[b].level else b


def promote(*precisions: Precision) -> Precision:
    """The format a precision-dependent operator runs in, given the formats of its inputs.

    See docs/design/precision-semantics.md#operator-classes.

    Raises:
        ValueError: when called without arguments.
    """
    if not precisions:
        raise ValueError("promote() needs at least one precision")
    return reduce(join, precisions)


class Rounding(enum.StrEnum):
    """How a cast to an 8-bit format picks between the two neighbouring values.

    Float casts of the hardware (float32 to bfloat16 and so on) are always ``NEAREST``.
    """

    STOCHASTIC = "stochastic"
    NEAREST = "nearest"
    FLOOR = "floor"


class Granularity(enum.StrEnum):
    """How many scales a quantized tensor has."""

    PER_TENSOR = "tensor"
    PER_CHANNEL = "channel"
    """One scale per output channel (dimension 0 of a linear or convolution weight)."""
    PER_ROW = "row"
    """One scale per row of the flattened 2-d activation."""

    def scale_count(self, shape: Sequence[int]) -> int:
        """How many scales a tensor of that shape has."""
        if self is Granularity.PER_TENSOR:
            return 1
        return shape[0] if self is Granularity.PER_CHANNEL else math.prod(shape[:-1])

    @property
    def scale_of_zeros(self) -> float:
        """The symmetric scale of a group of zeros.

        Gradients are multiplied by the scales of the weight's channels and of the activation's rows.  That of a row of zeros, of
        which nothing depends, is to be small beside the others'.  A channel of zeros has a gradient of its own, so its scale is of
        the order of trained weights' scales: a much larger one takes the range of others, under a much smaller one it has none.
        """
        return {Granularity.PER_CHANNEL: 2.0**-11, Granularity.PER_ROW: 2.0**-126}.get(self, 1.0)


INT8_BLOCK_COLUMNS = 128
"""Columns of a row that share a scale in ``int8-block``."""
NF4_BLOCK = 64
"""Consecutive elements, over the ends of rows, that share a constant (their largest magnitude) in ``nf4``."""
NF4_CONSTANTS = 256
"""Consecutive constants that share a scale, as those of ``nf4`` are quantized in turn."""
_FLOAT32_BYTES = 4


class Storage(enum.StrEnum):
    """How a frozen weight is stored.  The value is what plans and people write, ``;store=nf4``.

    A stored weight is a matrix with a row for each output channel, (N, K) of a linear and (O, C / groups · taps) of a convolution.
    It is quantized once, to nearest, so that its error is the same in every step
    (docs/design/precision-semantics.md#stored-weights).  How products read it is in :mod:`qsync_core.ir.semantics`.
    """

    AS_IS = "as-is"
    """The format in which the script has it."""
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
