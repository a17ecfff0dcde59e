"""Forwards and parts that are exchanged, and operators that are called in other ways than the trace saw."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from qsync_torch import apply_
from robustness.reference import Reference
from robustness.wrong.two import (
    BASE,
    BFLOAT16,
    BOTH,
    INT8,
    WIDTH,
    Pair,
    Two,
    batch,
    did_not_run,
    first_step,
    gradients,
    plain,
    plan,
    refused_only,
    same,
    script,
    step,
)


@script()
def forward_patched_before() -> Pair:
    def make() -> Any:
        model = Two()
        own = model.b.forward
        model.b.forward = lambda input: 2 * own(input)
        return model

    return same(make=make)


@script()
def forward_patched_with_a_function() -> Pair:
    def make() -> Any:
        model = Two()
        model.b.forward = lambda input: 2 * F.linear(input, model.b.weight, model.b.bias)
        return model

    return same(make=make)


@script()
def forward_patched_after() -> Pair:
    def run(model: Any) -> Any:
        own = model.b.forward
        model.b.forward = lambda input: 2 * own(input)
        return step(model)

    return same(run)


@script()
def forward_of_the_class_patched_after() -> Pair:
    class Own(Two):
        pass

    def run(model: Any) -> Any:
        Own.body = lambda self, x: 2 * self.b(self.a(x).relu())  # type: ignore[method-assign]
        return step(model)

    return same(run, Own)


@script()
def removed_in_the_wrong_order() -> Pair:
    model = Two()
    applied = apply_(model, plan())
    own = model.b.forward
    model.b.forward = lambda input: own(input)
    applied.remove()
    return 0, "a refusal"


@script()
def two_plans() -> Pair:
    model = Two()
    apply_(model, plan())
    apply_(model, plan(BASE))
    return 0, "a refusal"


@script()
def one_plan_after_another() -> Pair:
    model = Two()
    apply_(model, plan({"a": BFLOAT16, "b": INT8})).remove()
    apply_(model, plan())
    return step(model), same()[1]


@script()
def removed_twice() -> Pair:
    model = Two()
    applied = apply_(model, plan())
    applied.remove()
    applied.remove()
    return step(model), plain(step)


@script()
def removed_between_forward_and_backward() -> Pair:
    model = Two()
    applied = apply_(model, plan())
    y = model(batch())
    applied.remove()
    y.square().sum().backward()
    return [y.detach(), *gradients(model)], same()[1]


@script()
def submodule_replaced_after_apply() -> Pair:
    model = Two()
    apply_(model, plan())
    model.a = nn.Linear(WIDTH, WIDTH)
    twin = copy.deepcopy(model)  # without a plan
    found, said = first_step(model)
    named = did_not_run(said, "a#0") and any("lowers a#0, whose modules are not in the model any more" in one for one in said)
    with Reference(twin, {"b": BFLOAT16}).running():
        return [torch.tensor(named), found], [torch.tensor(True), step(twin)]


@script()
def submodule_replaced_after_the_first_step() -> Pair:
    model = Two()
    apply_(model, plan())
    step(model)
    model.a = nn.Linear(WIDTH, WIDTH)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        step(model)
    return torch.tensor(any("lowers a#0, whose modules are not" in str(one.message) for one in said)), torch.tensor(True)


@script()
def function_of_pytorch_replaced() -> Pair:
    own = F.linear

    def doubled(*args: Any) -> torch.Tensor:
        return 2 * own(*args)

    def run(model: Any) -> Any:
        F.linear = doubled
        try:
            return step(model)
        finally:
            F.linear = own

    return refused_only(run)


@script()
def convolution_patched_after_apply() -> Pair:
    def run(model: Any) -> Any:
        layer = model[0]
        layer._conv_forward = lambda x, weight, bias: F.conv2d(F.pad(x, (1, 1, 1, 1), "circular"), weight, bias)
        return step(model, torch.ones(2, 3, 8, 8))

    return refused_only(run, lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1)), {"0": BFLOAT16})


def normed_after_apply(norm: Callable[[nn.Module], Any]) -> Pair:
    """A weight that is computed in every forward since the plan was applied."""
    model, twin = Two(), Two()
    apply_(model, plan())
    for one in (model, twin):
        norm(one.b)
    found = step(model)
    with Reference(twin, BOTH).running():
        return found, step(twin)


@script()
def parametrization_after_apply() -> Pair:
    return normed_after_apply(nn.utils.parametrizations.weight_norm)


@script()
def older_weight_norm_after_apply() -> Pair:
    return normed_after_apply(nn.utils.weight_norm)


@script()
def weight_norm_before_apply() -> Pair:
    def make() -> Any:
        model = Two()
        nn.utils.parametrizations.weight_norm(model.b)
        return model

    return same(make=make)


@script()
def forward_called_by_name() -> Pair:
    return same(make=lambda: Two(lambda model, x: model.b.forward(model.a.forward(x).relu())))


@script()
def functional_calls_in_another_order() -> Pair:
    def body(model: Any, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, model.b.weight) + F.linear(x, model.a.weight, model.a.bias) + F.linear(x, model.b.weight)

    return same(make=lambda: Two(body))


@script()
def weights_cast_to_the_format_of_the_activation() -> Pair:
    def body(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = model.a(x).relu()
        return F.linear(x, model.b.weight.to(x.dtype), model.b.bias.to(x.dtype))

    variants = {"a": BFLOAT16, "b": INT8}
    model, twin = Two(body), Two()
    apply_(model, plan(variants))
    with Reference(twin, variants).running():
        return step(model), step(twin)


@script()
def a_weight_seen_as_a_view() -> Pair:
    model = Two(lambda model, x: F.linear(F.linear(x, model.a.weight[:, :]), model.b.weight.view(WIDTH, WIDTH)))
    apply_(model, plan())
    found, said = first_step(model)
    return [torch.tensor(did_not_run(said, "a#0", "b#0")), found], [torch.tensor(True), plain(step, lambda: Two(model.way))]


@script()
def a_weight_that_is_computed_beside_its_operator() -> Pair:
    """What is computed from a weight, a copy too, is not what was planned."""
    body = lambda model, x: model.body(x) + F.linear(x, model.b.weight.clone()) + F.linear(x, model.b.weight * 1)  # noqa: E731
    return same(make=lambda: Two(body))


@script()
def weights_tied_after_apply() -> Pair:
    model = Two()
    apply_(model, plan())
    model.b.weight = model.a.weight
    return step(model), of_tied_weights()


@script()
def tied_weights_with_two_formats() -> Pair:
    def make() -> Any:
        model = Two()
        model.b.weight = model.a.weight
        return model

    model = make()
    apply_(model, plan())
    return step(model), of_tied_weights()


def of_tied_weights() -> list[Any]:
    """A step of two layers with one weight, each in its own format."""
    twin = Two()
    with torch.no_grad():
        twin.b.weight.copy_(twin.a.weight)
    with Reference(twin, BOTH).running():
        y, a, a_bias, b, b_bias = step(twin)
    return [y, a + b, a_bias, b_bias]


@script()
def a_model_that_calls_itself() -> Pair:
    def body(model: Any, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 1:
            return model.body(x)
        return torch.cat([model(x[:1]), model(x[1:])])

    def flat(model: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([model.body(row[None]) for row in x])

    model, twin = Two(body), Two(flat)
    apply_(model, plan())
    with Reference(twin, BOTH).running():
        expected = step(twin)
    return step(model), expected


@script()
def class_exchanged_after_apply() -> Pair:
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    def run(model: Any) -> Any:
        model.a.__class__ = Doubled
        return step(model)

    return refused_only(run)
