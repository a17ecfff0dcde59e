"""Models that cast a weight to the format of their activation, which is another under a plan, run as their plan says."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from qsync_torch import apply_

from .small_models import BFLOAT16, FLOAT32, INT8, named
from .test_apply import plan_of

WAYS = {
    "linear": lambda x, w, b: F.linear(x, w, b),
    "keywords": lambda x, w, b: F.linear(input=x, weight=w, bias=b),
    "without a bias": lambda x, w, b: F.linear(x, w),
    "product": lambda x, w, b: x @ w,
    "addmm": lambda x, w, b: torch.addmm(b, x, w),
    "conv2d": lambda x, w, b: F.conv2d(x[:, :, None, None], w, b).flatten(1),
    "checkpointed": lambda x, w, b: checkpoint(F.linear, x, w, b, use_reentrant=False),
}
CASTS = {
    "to": lambda p, x: p.to(x.dtype),
    "type_as": lambda p, x: p.type_as(x),
    "like": lambda p, x: p.to(x),
    "bfloat16": lambda p, x: p.bfloat16() if x.dtype is torch.bfloat16 else p,
}


class Casting(nn.Module):
    """A linear layer, and another one that the model runs itself, with or without casts."""

    def __init__(self, way, cast=None):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 16)
        self.weight, self.bias = nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.randn(16))
        if way == "conv2d":
            self.weight = nn.Parameter(torch.randn(16, 16, 1, 1))
        self.way, self.cast = way, CASTS.get(cast, lambda p, x: p)

    def forward(self, x):
        h = torch.relu(self.first(x))
        return WAYS[self.way](h, self.cast(self.weight, h), self.bias)


def results_of(model, variants, compiled=False):
    apply_(model, plan_of(variants), seed=5)
    y = (torch.compile(model, backend="eager") if compiled else model)(torch.linspace(-1, 1, 64).view(4, 16))
    y.square().sum().backward()
    return [y, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for one, two in zip(found, expected, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("variant", [INT8, FLOAT32], ids=["int8", "float32"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cast", CASTS)
def test_the_operator_runs_as_without_the_cast(way, cast, variant):
    variants = named(first=BFLOAT16, weight=variant)
    assert_equal(results_of(Casting(way, cast), variants), results_of(Casting(way), variants))


def test_a_frozen_weight_does_too():
    found = []
    for cast in (None, "to"):
        model = Casting("linear", cast)
        model.weight.requires_grad_(False)
        found.append(results_of(model, named(first=BFLOAT16, weight=INT8)))
    assert_equal(*found)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_around_the_cast_does_too(use_reentrant):
    class Checkpointing(Casting):
        def forward(self, x):
            return checkpoint(super().forward, x.requires_grad_(), use_reentrant=use_reentrant)

    variants = named(first=BFLOAT16, weight=INT8)
    assert_equal(results_of(Checkpointing("linear", "to"), variants), results_of(Casting("linear"), variants))


def test_a_weight_that_is_asked_for_its_type_is_not_cast():
    class Asking(Casting):
        def forward(self, x):
            return super().forward(x.type(self.weight.type()))

    variants = named(first=BFLOAT16, weight=INT8)
    assert_equal(results_of(Asking("linear"), variants), results_of(Casting("linear"), variants))


def test_compiled_code_does_too():
    variants = named(first=BFLOAT16, weight=INT8)
    assert_equal(
        results_of(Casting("linear", "to"), variants, compiled=True), results_of(Casting("linear"), variants, compiled=True)
    )


def test_a_cast_that_was_there_in_the_trace_stays():
    """The trace has no operator that a plan could lower there, and no plan names it."""

    class Own(Casting):
        def forward(self, x):
            h = torch.relu(self.first(x))
            return F.linear(h.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16())

    model, plain = Own("linear"), Own("linear")
    apply_(model, plan_of(named(first=FLOAT32)))
    x = torch.randn(4, 16)
    assert torch.equal(model(x), plain(x))
