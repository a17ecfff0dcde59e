"""A profile as of a device that is twice as fast: every measured time halved, for a strong group beside the measured weak one.

    python bench/faster_profile.py profile.infer.qsync profile.train.qsync

What was measured stands for half of the device, the result for the whole.  A stand-in where only one device can be measured: in a
plan the strong group keeps its precision, and its profile only says how long a step takes at least.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TypeVar

import attrs

from qsync_core.artifacts.files import load, save
from qsync_core.ir.profile import Profile

FACTOR = 2
T = TypeVar("T", bound=attrs.AttrsInstance)


def faster(value: T) -> T:
    """Its times, each named ``…_ns`` or ``ns_per_element``, divided by the factor."""
    times = {field.name: getattr(value, field.name) for field in attrs.fields(type(value)) if field.name.endswith("_ns")}
    scaled = {name: round(time / FACTOR) if isinstance(time, int) else time / FACTOR for name, time in times.items()}
    if hasattr(value, "ns_per_element"):
        scaled["ns_per_element"] = value.ns_per_element / FACTOR
        scaled["samples"] = tuple((numel, round(time / FACTOR)) for numel, time in value.samples)
    return attrs.evolve(value, **scaled)


def faster_profile(measured: Profile) -> Profile:
    """The profile of the whole device."""
    if measured.collective is not None:
        raise SystemExit("all-reduces do not become faster with the device; profile without torchrun")
    parts = {name: tuple(map(faster, getattr(measured, name))) for name in ("costs", "casts", "steps")}
    return attrs.evolve(faster(measured), device=attrs.evolve(measured.device, share=1.0), **parts)


def main() -> None:
    """Read the measured profile, make it that of half of a device, and write that of the whole."""
    source, target = map(Path, sys.argv[1:])
    measured = load(source, Profile)
    save(attrs.evolve(measured, device=attrs.evolve(measured.device, share=1 / FACTOR)), source)
    save(faster_profile(measured), target)


if __name__ == "__main__":
    main()
