"""The demo's vision job: a BatchNorm ResNet on scikit-learn's handwritten digits (1,797 real images, 8×8 enlarged to 16×16).

Widths are chosen so that convolutions take nearly all of the step on a CPU core, as they do on a GPU for real images; the data
is installed with scikit-learn, so nothing is downloaded.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from qsync_torch.demo.workload import Evaluation, Workload
from qsync_torch.job import Batch, Job

ENLARGED = 2
"""Images are enlarged by this: on 16×16 pixels bfloat16 convolutions are fast on a CPU in backward too, on 8×8 they are not."""
HELD_OUT_EVERY = 5
"""Every fifth image is held out."""


class BasicBlock(nn.Module):
    """Two 3×3 convolutions with BatchNorm and a shortcut (He et al., 2016); ``inner`` channels between them."""

    def __init__(self, width_in: int, width: int, stride: int, inner: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, inner, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or width_in != width:
            self.shortcut = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """(N, width_in, H, W) to (N, width, H/stride, W/stride)."""
        out = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class DigitsResNet(nn.Module):
    """A ResNet for small grey images; ``stages`` are (width, blocks, stride of the first block, channels inside a block)."""

    def __init__(self, stages: Iterable[tuple[int, int, int, int]], classes: int = 10) -> None:
        super().__init__()
        stages = list(stages)
        width_in = stages[0][0]
        self.conv1 = nn.Conv2d(1, width_in, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width_in)
        self.relu = nn.ReLU()
        blocks: list[nn.Module] = []
        for width, count, stride, inner in stages:
            for position in range(count):
                blocks.append(BasicBlock(width_in, width, stride if position == 0 else 1, inner))
                width_in = width
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(width_in, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 1, H, W) to logits (N, classes)."""
        x = self.blocks(self.relu(self.bn1(self.conv1(x))))
        return self.fc(self.pool(x).flatten(1))


STAGES = ((128, 3, 1, 128), (128, 2, 1, 64))
TINY_STAGES = ((8, 1, 1, 8), (16, 1, 2, 16))


@functools.cache
def _digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, held-out images and labels; images (N, 1, 16, 16) with zero mean and unit variance."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8)
    x = nn.functional.interpolate(x, scale_factor=ENLARGED, mode="bilinear")
    x = (x - x.mean()) / x.std()
    y = torch.tensor(labels, dtype=torch.int64)
    held_out = torch.arange(len(x)) % HELD_OUT_EVERY == 0
    return x[~held_out], y[~held_out], x[held_out], y[held_out]


def _take(indices: Tensor, step: int) -> Batch:
    x, y, _, _ = _digits()
    return Batch((x[indices].contiguous(memory_format=torch.channels_last),), target=y[indices])


def _loss(logits: Tensor, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(logits, batch.target)


def _evaluate(model: nn.Module) -> Evaluation:
    _, _, x, y = _digits()
    logits = model(x.contiguous(memory_format=torch.channels_last))
    return Evaluation(float(nn.functional.cross_entropy(logits, y)), float((logits.argmax(1) == y).float().mean()))


def digits_resnet(tiny: bool = False) -> Workload:
    """The job at the size of the demo, or ``tiny`` for tests: the same code in milliseconds a step."""
    torch.manual_seed(0)
    model = DigitsResNet(TINY_STAGES if tiny else STAGES).to(memory_format=torch.channels_last)
    return Workload(
        name="resnet",
        model=model,
        data="scikit-learn's handwritten digits",
        samples=len(_digits()[0]),
        take=_take,
        loss=_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=5e-4, fused=True),
        batch_size=32,
        evaluate_once=_evaluate,
    )


def job(tiny: bool = False) -> Job:
    """For the command line: ``qsync trace --job qsync_torch.demo.digits:job``."""
    return digits_resnet(tiny).job()
