"""Backward graphs in which a gated unit finds the maxima of its gradients, whose quantizations then read them once."""

import attrs
import pytest
import torch

import qsync_torch as qsync
from nightly import nightly
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_torch import apply_
from qsync_torch.aten import backend
from qsync_torch.compiling import compile as compiling

from .chained_models import INT8, Llama, lowered, tokens

OPS = torch.ops.qsync
ALL = attrs.evolve(INT8, grad_input=Precision.INT8, grad_weight=Precision.INT8, rounding=Rounding.STOCHASTIC)


@pytest.fixture
def units(counted):
    """How many gated units of each backward graph write maxima."""
    return counted("fuse_gradient_maxima")


def gradients(variant, x, how="aot_eager", **options):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Llama()
    apply_(model, lowered(model, variant))
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


def test_a_backend_that_takes_no_maxima_is_given_none(units, monkeypatch):
    reasons = backend.AtenBackend.unsupported_reasons

    def refusing(self, request):
        return ["it takes no maxima"] if request.knows_maxima else reasons(self, request)

    monkeypatch.setattr(backend.AtenBackend, "unsupported_reasons", refusing)
    gradients(ALL, tokens())
    assert not units
