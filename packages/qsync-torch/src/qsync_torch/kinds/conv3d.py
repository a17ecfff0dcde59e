"""The three-dimensional convolution, of volumes (B, C, D, H, W), in float formats."""

from __future__ import annotations

import torch
from torch import nn

from qsync_core.kinds import KINDS
from qsync_torch.kinds.convolution import convolution

CONV3D = convolution(KINDS["conv3d"], torch.conv3d, nn.Conv3d)
