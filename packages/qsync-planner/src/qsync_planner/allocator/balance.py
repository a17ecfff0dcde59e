"""Balancing a global batch over device groups: the integers that minimise the slowest group's time, found exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def balance(
    counts: Sequence[int], total: int, largest: Sequence[int], time_ns: Sequence[Callable[[int], int]], near: int
) -> tuple[int, ...] | None:
    """Integer batches b_i ≥ 1 with Σ counts_i·b_i = total that minimise max_i time_ns_i(b_i).

    Binary search over the time; each probe is a bounded subset-sum over the groups, held as the bits of an integer.

    Args:
        counts: ranks per group.
        total: the global batch, in samples.
        largest: the largest batch each group may take.
        time_ns: per group a non-decreasing function of its batch.
        near: among equally good batches, prefer those close to this one, in the last groups first.

    Returns:
        The batches, or None where no integers satisfy the sum.
    """
    if _reach(counts, largest, total) is None:
        return None
    low, high = max(time(1) for time in time_ns), max(time(most) for time, most in zip(time_ns, largest, strict=True))
    while low < high:
        middle = (low + high) // 2
        if _reach(counts, _within(middle, largest, time_ns), total) is not None:
            high = middle
        else:
            low = middle + 1
    limits = _within(low, largest, time_ns)
    reach = _reach(counts, limits, total)
    assert reach is not None
    return _trace_back(counts, limits, total, reach, near)


def _within(limit_ns: int, largest: Sequence[int], time_ns: Sequence[Callable[[int], int]]) -> list[int]:
    """The largest batch of each group that takes at most ``limit_ns`` (0: not even one sample)."""
    found = []
    for most, time in zip(largest, time_ns, strict=True):
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if time(middle) <= limit_ns else (low, middle - 1)
        found.append(low)
    return found


def _reach(counts: Sequence[int], limits: Sequence[int], total: int) -> list[int] | None:
    """Bit s of entry i says whether the first i groups can take s samples together; None where all cannot take ``total``."""
    if min(limits) < 1:
        return None
    mask = (1 << (total + 1)) - 1
    reach = [1]
    for count, limit in zip(counts, limits, strict=True):
        bits = (reach[-1] << count) & mask
        # Up to limit - 1 further samples per rank, by binary splitting.
        remaining, step = limit - 1, 1
        while remaining > 0:
            step = min(step, remaining)
            bits |= (bits << (count * step)) & mask
            remaining -= step
            step *= 2
        reach.append(bits)
    return reach if reach[-1] >> total & 1 else None


def _trace_back(counts: Sequence[int], limits: Sequence[int], total: int, reach: Sequence[int], near: int) -> tuple[int, ...]:
    batches: list[int] = []
    left = total
    for index in range(len(counts) - 1, -1, -1):
        choices = sorted(range(1, limits[index] + 1), key=lambda batch: (abs(batch - near), batch))
        chosen = next(b for b in choices if left >= b * counts[index] and reach[index] >> (left - b * counts[index]) & 1)
        batches.append(chosen)
        left -= chosen * counts[index]
    return tuple(reversed(batches))
