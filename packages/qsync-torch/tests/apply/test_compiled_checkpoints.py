"""Checkpoints around compiled models: compiled forwards run again with the random numbers that they took first."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nightly import each_once
from qsync_torch import apply_, compile

from .small_models import INT8, named


class Layers(nn.Module):
    """Two layers, between which a compiler may have to stop."""

    def __init__(self, breaks):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.breaks = nn.Linear(16, 16), nn.Linear(16, 16), breaks

    def forward(self, x):
        y = torch.relu(self.a(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return self.b(y)


class Again(torch.autograd.Function):
    """Checkpointing of one's own make."""

    @staticmethod
    def forward(ctx, function, x, *weights):
        ctx.function, ctx.weights = function, weights
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        return None, *torch.autograd.grad(y, [x, *ctx.weights], grad)


def checkpointed(run, reentrant=False):
    return lambda x: checkpoint(run, x, use_reentrant=reentrant)


def compiled(run):
    return torch.compile(run, backend="aot_eager")


def compiled_in_place(model):
    model.compile(backend="aot_eager")
    return model


def between_eager(model, run):
    return lambda x: model.b(run(model.a(x)))


def by_hand(model):
    run = compiled(model)
    return lambda x: Again.apply(run, x, *model.parameters())


WAYS = {
    "checkpoint": lambda model: checkpointed(compiled(model)),
    "reentrant": lambda model: checkpointed(compiled(model), True),
    "twice": lambda model: checkpointed(checkpointed(compiled(model))),
    "in place": lambda model: checkpointed(compiled_in_place(model)),
    "function": lambda model: checkpointed(compiled(lambda x: model(x))),
    "chains": lambda model: checkpointed(compile(model, backend="aot_eager")),
    "eager too": lambda model: checkpointed(between_eager(model, compiled(model))),
    "by hand": by_hand,
}


def gradients(way, breaks, order):
    model = Layers(breaks)
    applied = apply_(model, named(a=INT8, b=INT8), seed=3)
    run, found = way(model), []
    torch.manual_seed(1)
    batches = [torch.randn(8, 16, requires_grad=True) for _ in range(3)]
    for _ in range(2):
        outputs = [run(batch) for batch in batches]
        for place in order:
            outputs[place].square().sum().backward()
            found += [one.grad.clone() for one in (*model.parameters(), batches[place])]
        applied.advance()
    return found


@each_once({"name": WAYS, "breaks, order": [(False, (0, 1, 2)), (False, (2, 0, 1)), (True, (2, 0, 1))]})
def test_compiled_forwards_run_again_as_they_did(name, breaks, order):
    way = WAYS[name]
    torch._dynamo.reset()
    once = {
        "eager too": lambda model: between_eager(model, model),
        # A fused chain draws by what its first operator reads.
        "chains": lambda model: compile(model, backend="aot_eager"),
    }.get(name, lambda model: model)
    found, expected = gradients(way, breaks, order), gradients(once, breaks, order)
    assert all(torch.allclose(one, other, rtol=1e-5, atol=1e-6) for one, other in zip(found, expected, strict=True))
