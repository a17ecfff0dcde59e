"""Checkpointing that is not PyTorch's, in several makes, and two layers that are called in one."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from .small_models import BFLOAT16, INT8, named


class Diffusion(torch.autograd.Function):
    """As in guided-diffusion: the function, the number of inputs, the inputs, and the parameters."""

    @staticmethod
    def forward(ctx, run_function, length, *args):
        ctx.run_function = run_function
        ctx.inputs, ctx.parameters = list(args[:length]), list(args[length:])
        with torch.no_grad():
            return ctx.run_function(*ctx.inputs)

    @staticmethod
    def backward(ctx, *output_grads):
        ctx.inputs = [x.detach().requires_grad_(True) for x in ctx.inputs]
        with torch.enable_grad():
            output = ctx.run_function(*[x.view_as(x) for x in ctx.inputs])
        grads = torch.autograd.grad(output, ctx.inputs + ctx.parameters, output_grads, allow_unused=True)
        return (None, None, *grads)


APPLY_AT_IMPORT = Diffusion.apply


def diffusion(function, x, parameters):
    return Diffusion.apply(function, 1, x, *parameters)


def taken_at_import(function, x, parameters):
    return APPLY_AT_IMPORT(function, 1, x, *parameters)


class Separate(torch.autograd.Function):
    """With ``setup_context``, random state of its own, and a backward that accumulates into the parameters."""

    @staticmethod
    def forward(run_function, state, x):
        return run_function(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.run_function, ctx.state, x = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            y = ctx.run_function(x)
        torch.autograd.backward(y, grad)
        return None, None, x.grad


def separate(function, x, parameters):
    return Separate.apply(function, torch.get_rng_state(), x)


def hooks(function, x, parameters):
    """Without a function of autograd: what was saved is counted, and computed again when it is asked for."""
    count, kept = 0, []

    def pack(_):
        nonlocal count
        count += 1
        return count - 1

    def unpack(index):
        if not kept:

            def keep(tensor):
                kept.append(tensor.detach())
                return tensor

            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                function(x)
        return kept[index]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return function(x)


def nested(function, x, parameters):
    return diffusion(lambda t: diffusion(function, t, parameters), x, parameters)


def inside_of_pytorchs(function, x, parameters):
    return checkpoint(lambda t: diffusion(function, t, parameters), x, use_reentrant=False)


def around_pytorchs(function, x, parameters):
    return diffusion(lambda t: checkpoint(function, t, use_reentrant=False), x, parameters)


KINDS = [diffusion, taken_at_import, separate, hooks, nested, inside_of_pytorchs, around_pytorchs]


class Block(nn.Module):
    """Two layers, one after the other, called as ``how`` says, in a checkpoint of the given kind."""

    def __init__(self, how, kind):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.right = nn.Parameter(torch.randn(16, 16) / 4)
        self.how, self.kind = how, kind

    def modules_of_block(self, x):
        return self.b(torch.relu(self.a(x)))

    def functions(self, x):
        x = torch.relu(F.linear(x, self.a.weight, self.a.bias))
        return F.linear(x, self.b.weight, self.b.bias) @ self.right

    def forward(self, x):
        function = {"modules": self.modules_of_block, "functions": self.functions}[self.how]
        y = function(x) if self.kind is None else self.kind(function, x, list(self.parameters()))
        return y.float().sin()


VARIANTS = named(a=INT8, b=BFLOAT16, right=INT8)


class Elsewhere(torch.autograd.Function):
    """As DeepSpeed does it on request: inputs wait in other memory."""

    @staticmethod
    def forward(ctx, function, x):
        ctx.function, ctx.x = function, x.detach().clone()
        return function(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.x.clone().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        torch.autograd.backward(y, grad)
        return None, x.grad


def elsewhere(function, x, parameters):
    return Elsewhere.apply(function, x)


def reentrant(function, x, parameters):
    return checkpoint(function, x, use_reentrant=True)


def inside_of_reentrant(function, x, parameters):
    return reentrant(lambda t: checkpoint(function, t, use_reentrant=False), x, parameters)


class Attached(torch.autograd.Function):
    """Gives what was computed before, and computes it again for its gradient."""

    @staticmethod
    def forward(ctx, function, y, x, *parameters):
        ctx.function, ctx.x, ctx.parameters = function, x, parameters
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        return None, None, *torch.autograd.grad(y, [x, *ctx.parameters], grad, allow_unused=True)


def attached(function, x, parameters):
    with torch.no_grad():
        y = function(x)
    return Attached.apply(function, y, x, *parameters)


def attached_inside(function, x, parameters):
    return diffusion(lambda t: attached(function, t, parameters), x, parameters)
