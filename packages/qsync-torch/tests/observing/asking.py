"""How tests observe: by options of the request and of the run alike, and a function that is differentiable once."""

import torch
from torch.autograd.function import once_differentiable

from qsync_torch.observing.observe import ObserveRequest, observe

_OF_THE_RUN = ("earlier", "checkpoint", "announce", "progress")


def observed(job, dag, variants, **options):
    of_the_run = {name: options.pop(name) for name in _OF_THE_RUN if name in options}
    return observe(job, dag, ObserveRequest(variants, **options), **of_the_run)


class OnceSquare(torch.autograd.Function):
    """A function of a third party with a first derivative only."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]
