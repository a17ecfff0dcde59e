"""Transposed convolutions: in every variant and geometry, as functions, and through the whole flow."""

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from qsync_core.geometry import Geometry
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_core.kernels.requests import CallShapes
from qsync_torch.apply.apply import apply_
from qsync_torch.kernels.canary import Canary

from .variants import CONVOLUTIONS, INT8, INT8_INPUT_GRADIENT
from .whole_flow import BFLOAT16, check_flow, check_kind, turned

AFFINE = attrs.evolve(INT8, symmetric=False)


def check(variant, kernel=(3, 2), groups=1, channels_last=False, size=(5, 4), **geometry):
    x, weight = torch.randn(2, 4, *size), torch.randn(6, 4 // groups, *kernel)
    x = x.to(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    bias = torch.randn(6, requires_grad=True)
    y = check_kind("conv_transpose2d", variant, x, weight, bias, lambda w: turned(w, groups), groups=groups, **geometry)
    assert y.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


@pytest.mark.parametrize("variant", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_every_variant(variant):
    check(variant, stride=2, padding=1, output_padding=1, kernel=(3, 3))


@pytest.mark.parametrize("variant", [INT8, INT8_INPUT_GRADIENT, AFFINE, BFLOAT16], ids=["int8", "input gradient", "affine", "bf16"])
@pytest.mark.parametrize(
    "geometry",
    [
        {"stride": (3, 1), "padding": (0, 1), "channels_last": True},
        {"dilation": (2, 3), "groups": 2},
        {"stride": (1, 2), "dilation": (3, 1), "output_padding": (2, 1)},  # more than the stride, as the dilation lets it be
        {"padding": (4, 3), "stride": 2, "output_padding": 1},  # beyond what the filter reaches: pixels are cut off
        {"kernel": (1, 1), "padding": 2, "stride": 3},
        {"groups": 2, "stride": 2, "kernel": (2, 2)},
    ],
    ids=str,
)
def test_every_geometry(variant, geometry):
    check(variant, **geometry)


class Called(nn.Module):
    """As a function, with an output size, and beside a convolution with the same filters."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 5, 3, stride=2), nn.ConvTranspose2d(3, 3, 3, stride=2)

    def forward(self, x):
        return self.up(F.conv_transpose2d(self.down(x), self.down.weight, stride=2), output_size=(20, 19))


def test_calls_that_share_filters_and_output_sizes_run_as_planned():
    model, x = Called(), torch.randn(2, 3, 9, 9)
    plain = model(x)
    applied = apply_(model, {"down#0": BFLOAT16, "down#1": BFLOAT16, "up#0": INT8})
    assert model(x).shape == plain.shape
    assert 0 < (model(x) - plain).abs().max() < 0.1 * plain.abs().max()
    applied.remove()
    assert torch.equal(model(x), plain)


@pytest.mark.parametrize("variant", [INT8, BFLOAT16, AFFINE], ids=["int8", "bf16", "affine"])
def test_a_wrong_product_is_noticed(variant, monkeypatch):
    geometry = Geometry((2, 2), (1, 1), (1, 1), 2, True, (1, 1))
    call = CallShapes.as_run("conv_transpose2d", (2, 4, 6, 5), (6, 2, 3, 3), (2, 6, 12, 10), geometry)
    assert Canary(torch.device("cpu")).of_operator(call, variant) == []
    if variant.compute is Precision.INT8:  # filters that are not turned
        monkeypatch.setattr(torch.Tensor, "flip", lambda self, *dims: self)
        wrong = {found.role for found in Canary(torch.device("cpu")).of_operator(call, variant)}
        assert wrong == {"conv_transpose2d.output"}


class Spread(nn.Module):
    """Pixels a stride apart, and zeros around them."""

    def __init__(self, stride, sides):
        super().__init__()
        self.stride, self.sides = stride, sides

    def forward(self, x):
        wide = x.new_zeros(*x.shape[:2], *((size - 1) * self.stride + 1 for size in x.shape[2:]))
        wide[:, :, :: self.stride, :: self.stride] = x
        return F.pad(wide, (self.sides, self.sides, self.sides, self.sides))


class Turned(nn.Module):
    """Filters of a convolution from those of a transposed one."""

    def forward(self, weight):
        return weight.transpose(0, 1).flip(2, 3)

    def right_inverse(self, weight):
        return weight.flip(2, 3).transpose(0, 1)


def test_the_whole_flow():
    # Without biases, which would change the order of the parameters, and with it the random directions.
    first = nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, bias=False)
    model = nn.Sequential(first, nn.Tanh(), nn.ConvTranspose2d(4, 2, 2, bias=False))

    def convolution(layer):
        twin = nn.Conv2d(layer.in_channels, layer.out_channels, layer.kernel_size, bias=False)
        parametrize.register_parametrization(twin, "weight", Turned())
        twin.parametrizations.weight.original = nn.Parameter(layer.weight.detach().clone())
        return twin

    twin = nn.Sequential(Spread(2, 1), convolution(model[0]), nn.Tanh(), Spread(1, 1), convolution(model[2]))
    x = torch.randn(2, 3, 4, 5)
    torch.testing.assert_close(twin(x), model(x))
    expected = {
        "0": ("conv_transpose2d", (4, 3, 3, 3), 2 * (4 * 3 * 4 * 5) * 4 * 9),
        "2": ("conv_transpose2d", (2, 4, 2, 2), 2 * (4 * 4 * 7 * 9) * 2 * 4),
    }
    check_flow(model, (3, 4, 5), expected, twin)


def test_compiled_steps_equal_eager_ones():
    model = nn.Sequential(nn.ConvTranspose2d(3, 4, 3, stride=2), nn.Flatten(2), nn.Conv1d(4, 2, 3, padding=1))
    apply_(model, {"0#0": Variant.of(Precision.INT8), "2#0": Variant.of(Precision.INT8)})
    x, parameters = torch.randn(2, 3, 4, 5), list(model.parameters())

    def step(run):
        y = run(x)
        return [y, *torch.autograd.grad(y.square().sum(), parameters)]

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for found, expected in zip(step(compiled), step(model), strict=True):
        assert torch.equal(found, expected)
