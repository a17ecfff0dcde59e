"""Training steps that call parts of the model, or functions with its weights, outside of its forward."""

from __future__ import annotations

from typing import Any

import attrs
import torch.nn.functional as F

from qsync_core.ir.precision import Precision
from qsync_torch import apply_
from robustness.reference import Reference
from robustness.wrong.two import (
    AMP,
    INT8,
    Pair,
    Two,
    autocast,
    batch,
    gradients,
    inside,
    plain,
    plan,
    refused_only,
    same,
    script,
    step,
    with_functions,
)


@script()
def parts_called_by_themselves() -> Pair:
    return same(lambda model: (model.b(model.a(batch()).relu()).float().square().sum().backward(), gradients(model))[1])


@script()
def training_step_that_calls_functions() -> Pair:
    return same(lambda model: (model.b(F.linear(batch(), model.a.weight)).float().square().sum().backward(), gradients(model))[1])


@script()
def training_step_that_calls_functions_only() -> Pair:
    return same(lambda model: (with_functions(model, batch()).float().square().sum().backward(), gradients(model))[1])


@script()
def training_step_under_autocast() -> Pair:
    def run(model: Any) -> Any:
        y = model.a(batch()).relu()
        F.linear(y, model.b.weight).float().square().sum().backward()
        return gradients(model)

    variants = {**AMP, "b": attrs.evolve(INT8, output=Precision.BFLOAT16)}
    model, twin = Two(), Two()
    apply_(model, plan(variants, base=Precision.BFLOAT16))
    found = inside(autocast, run)(model)
    with Reference(twin, variants).running():
        return found, run(twin)


@script()
def functional_call_beside_the_model() -> Pair:
    def run(model: Any) -> Any:
        (model(batch()).float().square().sum() + F.linear(batch(2), model.a.weight).float().square().sum()).backward()
        return gradients(model)

    return same(run)


@script()
def penalty_on_all_weights() -> Pair:
    def run(model: Any) -> Any:
        penalty = sum(p.square().sum() for p in model.parameters())
        (model.a(batch()).float().square().sum() + penalty).backward()  # b has no call here
        return gradients(model), step(model)

    return same(run)


@script()
def part_outside_of_autocast() -> Pair:
    run = lambda model: (model.b(model.a(batch()).relu()).square().sum().backward(), gradients(model))  # noqa: E731
    return refused_only(run, variants=AMP, base=Precision.BFLOAT16)


@script()
def functional_call_outside_of_autocast() -> Pair:
    run = lambda model: (with_functions(model, batch()).square().sum().backward(), gradients(model))  # noqa: E731
    return refused_only(run, variants=AMP, base=Precision.BFLOAT16)


@script()
def part_under_its_autocast() -> Pair:
    run = inside(autocast, lambda m: (m.b(m.a(batch()).relu()).float().square().sum().backward(), gradients(m))[1])
    model = Two()
    apply_(model, plan(AMP, Precision.BFLOAT16))
    return run(model), plain(run)
