"""Plain layers: linear, convolutional and recurrent ones, and one of a transformer."""

from __future__ import annotations

import torch
from torch import nn

from robustness.zoo.entries import CLASSES, VOCABULARY, WIDTH, entry, images, sequences, texts


@entry()
def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, CLASSES))


@entry(images)
def convolutions() -> nn.Module:
    body = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    return nn.Sequential(*body, nn.Conv2d(8, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(72, CLASSES))


@entry(images)
def grouped_and_dilated() -> nn.Module:
    body = [nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=8, padding=1), nn.Conv2d(8, 16, 3, groups=2, dilation=2)]
    return nn.Sequential(*body, nn.GroupNorm(4, 16), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES))


@entry(images)
def channels_last() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, CLASSES)).to(
        memory_format=torch.channels_last
    )


@entry(images)
class UNet(nn.Module):
    """Down, up by a transposed convolution, a skip between."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(8, 8, 2, stride=2), nn.Conv2d(11, CLASSES, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(self.middle(self.down(x).relu()).relu())
        return self.out(torch.cat([x, y], 1)).mean((2, 3))


@entry(sequences)
class Convolved1d(nn.Module):
    """Convolution along a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv1d(WIDTH, 8, 3), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.conv(x.transpose(1, 2)).relu().amax(-1))


@entry(sequences)
class Lstm(nn.Module):
    """Two LSTM layers, the last state classified."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(WIDTH, 12, 2, batch_first=True), nn.Linear(12, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.rnn(x)[0][:, -1])


@entry(sequences)
class Gru(nn.Module):
    """A bidirectional GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.GRU(WIDTH, 12, bidirectional=True, batch_first=True), nn.Linear(24, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.rnn(x)[0].mean(1))


@entry(sequences)
class LstmCells(nn.Module):
    """A cell that Python unrolls."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(WIDTH, 12), nn.Linear(12, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(len(x), 12), x.new_zeros(len(x), 12)
        for part in x.unbind(1):
            state = self.cell(part, state)
        return self.out(state[0])


@entry(sequences)
class Encoder(nn.Module):
    """PyTorch's own transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layer(x).mean(1))


@entry(texts)
def embedding_bag() -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(VOCABULARY, WIDTH), nn.Linear(WIDTH, CLASSES))


def block() -> nn.Module:
    """A part of other jobs' models."""
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
