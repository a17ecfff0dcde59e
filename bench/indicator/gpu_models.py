"""Models of real size that indicators are compared with the measured truth on: ResNet-18 on digits, a BERT on source text."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from torch import nn

from indicator.data import BYTES, digits_batch, text_batch
from qsync_torch.job import Batch, Job
from qsync_torch.load_job import load_job

_MASKED = 0.15
_MASK_TOKEN = BYTES - 1
"""ASCII's DEL, which no source text holds."""
_IMAGE = 64
_SEQUENCE = 128


def resnet18(seed: int = 0) -> Job:
    """21 adjustable operators; images of 64×64 pixels, so that the stem halves them as it does those of ImageNet."""
    job = load_job(f"resnet18:classes=10,image={_IMAGE},seed={seed},batch=64,channels_last=true")

    def batch(step: int, size: int) -> Batch:
        digits = digits_batch(step, size, seed=seed)
        images = nn.functional.interpolate(digits.args[0], size=(_IMAGE, _IMAGE), mode="bilinear").repeat(1, 3, 1, 1)
        return Batch((images.to(memory_format=torch.channels_last),), target=digits.target)

    return attrs.evolve(job, name="indicator-resnet18", batch=batch)


def bert6(seed: int = 0) -> Job:
    """6 layers of BERT-base's width as a masked language model over bytes; 38 adjustable operators."""
    job = load_job(f"bert-base:head=mlm,layers=6,vocab={BYTES},seq={_SEQUENCE},batch=32,seed={seed}")

    def batch(step: int, size: int) -> Batch:
        tokens = text_batch(step, size, length=_SEQUENCE, seed=seed).args[0]
        generator = torch.Generator().manual_seed(1_000_003 * (seed + 7) + step)
        masked = torch.rand(tokens.shape, generator=generator) < _MASKED
        return Batch(
            kwargs={"input_ids": tokens.masked_fill(masked, _MASK_TOKEN), "attention_mask": torch.ones_like(tokens)},
            target=tokens.masked_fill(~masked, -100),
        )

    return attrs.evolve(job, name="indicator-bert6", batch=batch)


MODELS: dict[str, Callable[[int], Job]] = {"resnet18": resnet18, "bert6": bert6}
