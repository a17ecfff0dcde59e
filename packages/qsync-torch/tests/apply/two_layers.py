"""Two layers that are called in several ways, and gradients of steps under their plans."""

import torch
import torch.nn.functional as F
from torch import nn

from qsync_torch import apply_

from .small_models import BFLOAT16, INT8, named


class TwoLayers(nn.Module):
    """Two layers, called as ``how`` says."""

    def __init__(self, how="modules"):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.how = how

    def body(self, x):
        if self.how == "forward":
            return self.b.forward(torch.relu(self.a.forward(x)))
        if self.how == "functional":
            return F.linear(torch.relu(F.linear(x, self.a.weight, self.a.bias)), weight=self.b.weight, bias=self.b.bias)
        return self.b(torch.relu(self.a(x)))

    def forward(self, x):
        return self.body(x)


BOTH = named(a=INT8, b=BFLOAT16)


def gradients_of(model, loss):
    model.zero_grad()
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def step_of(model, x, variants=BOTH):
    applied = apply_(model, variants, seed=5)
    found = gradients_of(model, model(x).square().sum())
    applied.remove()
    return found


def equal(first, second):
    return all((a is b is None) or torch.equal(a, b) for a, b in zip(first, second, strict=True))
