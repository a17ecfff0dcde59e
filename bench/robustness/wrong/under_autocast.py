"""Autocast around a step, inside of the model and around a part of it, with plans that want it and plans that do not."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from qsync_core.ir.precision import Precision
from qsync_torch import apply_
from robustness.wrong.two import (
    AMP,
    BASE,
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
)


@script()
def autocast_bfloat16_around_a_float32_plan() -> Pair:
    return refused_only(inside(autocast))


@script()
def autocast_around_an_all_float32_plan() -> Pair:
    return refused_only(inside(autocast), variants=BASE)


@script()
def autocast_float16() -> Pair:
    return refused_only(inside(lambda: autocast(torch.float16)))


@script()
def autocast_disabled() -> Pair:
    return same(inside(lambda: autocast(enabled=False)))


@script()
def autocast_of_another_device() -> Pair:
    return same(inside(lambda: autocast(device="cuda", enabled=False)))


@script()
def autocast_inside_the_model() -> Pair:
    def body(model: Any, x: torch.Tensor) -> torch.Tensor:
        with autocast():
            return model.body(x)

    return refused_only(step, lambda: Two(body))


@script()
def autocast_inside_around_one_operator() -> Pair:
    def body(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = model.a(x).relu()
        with autocast():
            return model.b(x)

    return refused_only(step, lambda: Two(body))


@script()
def autocast_nested_off_again_inside() -> Pair:
    def body(model: Any, x: torch.Tensor) -> torch.Tensor:
        with autocast(), autocast(enabled=False):
            return model.body(x)

    return same(make=lambda: Two(body))


@script()
def autocast_plan_without_autocast() -> Pair:
    return refused_only(step, variants=AMP, base=Precision.BFLOAT16)


@script()
def autocast_plan_under_float16() -> Pair:
    return refused_only(inside(lambda: autocast(torch.float16)), variants=AMP, base=Precision.BFLOAT16)


@script()
def autocast_plan_turned_off_inside() -> Pair:
    def body(model: Any, x: torch.Tensor) -> torch.Tensor:
        with autocast(enabled=False):
            return model.body(x)

    model = Two(body)  # nothing is lowered: it runs as it is
    apply_(model, plan(AMP, Precision.BFLOAT16))
    return inside(autocast)(model), plain(inside(autocast), lambda: Two(body))


@script()
def autocast_lowering_plan_turned_off_inside() -> Pair:
    def body(model: Any, x: torch.Tensor) -> torch.Tensor:
        with autocast(enabled=False):
            return model.body(x)

    lowered = attrs.evolve(INT8, output=Precision.BFLOAT16)
    return refused_only(inside(autocast), lambda: Two(body), {**AMP, "a": lowered}, base=Precision.BFLOAT16)


@script()
def autocast_plan_under_its_autocast() -> Pair:
    model = Two()
    apply_(model, plan(AMP, Precision.BFLOAT16))
    return inside(autocast)(model), plain(inside(autocast))


@script()
def autocast_in_the_second_step_only() -> Pair:
    return refused_only(lambda model: (step(model), inside(autocast)(model)))


@script()
def autocast_around_eval() -> Pair:
    run = inside(autocast, lambda model: model.eval()(batch()).detach())
    model = Two()
    apply_(model, plan())
    return run(model), plain(run)


@script()
def autocast_around_the_loss_only() -> Pair:
    def run(model: Any) -> Any:
        y = model(batch()).float()
        with autocast():
            y.square().sum().backward()
        return gradients(model)

    return same(run)
