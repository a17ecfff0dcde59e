"""Which products are tuned before a row's contenders start."""

import attrs
import pytest

from eight_bit.products_tuned import requests_of
from eight_bit.steps import SHAPES
from qsync_core.kernels.backend import Op


@pytest.mark.parametrize("name", ["P1b", "P3b-bert"])
def test_the_products_of_one_layer_and_none_of_the_head(name):
    shape = SHAPES[name]
    shape = attrs.evolve(shape, arguments={**shape.arguments, "vocab_size": 250})
    found = [asked.request for asked in requests_of(shape, "cuda", "9.0", quick=True)]
    assert {request.op for request in found} == {Op.LINEAR_OUTPUT, Op.LINEAR_GRAD_INPUT, Op.LINEAR_GRAD_WEIGHT}
    assert len(set(found)) == len(found)
    sizes = {size for request in found for dims in request.shapes for size in dims}
    assert {128, 256} <= sizes
    assert 250 not in sizes
