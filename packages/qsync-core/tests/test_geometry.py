"""Geometry is a value that is a convolution's, or none at all."""

from __future__ import annotations

import pytest

from qsync_core.geometry import NEUTRAL, Geometry


@pytest.mark.parametrize(
    "attributes",
    [
        {"stride": "one"},
        {"stride": "1", "padding": "0,0"},
        {"stride": "1,1,1", "dilation": "1,1"},
        {"transposed": "yes"},
        {"transposed": "true", "output_padding": "-1,0"},
        {"stride": "0,1"},
        {"stride": "1,-1"},
        {"dilation": "1,0"},
        {"padding": "-1,0"},
        {"groups": "0"},
        {"groups": "x"},
    ],
)
def test_texts_of_no_convolution_are_refused(attributes):
    with pytest.raises(ValueError):
        Geometry.of(attributes)


def test_a_geometry_is_its_texts():
    geometry = Geometry((2, 1), (0, 3), (1, 2), 4)
    assert Geometry.of(geometry.attributes) == geometry
    assert Geometry.of({}) == Geometry.of({"kernel": "3,3"}) == NEUTRAL


def test_the_output_shrinks_by_the_filters_reach():
    assert Geometry((2, 1), (3, 0), (1, 2)).output_size((224, 10), (7, 3)) == (112, 6)


def test_images_of_any_number_of_dimensions():
    line, space = Geometry((2,), (1,), (3,)), Geometry((1, 2, 1), (0, 1, 0), (1, 1, 1), 2)
    assert [
        geometry.output_size(size, kernel) for geometry, size, kernel in ((line, (9,), (2,)), (space, (4, 5, 6), (1, 3, 2)))
    ] == [
        (4,),
        (4, 3, 5),
    ]
    assert line.with_dimensions(2) == Geometry((1, 2), (0, 1), (1, 3))
    assert Geometry.of(space.attributes) == space


def test_a_transposed_output_grows_by_what_the_filters_reach():
    geometry = Geometry((2, 1), (1, 0), (1, 2), 1, True, (1, 0))
    assert geometry.output_size((5, 4), (3, 2)) == (10, 6)
    assert Geometry.of(geometry.attributes) == geometry
    assert Geometry.of(geometry.attributes | {"output_padding": "0,0"}) == Geometry((2, 1), (1, 0), (1, 2), 1, True)
