"""Transposed convolutions of sequences: in every float format and geometry, as functions, and through the whole flow."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_core.errors import QSyncError
from qsync_core.geometry import Geometry
from qsync_core.ir.op_id import OpId
from qsync_core.kernels.requests import CallShapes
from qsync_planner.indicate import indicate
from qsync_torch.apply.apply import apply_
from qsync_torch.aten.float_products import FORMATS_WITHOUT_HARDWARE
from qsync_torch.kernels.canary import float_products_of
from qsync_torch.kernels.exact_products import problem_of
from qsync_torch.observing.closed_form import LossVarCollector
from qsync_torch.observing.observe import ObserveRequest, observe
from qsync_torch.profiling.bench import Efforts
from qsync_torch.profiling.profile import ProfileRequest, profile
from qsync_torch.tracing.trace import trace

from .variants import CONVOLUTIONS, INT8
from .whole_flow import BFLOAT16, FLOAT32, LADDER, QUICK, check_kind, job_of

FLOATS = {name: variant for name, variant in CONVOLUTIONS.items() if not variant.compute.needs_scale}


def turned(weight, groups=1):
    """(C, O / groups, K) from (O, C / groups, K), group by group."""
    return torch.cat([part.transpose(0, 1) for part in weight.chunk(groups)])


def check(variant, length=7, kernel=3, groups=1, **geometry):
    x, weight = torch.randn(2, 4, length), torch.randn(6, 4 // groups, kernel)
    bias = torch.randn(6, requires_grad=True)
    return check_kind("conv_transpose1d", variant, x, weight, bias, lambda w: turned(w, groups), groups=groups, **geometry)


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


def spread(x, weight, stride, padding):
    """A transposed convolution by its definition: each element of the input adds its filter to the output, ``stride`` apart.

    All are float64; x (B, C, L), weight (C, O, K), output (B, O, (L - 1) * stride - 2 * padding + K).
    """
    length, kernel = x.shape[2], weight.shape[2]
    whole = x.new_zeros(len(x), weight.shape[1], (length - 1) * stride + kernel)
    for position in range(length):
        whole[:, :, position * stride : position * stride + kernel] += torch.einsum("bc,cok->bok", x[:, :, position], weight)
    return whole[:, :, padding : whole.shape[2] - padding]


@pytest.mark.parametrize("label", ["float32", "bfloat16", "float16"])
def test_numbers_are_those_of_the_definition(label):
    variant = FLOATS[label]
    dtype, bound = getattr(torch, label), {"float32": 1e-5, "float16": 3e-3, "bfloat16": 2e-2}[label]
    model = nn.Sequential(nn.ConvTranspose1d(4, 3, 4, stride=2, padding=1, bias=False))
    x = torch.randn(2, 4, 6, requires_grad=True)
    applied = apply_(model, {"0#0": variant})
    y = model(x)
    x64, w64 = (one.detach().to(dtype).double().requires_grad_() for one in (x, model[0]._parameters["weight"]))
    want = spread(x64, w64, 2, 1)
    grad = torch.randn(y.shape).to(y.dtype)
    y.backward(grad)
    applied.remove()
    wanted = (want, *torch.autograd.grad(want, (x64, w64), grad.double()))
    for found, expected in zip((y, x.grad, model[0].weight.grad), wanted, strict=True):
        assert (found.double() - expected).abs().max() <= bound * expected.abs().max()


class Called(nn.Module):
    """As a function of a parameter."""

    def __init__(self):
        super().__init__()
        self.filters, self.bias = nn.Parameter(torch.randn(5, 3, 4)), nn.Parameter(torch.randn(3))

    def forward(self, x):
        return F.conv_transpose1d(x, self.filters, bias=self.bias, stride=2, padding=1)


def test_functional_calls_run_as_planned():
    model, x = Called(), torch.randn(2, 5, 6)
    assert [operator.op_id.fqn for operator in trace(job_of(model, (5, 6))).adjustable] == ["filters"]
    planned = copy.deepcopy(model)
    apply_(planned, {"filters#0": BFLOAT16})
    halves = (x.bfloat16(), model.filters.bfloat16(), model.bias.bfloat16())
    assert torch.equal(planned(x), F.conv_transpose1d(*halves, stride=2, padding=1))


class Sized(nn.Module):
    """A module that is called with an output size."""

    def __init__(self):
        super().__init__()
        self.up = nn.ConvTranspose1d(3, 2, 3, stride=2)

    def forward(self, x):
        return self.up(x, output_size=(12,))


def test_output_sizes_hold_under_a_plan():
    model, x = Sized(), torch.randn(2, 3, 5)
    plain = model(x)
    apply_(model, {"up#0": BFLOAT16})
    assert model(x).shape == plain.shape == (2, 2, 12)
    assert 0 < (model(x) - plain).abs().max() < 0.1 * plain.abs().max()


def test_8_bit_is_refused_by_name():
    with pytest.raises(QSyncError, match=r"0#0.*conv_transpose1d"):
        apply_(nn.Sequential(nn.ConvTranspose1d(3, 2, 3)), {"0#0": INT8})


def test_a_wrong_element_is_found_before_it_is_measured():
    geometry = Geometry((2,), (1,), (1,), 2, True, (1,))
    call = CallShapes("conv_transpose1d", (2, 4, 6), (6, 2, 3), (2, 6, 12), geometry)
    products = list(float_products_of(call, BFLOAT16, torch.device("cpu")))
    assert {product.what for product in products} == {"output", "grad_input", "grad_weight"}
    for product in products:
        assert problem_of(product) == ""
        product.found.view(-1)[-1] += 8 * product.found.abs().max()
        assert "its errors are" in problem_of(product)


def test_the_whole_flow():
    """What is measured and rated of it is rated in the formats that it runs in; of the linear beside it in all."""
    shape = (3, 5)
    model = nn.Sequential(nn.ConvTranspose1d(3, 4, 3, stride=2), nn.Tanh(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 2))
    sequence, rows = OpId("0"), OpId("4")
    job = job_of(model, shape)
    dag = trace(job)
    assert {o.op_id: (o.kind, o.weight_shape, o.parameter_shape, o.flops) for o in dag.adjustable} == {
        sequence: ("conv_transpose1d", (4, 3, 3), (3, 4, 3), 2 * (4 * 3 * 5) * 4 * 3),
        rows: ("linear", (2, 4), (2, 4), 2 * (4 * 2) * 4),
    }
    runs = {sequence: {BFLOAT16, FLOAT32}, rows: set(LADDER)}
    measured = profile(job, dag, ProfileRequest(ladder=LADDER, with_collectives=False, efforts=Efforts(QUICK, QUICK, QUICK)))
    assert {op_id: set(measured.cost_index[op_id]) for op_id in runs} == runs

    options = {"warmup": 0, "steps": 1, "settled": None}
    observed = observe(job, dag, ObserveRequest(LADDER, collectors=[LossVarCollector()], **options))
    sensitivity = indicate(observed, dag, LADDER, "lossvar")
    assert {op_id: set(by_variant) for op_id, by_variant in sensitivity.omega.items()} == runs

    x = torch.randn(2, *shape)
    planned = copy.deepcopy(model)
    applied = apply_(planned, {"0#0": BFLOAT16})
    y = planned(x)
    y.sum().backward()
    half = F.conv_transpose1d(x.bfloat16(), model[0].weight.bfloat16(), model[0].bias.bfloat16(), stride=2)
    want = model[1:](half.float())
    assert torch.equal(y, want)
    (grad,) = torch.autograd.grad(want.sum(), model[0].weight)
    applied.remove()
    # Where a CPU has no instructions for the format, PyTorch's own gradient sums in 16 bit.
    allowed = 2.0**-8 if torch.bfloat16 in FORMATS_WITHOUT_HARDWARE else 0.0
    assert (planned[0].weight.grad - grad).norm() <= allowed * grad.norm()
