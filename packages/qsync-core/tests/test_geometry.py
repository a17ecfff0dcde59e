"""Geometry is a value that is a convolution's, or none at all."""

from __future__ import annotations

import pytest

from qsync_core.geometry import NEUTRAL, Geometry


@pytest.mark.parametrize(
    "attributes",
    [
        {"stride": "one"},
        {"stride": "1"},
        {"stride": "1,1,1"},
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
