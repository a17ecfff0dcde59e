"""Three small jobs on which an indicator can be compared with the measured truth: each has more than 30 adjustable operators.

================  ====================================================================================================
``transformer``   pre-LayerNorm decoder with GELU, fused attention and dropout .1, on the source text of Python's library
``gelu-cnn``      ConvNeXt-like: 3×3 convolution, GroupNorm, two linear operators with GELU between them, residual; on digits
``relu-cnn``      CIFAR-style ResNet-30, narrow: BatchNorm, ReLU, residuals, MaxPool after the first layer; on digits
================  ====================================================================================================

They are small so that thousands of passes take minutes on one core, and train to a useful state within a few hundred updates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from indicator.data import BYTES, digits_batch, held_out_digits, held_out_text, text_batch
from qsync_torch.job import Batch, Job

LENGTH = 32
"""Tokens of a sequence."""


class Layer(nn.Module):
    """One pre-LayerNorm layer of a decoder: causal attention and a GELU network, each with dropout and a residual."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(N, S, width) to the same."""
        n, s, width = x.shape
        y = self.norm1(x)
        q, k, v = (part(y).view(n, s, self.heads, -1).transpose(1, 2) for part in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        y = self.out(y.transpose(1, 2).reshape(n, s, width))
        x = x + F.dropout(y, self.dropout, self.training)
        y = self.down(F.gelu(self.up(self.norm2(x))))
        return x + F.dropout(y, self.dropout, self.training)


class Transformer(nn.Module):
    """A language model over ASCII: 6 adjustable operators a layer, and the head."""

    def __init__(self, width: int = 32, layers: int = 5, heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(BYTES, width), nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.layers = nn.ModuleList(Layer(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, BYTES)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (N, S) to logits (N, S, BYTES) of those that follow."""
        x = self.tokens(tokens) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class GeluBlock(nn.Module):
    """3×3 convolution, GroupNorm of one group, linear to twice the width, GELU, linear back; added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.spatial = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.GroupNorm(1, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(N, width, H, W) to the same."""
        y = self.norm(self.spatial(x)).permute(0, 2, 3, 1)
        return x + self.down(F.gelu(self.up(y))).permute(0, 3, 1, 2)


class GeluCnn(nn.Module):
    """Three stages of GELU blocks on 8×8, 4×4 and 2×2 positions, patches of 2×2 before each."""

    def __init__(self, widths: tuple[int, ...] = (16, 24, 32), blocks: int = 3) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        width_in = 1
        for width in widths:
            parts += [nn.Conv2d(width_in, width, 2, stride=2), nn.GroupNorm(1, width)]
            parts += [GeluBlock(width) for _ in range(blocks)]
            width_in = width
        self.body, self.head = nn.Sequential(*parts), nn.Linear(width_in, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 1, 16, 16) to logits (N, 10)."""
        return self.head(self.body(x).mean((2, 3)))


class ReluBlock(nn.Module):
    """Two 3×3 convolutions with BatchNorm, ReLU and a shortcut, which is a 1×1 convolution where the width changes."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if width_in != width:
            self.shortcut = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """(N, width_in, H, W) to (N, width, H / stride, W / stride)."""
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class ReluCnn(nn.Module):
    """ResNet-30 after He et al. (2016) for CIFAR, narrow, with the MaxPool of their larger ones: stages at 8×8, 8×8 and 4×4."""

    def __init__(self, widths: tuple[int, int, int] = (8, 12, 24), blocks: tuple[int, int, int] = (5, 5, 4)) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(1, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0])
        parts: list[nn.Module] = []
        width_in = widths[0]
        for stage, (width, count) in enumerate(zip(widths, blocks, strict=True)):
            for position in range(count):
                parts.append(ReluBlock(width_in, width, 2 if stage == 2 and position == 0 else 1))
                width_in = width
        self.body, self.head = nn.Sequential(*parts), nn.Linear(width_in, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 1, 16, 16) to logits (N, 10)."""
        x = F.max_pool2d(F.relu(self.bn(self.conv(x))), 2)
        return self.head(self.body(x).mean((2, 3)))


def _loss(logits: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch.target.flatten())


def transformer(seed: int = 0) -> Job:
    """31 linear operators; half a batch is 8 sequences of 32 bytes."""
    torch.manual_seed(seed)
    return Job(
        "indicator-transformer",
        Transformer(),
        lambda step, size: text_batch(step, size, length=LENGTH, seed=seed),
        _loss,
        lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.01),
        batch_size=16,
    )


def gelu_cnn(seed: int = 0) -> Job:
    """12 convolutions and 19 linear operators; half a batch is 32 images."""
    torch.manual_seed(seed)
    return Job(
        "indicator-gelu-cnn",
        GeluCnn(),
        lambda step, size: digits_batch(step, size, seed=seed),
        _loss,
        lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.01),
        batch_size=64,
    )


def relu_cnn(seed: int = 0) -> Job:
    """31 convolutions and a linear operator; half a batch is 24 images."""
    torch.manual_seed(seed)
    return Job(
        "indicator-relu-cnn",
        ReluCnn(),
        lambda step, size: digits_batch(step, size, seed=seed),
        _loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=5e-4),
        batch_size=48,
    )


@attrs.frozen
class Subject:
    """A model to judge indicators by.

    Attributes:
        name: as ``--models`` takes it; row: the row of its int8 τ.
        job: makes it from a seed, which rules its weights and its batches.
        held_out: data that it is not trained on.
    """

    name: str
    row: str
    job: Callable[[int], Job]
    held_out: Callable[[], Batch]


SUBJECTS = {
    subject.name: subject
    for subject in (
        Subject("transformer", "I1a", transformer, functools.partial(held_out_text, LENGTH)),
        Subject("gelu-cnn", "I1b", gelu_cnn, held_out_digits),
        Subject("relu-cnn", "I2", relu_cnn, held_out_digits),
    )
}


@attrs.frozen
class Reached:
    """How far training got: mean loss of the last 20 updates, loss and accuracy (0..1) on held-out data."""

    training_loss: float
    loss: float
    accuracy: float


def reached(subject: Subject, seed: int, updates: int) -> Reached:
    """Train as observing does, in float32 on half batches, and look at data that was held out."""
    job = subject.job(seed)
    torch.manual_seed(seed)
    optimizer = job.optimizer(job.model.parameters())
    losses = []
    for step in range(updates):
        loss = job.compute_loss(job.batch(step, job.batch_size // 2), job.model.train())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    batch = subject.held_out()
    with torch.no_grad():
        logits = job.model.eval()(*batch.args)
    right = (logits.argmax(-1) == batch.target).float().mean()
    return Reached(sum(losses[-20:]) / len(losses[-20:]), float(_loss(logits, batch)), float(right))
