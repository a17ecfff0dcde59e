"""Autograd in unusual ways: several forwards and backwards, ``torch.func``, modes, accumulation, hooks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from qsync_torch import apply_
from robustness.reference import Reference
from robustness.wrong.two import (
    BFLOAT16,
    BOTH,
    FLOAT32,
    INT8,
    WIDTH,
    Pair,
    Two,
    batch,
    did_not_run,
    first_step,
    gradients,
    inside,
    plain,
    plan,
    refused_only,
    same,
    script,
    step,
    twice,
)


@script()
def two_forwards_one_backward() -> Pair:
    return same(twice)


class Adjoint(torch.autograd.Function):
    """Steps of y' = f(y), whose backward pass goes back through them, as torchdiffeq's does."""

    @staticmethod
    def forward(ctx: Any, function: Any, y: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.function, ctx.parameters = function, parameters
        with torch.no_grad():
            for _ in range(3):
                y = y + 0.1 * function(y).float()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (y,), of_parameters = ctx.saved_tensors, [torch.zeros_like(parameter) for parameter in ctx.parameters]
        for _ in range(3):
            with torch.enable_grad():
                y = y.detach().requires_grad_()
                slope = 0.1 * ctx.function(y).float()
                of_y, *more = torch.autograd.grad(slope, [y, *ctx.parameters], grad)
            y, grad = y - slope, grad + of_y
            of_parameters = [one + other for one, other in zip(of_parameters, more, strict=True)]
        return None, grad, *of_parameters


def solved(model: Any) -> list[Any]:
    """A neural differential equation: the model is the function that a solver calls."""
    y = Adjoint.apply(model, batch().requires_grad_(), *model.parameters())
    y.square().sum().backward()
    return [y.detach(), *gradients(model)]


@script()
def adjoint_of_the_model_in_a_float_format() -> Pair:
    return same(solved, variants={"a": BFLOAT16, "b": BFLOAT16})


@script()
def adjoint_of_the_model_in_8_bits() -> Pair:
    return same(solved)


@script()
def own_function_with_gradients_written_down() -> Pair:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            return F.linear(x, weight)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            x, weight = ctx.saved_tensors
            return grad @ weight, grad.t() @ x

    model, twin = Two(lambda model, x: Own.apply(x, model.a.weight)), Two()
    apply_(model, plan({"a": INT8, "b": FLOAT32}))
    x = batch().requires_grad_()
    y = model(x)
    y.backward(batch(2))
    return [x.grad, model.a.weight.grad], [batch(2) @ twin.a.weight.detach(), batch(2).t() @ batch()]


@script()
def backward_twice() -> Pair:
    def run(model: Any) -> Any:
        loss = model(batch()).float().square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients(model)

    return same(run)


@script(RuntimeError)
def backward_twice_without_the_graph() -> Pair:
    def run(model: Any) -> Any:
        loss = model(batch()).square().sum()
        loss.backward()
        loss.backward()

    return refused_only(run)


@script()
def second_derivatives() -> Pair:
    def run(model: Any) -> Any:
        loss = model(batch()).square().sum()
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        sum(g.square().sum() for g in grads).backward()

    return refused_only(run, variants={"a": INT8, "b": INT8})


@script()
def gradient_of_the_input() -> Pair:
    def run(model: Any) -> Any:
        x = batch().requires_grad_()
        return torch.autograd.grad(model(x).float().square().sum(), x)[0]

    return same(run)


@script(RuntimeError)
def per_sample_gradients() -> Pair:
    def run(model: Any) -> Any:
        params = dict(model.named_parameters())
        loss = lambda p, x: torch.func.functional_call(model, p, (x[None],)).float().square().sum()  # noqa: E731
        found = torch.func.vmap(torch.func.grad(loss), (None, 0))(params, batch())
        return list(found.values())

    model, twin = Two(), Two()
    apply_(model, plan())
    found = run(model)
    rows = []
    with Reference(twin, BOTH).running():
        for row in batch():
            rows.append(step(twin, row[None])[1:])
    return found, [torch.stack(parts) for parts in zip(*rows, strict=True)]


@script(RuntimeError, NotImplementedError)
def forward_mode() -> Pair:
    def run(model: Any) -> Any:
        return torch.func.jvp(lambda x: model(x), (batch(),), (torch.ones(4, WIDTH),))

    return refused_only(run, variants={"a": INT8, "b": INT8})


@script()
def functional_call_with_other_weights() -> Pair:
    def run(model: Any) -> Any:
        other = {name: (2 * p.detach()).requires_grad_() for name, p in model.named_parameters()}
        y = torch.func.functional_call(model, other, (batch(),)).float()
        return [y.detach(), *torch.autograd.grad(y.square().sum(), list(other.values()))]

    def make() -> Any:
        twin = Two()
        with torch.no_grad():
            for p in twin.parameters():
                p.mul_(2)
        return twin

    model = Two()
    apply_(model, plan())
    return run(model), same(make=make)[1]


@script()
def no_grad_in_training_mode() -> Pair:
    return same(inside(torch.no_grad, lambda model: model(batch()).float()))


@script()
def inference_mode_in_training_mode() -> Pair:
    run = lambda model: model(batch()).float()  # noqa: E731
    model = Two()
    apply_(model, plan())
    with torch.inference_mode():
        found = run(model)
    return [found.clone(), step(model)], [same(inside(torch.no_grad, run))[1], same()[1]]


@script()
def eval_then_train() -> Pair:
    model = Two()
    apply_(model, plan())
    evaluated = step(model.eval())
    return [evaluated, step(model.train())], [plain(step), same()[1]]


@script()
def trained_in_eval_mode() -> Pair:
    model = Two()
    apply_(model, plan())
    found, said = first_step(model.eval())
    named = did_not_run(said, "a#0", "b#0") and any("call apply_(" in one and "lower_eval=True" in one for one in said)
    return [torch.tensor(named), found], [torch.tensor(True), plain(step)]


@script()
def part_in_eval_mode() -> Pair:
    return same(lambda model: (model.b.eval(), step(model))[1])


@script()
def lower_eval() -> Pair:
    return same(lambda model: step(model.eval()), lower_eval=True)


@script()
def accumulated_and_clipped_gradients() -> Pair:
    def run(model: Any) -> Any:
        for seed in range(3):
            (model(batch(seed)).float().square().sum() / 3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return gradients(model)

    return same(run)


@script()
def hooks_that_change_inputs_outputs_and_gradients() -> Pair:
    def run(model: Any) -> Any:
        model.a.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
        model.a.register_forward_hook(lambda m, args, y: y - 1)
        model.b.register_full_backward_hook(lambda m, gi, go: (gi[0] * 0.5,))
        model.a.weight.register_hook(lambda g: g * 3)
        return step(model)

    return same(run)
