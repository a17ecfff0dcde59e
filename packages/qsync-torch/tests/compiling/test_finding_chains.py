"""Which chains a graph of ``torch.compile`` has, and which it must not have."""

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nightly import nightly
from qsync_core.ir.precision import Granularity, Precision
from qsync_torch import apply_
from qsync_torch.compiling.finding import find_chains

from .chained_models import INT8, Bert, Llama, ResNet, Vgg, images, lowered, tokens


def chains(model, x, variants=None):
    """Of all graphs that a model compiles to: producer, members, readers of the copy, and whether the float result is read."""
    applied = apply_(model, lowered(model) if variants is None else variants)
    found = []

    def backend(module, inputs):
        found.extend(find_chains(module.graph))
        return module.forward

    torch.compile(model, backend=backend)(x)
    applied.remove()
    return [str(chain).replace(f"({chain.last.name})", "").replace(" ,", ",") for chain in found]


def test_resnet():
    # The copy of the first block's input serves its first convolution and the shortcut's; no 8-bit operator reads the last block's.
    assert chains(ResNet(), images()) == [
        "batch_norm + relu, 2 readers",
        "batch_norm + relu, 1 readers",
        "batch_norm + residual + relu, 1 readers, float",
        "batch_norm + relu, 1 readers",
        "batch_norm + residual + relu, 1 readers, float",
        "batch_norm + relu, 1 readers",
    ]


def test_vgg():
    assert chains(Vgg(), images()) == ["batch_norm + relu, 1 readers", "relu, 1 readers"]


def test_bert():
    assert chains(Bert(), tokens()) == [
        "layer_norm, 3 readers, float",
        "layer_norm + residual, 1 readers, float",
        "gelu, 1 readers",
        "layer_norm + residual, 1 readers",
    ]


def test_llama():
    assert chains(Llama(), tokens()) == ["rms_norm, 2 readers", "glu + silu, 1 readers"]


def test_float_rungs_have_none():
    model = Bert()
    assert chains(model, tokens(), lowered(model, attrs.evolve(INT8, compute=Precision.BFLOAT16, saved=Precision.BFLOAT16))) == []


class Net(nn.Module):
    """A convolution, what ``between`` makes of its result with a batch norm, and a convolution."""

    def __init__(self, between, **options):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8, **options)
        self.between = between
        self.register_buffer("row", torch.randn(1, 8, 1, 1))

    def forward(self, x):
        y = self.between(self, self.conv1(x), x)
        result, *others = y if isinstance(y, tuple) else (y,)
        return sum((other.sum() for other in others), self.conv2(result).sum())


def relu_of_norm(net, y, x):
    return F.relu(net.bn(y))


@pytest.mark.parametrize(
    "options",
    [
        {"affine": False},
        {"track_running_stats": False},
        *nightly({}, {"eps": 1e-3, "momentum": 0.5}, {"momentum": 0}, {"momentum": 1}),
    ],
    ids=str,
)
def test_batch_norms_of_every_kind(options):
    assert chains(Net(relu_of_norm, **options), images()) == ["batch_norm + relu, 1 readers"]


@pytest.mark.parametrize(
    "between, expected",
    [
        (lambda net, y, x: net.bn(y), ["batch_norm, 1 readers"]),
        (lambda net, y, x: net.bn(y).relu(), ["batch_norm + relu, 1 readers"]),
        (lambda net, y, x: torch.relu_(net.bn(y).add_(x)), ["batch_norm + residual + relu, 1 readers"]),
        (lambda net, y, x: F.relu(torch.add(input=net.bn(y), other=x)), ["batch_norm + residual + relu, 1 readers"]),
        (lambda net, y, x: F.gelu(y, approximate="tanh"), ["gelu_tanh, 1 readers"]),
        (lambda net, y, x: F.silu(y), ["silu, 1 readers"]),
        *nightly(
            (lambda net, y, x: x + net.bn(y), ["batch_norm + residual, 1 readers"]),
            (lambda net, y, x: F.relu(torch.add(x, other=net.bn(y), alpha=1)), ["batch_norm + residual + relu, 1 readers"]),
            (lambda net, y, x: F.relu(input=net.bn(y).add(other=x)), ["batch_norm + residual + relu, 1 readers"]),
            (lambda net, y, x: F.relu(y, inplace=True), ["relu, 1 readers"]),
        ),
        # GELU is not fused behind a batch norm; it is a chain of its own.
        (lambda net, y, x: F.gelu(net.bn(y)), ["gelu, 1 readers"]),
    ],
)
def test_other_forms(between, expected):
    assert chains(Net(between), images()) == expected


def second_reader_of_the_norm(net, y, x):
    z = net.bn(y)
    return F.relu(z), z


def in_place_relu_on_what_others_read(net, y, x):
    z = net.bn(y)
    total = z.sum()
    return F.relu(z, inplace=True), z, total


def in_place_relu_of_a_view(net, y, x):
    return F.relu(y.view(y.shape), inplace=True), y


def changed_result(net, y, x):
    z = F.relu(net.bn(y))
    z.mul_(2)
    return z


def changed_result_through_a_view(net, y, x):
    z = F.relu(net.bn(y))
    z[0] = 1.0
    return z


def residual_changed_between(net, y, x):
    residual, z = x + 1, net.bn(y)
    result = z + residual
    residual.mul_(2)
    return F.relu(result), residual


def statistics_read_between(net, y, x):
    z = net.bn(y)
    mean = net.bn.running_mean.clone()
    return F.relu(z), mean


def shortcut_is_written_to(net, y, x):
    shortcut = x * 2
    shortcut += net.bn(y)
    return F.relu(shortcut), shortcut


def without_gradients_between(net, y, x):
    z = net.bn(y)
    with torch.no_grad():
        total = z.detach().clone()
    return F.relu(z), total


@pytest.mark.parametrize(
    "between, expected",
    [
        (second_reader_of_the_norm, ["relu, 1 readers"]),
        (in_place_relu_on_what_others_read, []),
        (in_place_relu_of_a_view, []),
        (changed_result, []),
        (changed_result_through_a_view, []),
        (residual_changed_between, ["relu, 1 readers"]),
        (statistics_read_between, ["relu, 1 readers"]),
        (shortcut_is_written_to, ["relu, 1 readers"]),
        (without_gradients_between, ["relu, 1 readers"]),
        (lambda net, y, x: F.relu6(net.bn(y)), []),
        # The rows that are added, or the factor, are no residual: what remains of the chain is the ReLU.
        (lambda net, y, x: F.relu(net.bn(y) + net.row), ["relu, 1 readers"]),
        (lambda net, y, x: F.relu(F.batch_norm(y.double(), None, None, training=True).float()), ["relu, 1 readers"]),
        *nightly(
            (lambda net, y, x: F.leaky_relu(net.bn(y)), []),
            (lambda net, y, x: F.dropout(F.relu(net.bn(y)), 0.5), []),
            (lambda net, y, x: F.max_pool2d(F.relu(net.bn(y)), 1), []),
            (lambda net, y, x: F.relu(torch.add(net.bn(y), x, alpha=2)), ["relu, 1 readers"]),
            (lambda net, y, x: F.relu(torch.add(input=net.bn(y), other=x, alpha=2)), ["relu, 1 readers"]),
            (lambda net, y, x: F.relu(torch.add(net.bn(y), other=1.0)), ["relu, 1 readers"]),
            (lambda net, y, x: F.relu(net.bn(y) + 1.0), ["relu, 1 readers"]),
            (lambda net, y, x: F.relu(F.instance_norm(y)), ["relu, 1 readers"]),
            (lambda net, y, x: F.relu(F.batch_norm(y, net.bn.running_mean, net.bn.running_var)), ["relu, 1 readers"]),
            (lambda net, y, x: F.layer_norm(y, y.shape[1:]), []),
        ),
    ],
)
def test_what_must_not_be_taken_whole(between, expected):
    assert chains(Net(between), images()) == expected


def test_functional_batch_norm_with_weights_that_are_computed():
    def between(net, y, x):
        return F.relu(F.batch_norm(y, None, None, net.bn.weight * 2, net.bn.bias.tanh(), training=True))

    assert chains(Net(between), images()) == ["batch_norm + relu, 1 readers"]


def test_a_frozen_batch_norm():
    model = Net(relu_of_norm)
    model.bn.eval()
    assert chains(model, images()) == ["relu, 1 readers"]


def test_scales_of_rows():
    """A batch norm's copy has one scale; a layer norm's has what the operator takes."""
    rows = attrs.evolve(INT8, x_granularity=Granularity.PER_ROW)
    model = Bert()
    assert chains(model, tokens(), lowered(model, rows))[0] == "layer_norm, 3 readers, float"


@pytest.mark.slow
def test_readers_of_other_copies_read_the_float_result():
    model = Bert()
    variants = lowered(model)
    [key] = [op_id for op_id in variants if op_id.fqn == "v"]
    variants[key] = attrs.evolve(INT8, x_granularity=Granularity.PER_ROW)
    assert chains(model, tokens(), variants)[0] == "layer_norm, 2 readers, float"


def test_readers_whose_gradients_are_in_8_bit_read_the_copy():
    """Which they transpose, for the product for the weight's gradient."""
    model = Bert()
    variants = lowered(model)
    [key] = [op_id for op_id in variants if op_id.fqn == "v"]
    variants[key] = attrs.evolve(INT8, grad_weight=Precision.INT8, grad_input=Precision.INT8)
    assert chains(model, tokens(), variants)[0] == "layer_norm, 3 readers, float"
