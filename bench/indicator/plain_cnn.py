"""A fourth model, of another kind: the exponent of :mod:`qsync_planner.allocator.verdict` was not chosen on it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from indicator.data import digits_batch, held_out_digits
from indicator.models import SUBJECTS, Subject
from qsync_torch.job import Batch, Job

NAME = "plain-cnn"


class PlainCnn(nn.Module):
    """VGG-like: convolutions with bias and ReLU, neither normalisation nor shortcuts, MaxPool after every fourth."""

    def __init__(self, widths: tuple[int, ...] = (16, 24, 32), depth: int = 4) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        width_in = 1
        for width in widths:
            for _ in range(depth):
                parts += [nn.Conv2d(width_in, width, 3, padding=1), nn.ReLU()]
                width_in = width
            parts.append(nn.MaxPool2d(2))
        self.body = nn.Sequential(*parts)
        self.hidden, self.head = nn.Linear(4 * width_in, 64), nn.Linear(64, 10)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 1, 16, 16) to logits (N, 10)."""
        return self.head(F.relu(self.hidden(self.body(x).flatten(1))))


def _loss(logits: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(logits, batch.target)


def plain_cnn(seed: int = 0) -> Job:
    """12 convolutions and 2 linear operators; half a batch is 32 images."""
    torch.manual_seed(seed)
    return Job(
        f"indicator-{NAME}",
        PlainCnn(),
        lambda step, size: digits_batch(step, size, seed=seed),
        _loss,
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01),
        batch_size=64,
    )


def register() -> None:
    """Let it be measured as the three models are; rows I1 to I5 leave it out."""
    SUBJECTS[NAME] = Subject(NAME, "", plain_cnn, held_out_digits)
