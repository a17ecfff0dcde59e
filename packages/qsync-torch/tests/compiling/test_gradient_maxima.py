"""Backward graphs in which a gated unit finds the maxima of its gradients, whose quantizations then read them once."""

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qsync_torch as qsync
from nightly import nightly
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.kernels.backend import KernelRequest, Op
from qsync_core.kernels.requests import quantization_variant
from qsync_core.plugins.backends import checked
from qsync_torch import apply_
from qsync_torch.aten.backend import AtenBackend
from qsync_torch.compiling import compile as compiling
from qsync_torch.kernels import selection

from .chained_models import INT8, Llama, lowered, tokens

OPS = torch.ops.qsync
ALL = attrs.evolve(INT8, grad_input=Precision.INT8, grad_weight=Precision.INT8, rounding=Rounding.STOCHASTIC)


@pytest.fixture
def units(counted):
    """How many gated units of each backward graph write maxima."""
    return counted("fuse_gradient_maxima")


def gradients(variant, x, how="aot_eager", backend_of_operators=None, **options):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Llama()
    apply_(model, lowered(model, variant), backend=backend_of_operators)
    with torch._inductor.config.patch(force_disable_caches=True):
        taken = x.clone().requires_grad_()
        qsync.compile(model, backend=how, fullgraph=True, **options)(taken).square().sum().backward()
    return [taken.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("how", ["aot_eager", *nightly("inductor")])
def test_a_step_with_maxima_is_bit_for_bit_the_one_without(units, monkeypatch, how):
    """Random numbers too: they follow from the checksum that is handed on."""
    x = tokens()
    with_maxima = gradients(ALL, x, how)
    assert units
    assert all(count == units[0] > 0 for count in units)
    monkeypatch.setattr(compiling, "fuse_gradient_maxima", lambda graph: 0)
    assert all(map(torch.equal, with_maxima, gradients(ALL, x, how)))


def test_both_quantizations_of_a_unit_are_given_its_maxima(monkeypatch):
    given, rewrite = [], compiling.fuse_gradient_maxima

    def counting(graph):
        count = rewrite(graph)
        quantizations = [node for node in graph.nodes if node.target in (OPS.quantize.at, OPS.quantize_transposed.at)]
        known = [node.args[-1] for node in quantizations if len(node.args) > 5]
        given.append((count, len(known), {node.args[0].target for node in known}))
        return count

    monkeypatch.setattr(compiling, "fuse_gradient_maxima", counting)
    gradients(ALL, tokens())
    maxima = {OPS.glu_grad_maxima.default}
    assert [one for one in given if one[0]] == [(count, 2 * count, maxima) for count, *_ in given if count] != []


@pytest.mark.parametrize(
    "variant",
    [
        attrs.evolve(ALL, x_granularity=Granularity.PER_ROW),
        attrs.evolve(ALL, grad_input=Precision.FLOAT32, grad_weight=Precision.FLOAT32),
    ],
    ids=["rows", "floats"],
)
def test_gradients_that_have_no_single_scale_have_no_maxima(units, variant):
    gradients(variant, tokens())
    assert not units


def test_a_gated_unit_that_writes_its_copy_again_writes_no_maxima(units):
    """Its kernel is another one; the copy is worth more memory than the maxima are time."""
    gradients(ALL, tokens(), saved="int8")
    assert not units


class Third(AtenBackend):
    """Of other people, who have not heard of maxima."""

    name, hands_on_maxima = "third", False

    def kernel_specs(self):
        return [spec for spec in super().kernel_specs() if spec.op in (Op.QUANTIZE, Op.GLU_OUTPUT, Op.GLU_GRAD_INPUT)]

    def unsupported_reasons(self, request):
        known = attrs.evolve(request, knows_maxima=False, chain=attrs.evolve(request.chain, grad_maxima=False))
        return super().unsupported_reasons(known) if any(spec.op == request.op for spec in self.kernel_specs()) else ["not here"]


def test_kernels_of_a_backend_that_does_not_hand_on_maxima_stay_its_own(units, monkeypatch):
    """Another one that does would take over the gated unit's gradient, or its quantization."""
    third = checked(Third())
    monkeypatch.setattr(selection, "_find_backend", lambda name: third if name == "third" else AtenBackend())
    selection.find_backends.cache_clear()
    try:
        gradients(ALL, tokens(), backend_of_operators="third+aten")
    finally:
        selection.find_backends.cache_clear()
    assert not units


def test_kernels_that_take_numbers_are_given_what_goes_by_name():
    request = KernelRequest(Op.QUANTIZE, quantization_variant(Precision.INT8, Granularity.PER_ROW, Rounding.STOCHASTIC), ((2, 3),))
    called = {}

    def kernel(x, q, scale, stream, seed, offset, multiplier=None, transposed_out=None, **named):
        called.update(offset=offset, **named)

    given = {"row_multiplier": torch.ones(2), "maxima": torch.ones(2, 4)}
    selection._with_number(kernel, "third", request, None, None, None, None, 1, torch.tensor([7]), None, None, **given)
    assert called == {"offset": 7, **given}


class Viewed(nn.Module):
    """The quantized gradients are views of the gated unit's, of other columns."""

    def __init__(self, heads, width):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(width, 8)
        self.heads = heads, width

    def forward(self, x):
        gate, up = self.gate(x).unflatten(-1, self.heads), self.up(x).unflatten(-1, self.heads)
        return self.down(F.silu(gate) * up)


@pytest.mark.parametrize(("heads", "width"), [(4, 8), (32, 1)])
@pytest.mark.parametrize("dynamic", [None, True])
def test_views_of_other_columns_have_no_maxima(units, heads, width, dynamic):
    """A multiplier has one factor for each column of what is quantized."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Viewed(heads, width), torch.randn(4, 6, 16)
    apply_(model, lowered(model, ALL))
    qsync.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)(x).square().sum().backward()
    assert not units
    assert model.gate.weight.grad.norm() > 0
