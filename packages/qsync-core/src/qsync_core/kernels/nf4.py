"""What the codes of NF4 stand for (docs/design/precision-semantics.md#stored-weights)."""

from __future__ import annotations

import functools
import itertools
import struct

NF4_CODES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The 16 values of NF4, quantiles of a normal distribution with an exact 0: Dettmers et al., QLoRA (2023), appendix E."""


@functools.cache
def dynamic_codes() -> tuple[float, ...]:
    """The 256 values of the dynamic 8-bit format, sorted: Dettmers, 8-Bit Approximations for Parallelism in Deep Learning (2015).

    Powers of ten times midpoints between equally spaced fractions, in float32 as bitsandbytes has them, to the last bit.
    """
    values, least = [0.0, 1.0], _float32(0.1)
    for exponent in range(7):
        count = 2**exponent
        step, power = _float32((1.0 - least) / count), _float32(10.0 ** (exponent - 6))
        edges = [_float32(least + step * i if 2 * i < count + 1 else 1.0 - step * (count - i)) for i in range(count + 1)]
        middles = [_float32(power * _float32((a + b) / 2)) for a, b in itertools.pairwise(edges)]
        values += [sign * middle for middle in middles for sign in (1.0, -1.0)]
    return tuple(sorted(values))


def _float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])
