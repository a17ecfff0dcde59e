"""Compiled graphs keep no activation for its shape."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import qsync_torch as qsync
from qsync_torch import apply_
from qsync_torch.compiling import compile as compiling
from qsync_torch.compiling.shape_arguments import keep_no_shapes

from .chained_models import images, lowered, step


def reads_of(pool):
    """Result and gradient of a pooling, as one graph of ATen operators before and after, and how often it was changed."""
    x, grad = images(), torch.randn(4, 8, 3, 3)

    def gradient(x, grad):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(pool(x * 2), x, grad)[0]

    graph = make_fx(gradient, tracing_mode="fake")(x, grad)
    expected = graph(x, grad)
    count = keep_no_shapes(graph.graph)
    graph.graph.lint()
    graph.recompile()
    return graph, expected, graph(x, grad), count


@pytest.mark.parametrize(
    "pool",
    [lambda x: F.max_pool2d(x, 3, 2, 1), lambda x: F.max_pool2d(x, 2), lambda x: F.avg_pool2d(x, 2)],
    ids=["3", "2", "average"],
)
def test_the_gradient_of_a_pooling_needs_the_shape_alone(pool):
    graph, expected, found, count = reads_of(pool)
    assert count == 1
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
    (empty,) = (node for node in graph.graph.nodes if node.target is torch.ops.aten.empty_strided.default)
    assert empty.meta["val"].stride() == images().stride()


class Pooled(nn.Module):
    """A pooling of what a convolution has made, which inductor does not compute again."""

    def __init__(self):
        super().__init__()
        self.first, self.pool, self.last = nn.Conv2d(8, 8, 3, padding=1), nn.AvgPool2d(2), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return self.last(self.pool(self.first(x))).mean((2, 3))


@pytest.mark.nightly
@pytest.mark.slow
def test_what_is_pooled_is_not_kept(counted, monkeypatch):
    gone, found = counted("keep_no_shapes"), []
    for rewriting in (True, False):
        if not rewriting:
            monkeypatch.setattr(compiling, "keep_no_shapes", lambda graph: None)
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, x, kept = Pooled(), images(), []
        apply_(model, lowered(model))
        note = lambda tensor, kept=kept: (kept.append(tuple(tensor.shape)), tensor)[1]  # noqa: E731
        with (
            torch._inductor.config.patch(fx_graph_cache=False),
            torch._functorch.config.patch(enable_autograd_cache=False),
            torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        ):
            found.append((step(qsync.compile(model), model, x), kept.count((4, 8, 6, 6))))
    (values, kept), (expected, kept_before) = found
    assert gone == [1]
    assert all(torch.equal(value, expected[name]) for name, value in values.items())
    assert kept == kept_before - 1
