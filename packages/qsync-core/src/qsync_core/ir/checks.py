"""Validators for artifact fields: checked whenever an object is built."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeVar

import attrs

from qsync_core.ir.precision import Precision

MAX_INT = 2**62
"""Upper bound of every stored count, so that sums of thousands of them stay inside 64 bits elsewhere."""

MAX_MEASURED = 2**48
"""Upper bound of what is measured of one operator, cast, bucket or step: 3 days in nanoseconds, 256 TiB in bytes.  The sums of ten
thousand of them stay below :data:`MAX_INT`."""
MAX_ELEMENTS = 2**44
"""Elements of one tensor, at most; its bytes, several times over, stay below :data:`MAX_MEASURED`."""

MAX_BATCH = 2**20
"""Samples of a rank's batch; what balances batches tries every size."""
MOST_MICRO_BATCHES = 2**16
"""Micro-batches of an optimizer step, at most."""

H = TypeVar("H", bound=Hashable)
Validator = Callable[[Any, "attrs.Attribute[Any]", Any], None]


def _integer(least: int, most: int) -> Validator:
    """An integer from ``least`` to ``most``, a power of two."""

    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if type(value) is not int or not least <= value <= most:
            where = f"{least}..2**{most.bit_length() - 1}"
            raise ValueError(f"{type(instance).__name__}.{attribute.name} must be an integer in {where}, got {value!r}")

    return check


non_negative_int = _integer(0, MAX_INT)
"""An integer in 0..2**62 (nanoseconds, bytes, counts)."""
measured_int = _integer(0, MAX_MEASURED)
"""An integer in 0..2**48 (nanoseconds or bytes of one operator, cast, bucket or step)."""
batch_int = _integer(0, MAX_BATCH)
"""An integer in 0..2**20 (samples of a rank's batch)."""
micro_batches = _integer(1, MOST_MICRO_BATCHES)
"""An integer in 1..2**16 (micro-batches of an optimizer step)."""


def measured_rate(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """A float in -2**48..2**48 (nanoseconds, or nanoseconds per byte or element, of a fitted line)."""
    finite(instance, attribute, value)
    if abs(value) > MAX_MEASURED:
        raise ValueError(f"{type(instance).__name__}.{attribute.name} must be a number of at most 2**48, got {value!r}")


def positive_int(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """An integer in 1..2**62 (numbers of ranks, samples)."""
    non_negative_int(instance, attribute, value)
    if value == 0:
        raise ValueError(f"{type(instance).__name__}.{attribute.name} must be at least 1, got 0")


def first_repeated(values: Iterable[H]) -> H | None:
    """The first value that was there before, None where all differ."""
    seen: set[H] = set()
    for value in values:
        if value in seen:
            return value
        seen.add(value)
    return None


def optional(validator: Validator) -> Validator:
    """None, or what the validator accepts."""

    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is not None:
            validator(instance, attribute, value)

    return check


def each(validator: Validator) -> Validator:
    """A sequence whose every item, or a mapping whose every value, the validator accepts."""

    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        for item in value.values() if isinstance(value, Mapping) else value:
            validator(instance, attribute, item)

    return check


def finite(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """A float that is neither NaN nor infinite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{type(instance).__name__}.{attribute.name} must be a finite number, got {value!r}")


def fraction(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """A float in (0, 1]."""
    finite(instance, attribute, value)
    if not 0 < value <= 1:
        raise ValueError(f"{type(instance).__name__}.{attribute.name} must be in (0, 1], got {value!r}")


def share(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """A float in [0, 1]."""
    finite(instance, attribute, value)
    if not 0 <= value <= 1:
        raise ValueError(f"{type(instance).__name__}.{attribute.name} must be in [0, 1], got {value!r}")


def shape(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """A tuple of dimensions, each in 0..2**62, whose product is in 0..2**44."""
    product = 1
    for size in value:
        non_negative_int(instance, attribute, size)
        product *= size
        if product > MAX_ELEMENTS:
            raise ValueError(f"{type(instance).__name__}.{attribute.name} has more than 2**44 elements: {value!r}")


def base_precision(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """A format that a whole model can train in: a 16- or 32-bit float."""
    if not isinstance(value, Precision) or value.needs_scale:
        raise ValueError(f"{type(instance).__name__}.{attribute.name} must be a 16- or 32-bit float, got {value!r}")
