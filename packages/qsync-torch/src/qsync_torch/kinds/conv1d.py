"""The one-dimensional convolution, of sequences (B, C, L): in 8 bit one of images of one row, by the kernels of ``conv2d``."""

from __future__ import annotations

import torch
from torch import nn

from qsync_core.kinds import KINDS
from qsync_torch.kinds.convolution import convolution

CONV1D = convolution(KINDS["conv1d"], torch.conv1d, nn.Conv1d)
