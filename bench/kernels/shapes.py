"""Shape sets: the linear operators and convolutions of real models, and tensors to quantize.

Convolutions are those of stored graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs

from qsync_core.artifacts import files as artifact
from qsync_core.geometry import Geometry
from qsync_core.ir.dag import PrecisionDag
from qsync_torch.benchmarking.shapes import ProductShape, ShapeSet, convolution, shapes_of
from qsync_torch.benchmarking.shapes import product_of_rows as linear

GRAPHS = Path(__file__).parents[2] / "tests" / "data"
BATCH = {"resnet50": 128, "vgg16": 64}
"""Samples per step of the image models; the paper uses 64 to 128."""


def _bert(name: str, rows: int, hidden: int, layers: int) -> ShapeSet:
    products = (
        linear(rows, hidden, hidden, 4 * layers),
        linear(rows, hidden, 4 * hidden, layers),
        linear(rows, 4 * hidden, hidden, layers),
    )
    return ShapeSet(name, products, ((rows, hidden), (rows, 4 * hidden)))


def _images(name: str, graph: str, *quantize: tuple[int, ...]) -> ShapeSet:
    dag = artifact.load(GRAPHS / graph / "dag.qsync", PrecisionDag)
    factor = BATCH[name] // dag.batch_size

    def enlarged(shape: ProductShape) -> ProductShape:
        call = shape.call
        x, y = ((factor * operand[0], *operand[1:]) for operand in (call.x, call.y))
        return attrs.evolve(shape, call=attrs.evolve(call, x=x, y=y))

    return ShapeSet(name, tuple(map(enlarged, shapes_of(dag).products)), quantize)


def _llama() -> ShapeSet:
    products = (
        linear(8192, 4096, 4096),
        linear(8192, 4096, 14336),
        linear(8192, 14336, 4096),
        linear(8192, 1024, 4096),
        linear(8192, 8192, 8192),
    )
    return ShapeSet("llama", products, ((8192, 4096), (8192, 8192)))


def _smoke() -> ShapeSet:
    images = (2, 16, 14, 14)
    products = (
        linear(64, 64, 96),
        linear(33, 40, 24),
        convolution(images, (32, 16, 3, 3), Geometry(padding=(1, 1))),
        convolution(images, (32, 16, 1, 1), Geometry(stride=(2, 2))),
    )
    return ShapeSet("smoke", products, (images, (64, 96)))


_SETS: dict[str, Callable[[], ShapeSet]] = {
    "bert-base": lambda: _bert("bert-base", 12 * 384, 768, 12),
    "bert-large": lambda: _bert("bert-large", 12 * 384, 1024, 24),
    "resnet50": lambda: _images("resnet50", "h200/resnet50", (64, 64, 56, 56), (256, 64, 56, 56), (512, 64, 56, 56)),
    "vgg16": lambda: _images("vgg16", "h100/vgg16-bn", (BATCH["vgg16"], 64, 224, 224)),
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
