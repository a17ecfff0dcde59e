"""A small BatchNorm CNN and scikit-learn's handwritten digits: the model and data of ``train_ddp.py``.  Knows nothing of QSync."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset


class DigitsNet(nn.Module):
    """Three convolutions with BatchNorm and a linear layer; (N, 1, 8, 8) to logits (N, 10)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1, stride=2, bias=False)
        self.bn2 = nn.BatchNorm2d(2 * width)
        self.conv3 = nn.Conv2d(2 * width, 2 * width, 3, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(2 * width)
        self.fc = nn.Linear(2 * width * 16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.conv2(x)))
        x = torch.relu(self.bn3(self.conv3(x)) + x)
        return self.fc(x.flatten(1))


def make_model() -> DigitsNet:
    """The model with the same initial weights everywhere."""
    torch.manual_seed(0)
    return DigitsNet()


def make_optimizer(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Training and held-out images (N, 1, 8, 8) with their labels; every fifth image is held out."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1
    y = torch.tensor(labels)
    held_out = torch.arange(len(x)) % 5 == 0
    return TensorDataset(x[~held_out], y[~held_out]), TensorDataset(x[held_out], y[held_out])


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """Share of right answers in evaluation mode."""
    model.eval()
    x, y = data.tensors
    device = next(model.parameters()).device
    return float((model(x.to(device)).argmax(1).cpu() == y).float().mean())


def job():
    """What ``qsync trace``, ``profile`` and ``observe`` are given: model, batch, loss and optimizer."""
    from qsync_torch.job import Batch

    images, labels = load_data()[0].tensors

    def batch(step: int, size: int) -> Batch:
        rows = torch.arange(step * size, (step + 1) * size) % len(images)
        return Batch((images[rows],), target=labels[rows])

    def loss(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        return nn.functional.cross_entropy(logits, batch.target)

    return make_model(), batch, loss, make_optimizer
