"""Four jobs that no other row has, for row C10: small enough for thousands of passes on one core.

==================  ==================================================================================================
``vit``             vision transformer: patches of 4×4, a class token, fused attention, GELU; on digits
``depthwise``       MobileNetV2-like: bottlenecks of 1×1 and 3×3 depthwise convolutions, BatchNorm, ReLU; on grainy digits
``gpt``             decoder with one product for query, key and value, tanh GELU, tied head; on Python's source text
``unet``            two levels down and up, BatchNorm, ReLU, MaxPool, skip connections; removes noise from digits
==================  ==================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from indicator.data import BYTES, digits_batch, text_batch
from qsync_torch.job import Batch, Job

LENGTH = 32
"""Tokens of a sequence."""


class Attention(nn.Module):
    """Multi-head self-attention, one product for query, key and value."""

    def __init__(self, width: int, heads: int, *, is_causal: bool) -> None:
        super().__init__()
        self.heads, self.is_causal = heads, is_causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(N, S, width) to the same."""
        n, s, width = x.shape
        q, k, v = self.qkv(x).view(n, s, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return self.out(y.transpose(1, 2).reshape(n, s, width))


class Layer(nn.Module):
    """One pre-LayerNorm layer: attention and a GELU network, each with a residual."""

    def __init__(self, width: int, heads: int, *, is_causal: bool, approximate: str) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, is_causal=is_causal)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        """(N, S, width) to the same."""
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate=self.approximate))


class VisionTransformer(nn.Module):
    """4 layers on 16 patches and a class token."""

    def __init__(self, width: int = 48, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, stride=4)
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(17, width))
        self.layers = nn.ModuleList(Layer(width, heads, is_causal=False, approximate="none") for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 1, 16, 16) to logits (N, 10)."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])


class Gpt(nn.Module):
    """A language model over ASCII whose head is its embedding."""

    def __init__(self, width: int = 48, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(BYTES, width), nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(Layer(width, heads, is_causal=True, approximate="tanh") for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, BYTES, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (N, S) to logits (N, S, BYTES) of those that follow."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def _convolution(width_in: int, width: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """With BatchNorm and ReLU."""
    convolution = nn.Conv2d(width_in, width, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(width), nn.ReLU())


class Bottleneck(nn.Module):
    """Widens, a 3×3 depthwise convolution, narrows without ReLU; added to its input where shapes allow."""

    def __init__(self, width_in: int, width: int, stride: int, factor: int = 3) -> None:
        super().__init__()
        inner = factor * width_in
        self.widen, self.spatial = _convolution(width_in, inner, 1), _convolution(inner, inner, 3, stride, groups=inner)
        self.narrow, self.norm = nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width)
        self.is_residual = width == width_in and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        """(N, width_in, H, W) to (N, width, H / stride, W / stride)."""
        y = self.norm(self.narrow(self.spatial(self.widen(x))))
        return x + y if self.is_residual else y


class Depthwise(nn.Module):
    """MobileNetV2-like: a first convolution, then 6 bottlenecks at 8×8 and 4×4."""

    def __init__(self, widths: tuple[int, ...] = (12, 12, 12, 20, 20, 20)) -> None:
        super().__init__()
        parts: list[nn.Module] = [_convolution(1, widths[0], 3, 2)]
        width_in = widths[0]
        for width in widths:
            parts.append(Bottleneck(width_in, width, 2 if width != width_in else 1))
            width_in = width
        self.body, self.head = nn.Sequential(*parts), nn.Linear(width_in, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 1, 16, 16) to logits (N, 10)."""
        return self.head(self.body(x).mean((2, 3)))


class UNet(nn.Module):
    """At 16×16, 8×8 and 4×4; what goes down is handed to what comes up."""

    def __init__(self, widths: tuple[int, int, int] = (12, 24, 32)) -> None:
        super().__init__()
        a, b, c = widths
        self.first = nn.Sequential(_convolution(1, a, 3), _convolution(a, a, 3))
        self.second = nn.Sequential(_convolution(a, b, 3), _convolution(b, b, 3))
        self.lowest = nn.Sequential(_convolution(b, c, 3), _convolution(c, c, 3))
        self.third = nn.Sequential(_convolution(c + b, b, 3), _convolution(b, b, 3))
        self.fourth = nn.Sequential(_convolution(b + a, a, 3), _convolution(a, a, 3))
        self.last = nn.Conv2d(a, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 1, 16, 16) to the same."""
        first = self.first(x)
        second = self.second(F.max_pool2d(first, 2))
        lowest = self.lowest(F.max_pool2d(second, 2))
        third = self.third(torch.cat([F.interpolate(lowest, scale_factor=2.0), second], dim=1))
        fourth = self.fourth(torch.cat([F.interpolate(third, scale_factor=2.0), first], dim=1))
        return self.last(fourth)


def _classes(logits: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch.target.flatten())


def _images(output: Tensor, batch: Batch) -> Tensor:
    return F.mse_loss(output, batch.target)


def _grainy(step: int, size: int) -> Batch:
    """Digits with noise added, as a photograph has it: an even background would put equal activations everywhere."""
    clean = digits_batch(step, size, seed=0)
    noise = torch.randn(clean.args[0].shape, generator=torch.Generator().manual_seed(step))
    return Batch((clean.args[0] + 0.5 * noise,), target=clean.target)


def _to_clean(step: int, size: int) -> Batch:
    """The same images; the target is the digits themselves."""
    return Batch(_grainy(step, size).args, target=digits_batch(step, size, seed=0).args[0])


def _job(
    name: str,
    model: Callable[[], nn.Module],
    batch: Callable[[int, int], Batch],
    loss: Callable[[Tensor, Batch], Tensor] = _classes,
    *,
    rate: float,
    size: int,
) -> Job:
    torch.manual_seed(0)
    return Job(f"omega-{name}", model(), batch, loss, lambda p: torch.optim.AdamW(p, lr=rate, weight_decay=0.01), batch_size=size)


def vit() -> Job:
    """A convolution and 17 linear operators; half a batch is 32 images."""
    return _job("vit", VisionTransformer, lambda step, size: digits_batch(step, size, seed=0), rate=1e-3, size=64)


def depthwise() -> Job:
    """19 convolutions, 6 of them depthwise, and a linear operator; half a batch is 32 images."""
    return _job("depthwise", Depthwise, _grainy, rate=2e-3, size=64)


def gpt() -> Job:
    """17 linear operators; half a batch is 8 sequences of 32 bytes."""
    return _job("gpt", Gpt, lambda step, size: text_batch(step, size, length=LENGTH, seed=0), rate=1e-3, size=16)


def unet() -> Job:
    """11 convolutions; half a batch is 16 images."""
    return _job("unet", UNet, _to_clean, _images, rate=2e-3, size=32)


MODELS = {"vit": vit, "depthwise": depthwise, "gpt": gpt, "unet": unet}
"""Jobs by the name of their row."""
