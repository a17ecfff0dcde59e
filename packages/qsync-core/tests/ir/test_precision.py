"""The precision lattice's laws, and the figures of each format against hand-worked ones."""

from __future__ import annotations

import itertools
from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qsync_core.ir.precision import Precision, join, promote

INT8, FLOAT8, BFLOAT16, FLOAT16, FLOAT32 = Precision
precisions = st.sampled_from(Precision)


def below(a: Precision, b: Precision) -> bool:
    return join(a, b) is b


@given(precisions, precisions, precisions)
def test_join_is_a_semilattice(a: Precision, b: Precision, c: Precision) -> None:
    assert join(a, a) is a
    assert join(a, b) is join(b, a)
    assert join(join(a, b), c) is join(a, join(b, c))


@given(precisions, precisions)
def test_join_is_the_least_upper_bound(a: Precision, b: Precision) -> None:
    upper = [p for p in Precision if below(a, p) and below(b, p)]
    assert join(a, b) in upper
    assert all(below(join(a, b), p) for p in upper)


@given(precisions, precisions)
def test_the_order_is_antisymmetric(a: Precision, b: Precision) -> None:
    if below(a, b) and below(b, a):
        assert a is b


@given(st.lists(precisions, min_size=1))
def test_promote_folds_join_in_any_order(values: list[Precision]) -> None:
    assert promote(*values) is reduce(join, values) is promote(*reversed(values))


def test_the_order() -> None:
    for lower, higher in itertools.combinations([INT8, FLOAT8, FLOAT16, FLOAT32], 2):
        assert below(lower, higher)
        assert not below(higher, lower)
    assert join(FLOAT16, BFLOAT16) is FLOAT32
    assert below(FLOAT8, BFLOAT16)
    assert below(BFLOAT16, FLOAT32)


def test_promote_needs_an_argument() -> None:
    with pytest.raises(ValueError, match=r"promote\(\) needs at least one precision"):
        promote()


# Bytes, stored mantissa bits, exponent of the smallest normal number: IEEE 754 binary16/32, bfloat16, and OCP FP8 E4M3.
@pytest.mark.parametrize(
    ("precision", "nbytes", "mantissa_bits", "min_exponent"),
    [(FLOAT32, 4, 23, -126), (FLOAT16, 2, 10, -14), (BFLOAT16, 2, 7, -126), (FLOAT8, 1, 3, -6)],
)
def test_float_formats(precision: Precision, nbytes: int, mantissa_bits: int, min_exponent: int) -> None:
    assert (precision.nbytes, precision.mantissa_bits, precision.min_exponent) == (nbytes, mantissa_bits, min_exponent)
    assert not precision.is_fixed_point
    assert precision.needs_scale is (precision is FLOAT8)


def test_int8_has_no_mantissa_and_no_exponent() -> None:
    assert INT8.nbytes == 1
    assert INT8.is_fixed_point
    assert INT8.needs_scale
    with pytest.raises(ValueError, match="int8 is a fixed-point format and has no mantissa"):
        _ = INT8.mantissa_bits
    with pytest.raises(ValueError, match="int8 is a fixed-point format and has no exponent"):
        _ = INT8.min_exponent
