"""Shape sets: the linear operators and convolutions of real models, and tensors to quantize.

Linear: M rows, K contracted, N columns.  Convolutions are read off the models themselves, on the ``meta`` device.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from torch import nn

from qsync_core.geometry import Geometry

IMAGE = 224
BATCH = {"resnet50": 128, "vgg16": 64}
"""Samples per step of the image models; the paper uses 64 to 128."""


@attrs.frozen
class LinearShape:
    """``count``: how many calls of the model have it."""

    m: int
    k: int
    n: int
    count: int = 1

    @property
    def label(self) -> str:
        """``4608×768×3072``, rows × contracted × columns."""
        return f"{self.m}×{self.k}×{self.n}"


@attrs.frozen
class ConvShape:
    """A 2-d convolution of square or other images; ``count``: how many of the model have it."""

    batch: int
    channels: int
    height: int
    width: int
    out_channels: int
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    count: int = 1

    @property
    def x_shape(self) -> tuple[int, int, int, int]:
        """B, C, H, W."""
        return self.batch, self.channels, self.height, self.width

    @property
    def w_shape(self) -> tuple[int, int, int, int]:
        """O, C / groups, KH, KW."""
        return self.out_channels, self.channels // self.groups, *self.kernel

    @property
    def y_shape(self) -> tuple[int, int, int, int]:
        """B, O, OH, OW."""
        return self.batch, self.out_channels, *self.geometry.output_size((self.height, self.width), self.kernel)

    @property
    def geometry(self) -> Geometry:
        """As a kernel request carries it."""
        return Geometry(self.stride, self.padding, self.dilation, self.groups)

    @property
    def label(self) -> str:
        """``128×64×56×56 → 256, 1×1/1``: images, output channels, kernel and stride."""
        text = f"{self.batch}×{self.channels}×{self.height}×{self.width} → {self.out_channels}, "
        text += f"{self.kernel[0]}×{self.kernel[1]}/{self.stride[0]}"
        return text if self.groups == 1 else f"{text}, {self.groups} groups"


@attrs.frozen
class ShapeSet:
    """Shapes of one model.

    Attributes:
        name: as ``--set`` takes it.
        linear, conv: its operators, each distinct shape once.
        quantize: shapes of activations to quantize.
    """

    name: str
    linear: tuple[LinearShape, ...] = ()
    conv: tuple[ConvShape, ...] = ()
    quantize: tuple[tuple[int, ...], ...] = ()


def model_shapes(model: Callable[[], nn.Module], x_shape: tuple[int, ...]) -> tuple[list[LinearShape], list[ConvShape]]:
    """The linear operators and convolutions that a model runs on an input of that shape, in order of their first call."""
    linear: dict[LinearShape, int] = {}
    conv: dict[ConvShape, int] = {}

    def note(module: nn.Module, inputs: tuple[torch.Tensor, ...], _: torch.Tensor) -> None:
        (x,) = inputs
        if isinstance(module, nn.Linear):
            shape = LinearShape(x.numel() // x.shape[-1], x.shape[-1], module.out_features)
            linear[shape] = linear.get(shape, 0) + 1
        elif isinstance(module, nn.Conv2d):
            found = ConvShape(*x.shape, module.out_channels, module.kernel_size, module.stride, module.padding,
                              module.dilation, module.groups)  # fmt: skip
            conv[found] = conv.get(found, 0) + 1

    with torch.device("meta"):
        built = model()
        for module in built.modules():
            module.register_forward_hook(note) if isinstance(module, (nn.Linear, nn.Conv2d)) else None
        built(torch.empty(x_shape))
    return ([attrs.evolve(shape, count=count) for shape, count in linear.items()],
            [attrs.evolve(shape, count=count) for shape, count in conv.items()])  # fmt: skip


def _bert(name: str, rows: int, hidden: int, layers: int) -> ShapeSet:
    linear = (
        LinearShape(rows, hidden, hidden, 4 * layers),
        LinearShape(rows, hidden, 4 * hidden, layers),
        LinearShape(rows, 4 * hidden, hidden, layers),
    )
    return ShapeSet(name, linear, quantize=((rows, hidden), (rows, 4 * hidden)))


def _resnet50() -> ShapeSet:
    from qsync_torch.models.resnet import resnet50

    linear, conv = model_shapes(resnet50, (BATCH["resnet50"], 3, IMAGE, IMAGE))
    return ShapeSet("resnet50", tuple(linear), tuple(conv), ((64, 64, 56, 56), (256, 64, 56, 56), (512, 64, 56, 56)))


def _vgg16() -> ShapeSet:
    from qsync_torch.models.vgg import VGG

    linear, conv = model_shapes(VGG, (BATCH["vgg16"], 3, IMAGE, IMAGE))
    return ShapeSet("vgg16", tuple(linear), tuple(conv), ((BATCH["vgg16"], 64, IMAGE, IMAGE),))


def _llama() -> ShapeSet:
    linear = (
        LinearShape(8192, 4096, 4096),
        LinearShape(8192, 4096, 14336),
        LinearShape(8192, 14336, 4096),
        LinearShape(8192, 1024, 4096),
        LinearShape(8192, 8192, 8192),
    )
    return ShapeSet("llama", linear, quantize=((8192, 4096), (8192, 8192)))


def _smoke() -> ShapeSet:
    conv = (ConvShape(2, 16, 14, 14, 32, (3, 3), padding=(1, 1)), ConvShape(2, 16, 14, 14, 32, (1, 1), stride=(2, 2)))
    return ShapeSet("smoke", (LinearShape(64, 64, 96), LinearShape(33, 40, 24)), conv, ((2, 16, 14, 14), (64, 96)))


_SETS: dict[str, Callable[[], ShapeSet]] = {
    "bert-base": lambda: _bert("bert-base", 12 * 384, 768, 12),
    "bert-large": lambda: _bert("bert-large", 12 * 384, 1024, 24),
    "resnet50": _resnet50,
    "vgg16": _vgg16,
    "llama": _llama,
    "smoke": _smoke,
}
SET_NAMES = tuple(_SETS)
CUDA_SETS = tuple(name for name in SET_NAMES if name != "smoke")
"""What is measured on a CUDA device unless told otherwise; on a CPU it is ``smoke``."""


def shape_set(name: str) -> ShapeSet:
    """The shape set of that name.

    Raises:
        ValueError: naming the known ones.
    """
    if name not in _SETS:
        raise ValueError(f"no shape set is named {name!r}; known are {', '.join(SET_NAMES)}")
    return _SETS[name]()
