"""Counter-based random numbers for stochastic rounding: element i of stream (seed, stream) is a pure function of the three.

What is rounded decides which stream it takes (:func:`stream_of`): rounding is a pure function of seed, offset and data.

Nothing is stored between calls and nothing depends on the number of threads, so a recomputed forward (gradient checkpointing) draws
the same bits.  The generator is MurmurHash3's 32-bit finaliser over the element's index with a 64-bit key put in between its
rounds; every 32-bit word gives two 16-bit draws.  ``torch.rand`` on a CPU is a serial Mersenne twister and several times slower.

The offset may be a tensor.  Then the key is worked out on its device, when the kernels run: a replayed CUDA graph takes the number
that is there by then.  The bits are those of the number.
"""

from __future__ import annotations

import functools
import threading

import torch

from qsync_core.kernels.launches import HERE

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B1
_FMIX_1 = 0x85EBCA6B
_FMIX_2 = 0xC2B2AE35
_BYTES = 4
_KEPT_WORDS = 1 << 17
"""Larger scratch memory than this is not kept."""


def _signed(word: int) -> int:
    """A 32-bit word as the int32 of the same bits."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >= 1 << 31 else word


def _signed64(word: int) -> int:
    """A 64-bit word as the int64 of the same bits."""
    return word - (1 << 64) if word >= 1 << 63 else word


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


Offset = int | torch.Tensor
"""An offset or a stream: a number, or one int64 that holds it when kernels run."""
_WEIGHT = 0x9E3779B9 << 32
"""What a checksum is multiplied by: 2**32 times an odd number, so that different checksums give different streams, and parts of a
sum that wraps around at 32 bits may be added up in 64."""
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def checksum(x: torch.Tensor) -> torch.Tensor:
    """Sum up the bit patterns of a tensor, as signed integers of their width, in one int32 that wraps around.

    The order of summation does not matter, so neither do a tensor's layout and the cut of a launch.

    Args:
        x: float32, bfloat16 or float16.
    """
    return x.view(_BITS[x.dtype]).sum(dtype=torch.int32)


def stream_of(offset: Offset, x: torch.Tensor, known: torch.Tensor | None = None) -> Offset:
    """Which stream the rounding of ``x`` takes: ``offset + 0x9E3779B900000000 * checksum``, modulo 2**64.

    Args:
        known: the checksum, one int32, where it is known.

    Returns:
        A number on a CPU; elsewhere one int64 of shape (1,), for which no device is waited for.
    """
    found = checksum(x) if known is None else known
    if x.device.type == "cpu":
        word = (int(offset) + _WEIGHT * int(found)) & _MASK64
        return _signed64(word)
    return found.view(1).to(torch.int64).mul_(_signed64(_WEIGHT)).add_(offset)


def write_stream(stream: Offset, out: torch.Tensor) -> None:
    """Write a stream's number into one int64."""
    if isinstance(stream, int):
        out.fill_(stream)
    else:
        out.copy_(stream)


def known_number(offset: Offset) -> int | None:
    """The number that an offset is; None where only its device knows."""
    if isinstance(offset, int):
        return offset
    return int(offset) if offset.device.type == "cpu" else None


def as_kernels_take(offset: Offset) -> Offset:
    """The number that an offset is, or the tensor where only its device knows; a recorded call takes another one each time."""
    number = None if HERE.recorder is not None else known_number(offset)
    return offset if number is None else number


def stream_key_on_device(seed: int, offset: torch.Tensor) -> torch.Tensor:
    """:func:`stream_key` of a seed and an int64 tensor, in int64 arithmetic that wraps around."""
    key = torch.bitwise_xor(offset, _signed64(_mix64(seed & _MASK64))).add_(_signed64(0x9E3779B97F4A7C15))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        # The shift of signed integers repeats the sign.
        key.bitwise_xor_((key >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(_signed64(factor))
    return (key >> 1).bitwise_and_((1 << 63) - 1)


class _Scratch(threading.local):
    """Words that are being mixed, kept between calls: fresh memory of this size costs more in page faults than the mixing."""

    def __init__(self) -> None:
        self.words: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    @torch.inference_mode(False)  # memory made in inference mode could not be written to in training
    def of(self, count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Index times the golden ratio, and two buffers.

        On a CPU they are kept; elsewhere each call makes them, for memory of a captured graph is that graph's.
        """
        is_cpu = device.type == "cpu"
        kept = self.words if is_cpu else None
        if kept is None or kept[0].numel() < count:
            base = torch.arange(max(count, _KEPT_WORDS) if is_cpu else count, dtype=torch.int32, device=device)
            kept = (base.mul_(_signed(_GOLDEN)), torch.empty_like(base), torch.empty_like(base))
            if is_cpu and count <= _KEPT_WORDS:
                self.words = kept
        return kept[0][:count], kept[1][:count], kept[2][:count]


_SCRATCH = _Scratch()


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def _constant(value: int, device: torch.device) -> torch.Tensor | int:
    """A 0-dimensional int32 on a CPU, where a Python number would be converted to one at every operation."""
    return torch.tensor(value, dtype=torch.int32) if device.type == "cpu" else value


def random_bytes(numel: int, seed: int, offset: Offset, start: int, where: torch.device) -> torch.Tensor:
    """``numel`` uniform int8 draws: elements ``start ...`` of the stream.

    Args:
        numel: how many.
        seed: of the run; offset: which stream of it (see :func:`stream_key`).
        start: index of the first element.
        where: the device to make them on.

    Returns:
        An int8 tensor of shape ``(numel,)``, uniform over -128..127; on a CPU in memory that this thread's next call overwrites.
    """
    first_word, skip = divmod(start, _BYTES)
    low: int | torch.Tensor
    high: int | torch.Tensor
    number = known_number(offset)
    if number is not None:
        key = stream_key(seed, number)
        low, high = _signed(key + first_word * _GOLDEN), _signed(key >> 31)
    else:
        assert isinstance(offset, torch.Tensor)
        on_device = stream_key_on_device(seed, offset)
        low, high = on_device.add(first_word * _GOLDEN).to(torch.int32), (on_device >> 31).to(torch.int32)
    base, h, t = _SCRATCH.of(-(-(numel + skip) // _BYTES), where)
    sixteen = _constant(16, where)
    torch.add(base, low, out=h)
    torch.bitwise_right_shift(h, sixteen, out=t)
    h.bitwise_xor_(t.bitwise_and_(_constant(0xFFFF, where))).mul_(_constant(_signed(_FMIX_1), where)).bitwise_xor_(high)
    torch.bitwise_right_shift(h, _constant(13, where), out=t)
    h.bitwise_xor_(t.bitwise_and_(_constant(0x7FFFF, where))).mul_(_constant(_signed(_FMIX_2), where))
    torch.bitwise_right_shift(h, sixteen, out=t)
    h.bitwise_xor_(t.bitwise_and_(_constant(0xFFFF, where)))
    return h.view(torch.int8)[skip : skip + numel]


def random_thresholds(
    numel: int,
    seed: int,
    offset: Offset,
    start: int = 0,
    *,
    device: torch.device | str = "cpu",
    buffers: torch.Tensor | None = None,
) -> torch.Tensor:
    """Float32 draws: 256 times a number with 16 bits that is uniform over [-0.5 - 2**-9, 0.5 - 2**-9).

    A draw's high byte is its own and its low byte is its neighbour's high byte, so that a 32-bit word serves four elements.  Every
    draw is uniform over its 65,536 values; the correlation of neighbours is 1 / 256.

    Args:
        numel, seed, offset, start, device: as in :func:`random_bytes`.
        buffers: float32 scratch of shape (2, at least ``numel + 1``); its second row then holds the result.
    """
    drawn = random_bytes(numel + 1, seed, offset, start, torch.device(device))
    if buffers is None:
        high = drawn.to(torch.float32)
        return torch.add(high[:-1], high[1:], alpha=1.0 / 256.0)
    high = buffers[0, : numel + 1].copy_(drawn)
    return torch.add(high[:-1], high[1:], alpha=1.0 / 256.0, out=buffers[1, :numel])
