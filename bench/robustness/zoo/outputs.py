"""Outputs in containers, and losses of several kinds."""

from __future__ import annotations

import dataclasses

import attrs
import torch
import torch.nn.functional as F
from torch import nn

from qsync_torch.job import Batch
from robustness.zoo.entries import CLASSES, WIDTH, classified, entry, regressed
from robustness.zoo.layers import block, mlp


@attrs.frozen
class Prediction:
    """An own class of outputs."""

    logits: torch.Tensor
    features: torch.Tensor


@entry(loss=lambda output, batch: classified(output.logits, batch) + 0.01 * regressed(output.features, batch))
class OwnOutput(nn.Module):
    """Returns an object."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> Prediction:
        y = self.first(x).relu()
        return Prediction(self.out(y), y)


@dataclasses.dataclass
class Scored:
    """A dataclass of outputs."""

    logits: torch.Tensor
    parts: dict[str, torch.Tensor]


@entry(loss=lambda output, batch: classified(output.logits, batch) + 0.01 * regressed(output.parts["features"], batch))
class DataclassOutput(nn.Module):
    """Returns a dataclass with a dictionary in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> Scored:
        y = self.first(x).relu()
        return Scored(self.out(y), {"features": y})


@entry(loss=lambda output, batch: sum(output.values()))
class LossesInDict(nn.Module):
    """Returns a dictionary of losses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.out(self.first(x).relu())
        return {"size": y.square().mean(), "margin": F.relu(1 - y).mean(), "entropy": -y.log_softmax(-1).mean()}


@entry(lambda generator, size: Batch((torch.randn(size, 2, WIDTH, generator=generator),)), lambda output, batch: contrasted(output))
def contrastive() -> nn.Module:
    return block()


def contrasted(output: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of similarities of pairs (N, 2, width): each should be nearest to its partner."""
    left, right = F.normalize(output, dim=-1).unbind(1)
    return F.cross_entropy(left @ right.t() / 0.1, torch.arange(len(left)))


@entry(loss=lambda output, batch: F.nll_loss(output.log_softmax(-1), batch.target, reduction="sum") / len(output))
def summed_loss() -> nn.Module:
    return mlp()
