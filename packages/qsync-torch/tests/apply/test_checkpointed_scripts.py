"""PyTorch's checkpoints in a model under a plan, and one of another make: what runs again does so as in its forward.

The reference is the same model without checkpoints, with the same seed and step: both agree to the last bit.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from qsync_torch import apply_

from .small_models import BFLOAT16, INT8, named
from .two_layers import BOTH, TwoLayers, equal, gradients_of, step_of


class Checkpointed(TwoLayers):
    """A block that is checkpointed as a method, a closure, a module, or not at all."""

    def __init__(self, way, use_reentrant, how="modules"):
        super().__init__(how)
        self.way, self.use_reentrant = way, use_reentrant

    def forward(self, x):
        if self.way == "none":
            return self.body(x)
        function = {"method": self.body, "closure": lambda t: self.body(t), "inner": self.body}[self.way]
        return checkpoint(function, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("how", ["modules", "functional", "forward"])
@pytest.mark.parametrize("way", ["method", "closure"])
def test_checkpointed_functions_run_again_as_they_did(x, way, how, use_reentrant):
    x.requires_grad_()
    expected = step_of(Checkpointed("none", False, how), x)
    assert equal(step_of(Checkpointed(way, use_reentrant, how), x), expected)


@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("outer", [True, False])
def test_checkpoints_inside_checkpoints(x, outer, inner):
    class Nested(TwoLayers):
        def first(self, x):
            return torch.relu(F.linear(x, self.a.weight, self.a.bias))

        def segment(self, x):
            return F.linear(checkpoint(self.first, x, use_reentrant=inner), self.b.weight, self.b.bias)

        def forward(self, x):
            return checkpoint(self.segment, x, use_reentrant=outer)

    x.requires_grad_()
    assert equal(step_of(Nested(), x), step_of(TwoLayers(), x))


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("way", ["method", "whole"])
def test_two_forwards_before_one_backward(x, way, use_reentrant):
    def gradients(checkpointed):
        model = Checkpointed(way if checkpointed and way != "whole" else "none", use_reentrant, "functional")
        apply_(model, BOTH, seed=5)
        run = model
        if checkpointed and way == "whole":
            run = lambda t: checkpoint(model, t, use_reentrant=use_reentrant)  # noqa: E731
        first, second = run(x), run(2 * x)
        return gradients_of(model, first.square().sum() + second.square().sum())

    x.requires_grad_()
    assert equal(gradients(True), gradients(False))


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("way", ["method", "closure", "whole", "part"])
@pytest.mark.parametrize("how", ["modules", "functional"])
def test_a_mode_changed_before_the_backward_changes_nothing(x, how, way, use_reentrant):
    """The function that runs again does so as in the forward, under the plan."""

    def gradients(checkpointed):
        model = Checkpointed(way if checkpointed and way in ("method", "closure") else "none", use_reentrant, how)
        apply_(model, BOTH, seed=5)
        function = {"whole": model, "part": model.a}.get(way, model) if checkpointed else model.a if way == "part" else model
        y = checkpoint(function, x, use_reentrant=use_reentrant) if checkpointed and way in ("whole", "part") else function(x)
        model.eval()
        return gradients_of(model, y.square().sum())

    x.requires_grad_()
    assert equal(gradients(True), gradients(False))


def test_checkpointing_of_another_make_runs_the_last_forward_again(x):
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, module, x):
            ctx.module = module
            ctx.save_for_backward(x)
            with torch.no_grad():
                return module(x)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                y = ctx.module(x)
            torch.autograd.backward(y, grad)
            return None, x.grad

    class Wrapped(nn.Module):
        def __init__(self, own):
            super().__init__()
            self.block, self.own = TwoLayers(), own

        def forward(self, x):
            return Own.apply(self.block, x) if self.own else self.block(x)

    x.requires_grad_()
    variants = named(**{"block.a": INT8, "block.b": BFLOAT16})
    assert equal(step_of(Wrapped(True), x, variants), step_of(Wrapped(False), x, variants))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_optimizers_that_step_in_the_backward_pass_change_no_numbers_of_what_is_still_to_run_again(x, use_reentrant):
    """An optimizer a parameter, which steps when its gradient is there, while earlier blocks have yet to run again."""

    def trained(way):
        torch.manual_seed(0)
        model = nn.Sequential(*(Checkpointed(way, use_reentrant) for _ in range(3)))
        apply_(model, {f"{block}.{name}": INT8 for block in range(3) for name in "ab"}, seed=5)
        optimizers = {parameter: torch.optim.SGD([parameter], 0.01) for parameter in model.parameters()}

        def step(parameter):
            optimizers[parameter].step()
            parameter.grad = None

        for parameter in optimizers:
            parameter.register_post_accumulate_grad_hook(step)
        for _ in range(2):
            model(x).square().mean().backward()
        return [parameter.detach() for parameter in optimizers]

    x.requires_grad_()
    assert equal(trained("method"), trained("none"))
