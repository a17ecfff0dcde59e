"""Transposed convolutions of sequences: in every float format and geometry, as functions, and through the whole flow."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_core.errors import BackendError
from qsync_core.geometry import Geometry
from qsync_core.kernels.requests import CallShapes
from qsync_torch.apply.apply import apply_
from qsync_torch.tracing.trace import trace

from .variants import FLOATS, INT8
from .whole_flow import BFLOAT16, check_flow_in_floats, check_kind, check_wrong_elements_are_found, job_of, turned


def check(variant, length=7, kernel=3, groups=1, **geometry):
    x, weight = torch.randn(2, 4, length), torch.randn(6, 4 // groups, kernel)
    turn = functools.partial(turned, groups=groups)
    check_kind("conv_transpose1d", variant, x, weight, torch.randn(6, requires_grad=True), turn, groups=groups, **geometry)


@pytest.mark.parametrize("variant", FLOATS.values(), ids=FLOATS)
def test_every_variant(variant):
    check(variant, stride=2, padding=1, output_padding=1)


@pytest.mark.parametrize(
    "geometry",
    [
        {"stride": 3},
        {"dilation": 3, "groups": 2},
        {"dilation": 3, "output_padding": 2},
        {"padding": 4, "stride": 2, "output_padding": 1},
        {"kernel": 1, "padding": 2, "stride": 3},
        {"groups": 2, "stride": 2, "kernel": 2},
    ],
    ids=str,
)
def test_every_geometry(geometry):
    check(BFLOAT16, **geometry)


class Called(nn.Module):
    """As a function of a parameter, and with an output size."""

    def __init__(self):
        super().__init__()
        self.filters, self.bias = nn.Parameter(torch.randn(5, 3, 4)), nn.Parameter(torch.randn(3))
        self.up = nn.ConvTranspose1d(3, 2, 3, stride=2)

    def forward(self, x):
        return self.up(F.conv_transpose1d(x, self.filters, bias=self.bias, padding=1), output_size=(16,))


def test_functional_calls_and_output_sizes_run_as_planned():
    model, x = Called(), torch.randn(2, 5, 6)
    assert [operator.op_id.fqn for operator in trace(job_of(model, (5, 6))).adjustable] == ["filters", "up"]
    planned = copy.deepcopy(model)
    apply_(planned, {"filters#0": BFLOAT16, "up#0": BFLOAT16})
    found, half = planned(x), copy.deepcopy(model).bfloat16()
    assert found.shape == (2, 2, 16)
    assert torch.equal(found, half(x.bfloat16()))


def test_8_bit_is_refused_where_another_kind_has_weights_of_as_many_dimensions():
    """A plan does not say as which kind a parameter is called, so that only the call shows it."""
    model, x = Called(), torch.randn(2, 5, 6)
    apply_(model, {"filters#0": INT8, "up#0": BFLOAT16})
    with pytest.raises(
        BackendError, match=r"^operator filters#0 is called as conv_transpose1d, which has no kernels in 8 bit, and"
    ):
        model(x)


def test_a_wrong_element_is_found_before_it_is_measured():
    geometry = Geometry((2,), (1,), (1,), 2, True, (1,))
    check_wrong_elements_are_found(CallShapes("conv_transpose1d", (2, 4, 6), (6, 2, 3), (2, 6, 12), geometry))


def test_the_whole_flow():
    model = nn.Sequential(nn.ConvTranspose1d(3, 4, 3, stride=2), nn.Tanh(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 2))
    expected = {"0": ("conv_transpose1d", (4, 3, 3), 2 * (4 * 3 * 50) * 4 * 3), "4": ("linear", (2, 4), 2 * (4 * 2) * 4)}
    check_flow_in_floats(model, (3, 50), expected, functools.partial(F.conv_transpose1d, stride=2))
