"""Modules that share, repeat or compute their weights; functional calls and other products."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from robustness.zoo.entries import CLASSES, VOCABULARY, WIDTH, entry, sequences, texts


@entry(texts, lambda output, batch: F.cross_entropy(output.flatten(0, 1), batch.args[0].flatten()))
class Tied(nn.Module):
    """The decoder's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.decoder = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, VOCABULARY),
        )
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.body(self.embedding(tokens)).tanh())


@entry()
class Repeated(nn.Module):
    """One layer three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = x + self.layer(x).tanh()
        return self.out(x)


@entry()
def weight_norm() -> nn.Module:
    first = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 32))
    return nn.Sequential(first, nn.ReLU(), nn.Linear(32, CLASSES))


@entry()
def spectral_norm() -> nn.Module:
    first = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, 32))
    return nn.Sequential(first, nn.ReLU(), nn.Linear(32, CLASSES))


@entry()
def old_weight_norm() -> nn.Module:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(WIDTH, 32)), nn.ReLU(), nn.Linear(32, CLASSES))


@entry()
class LowRank(nn.Module):
    """A frozen layer with a trained product of two small ones beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, CLASSES, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 0.5 * self.b(self.a(x))


@entry()
class Standardised(nn.Module):
    """A weight that the forward standardises before it uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = (self.weight - self.weight.mean(1, keepdim=True)) / self.weight.std(1, keepdim=True)
        return self.out(F.linear(x, weight).relu())


@entry()
class ForwardByName(nn.Module):
    """Calls a submodule's ``forward`` instead of the submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.first.forward(x).relu())


@entry()
class Functional(nn.Module):
    """``F.linear`` on parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(24, WIDTH) / 4), nn.Parameter(torch.randn(CLASSES, 24) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x, self.w1).relu(), self.w2)


@entry()
class MatrixProducts(nn.Module):
    """``@``, ``addmm`` and ``bmm`` with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4), nn.Parameter(torch.randn(2, WIDTH, 8) / 4)
        self.bias, self.out = nn.Parameter(torch.zeros(WIDTH)), nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.addmm(self.bias, x @ self.a, self.a)
        return self.out(torch.bmm(y.expand(2, *y.shape), self.b).transpose(0, 1).flatten(1))


@entry(sequences)
class Einsum(nn.Module):
    """Attention and a projection written as einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Parameter(torch.randn(WIDTH, 2, 8) / 4), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = torch.einsum("ntw,whd->nhtd", x, self.project)
        scores = torch.einsum("nhtd,nhsd->nhts", heads, heads).softmax(-1)
        return self.out(torch.einsum("nhts,nhsd->nthd", scores, heads).flatten(2).mean(1))


@entry(sequences)
class Bilinear(nn.Module):
    """``nn.Bilinear`` of two parts of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Bilinear(WIDTH, WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x[:, 0], x[:, 1])


@entry(sequences)
class MixtureOfExperts(nn.Module):
    """Every expert sees every token; the router's probabilities weigh them."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = self.router(x).softmax(-1).unbind(-1)
        mixed = sum(p[..., None] * expert(x).relu() for p, expert in zip(share, self.experts, strict=True))
        return self.out(mixed.mean(1))
