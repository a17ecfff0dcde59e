"""int8 gradients: unbiased under stochastic rounding, one quantized copy for both products, and what each product reads."""

import attrs
import pytest
import torch
import torch.nn.functional as F

from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_torch.kernels.binding import operator_binding
from qsync_torch.operators import conv2d, linear
from qsync_torch.operators.casts import Seeds, cast_gradient, seeds_of

from .test_linear import saved_tensors
from .variants import INT8

BOTH = attrs.evolve(INT8, grad_input=Precision.INT8, grad_weight=Precision.INT8)
DRAWS = 400


def standard_error(draws, expected):
    """How many standard errors the mean of the draws is away from what it should be, at most."""
    draws = torch.stack(draws).double()
    error = (draws.mean(0) - expected.double()).abs()
    return (error / (draws.std(0) / DRAWS**0.5 + 1e-9)).max().item()


@pytest.mark.parametrize("x_granularity", [Granularity.PER_TENSOR, Granularity.PER_ROW])
@pytest.mark.parametrize("w_granularity", [Granularity.PER_TENSOR, Granularity.PER_CHANNEL])
def test_linear_gradients_are_unbiased(device, w_granularity, x_granularity):
    """Operands and gradient are rounded independently, so the mean over draws is the float product of what they stand for."""
    variant = attrs.evolve(BOTH, rounding=Rounding.STOCHASTIC, w_granularity=w_granularity, x_granularity=x_granularity)
    x, weight = (
        torch.randn(6, 16, device=device),
        torch.randn(5, 16, device=device) * torch.logspace(-2, 1, 5, device=device)[:, None],
    )
    grad = torch.randn(6, 5, device=device)
    found = []
    for draw in range(DRAWS):
        operands = [tensor.clone().requires_grad_() for tensor in (x, weight)]
        linear(*operands, None, variant, seed=1, offset=draw << 32).backward(grad)
        found.append([operand.grad for operand in operands])
    assert standard_error([grad_x for grad_x, _ in found], grad @ weight) < 5
    assert standard_error([grad_w for _, grad_w in found], grad.t() @ x) < 5


def test_a_convolutions_input_gradient_is_unbiased(device):
    variant = attrs.evolve(INT8, grad_input=Precision.INT8, rounding=Rounding.STOCHASTIC)
    x, weight = torch.randn(1, 4, 5, 5, device=device), torch.randn(3, 4, 3, 3, device=device)
    grad, found = torch.randn(1, 3, 5, 5, device=device), []
    for draw in range(DRAWS):
        operand = x.clone().requires_grad_()
        conv2d(operand, weight, None, variant, padding=1, seed=1, offset=draw << 32).backward(grad)
        found.append(operand.grad)
    assert standard_error(found, torch.nn.grad.conv2d_input(x.shape, weight, grad, padding=1)) < 5


def test_floor_is_biased_so_that_the_test_above_can_fail():
    variant = attrs.evolve(BOTH, rounding=Rounding.FLOOR)
    x, weight = torch.randn(6, 16).requires_grad_(), torch.randn(5, 16)
    grad = torch.rand(6, 5)
    linear(x, weight, None, variant).backward(grad)
    assert (x.grad - grad @ weight).abs().max() > 1e-3


@pytest.mark.parametrize(
    "grad_input, grad_weight", [("int8", "int8"), ("int8", "bfloat16"), ("bfloat16", "int8"), ("float32", "bfloat16")]
)
@pytest.mark.parametrize("needs", [(True, True, True), (True, False, False), (False, True, True), (False, False, True)])
def test_only_copies_that_a_product_reads_are_made(grad_input, grad_weight, needs):
    variant = attrs.evolve(INT8, grad_input=Precision(grad_input), grad_weight=Precision(grad_weight))
    wanted = {name for name, need in ((grad_input, needs[0]), (grad_weight, needs[1])) if need}
    gradient = cast_gradient(torch.randn(4, 5), None, torch.rand(5) + 0.1, operator_binding(variant), needs, 0, 0)
    assert (gradient.quantized is not None) == ("int8" in wanted)
    assert (gradient.channel_scale is not None) == (needs[0] and grad_input == "int8")
    if "int8" not in (grad_input, grad_weight) or wanted - {"int8"}:
        assert gradient.wide.dtype is not torch.int8


def test_the_gradients_of_a_seed_are_reproducible_and_of_another_are_not():
    variant = attrs.evolve(BOTH, rounding=Rounding.STOCHASTIC)
    grad, binding = torch.randn(32, 16), operator_binding(variant)

    def values(seeds):
        return cast_gradient(grad, None, None, binding, (True, True, False), seeds.grad, seeds.offset).quantized

    assert torch.equal(values(seeds_of(3, 7)), values(seeds_of(3, 7)))
    assert not torch.equal(values(seeds_of(3, 7)), values(seeds_of(4, 7)))
    assert not torch.equal(values(seeds_of(3, 7)), values(seeds_of(3, 8)))
    streams = seeds_of(3)
    assert len({streams.x, streams.w, streams.grad}) == 3
    assert isinstance(streams, Seeds)


def test_nothing_more_than_int8_copies_is_kept(device):
    x, weight = torch.randn(32, 24, device=device, requires_grad=True), torch.randn(16, 24, device=device, requires_grad=True)
    _, kept = saved_tensors(lambda: linear(x, weight, None, BOTH))
    sizes = {dtype: sum(t.untyped_storage().nbytes() for t in kept if t.dtype is dtype) for dtype in {t.dtype for t in kept}}
    # Beside the copies: their scales, and the stream that the gradient's rounding follows from.
    assert sizes == {torch.int8: 32 * 24 + 16 * 24, torch.float32: 4 + 16 * 4, torch.int64: 8}


def test_a_bias_gets_the_sum_of_the_unrounded_gradient(device):
    x, weight = torch.randn(8, 6, device=device), torch.randn(3, 6, device=device)
    bias = torch.zeros(3, device=device, requires_grad=True)
    grad = torch.randn(8, 3, device=device)
    linear(x, weight, bias, BOTH).backward(grad)
    assert torch.allclose(bias.grad, grad.sum(0), rtol=1e-5, atol=1e-6)


def test_a_gradient_of_zeros_stays_zero(device):
    x, weight = torch.randn(8, 6, device=device, requires_grad=True), torch.randn(3, 6, device=device, requires_grad=True)
    linear(x, weight, None, attrs.evolve(BOTH, rounding=Rounding.STOCHASTIC)).backward(torch.zeros(8, 3, device=device))
    assert x.grad.abs().sum().item() == weight.grad.abs().sum().item() == 0


BY_ROW = attrs.evolve(BOTH, x_granularity=Granularity.PER_ROW)


def gradients(variant, x, weight, grad):
    operands = [operand.clone().requires_grad_() for operand in (x, weight)]
    linear(*operands, None, variant).backward(grad)
    return [operand.grad for operand in operands]


def errors(variant, x, weight, grad):
    """Of y, grad_input and grad_weight, against float64, row by row (column by column of the last): the largest relative one."""
    x64, w64, grad64 = x.double(), weight.double(), grad.double()
    exact = (F.linear(x64, w64), grad64 @ w64, (grad64.t() @ x64).t())
    found = (linear(x, weight, None, variant), *gradients(variant, x, weight, grad))
    return [
        ((one.double() - right).norm(dim=-1) / right.norm(dim=-1)).max().item()
        for one, right in zip((found[0], found[1], found[2].t()), exact, strict=True)
    ]


def test_scales_by_row_keep_rows_of_all_sizes(device):
    """Tokens of sizes 1 to 1e6, and output channels likewise: under one scale the small ones are lost."""
    spread = torch.logspace(0, 6, 48, device=device)
    x, grad = torch.randn(48, 40, device=device), torch.randn(48, 24, device=device)
    weight = torch.randn(24, 40, device=device)
    rows = errors(BY_ROW, x * spread[:, None], weight, grad / spread[:, None])
    one = errors(BOTH, x * spread[:, None], weight, grad / spread[:, None])
    assert max(rows) < 0.03
    assert min(one) > 0.5
    wide = torch.logspace(0, 6, 24, device=device)

    def of_outputs(variant):
        found, exact = gradients(variant, x, weight, grad * wide)[1], (grad * wide).double().t() @ x.double()
        return ((found.double() - exact).norm(dim=1) / exact.norm(dim=1)).max().item()

    assert of_outputs(BY_ROW) < 0.03
    assert of_outputs(BOTH) > 0.5


def test_the_gradients_copy_by_column_has_the_activations_scales_in_it(device):
    """grad_weight from its definition: the activation by row, the gradient times its scales by column, integers summed exactly."""
    spread = torch.logspace(-2, 2, 33, device=device)[:, None]
    x, weight, grad = (
        spread * torch.randn(33, 40, device=device),
        torch.randn(24, 40, device=device),
        torch.randn(33, 24, device=device),
    )

    def quantized(values, along):
        scale = values.abs().amax(along, keepdim=True) / 127
        return (values / scale).round(), scale

    w_scale = weight.abs().amax(1) / 127
    q_x, x_scale = quantized(x, 1)
    q_grad, grad_scale = quantized(grad * w_scale * x_scale, 0)
    expected = (q_grad.t() @ q_x) * (grad_scale[0] / w_scale)[:, None]
    assert torch.allclose(gradients(BY_ROW, x, weight, grad)[1], expected, rtol=1e-4, atol=1e-5)


def test_rows_of_zeros_take_nothing_from_the_gradient_of_the_weight(device):
    """Nothing of it depends on them, so their scale must not decide how coarsely the gradient of the other rows is rounded."""
    x, weight = torch.randn(16, 32, device=device) * 1e-3, torch.randn(8, 32, device=device)
    grad = torch.randn(16, 8, device=device)
    x[5] = 0
    others = torch.arange(16, device=device) != 5
    assert torch.allclose(
        gradients(BY_ROW, x, weight, grad)[1], gradients(BY_ROW, x[others], weight, grad[others])[1], rtol=1e-5, atol=1e-8
    )


@pytest.mark.parametrize("variant", [BOTH, BY_ROW])
@pytest.mark.parametrize("size", [1e-2, 3e-2, 1e-1])
def test_channels_of_zeros_keep_a_gradient_beside_the_others(device, variant, size):
    """As rows have that pad a vocabulary: the others' part in the input's gradient is left as fine, and theirs is not lost."""
    x, weight = torch.randn(256, 64, device=device), size * torch.randn(40, 64, device=device)
    weight[3::8] = 0
    grad = torch.randn(256, 40, device=device)
    found = gradients(variant, x, weight, grad)
    for one, exact in zip(found, (grad @ weight, grad.t() @ x), strict=True):
        assert (one - exact).norm() < 0.05 * exact.norm()
    of_zeros = found[1][3::8], (grad.t() @ x)[3::8]
    assert (of_zeros[0] - of_zeros[1]).norm() < 0.1 * of_zeros[1].norm()


def test_more_rows_than_one_int32_sum_takes(device):
    from qsync_core.ir.precision import MAX_CONTRACTION
    from qsync_torch.aten.linear import build_linear_grad_weight

    rows = MAX_CONTRACTION + 5
    grad = torch.full((rows, 1), 127, dtype=torch.int8, device=device)
    x = torch.full((rows, 2), 127, dtype=torch.int8, device=device)
    out = torch.empty(1, 2, device=device)
    build_linear_grad_weight(BOTH)(grad, x, torch.tensor([1.0], device=device), out)
    assert out.tolist() == [[float(torch.tensor(127 * 127 * rows, dtype=torch.float64).float())] * 2]
