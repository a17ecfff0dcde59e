"""Random numbers follow from data: what rounds alike, what does not, and who shares a copy."""

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

from qsync_core.ir.precision import Granularity, Precision
from qsync_core.ir.variant import Variant
from qsync_torch import apply_
from qsync_torch.aten.random_bits import checksum, stream_of
from qsync_torch.operators import casts, conv2d, linear

INT8 = Variant.parse("int8>float32")
IN_8_BIT = attrs.evolve(INT8, grad_input=Precision.INT8, grad_weight=Precision.INT8)


@pytest.fixture
def quantized(monkeypatch):
    """What is quantized, in order: data, seed and offset."""
    seen, original = [], casts.quantize

    def quantize(x, quantization, seed, offset, *rest, **named):
        seen.append((x, seed, offset))
        return original(x, quantization, seed, offset, *rest, **named)

    monkeypatch.setattr(casts, "quantize", quantize)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_checksum_is_that_of_python_integers_in_any_layout(dtype):
    x = (torch.randn(6, 4, 5, 3) * 1000).to(dtype)
    width = 32 if dtype is torch.float32 else 16
    bits = x.view(torch.int32 if width == 32 else torch.int16).flatten().tolist()
    expected = (sum(bits) + (1 << 31)) % (1 << 32) - (1 << 31)
    for layout in (x, x.to(memory_format=torch.channels_last), x.permute(3, 1, 0, 2)):
        assert checksum(layout).item() == expected
    offset = (1 << 62) + 77
    stream = (offset + (0x9E3779B9 << 32) * expected) % (1 << 64)
    assert stream_of(offset, x) == stream_of(torch.tensor([offset]), x) == stream - (1 << 64) * (stream >> 63)


def test_the_activations_stream_is_the_offset_of_weight_and_gradient(quantized):
    x, weight = torch.randn(8, 6, requires_grad=True), torch.randn(4, 6, requires_grad=True)
    linear(x, weight, None, IN_8_BIT, seed=3, offset=11).square().sum().backward()
    (_, x_seed, first), (_, w_seed, second), (_, grad_seed, third) = quantized
    assert first == 11
    assert second == third == stream_of(11, x)
    assert len({x_seed, w_seed, grad_seed}) == 3


@pytest.mark.parametrize("run", ["linear", "conv2d"])
def test_equal_data_round_alike_and_clipped_data_otherwise(run):
    """A weight too: of its own data alone its error would be the same in all micro-batches of a step."""
    shape, w_shape, call = ((32, 48), (16, 48), linear) if run == "linear" else ((4, 8, 6, 6), (8, 8, 3, 3), conv2d)
    variant = IN_8_BIT if run == "linear" else attrs.evolve(INT8, grad_input=Precision.INT8)
    weight, x = torch.randn(w_shape), torch.randn(shape).clamp(-1, 1)
    other = x.clone()
    other.view(-1)[5] += 2.0**-12 if abs(other.view(-1)[5]) < 0.5 else -(2.0**-12)

    def found(x, offset=0):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = call(*leaves, None, variant, offset=offset)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]

    expected = found(x)
    assert all(map(torch.equal, expected, found(x)))
    for changed in (found(other), found(x, 1)):
        assert all(int((one != two).sum()) > one.numel() // 2 for one, two in zip(expected, changed, strict=True))


@pytest.mark.parametrize("x_granularity", [Granularity.PER_TENSOR, Granularity.PER_ROW])
@pytest.mark.parametrize("kind", ["normal", "constant", "a row of zeros"])
def test_rounding_is_unbiased_over_offsets(kind, x_granularity):
    """The mean over offsets of what an operator gives on the same data, in standard errors: squares of 1 in the mean."""
    torch.manual_seed(5)
    steps, x, weight, up = 600, torch.randn(6, 24), torch.randn(10, 24), torch.randn(6, 10)
    x = torch.full_like(x, 0.3) if kind == "constant" else x
    x[2] = 0 if kind == "a row of zeros" else x[2]
    wide = Precision.FLOAT32  # gradients in 16 bit are rounded to nearest
    variant = attrs.evolve(INT8, x_granularity=x_granularity, grad_input=wide, grad_weight=wide)
    x, weight = x.requires_grad_(), weight.requires_grad_()

    def gives(y):
        return torch.cat([t.detach().double().flatten() for t in (y, *torch.autograd.grad(y, (x, weight), up))])

    exact = gives(F.linear(x, weight))
    errors = torch.stack([gives(linear(x, weight, None, variant, offset=step << 32)) - exact for step in range(steps)])
    mean, standard_error = errors.mean(0), errors.std(0) / steps**0.5
    rounded = standard_error > 1e-8
    z = (mean / standard_error)[rounded]
    assert rounded.sum() > 50
    assert 0.6 < z.square().mean() < 1.5  # numbers share draws
    assert (z.abs() > 3).double().mean() < 0.02
    assert (mean[~rounded].abs() < 1e-4).all()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))


PLAN = dict.fromkeys(("q#0", "k#0", "v#0"), "int8>float32")


def test_readers_of_an_activation_share_one_copy_in_eager_mode(quantized):
    model, x = Attention(), torch.randn(2, 5, 16)
    apply_(model, PLAN)
    model(x)
    assert sum(seen is x for seen, *_ in quantized) == 1
    assert len(quantized) == 4


def test_readers_of_an_activation_share_one_copy_in_a_compiled_graph():
    """By the compiler's own elimination of what is equal: no pass of ours is in it."""
    graphs, model = [], Attention()
    apply_(model, PLAN)

    def keep(graph, inputs):
        graphs.append(graph.graph)
        return graph.forward

    from functorch.compile import min_cut_rematerialization_partition

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    torch.compile(model, backend=backend, fullgraph=True)(torch.randn(2, 5, 16, requires_grad=True)).sum().backward()
    quantizations = [node for node in graphs[0].nodes if node.target is torch.ops.qsync.quantize.at]
    assert len(quantizations) == 4
    torch._dynamo.reset()


def test_a_checkpoint_is_bit_equal_to_none_with_gradients_in_8_bit():
    torch.manual_seed(0)
    first, second = (torch.randn(12, 12, requires_grad=True) for _ in range(2))

    def block(x):
        return linear(torch.tanh(linear(x, first, None, IN_8_BIT)), second, None, IN_8_BIT)

    found = []
    for run in (block, lambda x: checkpoint(block, x, use_reentrant=False), lambda x: checkpoint(block, x, use_reentrant=True)):
        x = torch.linspace(-1, 1, 96).view(8, 12).requires_grad_()
        found.append([*torch.autograd.grad(run(x).square().sum(), (x, first, second))] if run is block else None)
        if run is not block:
            first.grad = second.grad = None
            run(x).square().sum().backward()
            found[-1] = [x.grad, first.grad, second.grad]
    assert all(torch.equal(*pair) for other in found[1:] for pair in zip(found[0], other, strict=True))
