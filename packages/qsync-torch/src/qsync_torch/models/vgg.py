"""VGG networks (Simonyan and Zisserman, 2014, arXiv:1409.1556), with torchvision's ``state_dict`` names but without torchvision."""

from __future__ import annotations

import torch
from torch import nn

VGG16 = (64, 64, "pool", 128, 128, "pool", 256, 256, 256, "pool", 512, 512, 512, "pool", 512, 512, 512, "pool")
"""Configuration D of the paper: output channels of its 13 convolutions, and where pooling stands."""


class VGG(nn.Module):
    """VGG of configuration D.

    Args:
        batch_norm: a BatchNorm after every convolution.
        width: channels of the first convolution (64 in the paper); all others scale with it.
        hidden: features of the two hidden linear layers (4096 in the paper).
        in_channels: channels of the images.
        pool_size: side of the feature map that the classifier sees (7 in the paper).
        dropout: probability in the classifier.
    """

    def __init__(
        self,
        *,
        batch_norm: bool = False,
        classes: int = 1000,
        width: int = 64,
        hidden: int = 4096,
        in_channels: int = 3,
        pool_size: int = 7,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = in_channels
        for entry in VGG16:
            if isinstance(entry, str):
                layers.append(nn.MaxPool2d(2, 2))
                continue
            out_channels = entry * width // 64
            layers.append(nn.Conv2d(channels, out_channels, 3, padding=1))
            if batch_norm:
                layers.append(nn.BatchNorm2d(out_channels))
            layers.append(nn.ReLU(inplace=True))
            channels = out_channels
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((pool_size, pool_size))
        self.classifier = nn.Sequential(
            nn.Linear(channels * pool_size * pool_size, hidden),
            nn.ReLU(True),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(True),
            nn.Dropout(dropout),
            nn.Linear(hidden, classes),
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0, 0.01)
            if isinstance(module, (nn.Conv2d, nn.Linear)) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images N×C×H×W to logits N×classes."""
        logits: torch.Tensor = self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))
        return logits
