"""Three-dimensional convolutions: in every float format and geometry, as functions, and through the whole flow without 8 bit."""

import copy
import functools
import re

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_core.errors import BackendError
from qsync_core.geometry import Geometry
from qsync_core.ir.precision import Precision
from qsync_core.kernels.backend import Op
from qsync_core.kernels.requests import CallShapes
from qsync_torch.apply.apply import apply_
from qsync_torch.aten.backend import AtenBackend
from qsync_torch.kinds.table import SPELLED
from qsync_torch.tracing.trace import trace

from .variants import FLOATS, INT8
from .whole_flow import BFLOAT16, check_flow_in_floats, check_kind, check_wrong_elements_are_found, job_of


def check(variant, size=(4, 6, 5), kernel=(3, 3, 2), channels=6, groups=2, **geometry):
    x, weight = torch.randn(2, channels, *size), torch.randn(4, channels // groups, *kernel)
    check_kind("conv3d", variant, x, weight, torch.randn(4, requires_grad=True), groups=groups, **geometry)


@pytest.mark.parametrize("variant", FLOATS.values(), ids=FLOATS)
def test_every_variant(variant):
    check(variant, stride=2, padding=1)


@pytest.mark.parametrize(
    "geometry",
    [
        {"stride": (1, 3, 2)},
        {"padding": (2, 1, 0), "dilation": (2, 1, 1)},
        {"padding": "same"},
        {"padding": "valid"},
        {"groups": 1},
    ],
    ids=str,
)
def test_every_geometry(geometry):
    check(BFLOAT16, **geometry)


class Called(nn.Module):
    """A convolution as a function of a parameter."""

    def __init__(self):
        super().__init__()
        self.filters, self.bias = nn.Parameter(torch.randn(3, 5, 2, 3, 3)), nn.Parameter(torch.randn(3))

    def forward(self, x):
        return F.conv3d(x, self.filters, bias=self.bias, padding=1)


def test_functional_calls_run_as_planned():
    model, x = Called(), torch.randn(2, 5, 3, 6, 5)
    assert [operator.op_id.fqn for operator in trace(job_of(model, (5, 3, 6, 5))).adjustable] == ["filters"]
    planned = copy.deepcopy(model)
    apply_(planned, {"filters#0": BFLOAT16})
    halves = (x.bfloat16(), model.filters.bfloat16(), model.bias.bfloat16())
    assert torch.equal(planned(x), F.conv3d(*halves, padding=1))


@pytest.mark.parametrize(
    "model, who, them",
    [
        (Called(), "operator filters#0 is", "it"),
        (nn.Sequential(nn.Conv3d(3, 2, 1)), "operator 0#0 is", "it"),
        (nn.Sequential(nn.Conv3d(3, 2, 1), nn.Conv3d(2, 2, 1)), "operators 0#0, 1#0 are", "them"),
    ],
    ids=["function", "module", "modules"],
)
def test_8_bit_is_refused_by_name(model, who, them):
    """A parameter may be of any kind with weights of as many dimensions."""
    names = re.findall(r"\w+#0", who)
    has = f"which has no kernels in 8 bit, and the plan has {them} as {INT8.label}: keep {them} in a float format in the plan"
    with pytest.raises(BackendError, match=rf"^{who} called as conv3d( or \w+)*, {has}$"):
        apply_(model, dict.fromkeys(names, INT8))


class Spread(nn.Module):
    """A transposed convolution as a function of a parameter."""

    def __init__(self):
        super().__init__()
        self.filters = nn.Parameter(torch.randn(3, 5, 3, 3))

    def forward(self, x):
        return F.conv_transpose2d(x, self.filters)


def test_8_bit_is_refused_where_another_kind_has_weights_of_as_many_dimensions(monkeypatch):
    """A plan does not say as which kind a parameter is called, so that only the call shows it."""
    kind, spelling = SPELLED[F.conv_transpose2d]
    in_floats = attrs.evolve(kind, row=attrs.evolve(kind.row, in_8_bit=False))
    monkeypatch.setitem(SPELLED, F.conv_transpose2d, (in_floats, spelling))
    model, x = Spread(), torch.randn(2, 3, 6, 5)
    applied = apply_(model, {"filters#0": INT8})
    with pytest.raises(
        BackendError, match=r"^operator filters#0 is called as conv_transpose2d, which has no kernels in 8 bit, and"
    ):
        model(x)
    applied.remove()
    apply_(model, {"filters#0": BFLOAT16})
    assert model(x).shape == (2, 5, 8, 7)


def test_aten_offers_it_in_float_formats_alone():
    offered = {spec.op: set(spec.compute) for spec in AtenBackend().kernel_specs()}
    floats = {str(precision) for precision in (Precision.BFLOAT16, Precision.FLOAT16, Precision.FLOAT32)}
    assert set(Op.IN_FLOATS) >= {"conv3d.output", "conv3d.grad_input", "conv3d.grad_weight"}
    assert all(offered[op] == floats for op in Op.IN_FLOATS)
    assert offered["conv2d.output"] == {"int8", *floats}


def test_a_wrong_element_of_a_volume_is_found_before_it_is_measured():
    geometry = Geometry((1, 2, 1), (1, 1, 0), (1, 1, 2), 2)
    call = CallShapes("conv3d", (2, 4, 4, 6, 7), (6, 2, 3, 3, 2), (2, 6, 4, 3, 5), geometry)
    check_wrong_elements_are_found(call)


def test_the_whole_flow():
    model = nn.Sequential(nn.Conv3d(3, 6, (2, 3, 3), padding=1), nn.Tanh(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(6, 4))
    expected = {
        "0": ("conv3d", (6, 3, 2, 3, 3), 2 * (4 * 6 * 5 * 6 * 5) * (3 * 18)),
        "4": ("linear", (4, 6), 2 * (4 * 4) * 6),
    }
    check_flow_in_floats(model, (3, 4, 6, 5), expected, functools.partial(F.conv3d, padding=1))
