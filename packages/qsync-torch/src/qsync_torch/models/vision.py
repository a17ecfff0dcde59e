"""Image classification jobs: ResNet and VGG on synthetic images."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from qsync_core.errors import JobError
from qsync_torch.job import Batch, Job
from qsync_torch.models.resnet import resnet18, resnet50
from qsync_torch.models.vgg import VGG


def resnet(
    name: str,
    /,
    *,
    image: int = 224,
    classes: int = 1000,
    width: int = 64,
    in_channels: int = 3,
    small_stem: bool = False,
    channels_last: bool = False,
    batch: int = 32,
    seed: int = 0,
) -> Job:
    """ResNet-18 or -50 with SGD; the learning rate is a quarter of the usual 0.1 for a batch of 256, in proportion: on noise, the
    usual one diverges.

    Args:
        name: ``resnet18`` or ``resnet50``.
        image: side of the square images in pixels.
        classes, width, in_channels, small_stem: see :class:`~qsync_torch.models.resnet.ResNet`.
        channels_last: memory format of model and images.
    """
    build = {"resnet18": resnet18, "resnet50": resnet50}[name]

    def model() -> nn.Module:
        return build(classes=classes, width=width, in_channels=in_channels, small_stem=small_stem)

    learning_rate = 0.025 * batch / 256
    return _image_job(name, model, (in_channels, image, image), classes, channels_last, batch, seed, learning_rate)


def vgg(
    name: str,
    /,
    *,
    image: int = 224,
    classes: int = 1000,
    width: int = 64,
    hidden: int = 4096,
    in_channels: int = 3,
    pool_size: int = 7,
    dropout: float = 0.5,
    channels_last: bool = False,
    batch: int = 32,
    seed: int = 0,
) -> Job:
    """VGG-16 with or without BatchNorm, with SGD.

    Args:
        name: ``vgg16`` or ``vgg16_bn``.
        image: side of the square images in pixels, at least 32.
        classes, width, hidden, in_channels, pool_size, dropout: see :class:`~qsync_torch.models.vgg.VGG`.
        channels_last, batch, seed: as for :func:`resnet`.
    """

    def model() -> nn.Module:
        return VGG(
            batch_norm=name.endswith("_bn"),
            classes=classes,
            width=width,
            hidden=hidden,
            in_channels=in_channels,
            pool_size=pool_size,
            dropout=dropout,
        )

    return _image_job(name, model, (in_channels, image, image), classes, channels_last, batch, seed, learning_rate=0.01)


def cross_entropy_loss(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy of logits N×classes against the batch's class indices N."""
    return nn.functional.cross_entropy(output, batch.target)


def _image_job(
    name: str,
    model: Callable[[], nn.Module],
    shape: tuple[int, int, int],
    classes: int,
    channels_last: bool,
    batch_size: int,
    seed: int,
    learning_rate: float,
) -> Job:
    if min(shape) < 1 or classes < 1:
        raise JobError(f"image, in_channels and classes of {name} are at least 1, got {shape[1]}, {shape[0]} and {classes}")
    layout = torch.channels_last if channels_last else torch.contiguous_format

    def batch(step: int, size: int) -> Batch:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        images = torch.randn(size, *shape, generator=generator).to(memory_format=layout)
        return Batch((images,), target=torch.randint(classes, (size,), generator=generator))

    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=learning_rate, momentum=0.9, weight_decay=1e-4)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        built = model().to(memory_format=layout)  # type: ignore[call-overload]  # torch's stub lacks this documented form
    return Job(name, built, batch, cross_entropy_loss, optimizer, batch_size)
