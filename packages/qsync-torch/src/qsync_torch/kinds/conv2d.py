"""The two-dimensional convolution.  A channels-last activation gives a channels-last output."""

from __future__ import annotations

import torch
from torch import nn

from qsync_core.kinds import KINDS
from qsync_torch.kinds.convolution import convolution

CONV2D = convolution(KINDS["conv2d"], torch.conv2d, nn.Conv2d)
