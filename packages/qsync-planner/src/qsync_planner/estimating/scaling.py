"""How a measured time becomes one of another chip or share (docs/absent-gpus.md#the-rule)."""

from __future__ import annotations

from qsync_planner.estimating.chips import Place
from qsync_planner.estimating.work import Work

LAUNCH_NS = 2500
"""A kernel's start and end on the device, which no chip shortens much; the smallest kernels of an H200 take 2 to 3 µs."""


def scaled_ns(time_ns: int, work: Work, source: Place, target: Place, *, tf32: bool = False) -> int:
    """A kernel's time on ``target``, measured as ``time_ns`` on ``source``.

    The measured time is split, in this order and as far as it goes, into launches, memory traffic, products at the rate that
    well-shaped ones reach, and the rest, which the multiprocessors' cycles bound; each part is scaled by its own rate.

    Args:
        time_ns: measured on ``source``.
        work: what the kernel has to do at least.
        source, target: with equal ones the time is unchanged.
        tf32: whether float32 products may run on tensor cores.
    """
    launches = min(float(time_ns), float(work.launches * LAUNCH_NS))
    left = time_ns - launches
    memory = min(left, work.nbytes / source.bytes_per_ns)
    left -= memory
    products = [(count / source.operations_per_ns(precision, tf32), precision) for precision, count in work.products]
    computing = sum(duration for duration, _ in products)
    fits = min(1.0, left / computing) if computing > 0 else 0.0
    rest = max(0.0, left - fits * computing)
    scaled = launches + memory * (source.bytes_per_ns / target.bytes_per_ns)
    for duration, precision in products:
        scaled += fits * duration * (source.operations_per_ns(precision, tf32) / target.operations_per_ns(precision, tf32))
    return round(scaled + rest * (_cycles(work, source) / _cycles(work, target)))


def scaled_cast(ns_per_element: float, nbytes: int, source: Place, target: Place) -> float:
    """Time per element of a cast that moves so many bytes for each; what memory does not explain goes with the cycles."""
    memory = min(max(0.0, ns_per_element), nbytes / source.bytes_per_ns)
    rest = ns_per_element - memory
    anything = Work(0)
    scaled = memory * (source.bytes_per_ns / target.bytes_per_ns)
    return scaled + rest * (_cycles(anything, source) / _cycles(anything, target))


def scaled_optimizer_ns(time_ns: int, work: Work, source: Place, target: Place) -> int:
    """An optimizer's step: memory binds it, but for its launches."""
    needed = min(float(time_ns), work.nbytes / source.bytes_per_ns)
    launches = min(time_ns - needed, float(work.launches * LAUNCH_NS))
    return round(launches + (time_ns - launches) * (source.bytes_per_ns / target.bytes_per_ns))


def _cycles(work: Work, place: Place) -> float:
    """Cycles per nanosecond, of all multiprocessors that can take part."""
    taking_part = min(place.multiprocessors, work.blocks) if work.blocks else place.multiprocessors
    return taking_part * place.sheet.clock_ghz
