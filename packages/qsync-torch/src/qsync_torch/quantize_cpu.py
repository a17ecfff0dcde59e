"""Rounding to int8 on a CPU, block by block, so that intermediate results stay in the second-level cache."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch

from qsync_core.precision import Rounding
from qsync_torch.random_bits import random_thresholds

_BLOCK = 1 << 16
"""Elements per thread that are rounded at a time."""
_JUST_BELOW_ONE = 1.0 - 2.0**-22
"""Keeps x / scale within 127 when it is computed as a product with the rounded inverse of the scale."""
CENTRE = 0.5 + 2.0**-9
"""Brings a threshold over 256, from [-0.5 - 2**-9, 0.5 - 2**-9), to [0, 1)."""


class _Scratch(threading.local):
    """Float32 buffers kept between calls: fresh memory of this size costs more in page faults than the rounding."""

    def __init__(self) -> None:
        self.buffers = torch.empty(0)

    @torch.inference_mode(False)  # memory made in inference mode could not be written to in training
    def of(self, numel: int) -> torch.Tensor:
        """(2, at least numel + 1)."""
        if self.buffers.numel() < 2 * (numel + 1):
            self.buffers = torch.empty(2, numel + 1)
        return self.buffers


_SCRATCH = _Scratch()


def _blocks(rows: int, columns: int, block: int) -> Iterator[tuple[slice, slice]]:
    """Whole rows where several fit into a block, else pieces of one row."""
    step = max(1, block // max(columns, 1))
    for first in range(0, rows, step):
        for start in range(0, columns, block):
            yield slice(first, min(first + step, rows)), slice(start, min(start + block, columns))


def quantize_int8_cpu(
    groups: torch.Tensor, scale: torch.Tensor, q_groups: torch.Tensor, rounding: Rounding, seed: int, offset: int
) -> None:
    """Round (groups, elements) with one scale a group into ``q_groups``.

    Stochastic: floor(x / scale + u) with u the draw in [0, 1), computed as 256 times that and divided.  Integers stay what
    they are: u is at most 1 - 2**-16 and a sum below 128 is exact to 2**-17.  Element i of the tensor takes draw i.
    """
    rows, columns = groups.shape
    block = _BLOCK * torch.get_num_threads()
    buffers = _SCRATCH.of(min(rows * columns, max(block, 1)))
    single = rows == 1
    centre = torch.tensor(CENTRE)
    inverse = scale.reciprocal().mul_(_JUST_BELOW_ONE)
    for row, column in _blocks(rows, columns, block):
        part, target = groups[row, column], q_groups[row, column]
        if rounding is Rounding.STOCHASTIC:
            position = row.start * columns + column.start
            y = random_thresholds(part.numel(), seed, offset, position, buffers=buffers).view(part.shape)
            if single:
                y.add_(part, alpha=256.0 * float(inverse))
            else:
                y.addcmul_(part.to(torch.float32), inverse[row, None], value=256.0)
            torch.add(centre, y, alpha=1.0 / 256.0, out=y).floor_()
        else:
            y = buffers[1, : part.numel()].view(part.shape)
            torch.div(part if part.dtype is torch.float32 else y.copy_(part), scale if single else scale[row, None], out=y)
            y = y.round_() if rounding is Rounding.NEAREST else y.floor_().clamp_(min=-127.0)
        target.copy_(y)
