"""Three-dimensional convolutions: in every float format and geometry, as functions, and through the whole flow without 8 bit."""

import copy
import re

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_core.errors import BackendError
from qsync_core.geometry import Geometry
from qsync_core.ir import observations as terms
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.kernels.backend import Op
from qsync_core.kernels.requests import CallShapes
from qsync_planner.indicate import indicate
from qsync_torch.apply.apply import apply_
from qsync_torch.aten.backend import AtenBackend
from qsync_torch.aten.float_products import FORMATS_WITHOUT_HARDWARE
from qsync_torch.kernels.canary import float_products_of
from qsync_torch.kernels.exact_products import problem_of
from qsync_torch.kinds.table import SPELLED
from qsync_torch.observing.closed_form import LossVarCollector
from qsync_torch.observing.montecarlo import MonteCarloCollector
from qsync_torch.observing.observe import ObserveRequest, observe
from qsync_torch.profiling.bench import Efforts
from qsync_torch.profiling.profile import ProfileRequest, profile
from qsync_torch.tracing.trace import trace

from .variants import CONVOLUTIONS, INT8
from .whole_flow import BFLOAT16, FLOAT32, LADDER, QUICK, check_kind, job_of

FLOATS = {name: variant for name, variant in CONVOLUTIONS.items() if not variant.compute.needs_scale}


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


class Spread(nn.Module):
    """A transposed convolution as a function of a parameter."""

    def __init__(self):
        super().__init__()
        self.filters = nn.Parameter(torch.randn(3, 5, 3, 3))

    def forward(self, x):
        return F.conv_transpose2d(x, self.filters)


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
    products = list(float_products_of(call, BFLOAT16, torch.device("cpu")))
    assert {product.what for product in products} == {"output", "grad_input", "grad_weight"}
    for product in products:
        assert problem_of(product) == ""
        product.found.view(-1)[-1] += 8 * product.found.abs().max()
        assert "its errors are" in problem_of(product)


def test_the_whole_flow():
    """What is measured, observed and rated of it is rated in the formats that it runs in; of the linear beside it in all."""
    shape = (3, 4, 6, 5)
    model = nn.Sequential(nn.Conv3d(3, 6, (2, 3, 3), padding=1), nn.Tanh(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(6, 4))
    volume, rows = OpId("0"), OpId("4")
    job = job_of(model, shape)
    dag = trace(job)
    assert {o.op_id: (o.kind, o.flops) for o in dag.adjustable} == {
        volume: ("conv3d", 2 * (4 * 6 * 5 * 6 * 5) * (3 * 18)),
        rows: ("linear", 2 * (4 * 4) * 6),
    }
    runs = {volume: {BFLOAT16, FLOAT32}, rows: set(LADDER)}
    measured = profile(job, dag, ProfileRequest(ladder=LADDER, with_collectives=False, efforts=Efforts(QUICK, QUICK, QUICK)))
    assert {op_id: set(measured.cost_index[op_id]) for op_id in runs} == runs

    options = {"warmup": 0, "steps": 1, "settled": None}
    collector = MonteCarloCollector(draws=2)
    truth = observe(job, dag, ObserveRequest(LADDER, collectors=[collector], **options))
    found = {}
    for series in truth.series:
        if series.term == terms.FIRST_HALF:
            found.setdefault(series.op_id, set()).add(series.variant)
    # One more of all operators at once: in int8 it is the linear alone.
    assert found == {op_id: variants - {FLOAT32} for op_id, variants in (runs | {None: set(LADDER)}).items()}
    assert truth.values(terms.MONTECARLO, terms.FIRST_HALF, None, INT8) == truth.values(
        terms.MONTECARLO, terms.FIRST_HALF, rows, INT8
    )
    # Nothing is drawn: both round to nearest.  The undisturbed pass, two operators and all in bfloat16, one and all in int8.
    assert collector.passes(dag, LADDER) == 1 + 3 + 2

    observed = observe(job, dag, ObserveRequest(LADDER, collectors=[LossVarCollector()], **options))
    sensitivity = indicate(observed, dag, LADDER, "lossvar")
    assert {op_id: set(by_variant) for op_id, by_variant in sensitivity.omega.items()} == runs

    x = torch.randn(2, *shape)
    planned = copy.deepcopy(model)
    applied = apply_(planned, {"0#0": BFLOAT16})
    y = planned(x)
    y.sum().backward()
    half = F.conv3d(x.bfloat16(), model[0].weight.bfloat16(), model[0].bias.bfloat16(), padding=1)
    want = model[1:](half.float())
    assert torch.equal(y, want)
    (grad,) = torch.autograd.grad(want.sum(), model[0].weight)
    applied.remove()
    # Where a CPU has no instructions for the format, PyTorch's own gradient sums in 16 bit.
    allowed = 2.0**-8 if torch.bfloat16 in FORMATS_WITHOUT_HARDWARE else 0.0
    assert (planned[0].weight.grad - grad).norm() <= allowed * grad.norm()
