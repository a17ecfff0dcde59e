"""Transposed convolutions of sequences: in every variant and geometry, as functions, and through the whole flow."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_core.ir.precision import Precision
from qsync_torch.apply.apply import apply_
from qsync_torch.tracing.trace import trace

from .variants import CONVOLUTIONS, INT8
from .whole_flow import BFLOAT16, check_flow, check_kind, job_of, turned


def check(variant, length=7, kernel=3, groups=1, **geometry):
    x, weight = torch.randn(2, 4, length), torch.randn(6, 4 // groups, kernel)
    turn = functools.partial(turned, groups=groups)
    check_kind("conv_transpose1d", variant, x, weight, torch.randn(6, requires_grad=True), turn, groups=groups, **geometry)


@pytest.mark.parametrize("variant", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_every_variant(variant):
    check(variant, **({} if variant.grad_input is Precision.INT8 else {"stride": 2, "padding": 1, "output_padding": 1}))


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
    check(INT8, **geometry)


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


def test_the_whole_flow():
    model = nn.Sequential(nn.ConvTranspose1d(3, 6, 3, stride=2), nn.Tanh(), nn.ConvTranspose1d(6, 4, 5, groups=2))

    def rows(layer):
        twin = nn.ConvTranspose2d(
            layer.in_channels, layer.out_channels, (1, *layer.kernel_size), (1, *layer.stride), groups=layer.groups
        )
        twin.load_state_dict({name: value.view_as(twin.get_parameter(name)) for name, value in layer.state_dict().items()})
        return twin

    twin = nn.Sequential(nn.Unflatten(2, (1, 11)), rows(model[0]), nn.Tanh(), rows(model[2]))
    expected = {
        "0": ("conv_transpose1d", (6, 3, 3), 2 * (4 * 3 * 11) * 6 * 3),
        "2": ("conv_transpose1d", (4, 3, 5), 2 * (4 * 6 * 23) * 2 * 5),
    }
    check_flow(model, (3, 11), expected, twin)
