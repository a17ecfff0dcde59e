import gc
import weakref

import pytest
import torch

from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import CastKey
from qsync_torch.operators.casts import CastCache

KEY = CastKey(Precision.FLOAT32, Precision.BFLOAT16)
OTHER = CastKey(Precision.FLOAT32, Precision.FLOAT16)


class Maker:
    """Counts casts and remembers their seeds."""

    def __init__(self, x):
        self.x, self.seeds = weakref.ref(x), []

    def __call__(self, seed):
        self.seeds.append(seed)
        return self.x().to(torch.bfloat16)


def cast(cache, x, key, seed, make):
    """What a consumer does: the cast that is there, else a new one."""
    entry = cache.find(x, key, seed)
    if entry.value is None:
        entry.value = make(entry.seed)
    return entry.value


def test_equal_casts_of_one_tensor_are_made_once():
    cache, x = CastCache(), torch.randn(4)
    make = Maker(x)
    assert cast(cache, x, KEY, 1, make) is cast(cache, x, KEY, 2, make)
    assert make.seeds == [1]
    cast(cache, x, OTHER, 3, make)
    cast(cache, x.clone(), KEY, 4, make)
    assert make.seeds == [1, 3, 4]


def test_a_changed_tensor_is_cast_again_with_the_first_seed():
    cache, x = CastCache(), torch.zeros(4)
    make = Maker(x)
    cast(cache, x, KEY, 1, make)
    x.add_(1)
    assert cast(cache, x, KEY, 2, make).tolist() == [1.0] * 4
    assert make.seeds == [1, 2]


def test_a_cast_made_without_gradients_is_not_used_with_them():
    cache, x = CastCache(), torch.randn(4, requires_grad=True)
    make = Maker(x)
    with torch.no_grad():
        assert not cast(cache, x, KEY, 1, make).requires_grad
    assert cast(cache, x, KEY, 1, make).requires_grad


def test_nothing_is_kept_past_the_forward_but_the_seed():
    cache, x = CastCache(), torch.randn(4)
    make = Maker(x)
    kept = weakref.ref(cast(cache, x, KEY, 5, make))
    assert kept() is not None
    cache.end_forward()
    gc.collect()
    assert kept() is None
    cast(cache, x, KEY, 6, make)
    assert make.seeds == [5, 5]


def test_an_activation_that_dies_takes_its_casts_along():
    cache, x = CastCache(), torch.randn(4)
    kept = weakref.ref(cast(cache, x, KEY, 1, Maker(x)))
    del x
    gc.collect()
    assert kept() is None
    assert len(cache) == 0


@pytest.mark.parametrize("inference", [True, False])
def test_changes_go_unnoticed_in_inference_mode_so_nothing_is_shared_there(inference):
    with torch.inference_mode(inference):
        assert CastCache().applies_to(torch.randn(2)) is not inference
