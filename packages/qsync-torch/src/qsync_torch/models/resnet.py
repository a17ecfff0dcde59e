"""Residual networks (He et al., 2015, arXiv:1512.03385), with torchvision's ``state_dict`` names but without torchvision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut; input and output N×C×H×W."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = downsample

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """N×C_in×H×W to N×C_out×H'×W'."""
        shortcut = x if self.downsample is None else self.downsample(x)
        out: torch.Tensor = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)) + shortcut)
        return out


class Bottleneck(nn.Module):
    """1×1, 3×3 (which carries the stride, as in torchvision) and 1×1 convolutions and a shortcut."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, width * self.expansion, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """N×C_in×H×W to N×C_out×H'×W'."""
        shortcut = x if self.downsample is None else self.downsample(x)
        out: torch.Tensor = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.relu(self.bn3(self.conv3(out)) + shortcut)
        return out


class ResNet(nn.Module):
    """A residual network.

    Args:
        block: BasicBlock or Bottleneck.
        layers: blocks in each of the four stages.
        width: channels of the first stage (64 in the paper).
        in_channels: channels of the images.
        small_stem: a 3×3 stride-1 first convolution and no pooling, for images of a few tens of pixels.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        layers: Sequence[int],
        *,
        classes: int = 1000,
        width: int = 64,
        in_channels: int = 3,
        small_stem: bool = False,
    ) -> None:
        super().__init__()
        self._channels = width
        self.conv1 = (
            nn.Conv2d(in_channels, width, 3, 1, 1, bias=False) if small_stem else nn.Conv2d(in_channels, width, 7, 2, 3, bias=False)
        )
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if small_stem else nn.MaxPool2d(3, 2, 1)
        self.layer1 = self._stage(block, width, layers[0], stride=1)
        self.layer2 = self._stage(block, width * 2, layers[1], stride=2)
        self.layer3 = self._stage(block, width * 4, layers[2], stride=2)
        self.layer4 = self._stage(block, width * 8, layers[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(self._channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def _stage(self, block: type[BasicBlock] | type[Bottleneck], width: int, count: int, stride: int) -> nn.Sequential:
        blocks = []
        for index in range(count):
            step, out_channels = (stride if index == 0 else 1), width * block.expansion
            downsample = None
            if step != 1 or self._channels != out_channels:
                downsample = nn.Sequential(
                    nn.Conv2d(self._channels, out_channels, 1, step, bias=False), nn.BatchNorm2d(out_channels)
                )
            blocks.append(block(self._channels, width, step, downsample))
            self._channels = out_channels
        return nn.Sequential(*blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images N×C×H×W to logits N×classes."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: torch.Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return logits


def resnet18(**options: Any) -> ResNet:
    """ResNet-18; options as of :class:`ResNet`."""
    return ResNet(BasicBlock, (2, 2, 2, 2), **options)


def resnet50(**options: Any) -> ResNet:
    """ResNet-50; options as of :class:`ResNet`."""
    return ResNet(Bottleneck, (3, 4, 6, 3), **options)
