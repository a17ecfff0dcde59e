"""The transposed two-dimensional convolution, which spreads its input by the stride.

PyTorch stores its weight as (C, O / groups, KH, KW).  Its products have kernels of their own: ``aten`` has them in every format.
"""

from __future__ import annotations

import torch
from torch import nn

from qsync_core.kinds import KINDS
from qsync_torch.kinds.convolution import convolution

CONV_TRANSPOSE2D = convolution(KINDS["conv_transpose2d"], torch.conv_transpose2d, nn.ConvTranspose2d)
