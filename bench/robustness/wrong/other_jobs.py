"""A plan for another machine, other settings, other shapes, another format or another model."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import nn

from qsync_core.ir.profile import DeviceKind, DeviceType
from qsync_torch import apply_
from robustness.wrong.two import BFLOAT16, BOTH, INT8, WIDTH, Pair, Two, batch, plan, refused_only, script, step


@script()
def another_matmul_precision() -> Pair:
    software = {"infer": {"float32_matmul": "highest"}}
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        return refused_only(step, software=software)
    finally:
        torch.set_float32_matmul_precision(before)


@script()
def settings_changed_after_apply() -> Pair:
    before = torch.get_float32_matmul_precision()

    def run(model: Any) -> Any:
        torch.set_float32_matmul_precision("medium")
        return step(model)

    try:
        return refused_only(run, software={"infer": {"float32_matmul": before}})
    finally:
        torch.set_float32_matmul_precision(before)


@script()
def settings_changed_after_the_first_step() -> Pair:
    before = torch.get_float32_matmul_precision()

    def run(model: Any) -> Any:
        first = step(model)
        torch.set_float32_matmul_precision("medium")
        return first, step(model)

    try:
        return refused_only(run, software={"infer": {"float32_matmul": before}})
    finally:
        torch.set_float32_matmul_precision(before)


@script()
def another_device_in_the_profile() -> Pair:
    elsewhere = plan()
    group = attrs.evolve(elsewhere.groups[0], device=DeviceType("T4", DeviceKind.CUDA))
    apply_(Two(), attrs.evolve(elsewhere, groups=(group,)))
    return 0, "a refusal"


@script()
def another_width() -> Pair:
    return refused_only(
        lambda model: model(torch.randn(4, 32)), lambda: Two(width=32), weight_shapes={"a": (16, 16), "b": (16, 16)}
    )


@script()
def another_depth() -> Pair:
    return refused_only(step, variants={**BOTH, "c": INT8})


@script()
def more_layers_than_planned() -> Pair:
    def make() -> Any:
        model = Two(lambda model, x: model.c(model.body(x)))
        model.c = nn.Linear(WIDTH, WIDTH)
        return model

    return refused_only(step, make)


@script()
def another_vocabulary() -> Pair:
    def make() -> Any:
        model = Two()
        model.b = nn.Linear(WIDTH, 40)
        return model

    return refused_only(step, make, weight_shapes={"a": (16, 16), "b": (50, 16)})


@script()
def another_model() -> Pair:
    return refused_only(lambda model: model(batch()), lambda: nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 4)))


@script()
def plan_of_the_inner_module() -> Pair:
    return refused_only(lambda model: model(batch()), lambda: nn.ModuleDict({"net": Two()}))


@script()
def plan_of_the_outer_module() -> Pair:
    return refused_only(step, variants={"net.a": INT8, "net.b": BFLOAT16})


@script()
def linear_became_a_convolution() -> Pair:
    def make() -> Any:
        model = Two(lambda model, x: model.b(model.a(x.view(4, WIDTH, 1, 1)).flatten(1)))
        model.a = nn.Conv2d(WIDTH, WIDTH, 1)
        return model

    return refused_only(step, make, weight_shapes={"a": (16, 16), "b": (16, 16)})


@script()
def half_model() -> Pair:
    return refused_only(lambda model: model(batch().half()), lambda: Two().half())


@script()
def double_model() -> Pair:
    return refused_only(lambda model: model(batch().double()), lambda: Two().double())


@script()
def bfloat16_after_apply() -> Pair:
    return refused_only(lambda model: model.bfloat16()(batch().bfloat16()))


@script()
def double_after_apply() -> Pair:
    return refused_only(lambda model: model.double()(batch().double()))


@script()
def double_inputs() -> Pair:
    return refused_only(lambda model: model(batch().double()))


@script()
def a_group_that_the_plan_lacks() -> Pair:
    apply_(Two(), plan(), group="elsewhere")
    return 0, "a refusal"


@script()
def a_backend_that_is_not_there() -> Pair:
    apply_(Two(), plan(), backend="nowhere")
    return 0, "a refusal"


@script()
def no_plan_at_all() -> Pair:
    apply_(Two(), None)  # type: ignore[arg-type]
    return 0, "a refusal"


@script()
def a_variant_that_does_not_exist() -> Pair:
    apply_(Two(), {"a#0": "int3"})
    return 0, "a refusal"


@script()
def infinite_activations() -> Pair:
    return refused_only(lambda model: model(torch.full((4, WIDTH), float("inf"))))
