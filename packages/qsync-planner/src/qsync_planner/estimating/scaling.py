"""How a measured time becomes one of another chip or share (docs/absent-gpus.md#the-rule)."""

from __future__ import annotations

import math

from qsync_core.ir.precision import Precision
from qsync_planner.estimating.chips import Place
from qsync_planner.estimating.work import Work

LAUNCH_NS = 2500
"""A kernel's start and end on the device, which no chip shortens much; the smallest kernels of an H200 take 2 to 3 µs."""

INEFFICIENT = 1.5
"""Products that take longer than so many times their bound are held by something else: latencies, atomic sums, few threads."""

WINOGRAD_SPARES = 1 - 36 / 144
"""Share of multiplications that Winograd's F(4×4, 3×3) saves: it makes 36 for 16 elements, not 144 (Lavin and Gray, 2015)."""


def scaled_ns(time_ns: int, work: Work, source: Place, target: Place, *, tf32: bool = False) -> int:
    """A kernel's time on ``target``, measured as ``time_ns`` on ``source``: another chip, or another share of the same one.

    Args:
        time_ns: measured on ``source``.
        work: what the kernel has to do at least.
        source, target: with equal ones the time is unchanged.
        tf32: whether float32 products may run on tensor cores.
    """
    scaled = _on_another_share if source.sheet == target.sheet else _on_another_chip
    return round(scaled(time_ns, work, source, target, tf32))


def modelled_ns(work: Work, place: Place, *, tf32: bool = False) -> float:
    """The least time that a kernel takes on a device of which nothing was measured: launches, then memory beside products."""
    return work.launches * LAUNCH_NS + _bound_ns(work, place, tf32)


def _on_another_chip(time_ns: int, work: Work, source: Place, target: Place, tf32: bool) -> float:
    """What chips bound differently: memory or products, or memory and the cycles that it does not explain.

    Launches stay, and transpositions go with memory or the cycles, whichever is the slower.  Memory traffic and computing overlap;
    together they take the root of the sum of their squares.  Products take as many times their bound as on the source; where that
    is more than :data:`INEFFICIENT`, what is beyond goes with the cycles.
    """
    launches = min(float(time_ns), float(work.launches * LAUNCH_NS))
    left = time_ns - launches
    slower, cycles = source.bytes_per_ns / target.bytes_per_ns, _cycles(work, source) / _cycles(work, target)
    transposing = min(left, work.transposed / source.bytes_per_ns)
    left -= transposing
    fixed = launches + transposing * max(slower, cycles)
    if work.products and (bound := _bound_ns(work, source, tf32)) > 0:
        well = min(left, INEFFICIENT * bound)
        return fixed + well * _bound_ns(work, target, tf32) / bound + (left - well) * cycles
    memory = min(left, work.nbytes / source.bytes_per_ns)
    return fixed + math.hypot(memory * slower, math.sqrt(left**2 - memory**2) * cycles)


def _bound_ns(work: Work, place: Place, tf32: bool) -> float:
    """Memory traffic and large products, which overlap; few tiles leave multiprocessors idle."""
    computing = sum(count / place.sustained_per_ns(precision, tf32, work.tiles) for precision, count in work.products)
    return math.hypot(work.nbytes / place.bytes_per_ns, computing)


def _on_another_share(time_ns: int, work: Work, source: Place, target: Place, tf32: bool) -> float:
    """The measured time is split, in this order and as far as it goes, into launches, memory traffic, transpositions, products at
    the rate that well-shaped ones reach, and the rest, which the multiprocessors' cycles bound; each part is scaled by its own
    rate, transpositions by memory's or the cycles', whichever is the slower."""
    launches = min(float(time_ns), float(work.launches * LAUNCH_NS))
    left = time_ns - launches
    memory = min(left, work.nbytes / source.bytes_per_ns)
    left -= memory
    transposing = min(left, work.transposed / source.bytes_per_ns)
    left -= transposing
    products = [(count / source.operations_per_ns(precision, tf32), precision) for precision, count in work.products]
    products, transforms = _by_winograd(products, work.transforms / source.bytes_per_ns, left)
    transforms = min(left, transforms)
    left -= transforms
    computing = sum(duration for duration, _ in products)
    fits = min(1.0, left / computing) if computing > 0 else 0.0
    rest = max(0.0, left - fits * computing)
    slower, cycles = source.bytes_per_ns / target.bytes_per_ns, _cycles(work, source) / _cycles(work, target)
    scaled = launches + (memory + transforms) * slower + transposing * max(slower, cycles)
    for duration, precision in products:
        scaled += fits * duration * (source.operations_per_ns(precision, tf32) / target.operations_per_ns(precision, tf32))
    return scaled + rest * cycles


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


def _by_winograd(
    products: list[tuple[float, Precision]], transforms: float, left: float
) -> tuple[list[tuple[float, Precision]], float]:
    """Durations of products and of the transforms around them, with as many float32 ones by Winograd's algorithm as make all fit.

    Args:
        products: how long each takes directly, with its format.
        transforms: how long memory takes for the transforms of all; 0 where that algorithm is not possible.
    """
    direct = sum(duration for duration, _ in products)
    spared = sum(duration for duration, precision in products if precision is Precision.FLOAT32) * WINOGRAD_SPARES
    if not spared > transforms > 0 or direct <= left:
        return products, 0.0
    share = min(1.0, (direct - left) / (spared - transforms))
    return [(d * (1 - share * WINOGRAD_SPARES * (p is Precision.FLOAT32)), p) for d, p in products], share * transforms


def _cycles(work: Work, place: Place) -> float:
    """Cycles per nanosecond, of all multiprocessors that can take part."""
    taking_part = min(place.multiprocessors, work.blocks) if work.blocks else place.multiprocessors
    return taking_part * place.sheet.clock_ghz
