"""What ``qsync demo`` trains: two models on real data that needs no download, and how well they do on held-out data.

``resnet``: a BatchNorm ResNet on scikit-learn's handwritten digits.  ``bert``: a small BERT that fills masked bytes in the source
text of Python's standard library.
"""

from __future__ import annotations

import functools
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from qsync_torch.job import Batch, Job

SHUFFLE_SEED = 20


@attrs.frozen
class Evaluation:
    """Mean loss and accuracy (0..1) on held-out data."""

    loss: float
    accuracy: float


@attrs.frozen(eq=False)
class Workload:
    """A job with a finite data set, so that several ranks can each take their part of one global batch.

    Attributes:
        name: as on the command line; data: what it learns from, in words.
        model: with its initial weights; the same on every rank and in every call.
        samples: training samples; ``take(indices, step)`` makes a batch of some of them (``step`` seeds what is random in it).
        loss, optimizer, batch_size: as in :class:`~qsync_torch.job.Job`; the batch size is that of one rank.
        evaluate_once: loss and accuracy of a model in evaluation mode on that share (0..1] of held-out data, without gradients.
    """

    name: str
    data: str
    model: nn.Module
    samples: int
    take: Callable[[Tensor, int], Batch]
    loss: Callable[[Tensor, Batch], Tensor]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    batch_size: int
    evaluate_once: Callable[[nn.Module, float], Evaluation]

    def job(self) -> Job:
        """The workload as trace, profile and observe know it: one rank's job."""
        return Job(
            f"demo-{self.name}",
            self.model,
            lambda step, size: self.part(step, size, 0, size),
            self.loss,
            self.optimizer,
            self.batch_size,
        )

    def part(self, step: int, global_batch: int, start: int, size: int) -> Batch:
        """One rank's part ``[start, start + size)`` of the global batch of a step.

        Samples are drawn without replacement within an epoch; the last, incomplete batch of an epoch is left out.
        """
        epoch, position = divmod(step, self.samples // global_batch)
        order = torch.randperm(self.samples, generator=torch.Generator().manual_seed(SHUFFLE_SEED + epoch))
        first = position * global_batch + start
        return self.take(order[first : first + size], step * global_batch + start)

    def evaluate(self, model: nn.Module, share: float = 1.0) -> Evaluation:
        """Loss and accuracy on that share of held-out data; the model's mode is restored."""
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                return self.evaluate_once(model, share)
        finally:
            model.train(was_training)


def load_workload(name: str, *, tiny: bool = False, batch_size: int | None = None) -> Workload:
    """The workload ``resnet`` or ``bert`` at the size of the demo, or ``tiny`` for tests: the same code in milliseconds a step.

    ``batch_size`` are samples a step and rank where they are not to be the workload's own.
    """
    workload = digits_resnet(tiny) if name == "resnet" else masked_sources_bert(tiny)
    return workload if batch_size is None else attrs.evolve(workload, batch_size=batch_size)


ENLARGED = 2
"""Images are enlarged by this: on 16×16 pixels bfloat16 convolutions are fast on a CPU in backward too, on 8×8 they are not."""
HELD_OUT_IMAGES = 5
"""Every fifth image is held out."""
STAGES = ((128, 3, 1, 128), (128, 2, 1, 64))
"""Widths of which convolutions take nearly all of the step on a CPU core, as they do on a GPU for real images."""
TINY_STAGES = ((8, 1, 1, 8), (16, 1, 2, 16))


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
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        result: Tensor = self.relu(out + self.shortcut(x))
        return result


class DigitsResNet(nn.Module):
    """A ResNet for small grey images; ``stages`` are (width, blocks, stride of the first block, channels inside a block)."""

    def __init__(self, stages: Iterable[tuple[int, int, int, int]]) -> None:
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
        self.fc = nn.Linear(width_in, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 1, H, W) to logits (N, 10)."""
        x = self.blocks(self.relu(self.bn1(self.conv1(x))))
        logits: Tensor = self.fc(self.pool(x).flatten(1))
        return logits


@functools.cache
def _digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, held-out images and labels; images (N, 1, 16, 16) with zero mean and unit variance."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8)
    x = nn.functional.interpolate(x, scale_factor=ENLARGED, mode="bilinear")
    x = (x - x.mean()) / x.std()
    y = torch.tensor(labels, dtype=torch.int64)
    held_out = torch.arange(len(x)) % HELD_OUT_IMAGES == 0
    return x[~held_out], y[~held_out], x[held_out], y[held_out]


def _take(indices: Tensor, step: int) -> Batch:
    x, y, _, _ = _digits()
    return Batch((x[indices].contiguous(memory_format=torch.channels_last),), target=y[indices])


def _digits_loss(logits: Tensor, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(logits, batch.target)


def _evaluate_digits(model: nn.Module, share: float) -> Evaluation:
    _, _, x, y = _digits()
    x, y = x[: round(share * len(x))], y[: round(share * len(y))]
    logits = model(x.contiguous(memory_format=torch.channels_last))
    return Evaluation(float(nn.functional.cross_entropy(logits, y)), float((logits.argmax(1) == y).float().mean()))


def digits_resnet(tiny: bool = False) -> Workload:
    """A BatchNorm ResNet on scikit-learn's handwritten digits: 1,797 real images, 8×8 enlarged to 16×16."""
    torch.manual_seed(0)
    model = DigitsResNet(TINY_STAGES if tiny else STAGES)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's annotation lacks it
    return Workload(
        name="resnet",
        model=model,
        data="scikit-learn's handwritten digits",
        samples=len(_digits()[0]),
        take=_take,
        loss=_digits_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=5e-4, fused=True),
        batch_size=32,
        evaluate_once=_evaluate_digits,
    )


BYTES = 256
MASK = BYTES
VOCABULARY = BYTES + 8
"""Bytes, the mask, and padding to a multiple of 8 (tensor cores and int8 kernels want aligned sizes)."""
MASKED_SHARE = 0.15
IGNORED = -100
TEXT_BYTES = 4_000_000
HELD_OUT_FILES = 10
"""Every tenth file is held out."""
HELD_OUT_WINDOWS = 256


@functools.cache
def _text() -> tuple[Tensor, Tensor]:
    """Bytes of the training and of the held-out files of the standard library, as two 1-d uint8 tensors."""
    training, held_out, size = bytearray(), bytearray(), 0
    for position, path in enumerate(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))):
        content = path.read_bytes()
        (held_out if position % HELD_OUT_FILES == 0 else training).extend(content)
        size += len(content)
        if size > TEXT_BYTES:
            break
    return torch.frombuffer(training, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8)


def _masked(tokens: Tensor, seed: int) -> Batch:
    """BERT's corruption of tokens (N, S): of 15%, 80% become the mask, 10% a random byte, 10% stay; targets are the originals."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.rand(tokens.shape, generator=generator)
    # The mean over no tokens is NaN: a short sample by itself, as in a small batch, has one masked token at least.
    without = (draw >= MASKED_SHARE).all(1)
    draw[without, draw[without].argmin(1)] = 0.0
    corrupted = tokens.clone()
    corrupted[draw < 0.8 * MASKED_SHARE] = MASK
    swapped = (draw >= 0.8 * MASKED_SHARE) & (draw < 0.9 * MASKED_SHARE)
    corrupted[swapped] = torch.randint(BYTES, (int(swapped.sum()),), generator=generator)
    return Batch(kwargs={"input_ids": corrupted}, target=torch.where(draw < MASKED_SHARE, tokens, IGNORED))


def _windows(text: Tensor, indices: Tensor, length: int) -> Tensor:
    return torch.stack([text[i * length : (i + 1) * length] for i in indices.tolist()]).long()


def _masked_loss(output: Any, batch: Batch) -> Tensor:
    logits: Tensor = output.logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch.target.flatten(), ignore_index=IGNORED)


def _evaluate_masked(model: nn.Module, length: int, share: float) -> Evaluation:
    _, held_out = _text()
    windows = round(share * HELD_OUT_WINDOWS)
    stride = len(held_out) // length // windows
    batch = _masked(_windows(held_out, torch.arange(windows) * stride, length), seed=0)
    output = model(**batch.kwargs)
    masked = batch.target != IGNORED
    right = (output.logits.argmax(-1) == batch.target)[masked]
    return Evaluation(float(_masked_loss(output, batch)), float(right.float().mean()))


def masked_sources_bert(tiny: bool = False) -> Workload:
    """A small BERT on the standard library's source text; tokens are bytes, so no tokenizer has to be trained."""
    from transformers import BertConfig, BertForMaskedLM

    length = 16 if tiny else 32
    hidden = 32 if tiny else 256
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "num_hidden_layers": 1 if tiny else 3,
        "num_attention_heads": 2 if tiny else 4,
        "intermediate_size": 4 * hidden,
        "max_position_embeddings": length,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "attn_implementation": "eager",  # fused attention's bfloat16 backward is several times slower than float32's on CPUs
    }
    model: nn.Module = BertForMaskedLM(BertConfig(**settings)).train()
    return Workload(
        name="bert",
        model=model,
        data="the source text of Python's standard library",
        samples=len(_text()[0]) // length,
        take=lambda indices, step: _masked(_windows(_text()[0], indices, length), step),
        loss=_masked_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01, fused=True),
        batch_size=4 if tiny else 32,
        evaluate_once=lambda held_out_model, share: _evaluate_masked(held_out_model, length, share),
    )


def resnet(tiny: bool = False) -> Job:
    """Make the job for the command line: ``qsync trace --job qsync_torch.demo.workloads:resnet``."""
    return digits_resnet(tiny).job()


def bert(tiny: bool = False) -> Job:
    """Make the job for the command line: ``qsync trace --job qsync_torch.demo.workloads:bert``."""
    return masked_sources_bert(tiny).job()
