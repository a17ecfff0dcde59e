"""Images that are drawn, and labels that a fixed random network gives them, so that there is something to learn.

An image is a sum of plane waves of random direction, wavelength, phase and colour, which repeats itself at its borders.  The
teacher is a convolution with random filters, ReLU, the mean over all places, and two random layers; its opinion does not change
where an image is rolled by an even number of pixels.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from qsync_torch.job import Batch

SIDE = 64
CLASSES = 20
IMAGES = 8192
_WAVES, _SHORTEST = 6, 8
"""Waves of an image, and the most periods that one has over the width or the height."""
_FILTERS, _FILTER_SIDE, _HIDDEN = 32, 7, 64
_CHUNK = 256
_SEED = 2_026


def waves(count: int, generator: torch.Generator) -> Tensor:
    """(count, 3, SIDE, SIDE), of zero mean and about unit variance."""
    grid = torch.arange(SIDE) * (2 * math.pi / SIDE)
    across, down = torch.randint(-_SHORTEST, _SHORTEST + 1, (2, count, _WAVES), generator=generator)
    phase = 2 * math.pi * torch.rand(count, _WAVES, generator=generator)
    colour = torch.randn(count, _WAVES, 3, generator=generator)
    angle = across[..., None, None] * grid + down[..., None, None] * grid[:, None] + phase[..., None, None]
    return torch.einsum("nwc,nwyx->ncyx", colour, angle.cos()) * math.sqrt(2 / _WAVES)


@functools.cache
def _filters() -> tuple[Tensor, Tensor, Tensor]:
    """The teacher: filters, and two layers."""
    generator = torch.Generator().manual_seed(_SEED)
    shapes = ((_FILTERS, 3, _FILTER_SIDE, _FILTER_SIDE), (_HIDDEN, _FILTERS), (CLASSES, _HIDDEN))
    filters, inner, outer = (torch.randn(shape, generator=generator) for shape in shapes)
    return filters, inner, outer


def responses(images: Tensor) -> Tensor:
    """What the teacher's filters find in images (N, 3, SIDE, SIDE): (N, filters)."""
    around = F.pad(images, [_FILTER_SIDE // 2] * 4, mode="circular")
    return F.conv2d(around, _filters()[0], stride=2).relu().mean((2, 3))


def _labels(found: Tensor) -> Tensor:
    """The class with the largest score, each score being standardised over all images so that every class occurs."""

    def standardised(x: Tensor) -> Tensor:
        return (x - x.mean(0)) / x.std(0)

    _, inner, outer = _filters()
    hidden = (standardised(found) @ inner.T).relu()
    return standardised(hidden @ outer.T).argmax(1)


@functools.cache
def _pool() -> tuple[Tensor, Tensor]:
    """All images in 16 bits and their labels."""
    generator = torch.Generator().manual_seed(_SEED + 1)
    images, found = torch.empty(IMAGES, 3, SIDE, SIDE, dtype=torch.float16), torch.empty(IMAGES, _FILTERS)
    for start in range(0, IMAGES, _CHUNK):
        drawn = waves(_CHUNK, generator)
        images[start : start + _CHUNK], found[start : start + _CHUNK] = drawn, responses(drawn)
    return images, _labels(found)


def image_batch(step: int, size: int, *, seed: int) -> Batch:
    """Images drawn at random, rolled by an even number of pixels in both directions; channels last."""
    images, labels = _pool()
    generator = torch.Generator().manual_seed(1_000_003 * (seed + 1) + step)
    chosen = torch.randint(IMAGES, (size,), generator=generator)
    down, across = (2 * torch.randint(SIDE // 2, (2,), generator=generator)).tolist()
    rolled = images[chosen].roll((down, across), (2, 3)).float()
    return Batch((rolled.to(memory_format=torch.channels_last),), target=labels[chosen])
