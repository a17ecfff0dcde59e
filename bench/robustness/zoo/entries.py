"""What the jobs of the zoo are made with: batches, losses, and their entry into it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from qsync_torch.job import Batch, Job

ZOO: dict[str, Callable[[], Job]] = {}
"""Jobs by name."""

CLASSES, WIDTH, TOKENS, VOCABULARY, SIZE = 10, 16, 8, 50, 4
"""Classes of a target, features of a vector, tokens of a sequence, ids of a vocabulary, samples of a batch."""

Make = Callable[[], nn.Module]
Draw = Callable[[torch.Generator, int], Batch]
Loss = Callable[[Any, Batch], torch.Tensor]


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def classified(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Cross-entropy of logits (N, classes, ...)."""
    return F.cross_entropy(output, batch.target)


def regressed(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Mean square of any output."""
    return output.square().mean()


def own_loss(output: Any, batch: Batch) -> torch.Tensor:
    """The loss that a transformers model computes itself from the labels."""
    loss: torch.Tensor = output.loss
    return loss


def vectors(generator: torch.Generator, size: int) -> Batch:
    """Inputs (N, width) and classes (N,)."""
    return Batch((torch.randn(size, WIDTH, generator=generator),), {}, _classes(generator, size))


def images(generator: torch.Generator, size: int, *, pixels: int = 16, channels: int = 3) -> Batch:
    """Inputs (N, channels, pixels, pixels) and classes (N,)."""
    return Batch((torch.randn(size, channels, pixels, pixels, generator=generator),), {}, _classes(generator, size))


def sequences(generator: torch.Generator, size: int) -> Batch:
    """Inputs (N, tokens, width) and classes (N,)."""
    return Batch((torch.randn(size, TOKENS, WIDTH, generator=generator),), {}, _classes(generator, size))


def texts(generator: torch.Generator, size: int) -> Batch:
    """Token ids (N, tokens) and classes (N,)."""
    return Batch((torch.randint(VOCABULARY, (size, TOKENS), generator=generator),), {}, _classes(generator, size))


def labelled_texts(generator: torch.Generator, size: int) -> Batch:
    """Token ids and labels (N, tokens) by name, as transformers' language models take them."""
    tokens = torch.randint(2, VOCABULARY, (size, TOKENS), generator=generator)
    return Batch((), {"input_ids": tokens, "labels": tokens})


def labelled_images(generator: torch.Generator, size: int) -> Batch:
    """Pixels (N, 3, 32, 32) and classes by name."""
    return Batch((), {"pixel_values": torch.randn(size, 3, 32, 32, generator=generator), "labels": _classes(generator, size)})


def _classes(generator: torch.Generator, size: int) -> torch.Tensor:
    return torch.randint(CLASSES, (size,), generator=generator)


def job(name: str, make: Make, draw: Draw = vectors, loss: Loss = classified) -> Job:
    """A job with weights of seed 0; batch ``step`` is drawn with seed ``step``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make()
    return Job(name, model, lambda step, size: draw(torch.Generator().manual_seed(step), size), loss, _sgd, SIZE)


def entry(draw: Draw = vectors, loss: Loss = classified) -> Callable[[Make], Make]:
    """Puts a function that makes a model, or a model's class, into the zoo under its name."""

    def enter(make: Make) -> Make:
        name = make.__name__.strip("_")
        ZOO[name] = functools.partial(job, name, make, draw, loss)
        return make

    return enter
