"""Second derivatives through a model under a plan: computed in float formats, refused by the operator's name in int8."""

import pytest
import torch
from torch import nn

from qsync_core.errors import PlanError
from qsync_core.ir.op_id import OpId
from qsync_torch import apply_

from .small_models import BFLOAT16, INT8
from .two_layers import BOTH, TwoLayers


def test_a_second_derivative_is_refused_by_the_operators_name(x):
    model = TwoLayers()
    apply_(model, BOTH)
    (slope,) = torch.autograd.grad(model(x.requires_grad_()).square().sum(), x, create_graph=True)
    with pytest.raises(PlanError, match=r"operator a#0 runs in int8, which has no second derivative"):
        slope.square().sum().backward()


def of_the_loss(model, x):
    p = list(model.parameters())
    g = torch.autograd.grad(model(x).square().mean(), p, create_graph=True)
    torch.autograd.grad(g, p, grad_outputs=[torch.ones_like(one) for one in p])


def of_a_sum_and_its_own_weight(model, x):
    weight = model[0].weight
    (g,) = torch.autograd.grad(model(x).sum(), weight, create_graph=True)
    torch.autograd.grad(g, weight, torch.ones_like(g), allow_unused=True)


def of_a_penalty(model, x):
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    torch.autograd.grad(g.square().sum(), list(model.parameters()), allow_unused=True)


def of_a_penalty_by_backward(model, x):
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    g.square().sum().backward(inputs=list(model.parameters()))


def of_a_product_with_the_hessian(model, x):
    torch.autograd.functional.hvp(lambda z: model(z).square().sum(), x, torch.ones_like(x))


@pytest.mark.parametrize(
    "differentiate",
    [of_the_loss, of_a_sum_and_its_own_weight, of_a_penalty, of_a_penalty_by_backward, of_a_product_with_the_hessian],
    ids=lambda one: one.__name__,
)
def test_second_derivatives_of_chosen_tensors_are_refused(differentiate):
    """The engine runs what lies on a path to the chosen tensors, and the refusal must; in float formats they are computed."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(4, 8)
    applied = apply_(model, {OpId("2"): BFLOAT16})
    differentiate(model, x)
    applied.remove()
    apply_(model, {OpId("2"): INT8})
    with pytest.raises(PlanError, match=r"operator 2#0 runs in int8, which has no second derivative"):
        differentiate(model, x)
