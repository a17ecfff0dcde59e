"""Quantization in numpy, written from its definition: what the kernels must give, bit for bit."""

from __future__ import annotations

import numpy as np
import torch

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
MANTISSA = {"float8_e4m3fn": 3, "float8_e5m2": 2}
MIN_EXPONENT = {"float8_e4m3fn": -6, "float8_e5m2": -14}

# Philox 4x32-10 as published (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)


def philox(seed, call, stream):
    """The four output words, as uint32, for the counters (call low, call high, stream low, stream high)."""
    call = np.asarray(call, dtype=np.uint64)
    c0, c1 = call & _LOW, call >> np.uint64(32)
    stream = np.asarray(stream, dtype=np.uint64)
    c2, c3 = np.zeros_like(c0) + (stream & _LOW), np.zeros_like(c0) + (stream >> np.uint64(32))
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        a, b = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (b >> np.uint64(32)) ^ c1 ^ np.uint64(k0), b & _LOW, (a >> np.uint64(32)) ^ c3 ^ np.uint64(k1), a & _LOW
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    return tuple(word.astype(np.uint32) for word in (c0, c1, c2, c3))


def thresholds(seed, position, stream):
    """Threshold number ``position`` of a stream: (h + 1/2) / 65536 in float32, exactly."""
    position = np.asarray(position, dtype=np.uint64)
    words = np.stack(philox(seed, position >> np.uint64(3), stream))
    word = np.take_along_axis(words.reshape(4, -1), ((position.reshape(1, -1) >> np.uint64(1)) & np.uint64(3)).astype(np.int64), 0)
    half = np.where(position.reshape(-1) & np.uint64(1), word[0] >> 16, word[0] & 0xFFFF)
    return ((half.astype(np.float32) + np.float32(0.5)) / np.float32(65536)).reshape(position.shape)


def scales(rows, form="int8", of_zeros=1.0):
    """One scale for each row of a float32 matrix."""
    with np.errstate(invalid="ignore", over="ignore"):
        absmax = np.abs(rows).max(axis=1)
        absmax = np.where(np.isnan(absmax), np.float32(np.inf), absmax).astype(np.float32)
        scale = (absmax / np.float32(LARGEST[form])).astype(np.float32)
    return np.where(absmax == 0, np.float32(of_zeros), np.maximum(scale, np.float32(2.0**-126)))


def inverses(rows, scale, form):
    """What stochastic rounding multiplies by: 1 / scale, a little less where the largest value would exceed 127."""
    inverse = np.float32(1) / scale
    too_large = np.abs(rows).max(axis=1, keepdims=True) * inverse > np.float32(127)
    return np.where(too_large & (form == "int8"), inverse * np.float32(1 - 2.0**-21), inverse)


def checksums(x, rows):
    """Sums of the bit patterns of each row of a torch tensor of floats, as numbers in -2**31..2**31-1."""
    bits = x.reshape(rows, -1).view({4: torch.int32, 2: torch.int16}[x.element_size()]).numpy().astype(object)
    return [(sum(row) + (1 << 31)) % (1 << 32) - (1 << 31) for row in bits.tolist()]


def stream_of(offset, checksum):
    """Which random numbers are taken: ``offset + 0x9E3779B900000000 * checksum``, modulo 2**64."""
    return (offset + 0x9E3779B900000000 * checksum) % (1 << 64)


def signed(stream):
    """The int64 of the same bits."""
    return stream - (1 << 64) if stream >= 1 << 63 else stream


def quantize(rows, rounding, form="int8", seed=0, streams=(0,), position=None, of_zeros=1.0):
    """Values (as float32) and scales of a float32 matrix, one scale and one stream per row; ``position``: of its elements."""
    scale = scales(rows, form, of_zeros)[:, None]
    spacing = np.float32(1)
    y = rows * inverses(rows, scale, form) if rounding == "stochastic" else rows / scale
    if form != "int8":
        _, exponent = np.frexp(y)
        exponent = np.maximum(exponent - 1, MIN_EXPONENT[form])
        spacing = np.ldexp(np.float32(1), exponent - MANTISSA[form]).astype(np.float32)
        y = y / spacing
    if rounding == "nearest":
        q = np.rint(y)
    elif rounding == "floor":
        q = np.floor(y)
    else:
        position = np.arange(rows.size, dtype=np.uint64).reshape(rows.shape) if position is None else position
        # Adding the centred threshold and rounding to nearest is a floor of y + threshold.
        q = np.rint(
            (y + (thresholds(seed, position, np.array(streams, dtype=np.uint64)[:, None]) - np.float32(0.5))).astype(np.float32)
        )
    largest = np.float32(LARGEST[form])
    return np.clip((q * spacing).astype(np.float32), -largest, largest), scale[:, 0]
