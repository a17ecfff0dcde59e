"""PyTorch's checkpoints, and those of one's own make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from qsync_core.ir.precision import Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_torch import apply_
from robustness.wrong.two import (
    BOTH,
    Pair,
    Two,
    batch,
    did_not_run,
    first_step,
    gradients,
    one_rank,
    plain,
    plan,
    same,
    script,
    step,
    twice,
    with_functions,
)


@script()
def two_forwards_of_a_checkpointed_model() -> Pair:
    model = Two(lambda model, x: checkpoint(model.body, x, use_reentrant=False))
    apply_(model, plan())
    return twice(model), same(twice)[1]


@script()
def checkpointed_reentrant() -> Pair:
    model = Two(lambda model, x: checkpoint(model.body, x, use_reentrant=True))
    apply_(model, plan())
    x = batch().requires_grad_()
    return step(model, x), same()[1]


@script()
def checkpointed_closure_with_functional_calls() -> Pair:
    def body(model: Any, x: torch.Tensor) -> torch.Tensor:
        part = lambda t: F.linear(F.linear(t, model.a.weight, model.a.bias).relu(), model.b.weight, model.b.bias)  # noqa: E731
        return checkpoint(part, x, use_reentrant=True)

    model = Two(body)
    apply_(model, plan())
    return step(model, batch().requires_grad_()), same()[1]


@script()
def checkpointed_from_outside() -> Pair:
    model = Two()
    apply_(model, plan())
    checkpoint(model, batch(), use_reentrant=False).square().sum().backward()
    return gradients(model), same()[1][1:]


@script()
def checkpointed_sequential() -> Pair:
    from torch.utils.checkpoint import checkpoint_sequential

    body = lambda model, x: checkpoint_sequential([model.a, nn.ReLU(), model.b], 2, x, use_reentrant=False)  # noqa: E731
    model = Two(body)
    apply_(model, plan())
    return step(model), same()[1]


class OwnCheckpoint(torch.autograd.Function):
    """Checkpointing of one's own make, as in guided-diffusion."""

    @staticmethod
    def forward(ctx: Any, run_function: Any, length: int, *args: Any) -> Any:
        ctx.run_function, ctx.inputs, ctx.parameters = run_function, list(args[:length]), list(args[length:])
        with torch.no_grad():
            return ctx.run_function(*ctx.inputs)

    @staticmethod
    def backward(ctx: Any, *output_grads: Any) -> Any:
        inputs = [x.detach().requires_grad_(True) for x in ctx.inputs]
        with torch.enable_grad():
            output = ctx.run_function(*[x.view_as(x) for x in inputs])
        return (None, None, *torch.autograd.grad(output, inputs + ctx.parameters, output_grads, allow_unused=True))


def own_checkpoint(function: Any, x: torch.Tensor, parameters: Any) -> Any:
    """A function of one tensor, checkpointed."""
    return OwnCheckpoint.apply(function, 1, x, *parameters)


def checkpointed_by(how: Any, run: Any, variants: Mapping[str, Variant] = BOTH) -> Pair:
    """A body in a checkpoint, and as it is; what is not nearest is compared with the same plan without checkpoints."""
    model = Two(lambda model, x: how(lambda t: with_functions(model, t), x, list(model.parameters())))
    apply_(model, plan(variants), seed=3)
    found = run(model)
    if all(variant.rounding is Rounding.NEAREST or variant.compute is not Precision.INT8 for variant in variants.values()):
        return found, same(run)[1]
    twin = Two()
    apply_(twin, plan(variants), seed=3)
    return found, run(twin)


@script()
def own_checkpoint_of_functional_calls() -> Pair:
    return checkpointed_by(own_checkpoint, step)


@script()
def own_checkpoint_in_an_own_checkpoint() -> Pair:
    return checkpointed_by(lambda f, x, ps: own_checkpoint(lambda t: own_checkpoint(f, t, ps), x, ps), step)


@script()
def own_checkpoint_by_saved_tensors_hooks() -> Pair:
    def how(function: Any, x: torch.Tensor, _: Any) -> Any:
        count, kept = iter(range(99)), []

        def unpack(index: int) -> Any:
            if not kept:
                keep = lambda t: (kept.append(t.detach()), t)[1]  # noqa: E731
                with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
                    function(x)
            return kept[index]

        with torch.autograd.graph.saved_tensors_hooks(lambda _: next(count), unpack):
            return function(x)

    return checkpointed_by(how, step)


@script()
def own_checkpoint_and_two_forwards_of_stochastic_rounding() -> Pair:
    return checkpointed_by(own_checkpoint, twice, {"a": Variant.parse("int8"), "b": Variant.parse("int8")})


@script()
def own_checkpoint_of_a_part_from_outside() -> Pair:
    def run(model: Any) -> Any:
        y = own_checkpoint(model.a, batch().requires_grad_(), list(model.a.parameters())).float()
        model.b(y.relu()).float().square().sum().backward()
        return gradients(model)

    return same(run)


@script()
def own_checkpoint_under_ddp() -> Pair:
    model = Two(lambda model, x: own_checkpoint(lambda t: with_functions(model, t), x, list(model.parameters())))
    with one_rank():
        apply_(model, plan(), group="infer")
        return step(nn.parallel.DistributedDataParallel(model)), same()[1]


def with_given(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """The body, with weights and biases as arguments."""
    return F.linear(F.linear(x, weights[0], weights[1]).relu(), weights[2], weights[3])


@script()
def checkpoint_that_is_given_its_weights() -> Pair:
    def body(model: Any, x: torch.Tensor) -> torch.Tensor:
        weights = model.a.weight, model.a.bias, model.b.weight, model.b.bias
        return checkpoint(with_given, x, *weights, use_reentrant=True)

    model = Two(body)
    apply_(model, plan())
    return step(model), same()[1]


@script()
def checkpoint_that_is_given_all_parameters() -> Pair:
    """``parameters()`` gives no handles: full precision, which is said."""
    model = Two(lambda model, x: checkpoint(with_given, x, *model.parameters(), use_reentrant=True))
    apply_(model, plan())
    found, said = first_step(model)
    return [torch.tensor(did_not_run(said, "a#0", "b#0")), found], [torch.tensor(True), plain(step)]


@script()
def compiled_functional_calls_in_a_checkpoint() -> Pair:
    model = Two(lambda model, x: checkpoint(lambda t: with_functions(model, t), x, use_reentrant=False) + model.a(x))
    apply_(model, plan())
    found = step(torch.compile(model, backend="aot_eager"))
    return found, same(make=lambda: Two(lambda model, x: with_functions(model, x) + model.a(x)))[1]


@script()
def checkpoint_around_a_compiled_model() -> Pair:
    def run(checkpointed: bool) -> list[Any]:
        model = Two()
        apply_(model, plan({"a": Variant.parse("int8>float32"), "b": Variant.parse("int8>float32")}), seed=3)
        compiled = torch.compile(model, backend="aot_eager")
        called = (lambda x: checkpoint(compiled, x, use_reentrant=False)) if checkpointed else compiled
        outputs = [called(batch(number)) for number in range(2)]
        sum(output.square().sum() for output in outputs).backward()
        return gradients(model)

    return run(True), run(False)
