"""Operators beside the common ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from robustness.zoo.entries import CLASSES, TOKENS, WIDTH, entry, images, sequences
from robustness.zoo.layers import block, mlp


@entry(sequences)
class Fourier(nn.Module):
    """Mixes tokens by the real part of a Fourier transform."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = block(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        return self.out((x + torch.fft.fft2(x, norm="ortho").real).mean(1))


@entry(sequences)
class Spectral(nn.Module):
    """Multiplies in the frequency domain with a complex weight made of two real parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.filter, self.out = (
            nn.Linear(WIDTH, WIDTH),
            nn.Parameter(torch.randn(TOKENS // 2 + 1, WIDTH, 2)),
            nn.Linear(WIDTH, CLASSES),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frequencies = torch.fft.rfft(self.first(x), dim=1) * torch.view_as_complex(self.filter)
        return self.out(torch.fft.irfft(frequencies, n=TOKENS, dim=1).mean(1))


@entry()
class ComplexWeight(nn.Module):
    """A complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.phase, self.out = (
            nn.Linear(WIDTH, WIDTH),
            nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64)),
            nn.Linear(WIDTH, CLASSES),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out((self.first(x) * self.phase).abs())


@entry(sequences)
class LinearAlgebra(nn.Module):
    """Decompositions that exist for float32 only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(TOKENS, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        gram = y @ y.transpose(1, 2) + TOKENS * torch.eye(TOKENS)
        return self.out(torch.linalg.cholesky(gram).diagonal(dim1=1, dim2=2).log() + torch.linalg.solve(gram, y).sum(-1))


@entry(sequences)
class Sorting(nn.Module):
    """Sorts, picks the largest, gathers, sums along a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        top, at = y.topk(3, dim=1)
        return self.out(y.cumsum(1)[:, -1] + top.mean(1) + y.gather(1, at).sum(1) + y.sort(1).values[:, 0])


@entry(images)
class Deformed(nn.Module):
    """Resamples an image: grid_sample, interpolate, unfold."""

    def __init__(self) -> None:
        super().__init__()
        self.where, self.out = nn.Linear(3 * 16 * 16, 6), nn.Linear(27, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grid = F.affine_grid(self.where(x.flatten(1)).tanh().view(-1, 2, 3), list(x.shape), align_corners=False)
        seen = F.interpolate(F.grid_sample(x, grid, align_corners=False), size=(8, 8), mode="bilinear", align_corners=False)
        return self.out(F.unfold(seen, 3).mean(-1))


@entry()
class Branching(nn.Module):
    """Decides by a tensor's value: cannot be exported."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.out(y if y.mean() > 0 else -y)


@entry()
def auxiliary_head_unused() -> nn.Module:
    model = mlp()
    model.auxiliary = nn.Linear(3, 3)
    model.forward = lambda x: model[2](model[1](model[0](x)))
    return model


@entry()
def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.Dropout(0.5), nn.ReLU(), nn.Linear(32, CLASSES))
