"""The table of kinds: shapes and operations worked out by hand."""

from __future__ import annotations

import pytest

from qsync_core.geometry import Geometry
from qsync_core.ir.functions import FUNCTIONS
from qsync_core.kernels.backend import Op
from qsync_core.kernels.requests import CallShapes
from qsync_core.kinds import KINDS, kind_of


def test_a_kind_is_none_of_the_other_functions_and_has_products_that_backends_know():
    assert not KINDS.keys() & FUNCTIONS.keys()
    assert all(op in Op.UNFUSED for kind in KINDS.values() for op in kind.products)
    assert KINDS["conv1d"].products == KINDS["conv2d"].products
    assert all(kind.in_8_bit == kind.as_run.in_8_bit for kind in KINDS.values())


@pytest.mark.parametrize(
    ("name", "x", "weight", "output", "stored", "groups", "flops"),
    [
        ("linear", (2, 5, 16), (8, 16), (2, 5, 8), (8, 16), 1, 2 * 10 * 8 * 16),
        ("conv2d", (2, 4, 9, 9), (6, 2, 3, 3), (2, 6, 7, 7), (6, 2, 3, 3), 2, 2 * (2 * 6 * 49) * 18),
        ("conv1d", (2, 4, 9), (6, 4, 3), (2, 6, 7), (6, 4, 3), 1, 2 * (2 * 6 * 7) * 12),
        ("conv_transpose2d", (2, 4, 5, 5), (6, 2, 3, 3), (2, 6, 11, 11), (4, 3, 3, 3), 2, 2 * (2 * 4 * 25) * 3 * 9),
    ],
)
def test_shapes_and_operations(name, x, weight, output, stored, groups, flops):
    kind = KINDS[name]
    assert kind.fits(x, weight, output)
    assert not kind.fits(x, weight[1:], output)
    assert kind.parameter_shape(weight, groups) == stored
    assert kind.parameter_shape(stored, groups) == weight
    assert kind.flops(x, weight, output) == flops


def test_kernels_take_sequences_as_images_of_one_row():
    call = CallShapes.as_run("conv1d", (4, 9), (6, 4, 3), (6, 4), Geometry((2,), (0,), (1,)))
    assert (call.kind, call.x, call.w, call.y) == ("conv2d", (1, 4, 1, 9), (6, 4, 1, 3), (1, 6, 1, 4))
    assert call.geometry == Geometry((1, 2), (0, 0), (1, 1))


def test_a_geometry_says_which_kind_a_call_is():
    assert kind_of(None) is KINDS["linear"]
    assert kind_of(Geometry()) is KINDS["conv2d"]
    assert kind_of(Geometry((1,), (0,), (1,))) is KINDS["conv1d"]
    assert kind_of(Geometry(transposed=True)) is KINDS["conv_transpose2d"]
    with pytest.raises(KeyError):
        kind_of(Geometry((1,) * 4, (0,) * 4, (1,) * 4))
