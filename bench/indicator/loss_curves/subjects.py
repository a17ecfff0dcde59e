"""What is trained: ResNets of 18 and 50 layers and a BERT-base, on data that is drawn or comes with Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import attrs
import torch
from torch import nn

from indicator.data import BYTES, digits_batch, text_batch
from indicator.gpu_models import resnet18
from indicator.loss_curves.images import CLASSES, SIDE, image_batch
from qsync_torch.job import Batch, Job
from qsync_torch.load_job import load_job

_NOISE = 8.0
"""Standard deviation of what is added to images of unit variance: without it hardly any loss is left in the end."""
_SEQUENCE = 128
Parameters = Iterable[nn.Parameter]


def digits_resnet18(seed: int) -> Job:
    """21 adjustable operators."""
    clean_job = resnet18(seed)

    def batch(step: int, size: int) -> Batch:
        clean = clean_job.batch(step, size)
        generator = torch.Generator().manual_seed(1_000_003 * (seed + 13) + step)
        noise = _NOISE * torch.randn(clean.args[0].shape, generator=generator)
        return Batch((clean.args[0] + noise.to(memory_format=torch.channels_last),), target=clean.target)

    return attrs.evolve(clean_job, name="curves-resnet18", batch=batch, optimizer=_sgd)


def drawn_resnet50(seed: int) -> Job:
    """54 adjustable operators."""
    job = load_job(f"resnet50:classes={CLASSES},image={SIDE},seed={seed},batch=64,channels_last=true")
    for name, parameter in job.model.named_parameters():
        if name.endswith("bn3.weight"):
            # Residual branches start at nothing (Goyal et al. 2017, 5.1); the loss leaps at first otherwise.
            nn.init.zeros_(parameter)

    def batch(step: int, size: int) -> Batch:
        return image_batch(step, size, seed=seed)

    return attrs.evolve(job, name="curves-resnet50", batch=batch, optimizer=_sgd)


def text_bert(seed: int) -> Job:
    """74 adjustable operators."""
    return _bert("curves-bert-base", f"seed={seed},batch=16", seed)


def _bert(name: str, options: str, seed: int) -> Job:
    """A BERT that may not look ahead and says which byte follows.

    Guessing masked bytes instead, it would not learn more within a few hundred updates than how often every byte occurs.
    """
    job = load_job(f"bert-base:head=mlm,vocab={BYTES},seq={_SEQUENCE},{options}")
    before = torch.ones(_SEQUENCE, _SEQUENCE, dtype=torch.bool).tril()

    def batch(step: int, size: int) -> Batch:
        text = text_batch(step, size, length=_SEQUENCE, seed=seed)
        mask = before.expand(size, 1, -1, -1).contiguous()
        return Batch(kwargs={"input_ids": text.args[0], "attention_mask": mask}, target=text.target)

    return attrs.evolve(job, name=name, batch=batch, optimizer=_adamw)


def trial_resnet(seed: int) -> Job:
    """A narrow ResNet-18 on small digits, to try everything on a CPU."""
    job = load_job(f"resnet18:classes=10,image=16,in_channels=1,width=4,small_stem=true,seed={seed},batch=8")
    return attrs.evolve(job, name="curves-trial-resnet", batch=lambda step, size: digits_batch(step, size, seed=seed))


def trial_bert(seed: int) -> Job:
    """A BERT of one narrow layer, likewise."""
    return _bert("curves-trial-bert", f"layers=1,hidden=32,seed={seed},batch=4", seed)


def _sgd(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=5e-4)


def _adamw(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.01)


@attrs.frozen
class Subject:
    """A model to train.

    Attributes:
        name: short, for ids; what: in words.
        job: makes it from a seed, which rules its weights and its batches; its optimizer has the largest learning rate.
        wider: plans are made as though widths were so many times what they are.  At 1 all of a ResNet-50 in int8 takes a weak
            device as long as float32 the strong one, so that there is nothing to choose.
    """

    name: str
    what: str
    job: Callable[[int], Job]
    wider: float = 4.0


SUBJECTS = {
    subject.name: subject
    for subject in (
        Subject("resnet18", "ResNet-18 on digits of 64×64 pixels with noise, 10 classes", digits_resnet18),
        Subject("resnet50", f"ResNet-50 on drawn images of {SIDE}×{SIDE} pixels, {CLASSES} classes of a teacher", drawn_resnet50),
        Subject("bert-base", "BERT-base as a causal language model over the bytes of Python's library", text_bert),
        Subject("trial-resnet", "trial, a narrow ResNet-18", trial_resnet, wider=24.0),
        Subject("trial-bert", "trial, a BERT of one narrow layer", trial_bert, wider=24.0),
    )
}
DEFAULT = ("resnet18", "resnet50", "bert-base")
