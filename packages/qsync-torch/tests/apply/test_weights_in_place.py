"""Weights that are computed, replaced, or put into another's place while the model runs."""

import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from nightly import each_once
from qsync_core.ir.op_id import OpId
from qsync_torch import apply_

from .small_models import BFLOAT16, FLOAT32, INT8, named
from .two_layers import BOTH, TwoLayers, equal, gradients_of, step_of


@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm", "old_weight_norm"])
def test_computed_weights_run_as_planned(x, norm):
    make = {
        "weight_norm": nn.utils.parametrizations.weight_norm,
        "spectral_norm": nn.utils.parametrizations.spectral_norm,
        "old_weight_norm": nn.utils.weight_norm,
    }[norm]
    model = TwoLayers()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make(model.b)
    plain = gradients_of(model, model(x).square().sum())
    lowered = step_of(model, x, named(a=FLOAT32, b=INT8))
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(lowered, plain, strict=True) if b.norm() > 0]
    assert 0 < max(errors) < 0.1


def test_prompts_that_are_parameters_of_the_caller_are_activations(x):
    model, prompt = TwoLayers("functional"), nn.Parameter(x.clone())
    apply_(model, BOTH, seed=5)
    assert equal(gradients_of(model, model(prompt).square().sum()), step_of(TwoLayers(), x))


def test_parameters_that_are_replaced_after_apply_are_found(x):
    model = TwoLayers("functional")
    apply_(model, BOTH, seed=5)
    model.load_state_dict(TwoLayers().state_dict(), assign=True)
    assert equal(gradients_of(model, model(x).square().sum()), step_of(TwoLayers(), x))
    swapped = {name: parameter.detach().clone() for name, parameter in TwoLayers().named_parameters()}
    y = torch.func.functional_call(model, swapped, (x,))
    assert not torch.equal(y, torch.func.functional_call(TwoLayers(), swapped, (x,)))


class Hyper(nn.Module):
    """A base that runs with its own weight, and with others by ``torch.func.functional_call``; ``order`` says when."""

    def __init__(self, order, checkpointed=None):
        super().__init__()
        torch.manual_seed(0)
        self.base, self.task = Projection(), nn.Parameter(torch.randn(16, 16) / 4)
        self.order, self.checkpointed = order, checkpointed

    def forward(self, x):
        others = {"computed": self.base.weight * 2, "task": self.task}
        run = {
            "own": self.base,
            **{name: functools.partial(self.put_in, weight) for name, weight in others.items()},
        }
        if self.checkpointed is not None:
            run = {name: functools.partial(checkpoint, each, use_reentrant=self.checkpointed) for name, each in run.items()}
        return {name: run[name](x) for name in self.order}

    def put_in(self, weight, x):
        return torch.func.functional_call(self.base, {"weight": weight}, (x,))


class Projection(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x):
        return F.linear(x, self.weight)


@each_once(
    {"order": [("own", "computed", "task"), ("computed", "task", "own"), ("task", "own", "computed")], "compiled": [False, True]}
)
def test_what_a_forward_puts_into_a_weights_place_runs_as_the_trace_names_it(x, order, compiled):
    """A weight that is computed is no parameter, and no operator of a plan; another parameter is an operator of its own."""

    def outputs(variants, model):
        apply_(model, variants, seed=5)
        run = torch.compile(model, backend="aot_eager") if compiled else model
        return [run(x) for _ in range(2)]

    variants = {OpId("base.weight"): INT8, OpId("task"): BFLOAT16}
    for name in order:
        alone = outputs(variants, Hyper((name,)))
        for found, expected in zip(outputs(variants, Hyper(order)), alone, strict=True):
            assert torch.equal(found[name], expected[name])
        plain = Hyper((name,))(x)[name]
        assert torch.equal(alone[0][name], plain) == (name == "computed")


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_puts_the_same_into_a_weights_place_again(x, reentrant):
    def gradients(checkpointed):
        model = Hyper(("computed", "own", "task"), checkpointed)
        apply_(model, {OpId("base.weight"): INT8, OpId("task"): BFLOAT16}, seed=5)
        return gradients_of(model, sum(y.square().sum() for y in model(x.clone().requires_grad_()).values()))

    assert equal(gradients(reentrant), gradients(None))
