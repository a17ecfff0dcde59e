"""Validators for artifact fields: what a value must satisfy whoever made it, checked when the object is built."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs

MAX_INT = 2**62
"""Upper bound of every stored count, so that sums of thousands of them stay inside 64 bits elsewhere."""

Validator = Callable[[Any, "attrs.Attribute[Any]", Any], None]


def non_negative_int(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """An integer in 0..2**62 (nanoseconds, bytes, counts)."""
    if type(value) is not int or not 0 <= value <= MAX_INT:
        raise ValueError(f"{type(instance).__name__}.{attribute.name} must be an integer in 0..2**62, got {value!r}")


def finite(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """A float that is neither NaN nor infinite."""
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{type(instance).__name__}.{attribute.name} must be a finite number, got {value!r}")


def fraction(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """A float in (0, 1]."""
    finite(instance, attribute, value)
    if not 0 < value <= 1:
        raise ValueError(f"{type(instance).__name__}.{attribute.name} must be in (0, 1], got {value!r}")


def shape(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """A tuple of dimensions, each in 0..2**62, whose product is too."""
    product = 1
    for size in value:
        non_negative_int(instance, attribute, size)
        product *= size
    if product > MAX_INT:
        raise ValueError(f"{type(instance).__name__}.{attribute.name} has too many elements: {value!r}")
