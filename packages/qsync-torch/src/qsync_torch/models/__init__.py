"""Named models: jobs with random weights and synthetic data that need no download, in the sizes of the paper or smaller.

Options are written after the name, ``resnet50:image=64,classes=10``; every builder's keyword arguments are its options.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from qsync_torch.job import Job
from qsync_torch.models.transformers import bert, roberta
from qsync_torch.models.vision import resnet, vgg

NAMED: dict[str, Callable[..., Job]] = {
    "resnet18": partial(resnet, "resnet18"),
    "resnet50": partial(resnet, "resnet50"),
    "vgg16": partial(vgg, "vgg16"),
    "vgg16_bn": partial(vgg, "vgg16_bn"),
    "bert-base": partial(bert, "bert-base"),
    "bert-large": partial(bert, "bert-large"),
    "roberta-base": partial(roberta, "roberta-base"),
}
"""Builder of each named job; called with keyword options it returns a :class:`~qsync_torch.job.Job`."""
