"""The adjustable operators in any variant, with the casts around them; norms; casts that consumers share."""

from qsync_torch.operators.conv2d import conv2d
from qsync_torch.operators.linear import linear

__all__ = ["conv2d", "linear"]
