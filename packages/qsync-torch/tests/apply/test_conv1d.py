"""One-dimensional convolutions: in every variant and geometry, as functions, and through the whole flow."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_core.ir.precision import Precision
from qsync_torch.apply.apply import apply_
from qsync_torch.tracing.trace import trace

from .variants import CONVOLUTIONS, INT8
from .whole_flow import check_flow, check_kind, job_of


def check(variant, length=9, kernel=3, channels=6, groups=2, **geometry):
    x, weight = torch.randn(2, channels, length), torch.randn(4, channels // groups, kernel)
    y = check_kind("conv1d", variant, x, weight, torch.randn(4, requires_grad=True), groups=groups, **geometry)
    assert y.is_contiguous()


@pytest.mark.parametrize("variant", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_every_variant(variant):
    check(variant, stride=1 if variant.grad_input is Precision.INT8 else 2, padding=1)


@pytest.mark.parametrize(
    "geometry",
    [{"stride": 3}, {"padding": 2, "dilation": 2}, {"padding": "same", "kernel": 4}, {"padding": "valid"}, {"groups": 1}],
    ids=str,
)
def test_every_geometry(geometry):
    check(INT8, **geometry)


@pytest.mark.parametrize("compiles", [False, True])
def test_the_result_may_be_changed_in_place(compiles):
    models = [nn.Sequential(nn.Conv1d(6, 4, 3, padding=1), nn.ReLU(inplace=inplace)) for inplace in (False, True)]
    models[1].load_state_dict(models[0].state_dict())
    x, found = torch.randn(2, 6, 9), []
    for model in models:
        apply_(model, {"0#0": INT8})
        y = (torch.compile(model, backend="aot_eager") if compiles else model)(x)
        y.square().sum().backward()
        found.append((y, model[0].weight.grad))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


class Called(nn.Module):
    """A convolution as a function of a parameter, of sequences that lie by position."""

    def __init__(self):
        super().__init__()
        self.filters, self.bias = nn.Parameter(torch.randn(3, 5, 4)), nn.Parameter(torch.randn(3))

    def forward(self, x):
        return F.conv1d(x.transpose(1, 2), self.filters, bias=self.bias, padding=1)


def test_functional_calls_and_single_sequences_run_as_planned():
    model, x = Called(), torch.randn(2, 9, 5)
    assert [operator.op_id.fqn for operator in trace(job_of(model, (9, 5))).adjustable] == ["filters"]
    planned = copy.deepcopy(model)
    apply_(planned, {"filters#0": INT8})
    found, single = planned(x), planned(x[:1])[0]
    assert not torch.equal(found, model(x))
    assert (found - model(x)).abs().max() < 0.1 * model(x).abs().max()
    layer = nn.Conv1d(5, 3, 4, padding=1)
    layer.weight, layer.bias = nn.Parameter(model.filters.detach()), nn.Parameter(model.bias.detach())
    apply_(holder := nn.Sequential(layer), {"0#0": INT8})
    assert torch.equal(holder(x[0].t()), single)


def test_the_whole_flow():
    model = nn.Sequential(nn.Conv1d(3, 6, 3, padding=1), nn.Tanh(), nn.Conv1d(6, 4, 5, stride=2, groups=2))

    def rows(layer):
        twin = nn.Conv2d(
            layer.in_channels, layer.out_channels, (1, *layer.kernel_size), (1, *layer.stride), (0, *layer.padding),
            groups=layer.groups,
        )  # fmt: skip
        twin.load_state_dict({name: value.view_as(twin.get_parameter(name)) for name, value in layer.state_dict().items()})
        return twin

    twin = nn.Sequential(nn.Unflatten(2, (1, 11)), rows(model[0]), nn.Tanh(), rows(model[2]))
    expected = {
        "0": ("conv1d", (6, 3, 3), 2 * (4 * 6 * 11) * 9),
        "2": ("conv1d", (4, 3, 5), 2 * (4 * 4 * 4) * 15),
    }
    check_flow(model, (3, 11), expected, twin)
