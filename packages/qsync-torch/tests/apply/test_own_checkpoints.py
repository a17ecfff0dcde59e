"""Checkpointing that is not PyTorch's: what it runs again in backward has the precisions and random numbers of its own forward.

The reference is the same model without checkpointing, with the same seed and steps: both agree to the last bit, or it is refused.
"""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from qsync_torch import apply_

from .own_checkpoints import (
    KINDS,
    VARIANTS,
    Block,
    Diffusion,
    attached,
    attached_inside,
    diffusion,
    elsewhere,
    hooks,
    inside_of_reentrant,
    nested,
    reentrant,
    separate,
)
from .small_models import BFLOAT16, FLOAT32, INT8, named
from .two_layers import equal, gradients_of


@pytest.fixture
def x(x):
    return x.requires_grad_()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["modules", "functions"])
def test_two_forwards_before_one_backward_run_again_each_as_it_did(x, how, kind):
    def gradients(kind):
        model = Block(how, kind)
        apply_(model, VARIANTS, seed=5)
        first, second = model(x), model(2 * x)
        return gradients_of(model, first.square().sum() + second.square().sum())

    assert equal(gradients(kind), gradients(None))


@pytest.mark.parametrize("kind", [diffusion, separate, hooks, nested])
@pytest.mark.parametrize("part", [True, False])
def test_models_and_parts_that_the_script_checkpoints_itself(x, kind, part):
    def gradients(kind):
        model = Block("modules", None)
        apply_(model, VARIANTS, seed=5)
        run = model.a if part else model
        call = run if kind is None else lambda t: kind(run, t, list(run.parameters()))
        first, second = call(x), call(2 * x)
        return gradients_of(model, first.square().sum() + second.square().sum())

    assert equal(gradients(kind), gradients(None))


@pytest.mark.parametrize("kind", ["reentrant", "diffusion"])
def test_weights_that_are_arguments_of_a_checkpoint_arrive_detached(x, kind):
    class Arguments(Block):
        def forward(self, x):
            def function(x, weight, right):
                return F.linear(x, weight) @ right

            inputs = x, self.a.weight, self.right
            if self.kind == "reentrant":
                return checkpoint(function, *inputs, use_reentrant=True)
            return Diffusion.apply(function, 3, *inputs) if self.kind else function(*inputs)

    def gradients(kind):
        model = Arguments("", kind)
        apply_(model, VARIANTS, seed=5)
        return gradients_of(model, model(x).square().sum())

    assert equal(gradients(kind), gradients(None))


def test_weights_of_a_functional_call_are_known_again_after_it(x):
    class Closure(Block):
        def forward(self, x):
            weight = self.a.weight
            function = lambda t: F.linear(t, weight)  # noqa: E731
            return diffusion(function, x, [weight]) if self.kind else function(x)

    def gradients(kind):
        model = Closure("", kind)
        apply_(model, VARIANTS, seed=5)
        other = (model.a.weight.detach() * 2).requires_grad_()
        y = torch.func.functional_call(model, {"a.weight": other}, (x,))
        (y.square().sum() + model(x).square().sum()).backward()
        return [other.grad, model.a.weight.grad]

    assert equal(gradients(True), gradients(None))


def test_a_reversible_block_computes_its_input_again_without_gradients(x):
    found = []

    class Reversible(torch.autograd.Function):
        @staticmethod
        def forward(ctx, function, x):
            ctx.function = function
            y = x + function(x.roll(1, 0))
            ctx.save_for_backward(x.roll(1, 0), y)
            return y

        @staticmethod
        def backward(ctx, grad):
            rolled, y = ctx.saved_tensors
            found.append(y - ctx.function(rolled))
            return None, grad

    class Own(Block):
        def forward(self, x):
            return Reversible.apply(lambda t: F.linear(t, self.right), x)

    model = Own("", None)
    apply_(model, named(right=INT8), seed=5)
    model(x).sum().backward()
    assert torch.allclose(found[0], x, rtol=0, atol=1e-5)


class Late(torch.autograd.Function):
    """Runs a module in backward that its forward has not run."""

    @staticmethod
    def forward(ctx, module, x):
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None, ctx.module(grad)


def test_what_a_backward_pass_runs_for_the_first_time_is_planned(x):
    model = Block("modules", None)
    apply_(model, VARIANTS)
    expected = model.a(torch.ones_like(x))
    Late.apply(model.a, x).sum().backward()
    assert torch.equal(x.grad, expected)


def test_what_draws_no_random_numbers_may_run_in_any_backward(x):
    """As the adjoint of a differential equation does, whose function is the model."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    x.requires_grad_()
    apply_(model, named(**{"0": BFLOAT16, "1": BFLOAT16}))
    expected = model(torch.ones_like(x))
    Late.apply(model, x).sum().backward()
    assert expected.dtype is torch.float32
    assert torch.equal(x.grad, expected)


def test_nothing_keeps_a_model_alive(x):
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * x

        @staticmethod
        def backward(ctx, grad):
            return grad

    class Own(Block):
        def forward(self, x):
            return Square.apply(diffusion(self.functions, x, list(self.parameters())))

    model = Own("functions", None)
    apply_(model, VARIANTS)
    model(x).sum().backward()
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_full_precision_is_repeated_in_full_precision(x):
    def gradients(kind):
        model = Block("functions", kind)
        apply_(model, named(a=FLOAT32, b=FLOAT32, right=FLOAT32))
        return gradients_of(model, model(x).square().sum())

    plain = Block("functions", None)
    assert equal(gradients(diffusion), gradients_of(plain, plain(x).square().sum()))


class Halves(torch.autograd.Function):
    """Runs a module for each half of a batch, and in the backward pass the second half first."""

    @staticmethod
    def forward(ctx, module, x, *parameters):
        ctx.module = module
        ctx.save_for_backward(x, *parameters)
        return torch.cat([module(half) for half in x.chunk(2)])

    @staticmethod
    def backward(ctx, grad):
        x, *parameters = ctx.saved_tensors
        total = [torch.zeros_like(parameter) for parameter in parameters]
        for half, part in zip(reversed(x.chunk(2)), reversed(grad.chunk(2)), strict=True):
            with torch.enable_grad():
                y = ctx.module(half)
            for sum_, found in zip(total, torch.autograd.grad(y, parameters, part), strict=True):
                sum_ += found
        return None, None, *total


def test_several_runs_of_one_part_in_another_order(x):
    def gradients(run):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
        apply_(model, {"0#0": INT8, "2#0": INT8})
        return gradients_of(model, run(model).sum())

    halves = gradients(lambda model: Halves.apply(model, x, *model.parameters()))
    expected = gradients(lambda model: torch.cat([model(half) for half in x.chunk(2)]))
    assert all(torch.allclose(one, other, rtol=1e-6, atol=1e-6) for one, other in zip(halves, expected, strict=True))


@pytest.mark.parametrize("kind", [*KINDS, elsewhere, reentrant, inside_of_reentrant, attached, attached_inside])
@pytest.mark.parametrize("how", ["modules", "functions"])
def test_an_input_that_an_operator_before_the_checkpoint_read_is_rounded_again_as_it_was(x, how, kind):
    ran = []

    class Context(Block):
        def forward(self, x):
            keys = self.a(x)
            values = self.kind(self.values, x, [self.b.weight, self.b.bias])
            return keys + values + self.b(x)

        def values(self, x):
            y = self.b(x) if self.how == "modules" else F.linear(x, self.b.weight, self.b.bias)
            ran.append(y.detach())
            return y + (self.right @ x.t()).t()

    model = Context(how, kind)
    apply_(model, named(a=INT8, b=INT8, right=FLOAT32), seed=5)
    gradients_of(model, model(x).square().sum())
    assert len(ran) >= 2
    assert equal(ran[1:], ran[:1] * (len(ran) - 1))


@pytest.mark.parametrize("how", ["modules", "functions"])
def test_what_ran_without_gradients_and_is_attached_later_runs_again_as_it_did(x, how):
    class Context(Block):
        def forward(self, x):
            return self.a(x) + Block.forward(self, x)

    def gradients(kind):
        model = Context(how, kind)
        apply_(model, VARIANTS, seed=5)
        first, second = model(x), model(2 * x)
        return gradients_of(model, first.square().sum() + second.square().sum())

    assert equal(gradients(attached), gradients(None))


@pytest.mark.parametrize("how", ["modules", "functions", "model"])
@pytest.mark.parametrize("after", [lambda y: y, torch.sin])
def test_hooks_around_the_model_compute_its_pieces_again_as_they_ran(x, how, after):
    def gradients(kind):
        model = Block("functions" if how == "functions" else "modules", None)
        apply_(model, VARIANTS, seed=5)

        def run(t):
            return after(model(t) if how == "model" or not repeats else type(model).forward.__wrapped__(model, t))

        repeats = False
        found = 0
        for scale in (1, 2):
            y = run(scale * x) if kind is None else kind(run, scale * x, [])
            found = found + y.square().sum()
        repeats = how != "model"
        return gradients_of(model, found)

    assert equal(gradients(hooks), gradients(None))


def test_hooks_that_stay_for_all_of_training(x):
    model = Block("modules", None)
    apply_(model, VARIANTS)
    expected = gradients_of(model, model(x).sum())
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda packed: packed):
        for _ in range(2):
            assert equal(gradients_of(model, model(x).sum()), expected)
