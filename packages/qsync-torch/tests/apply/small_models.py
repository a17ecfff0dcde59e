"""Small models that have what ``apply_`` must cope with."""

import torch
import torch.nn.functional as F
from torch import nn

from qsync_core.ir.op_id import OpId
from qsync_core.ir.variant import Variant


class ConvNet(nn.Module):
    """Convolutions, BatchNorm, an in-place residual sum and a linear head."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        y = torch.relu(self.bn1(self.conv1(x)))
        z = self.bn2(self.conv2(y))
        z += y
        return self.fc(torch.relu(z).mean((2, 3)))


class Handwritten(torch.autograd.Function):
    """A linear whose gradients its author wrote down: they are products with the weight, and no calls of the model."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class Attention(nn.Module):
    """Q, K and V from one activation, products of two activations, LayerNorm."""

    def __init__(self, width=16):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        weights = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, dim=-1)
        return self.norm(x + self.out(torch.matmul(weights, v)))


class Functional(nn.Module):
    """Functional calls: its own, a child's, and those inside ``nn.MultiheadAttention``."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)
        self.kernel = nn.Parameter(torch.randn(2, 1, 3, 3) / 3)
        self.child = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        x = F.linear(x, self.weight)
        x = self.child(x)
        x = F.linear(x, self.weight)
        x = x + F.conv2d(x[:, None], self.kernel, padding=1).mean(1)
        return self.attention(x, x, x, need_weights=False)[0]


INT8, BFLOAT16, FLOAT32 = (Variant.parse(name) for name in ("int8>float32", "bfloat16", "float32"))


def named(**variants):
    """Variants by FQN, with ``_`` for ``.``-free names."""
    return {OpId(fqn): variant for fqn, variant in variants.items()}


def images(batch=4):
    """A batch for :class:`ConvNet`."""
    return torch.randn(batch, 3, 6, 6)
