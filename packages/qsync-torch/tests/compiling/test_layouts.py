"""Compiled steps of tensors in any layout: right, with results that lie in memory as those of eager steps."""

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qsync_torch as qsync
from nightly import nightly
from qsync_core.ir.precision import Precision, Rounding
from qsync_torch import apply_

from .chained_models import INT8, distance, images, lowered, step

NEAREST = attrs.evolve(INT8, rounding=Rounding.NEAREST, grad_input=Precision.FLOAT32, grad_weight=Precision.FLOAT32)


class Convolutions(nn.Module):
    """Batch norms before SiLU are not fused, so that PyTorch runs their backward."""

    def __init__(self, activation):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(4))
        self.norms, self.activation = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3)), activation

    def forward(self, x):
        y = F.relu(self.norms[0](self.convs[0](x)))
        for conv, norm in zip(self.convs[1:3], self.norms[1:], strict=True):
            y = self.activation(norm(conv(y)))
        return [self.convs[3](y)]


class ConvNext(nn.Module):
    def __init__(self):
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.batch_norm, self.conv = nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        y = self.down(F.gelu(self.up(self.norm(self.depthwise(x).permute(0, 2, 3, 1)))))
        return [self.conv(F.silu(self.batch_norm(x + y.permute(0, 3, 1, 2))))]


class Tokens(nn.Module):
    """What stands between two linears is of a transposed tensor, and read as a view as well."""

    def __init__(self, between, width=16):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(width, 8)
        self.between = between

    def forward(self, x):
        y = self.between(self.first(x).transpose(0, 1), x.transpose(0, 1))
        return [self.second(y), y]


class Viewed(Tokens):
    def forward(self, x):
        z, y = super().forward(x)
        return [z, y, y.transpose(0, 1).view(-1, y.shape[-1])]


class Images(nn.Module):
    """What stands between two convolutions is of channels-last images, or read beside others."""

    def __init__(self, between):
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
        self.between = between

    def forward(self, x):
        y = self.between(self.first(x), x.contiguous())
        return [self.second(y), y]


class LastDimension(nn.Module):
    """A linear reads the last dimension of channels-last images."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(6, 4)

    def forward(self, x):
        y = F.gelu(self.first(x))
        return [self.second(y), y, y.permute(0, 2, 3, 1).view(-1, 8)]


def normal(x):
    return F.batch_norm(x, None, None, training=True)


def tokens():
    return torch.randn(3, 5, 16)


def nchw():
    return images().contiguous()


@pytest.mark.parametrize(
    "make, x, chains",
    [
        (lambda: Convolutions(F.silu), images, 3),
        (ConvNext, nchw, 3),
        (lambda: Viewed(lambda x, residual: F.silu(x[..., :8]) * x[..., 8:], 8), tokens, 1),
        (lambda: Tokens(lambda x, residual: F.layer_norm(x + residual, (16,))), tokens, 1),
        (lambda: Images(lambda x, residual: F.relu(residual + normal(x))), nchw, 1),
        (LastDimension, images, 1),
        *nightly(
            (lambda: Convolutions(F.silu), nchw, 3),
            (ConvNext, images, 3),
            (lambda: Viewed(lambda x, residual: F.gelu(x)), tokens, 1),
            (lambda: Viewed(lambda x, residual: F.relu(x)), tokens, 1),
            (lambda: Viewed(lambda x, residual: F.silu(x.chunk(2, -1)[0]), 8), tokens, 1),
            (lambda: Tokens(lambda x, residual: F.layer_norm(x, (16,))), tokens, 1),
            (lambda: Images(lambda x, residual: F.relu(normal(x) + residual)), images, 1),
            (lambda: Images(lambda x, residual: F.relu(residual + normal(x))), images, 1),
            (lambda: Images(lambda x, residual: F.relu(normal(x.transpose(2, 3)))), images, 1),
            (lambda: Images(lambda x, residual: F.gelu(x.transpose(2, 3))), images, 1),
            (lambda: Images(lambda x, residual: F.gelu(x.transpose(2, 3))), nchw, 1),
        ),
    ],
)
def test_values_gradients_and_strides_are_those_of_eager_steps(make, x, chains, fused):
    model, x, strides = make(), x(), []

    def joined(run):
        def results_of(x):
            results = run(x)
            strides.append([result.stride() for result in results])
            return torch.cat([result.reshape(-1) for result in results])

        return results_of

    applied = apply_(model, lowered(model, NEAREST))
    expected = step(joined(model), model, x)
    applied.step = 0
    found = step(joined(qsync.compile(model, backend="aot_eager", fullgraph=True)), model, x)
    assert len([message for message in fused() if message.startswith("fused")]) == chains
    assert strides[0] == strides[1]
    assert distance(found, expected) < 2e-2
