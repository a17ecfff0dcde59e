import gc
import weakref

import pytest
import torch
from torch import nn

from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import CastKey
from qsync_torch import apply_
from qsync_torch.operators.casts import CastCache

KEY = CastKey(Precision.FLOAT32, Precision.BFLOAT16)
OTHER = CastKey(Precision.FLOAT32, Precision.FLOAT16)


class Maker:
    """Counts casts."""

    def __init__(self, x):
        self.x, self.count = weakref.ref(x), 0

    def __call__(self):
        self.count += 1
        return self.x().to(torch.bfloat16)


def cast(cache, x, key, make):
    """What a consumer does: the cast that is there, else a new one."""
    entry = cache.find(x, key)
    if entry.value is None:
        entry.value = make()
    return entry.value


def test_equal_casts_of_one_tensor_are_made_once():
    cache, x = CastCache(), torch.randn(4)
    make = Maker(x)
    assert cast(cache, x, KEY, make) is cast(cache, x, KEY, make)
    assert make.count == 1
    cast(cache, x, OTHER, make)
    cast(cache, x.clone(), KEY, make)
    assert make.count == 3


def test_a_changed_tensor_is_cast_again():
    cache, x = CastCache(), torch.zeros(4)
    make = Maker(x)
    cast(cache, x, KEY, make)
    x.add_(1)
    assert cast(cache, x, KEY, make).tolist() == [1.0] * 4
    assert make.count == 2


def test_a_cast_made_without_gradients_is_not_used_with_them():
    cache, x = CastCache(), torch.randn(4, requires_grad=True)
    make = Maker(x)
    with torch.no_grad():
        assert not cast(cache, x, KEY, make).requires_grad
    assert cast(cache, x, KEY, make).requires_grad


def test_nothing_is_kept_past_the_forward():
    cache, x = CastCache(), torch.randn(4)
    make = Maker(x)
    kept = weakref.ref(cast(cache, x, KEY, make))
    assert kept() is not None
    cache.end_forward()
    gc.collect()
    assert kept() is None
    cast(cache, x, KEY, make)
    assert make.count == 2


def test_an_activation_that_dies_takes_its_casts_along():
    cache, x = CastCache(), torch.randn(4)
    kept = weakref.ref(cast(cache, x, KEY, Maker(x)))
    del x
    gc.collect()
    assert kept() is None
    assert len(cache) == 0


@pytest.mark.parametrize("inference", [True, False])
def test_changes_go_unnoticed_in_inference_mode_so_nothing_is_shared_there(inference):
    with torch.inference_mode(inference):
        assert CastCache().applies_to(torch.randn(2)) is not inference


class Halved(nn.Module):
    """Changes what two operators read between them, in a way that leaves no version."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x, change):
        h = torch.tanh(x)
        y = self.first(h)
        change(h)
        return y, self.second(h)


def halve(h):
    h.data.mul_(0.5)


def replace(h):
    h.data = h.detach() * 0.5


@pytest.mark.parametrize("change", [halve, replace])
@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_what_is_written_through_data_is_read_by_the_next_operator(precision, change):
    model = Halved()
    apply_(model, {"first#0": precision, "second#0": precision})
    x = torch.randn(4, 16)
    _, second = model(x, change)
    expected = model.second(torch.tanh(x) * 0.5)
    # Two roundings of one value to 8 bits differ by less than a step; a stale copy is wrong by half of the value.
    assert (second - expected).norm() < 0.05 * expected.norm()
