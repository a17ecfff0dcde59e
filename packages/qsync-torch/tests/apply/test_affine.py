"""Activations with a zero point: properties of the copy, and operators against float64 autograd of what they multiply."""

import attrs
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st

from hypothesis_profiles import tries
from qsync_core.errors import BackendError
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_torch.apply.apply import apply_
from qsync_torch.aten.quantize import affine_parts, dequantize, scale_view
from qsync_torch.operators import conv2d, linear
from qsync_torch.quantize import quantize

from .operator_reference import check_operator

TENSOR, ROW = Granularity.PER_TENSOR, Granularity.PER_ROW
AFFINE = attrs.evolve(Variant.of(Precision.INT8, output=Precision.FLOAT32), symmetric=False, rounding=Rounding.NEAREST)
FLOAT32_GRADIENTS = attrs.evolve(AFFINE, grad_input=Precision.FLOAT32, grad_weight=Precision.FLOAT32)
VARIANTS = {
    "bfloat16 gradients": AFFINE,
    "float32 gradients": FLOAT32_GRADIENTS,
    "int8 gradient of the input": attrs.evolve(FLOAT32_GRADIENTS, grad_input=Precision.INT8),
    "float16 gradients": attrs.evolve(AFFINE, grad_input=Precision.FLOAT16, grad_weight=Precision.FLOAT16),
    "16-bit output": attrs.evolve(AFFINE, output=Precision.BFLOAT16),
}

numbers = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.sampled_from(
    [0.0, 1e-45, -1e-40, 2.0**-126, 3.4e38, -3.4e38]
)
vectors = st.lists(numbers, min_size=1, max_size=12) | st.lists(st.floats(-4, 9, width=32), min_size=1, max_size=12)


def copied(x, granularity=TENSOR, rounding=Rounding.STOCHASTIC, seed=0):
    """Values, scales and zero points that broadcast to them, in float64; and the dequantized values."""
    q, scale = quantize(x, Precision.INT8, granularity, rounding, seed=seed, symmetric=False)
    s, z = (scale_view(part.double(), x.ndim, granularity, x.shape) for part in affine_parts(scale))
    return q.double(), s, z, dequantize(q, scale, granularity, torch.float32, symmetric=False).double()


@tries(300)
@given(vectors, st.sampled_from(Rounding), st.integers(0, 1 << 40))
@example([-3.4e38, 0.0, 3.4e38], Rounding.STOCHASTIC, 1)
@example([-1e-45], Rounding.FLOOR, 1)
@example([0.0, 0.0], Rounding.STOCHASTIC, 1)
def test_no_value_moves_by_a_step_and_zero_is_exact(values, rounding, seed):
    x = torch.tensor(values)
    q, s, z, _ = copied(x, rounding=rounding, seed=seed)
    assert ((q >= -128) & (q <= 127)).all()
    assert (z == z.round()).all()
    assert -128 <= float(z) <= 127
    steps = (q - z) - x.double() / s  # what the float32 quotient of up to 255 rounds is 2**-16 of a step
    assert (steps.abs() <= (0.5 if rounding is Rounding.NEAREST else 1.0) + 2.0**-15).all()
    assert (q[x == 0] == z).all()
    low, high = min(0.0, float(x.double().min())), max(0.0, float(x.double().max()))
    assert float(s) == pytest.approx(max((high - low) / (255 if low == 0 or high == 0 else 254), 2.0**-126) if high > low else 1.0)


@tries(25)
@given(st.lists(st.floats(-4, 9, width=32), min_size=1, max_size=8), st.integers(0, 1 << 40))
@example([-1.0, 2.0], 3)
@example([-0.001, 6.0], 3)
def test_stochastic_rounding_is_unbiased_at_every_value(values, seed):
    """Within five standard errors and three draws (of rare ones), at the ends of the range too: nothing is clipped."""
    x = torch.tensor(values)[:, None].expand(-1, 4000).contiguous()
    _, s, _, found = copied(x, seed=seed)
    residual = (x.double() / s) % 1
    error = (found / s - x.double() / s).mean(1).abs()
    assert (error <= 5 * (residual[:, 0] * (1 - residual[:, 0]) / 4000).sqrt() + 3 / 4000).all()


@tries(100)
@given(st.lists(st.integers(0, 255), min_size=1, max_size=20), st.sampled_from(Rounding), st.booleans())
def test_what_the_format_holds_comes_back(integers, rounding, negative):
    """255 steps of one sign, whatever the rounding: float32 and 16-bit activations of a ReLU among them."""
    x = torch.tensor([*integers, 255]).float() * (-0.25 if negative else 0.25)
    assert torch.equal(copied(x, rounding=rounding)[3], x.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_have_a_zero_point_each(dtype):
    x = (torch.randn(5, 40) + torch.arange(-2, 3)[:, None]).to(dtype)
    x[3] = 0.0
    q, s, z, _ = copied(x, ROW, Rounding.NEAREST)
    for row in range(5):
        alone = copied(x[row], TENSOR, Rounding.NEAREST)
        assert torch.equal(q[row], alone[0])
        assert torch.equal(s[row], alone[1])
        assert torch.equal(z[row], alone[2])


def test_one_bit_is_gained_behind_a_relu():
    """The noise of an activation is a quarter of the symmetric copy's."""
    x = torch.randn(400, 100).relu()
    squared = {}
    for symmetric in (True, False):
        q, scale = quantize(x, Precision.INT8, rounding=Rounding.STOCHASTIC, seed=4, symmetric=symmetric)
        squared[symmetric] = float((dequantize(q, scale, TENSOR, torch.float32, symmetric=symmetric) - x).double().square().sum())
    assert squared[False] / squared[True] == pytest.approx((127 / 255) ** 2, rel=0.03)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("x_granularity", [TENSOR, ROW])
@pytest.mark.parametrize("name", VARIANTS)
def test_linear_against_float64_autograd(device, name, x_granularity, bias):
    torch.manual_seed(0)
    variant = attrs.evolve(VARIANTS[name], x_granularity=x_granularity)
    x, weight = torch.randn(3, 5, 24, device=device) + 0.7, torch.randn(16, 24, device=device)
    b = torch.randn(16, device=device, requires_grad=True) if bias else None
    check_operator(lambda x, w, b: linear(x, w, b, variant), F.linear, x, weight, b, variant)


GEOMETRIES = {
    "padded": {"padding": 1},
    "strided": {"padding": (2, 1), "stride": 2},
    "grouped": {"padding": 1, "groups": 2},
    "depthwise": {"padding": 1, "groups": 6},
    "dilated": {"padding": 2, "dilation": 2},
    "pointwise": {"padding": 1},
}


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("name", ["bfloat16 gradients", "float32 gradients"])
def test_conv2d_against_float64_autograd(device, name, geometry):
    """The zeros that a convolution pads with are zeros: an activation far from 0 has a zero point far from the integer 0."""
    torch.manual_seed(0)
    variant, arguments = VARIANTS[name], GEOMETRIES[geometry]
    size = 1 if geometry == "pointwise" else 3
    x = (torch.randn(2, 6, 7, 6, device=device) + 2).to(memory_format=torch.channels_last)
    weight = torch.randn(8 if geometry != "depthwise" else 6, 6 // arguments.get("groups", 1), size, size, device=device)
    b = torch.randn(weight.shape[0], device=device, requires_grad=True)
    check_operator(
        lambda x, w, b: conv2d(x, w, b, variant, **arguments), lambda x, w, b: F.conv2d(x, w, b, **arguments), x, weight, b, variant
    )


def test_gradients_are_unbiased_and_less_noisy_than_symmetric_ones():
    """Mean over 400 draws of the weight's gradient of Σ c·y, which is cᵀ·x, and its variance in closed form."""
    torch.manual_seed(0)
    x, c = torch.randn(6, 20).relu(), torch.randn(6, 4)
    weight = torch.randn(4, 20, requires_grad=True)
    exact, noise = c.double().t() @ x.double(), {}
    for symmetric in (True, False):
        variant = attrs.evolve(FLOAT32_GRADIENTS, rounding=Rounding.STOCHASTIC, symmetric=symmetric)
        drawn = torch.stack([
            torch.autograd.grad((linear(x, weight, None, variant, seed=seed) * c).sum(), weight)[0].double() for seed in range(400)
        ])  # fmt: skip
        noise[symmetric] = float((drawn - exact).square().mean(0).sum())
        s = float(x.double().max()) / (127 if symmetric else 255)
        residual = (x.double() / s) % 1
        variance = c.double().square().t() @ (s**2 * residual * (1 - residual))
        assert noise[symmetric] == pytest.approx(float(variance.sum()), rel=0.06)
        assert ((drawn.mean(0) - exact).abs() <= 5 * (variance / 400).sqrt() + 1e-5).all()
    assert noise[False] < 0.35 * noise[True]


def test_the_8_bit_copy_is_all_that_is_kept():
    x, weight = torch.randn(32, 24, requires_grad=True), torch.randn(16, 24, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        linear(x, weight, None, AFFINE)
    assert sum(tensor.untyped_storage().nbytes() for tensor in kept) == 32 * 24 + 2 * 4 + 16 * 24 + 16 * 4


def test_consumers_share_a_copy_of_their_own_symmetry_only():
    class Three(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (torch.nn.Linear(8, 8, bias=False) for _ in range(3))

        def forward(self, x):
            return self.q(x), self.k(x), self.v(x)

    torch.manual_seed(0)
    model, x = Three(), torch.rand(4, 8) + 1
    symmetric = attrs.evolve(AFFINE, symmetric=True)
    expected = [linear(x, layer.weight, None, v) for layer, v in ((model.q, AFFINE), (model.k, AFFINE), (model.v, symmetric))]
    apply_(model, {"q#0": AFFINE, "k#0": AFFINE, "v#0": symmetric})
    for found, y in zip(model(x), expected, strict=True):
        assert torch.equal(found, y)


def test_an_int8_gradient_of_the_weight_is_refused_before_anything_runs():
    variant = attrs.evolve(AFFINE, grad_weight=Precision.INT8)
    with pytest.raises(BackendError, match="aten: an int8 grad_weight takes no zero point; keep grad_weight in a float format"):
        apply_(torch.nn.Sequential(torch.nn.Linear(8, 8)), {"0#0": variant})


@pytest.mark.parametrize("precision", [Precision.FLOAT8_E4M3FN, Precision.BFLOAT16])
def test_other_formats_have_no_zero_points(precision):
    variant = attrs.evolve(Variant.of(precision), symmetric=False)
    with pytest.raises(BackendError, match=f"zero points belong to int8 activations, not to {precision}; quantize symmetrically"):
        apply_(torch.nn.Sequential(torch.nn.Linear(8, 8)), {"0#0": variant})
