"""The graphs that are planned: shapes, operator and parameter counts of real models, and transformers of any depth."""

from __future__ import annotations

from collections.abc import Callable

import attrs
from synthetic import BUCKET_BYTES, FIRST_BUCKET_BYTES, GraphBuilder, buckets_of, resnet, transformer

from qsync_core.ir.dag import OpClass, PrecisionDag

OPERATORS_A_LAYER = 14
"""Of one layer of :func:`deep_transformer`; 6 of them are adjustable."""


def vgg16_bn(batch: int = 32, image: int = 224, classes: int = 1000) -> PrecisionDag:
    """VGG16 with BatchNorm: 13 convolutions and 3 linear layers, all adjustable; the first linear layer holds most parameters."""
    g = GraphBuilder("vgg16-bn", batch)
    x = g.input("image", (batch, 3, image, image))
    side = image
    for stage, (channels, count) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))):
        for i in range(count):
            at = f"features.{stage}.{i}"
            x = g.unary(f"{at}.norm", "batch_norm", g.conv2d(f"{at}.conv", x, channels), guarded=True, affine=channels)
            x = g.unary(f"{at}.relu", "relu", x)
        side //= 2
        x = g.unary(f"features.{stage}.pool", "max_pool", x, shape=(batch, channels, side, side))
    x = g.unary("flatten", "avg_pool", x, shape=(batch, 512 * side * side))
    for i in range(2):
        x = g.unary(f"classifier.{i}.relu", "relu", g.linear(f"classifier.{i}", x, 4096))
        x = g.unary(f"classifier.{i}.dropout", "dropout", x)
    g.loss(g.linear("classifier.2", x, classes))
    return g.build()


def with_vocabulary(dag: PrecisionDag, words: int) -> PrecisionDag:
    """The same encoder with an embedding of another number of words, which moves the borders of the last buckets."""
    parameters = tuple(
        attrs.evolve(parameter, shape=(words, *parameter.shape[1:])) if parameter.fqn == "embeddings.word.weight" else parameter
        for parameter in dag.parameters
    )
    return attrs.evolve(dag, parameters=parameters, buckets=buckets_of(dag.operators, parameters, FIRST_BUCKET_BYTES, BUCKET_BYTES))


def deep_transformer(operators: int, hidden: int = 384, heads: int = 6, batch: int = 16, tokens: int = 128) -> PrecisionDag:
    """As many identical encoder layers without dropout as ``operators`` allow: 6 of 14 operators are adjustable."""
    g = GraphBuilder(f"transformer-{operators}", batch)
    rows = (batch, tokens, hidden)
    ids = g.input("input_ids", (batch, tokens))
    x = g.add("embeddings.word", "embedding", OpClass.FIXED, [ids], rows, parameter_shapes={"weight": (30522, hidden)})
    for i in range((operators - 4) // OPERATORS_A_LAYER):
        at = f"layer.{i}"
        q, k, v = (g.linear(f"{at}.attention.{name}", x, hidden) for name in ("query", "key", "value"))
        products = 2 * batch * tokens**2 * hidden
        scores = g.join(f"{at}.attention.scores", "matmul", [q, k], (batch, heads, tokens, tokens), products)
        weights = g.unary(f"{at}.attention.softmax", "softmax", scores, guarded=True)
        context = g.join(f"{at}.attention.context", "matmul", [weights, v], rows, products)
        y = g.join(f"{at}.attention.add", "add", [g.linear(f"{at}.attention.output", context, hidden), x])
        y = g.unary(f"{at}.attention.norm", "layer_norm", y, guarded=True, affine=hidden)
        up = g.unary(f"{at}.gelu", "gelu", g.linear(f"{at}.intermediate", y, 4 * hidden))
        y = g.join(f"{at}.add", "add", [g.linear(f"{at}.output", up, hidden), y])
        x = g.unary(f"{at}.norm", "layer_norm", y, guarded=True, affine=hidden)
    g.loss(g.linear("head", x, 2))
    return g.build()


PAPER_SCALE: dict[str, Callable[[], PrecisionDag]] = {
    "bert-base": lambda: transformer(model="bert-base"),
    "bert-large": lambda: transformer(24, 1024, 16, batch=8, model="bert-large"),
    "roberta-base": lambda: with_vocabulary(transformer(batch=64, tokens=128, model="roberta-base"), 50265),
    "resnet50": lambda: resnet(model="resnet50"),
    "resnet152": lambda: resnet((3, 8, 36, 3), batch=32, model="resnet152"),
    "vgg16-bn": vgg16_bn,
}
"""The models of rows A1.  RoBERTa-base differs from BERT-base in its vocabulary, and here in its shorter sequences."""

DEEP = {"transformer-2000": 2_000, "transformer-10000": 10_000}
"""The models of rows A2 to A5 and A7, by their number of operators."""


def model(name: str) -> PrecisionDag:
    """The graph of that name.

    Raises:
        ValueError: when there is none.
    """
    if name in PAPER_SCALE:
        return PAPER_SCALE[name]()
    if name in DEEP:
        return deep_transformer(DEEP[name])
    raise ValueError(f"no model is called {name!r}; there are {', '.join([*PAPER_SCALE, *DEEP])}")
