"""Results of operators that are changed in place, by numbers that 16 bits would lose."""

from __future__ import annotations

import torch
from torch import nn

from robustness.zoo.entries import CLASSES, WIDTH, entry, images
from robustness.zoo.layers import mlp


class _Offset(nn.Module):
    """A linear layer, and large float32 numbers in a buffer beside it."""

    offset: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("offset", torch.linspace(500, 1500, WIDTH))


@entry()
class AddedInPlace(_Offset):
    """Adds them to what an operator delivers, and takes them off again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        y += self.offset
        return self.out(y - self.offset)


@entry()
class AddedToAView(_Offset):
    """The same, in half of the columns, through a view."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        half = WIDTH // 2
        y[:, :half] += self.offset[:half]
        return self.out(torch.cat([y[:, :half] - self.offset[:half], y[:, half:]], 1))


@entry()
class ScaledInPlace(_Offset):
    """Products and fractions in place, by functions whose names end in an underscore."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).addcmul_(self.offset, self.offset, value=1e-3)
        return self.out(y.sub_(self.offset.square() * 1e-3).clamp_(-4, 4))


@entry()
class ResidualInPlace(nn.Module):
    """Adds the result of one operator to that of another in place, and a float32 input to both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.rest = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        y += self.second(torch.tanh(x))
        y += x
        return self.rest(y)


@entry(images)
class ConvolutionsInPlace(nn.Module):
    """Sums the results of two convolutions in place behind batch norms, as residual networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.out = nn.BatchNorm2d(8), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        z = self.norm(self.second(torch.relu(y)))
        z += y
        return self.out(z.relu_().mean((2, 3)))
