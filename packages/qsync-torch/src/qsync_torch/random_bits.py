"""Counter-based random numbers for stochastic rounding: element i of stream (seed, offset) is a pure function of the three.

Nothing is stored between calls and nothing depends on the number of threads, so a recomputed forward (gradient checkpointing) draws
the same bits.  The generator is MurmurHash3's 32-bit finaliser over the element's index with a 64-bit key put in between its
rounds; every 32-bit word gives two 16-bit draws.  ``torch.rand`` on a CPU is a serial Mersenne twister and several times slower.
"""

from __future__ import annotations

import functools

import torch

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B1
_FMIX_1 = 0x85EBCA6B
_FMIX_2 = 0xC2B2AE35
DRAW_LEVELS = 65536
"""A draw is one of this many equally likely values; the mean error of a rounding is below 1 / (2 * DRAW_LEVELS) of a step."""


def _signed(word: int) -> int:
    """A 32-bit word as the int32 of the same bits."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >= 1 << 31 else word


def _mix64(value: int) -> int:
    """SplitMix64's finaliser: a bijection of 64-bit words in which every input bit moves every output bit."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def stream_key(seed: int, *parts: int) -> int:
    """A 63-bit key from a seed and further integers (operator, operand, step, rank); different inputs give unrelated keys."""
    key = _mix64(seed & _MASK64)
    for part in parts:
        key = _mix64(key ^ (part & _MASK64))
    return key >> 1


@functools.lru_cache(maxsize=8)
def _indices(words: int, device: torch.device) -> torch.Tensor:
    return torch.arange(words, dtype=torch.int32, device=device).mul_(_signed(_GOLDEN))


def random_int16(numel: int, seed: int, offset: int, start: int = 0, *, device: torch.device | str = "cpu") -> torch.Tensor:
    """``numel`` uniform int16 draws, elements ``start ...`` of the stream.

    Args:
        numel: how many.
        seed: of the run; offset: which stream of it (see :func:`stream_key`).
        start: index of the first element, an even number.
        device: where to make them.

    Returns:
        An int16 tensor of shape ``(numel,)``, uniform over -32768..32767.
    """
    if start % 2:
        raise ValueError(f"a block of random numbers starts at an even element, got {start}")
    key = stream_key(seed, offset)
    words = (numel + 1) // 2
    base = _indices(words, torch.device(device))
    shift = _signed(key + (start // 2) * _GOLDEN)
    h = base + shift
    t = torch.bitwise_right_shift(h, 16)
    h.bitwise_xor_(t.bitwise_and_(0xFFFF)).mul_(_signed(_FMIX_1)).bitwise_xor_(_signed(key >> 31))
    torch.bitwise_right_shift(h, 13, out=t)
    h.bitwise_xor_(t.bitwise_and_(0x7FFFF)).mul_(_signed(_FMIX_2))
    torch.bitwise_right_shift(h, 16, out=t)
    h.bitwise_xor_(t.bitwise_and_(0xFFFF))
    return h.view(torch.int16)[:numel]
