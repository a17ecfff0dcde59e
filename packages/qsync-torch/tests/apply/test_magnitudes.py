"""Quantization and int8 operators from float32's smallest number to its largest, and operands of which there is no convolution."""

from __future__ import annotations

import math

import attrs
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st

from hypothesis_profiles import tries
from qsync_core.errors import NumericsError
from qsync_core.geometry import Geometry
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_torch.aten.int8 import int8_product
from qsync_torch.aten.quantize import dequantize, scale_view
from qsync_torch.kernels.binding import operator_binding
from qsync_torch.kernels.library_ops import convolution_grad_input, convolution_grad_weight
from qsync_torch.observing.rounding_noise import cast_scale, element_variance
from qsync_torch.operators import conv2d
from qsync_torch.quantize import quantize

INT8, FLOAT8 = Precision.INT8, Precision.FLOAT8_E4M3FN
LARGEST = {INT8: 127.0, FLOAT8: 448.0}
TINY = 2.0**-126
OF_ZEROS = {Granularity.PER_TENSOR: 1.0, Granularity.PER_CHANNEL: 2.0**-11, Granularity.PER_ROW: TINY}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Rows, each of its own magnitude or of all at once: one huge and many tiny, zeros, subnormals, the largest."""
    dtype = draw(st.sampled_from(DTYPES))
    limits = torch.finfo(dtype)
    exponents = st.floats(math.log2(limits.tiny * limits.eps), math.log2(limits.max))
    peaks = exponents.map(lambda exponent: min(2.0**exponent, limits.max)) | st.sampled_from([0.0, limits.tiny, limits.max])
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 24))
    shape = (rows, columns) if draw(st.booleans()) else (rows, 1)  # a magnitude for each element, or for each row
    sizes = torch.tensor([draw(peaks) for _ in range(shape[0] * shape[1])], dtype=torch.float64).view(shape)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return (sizes * (2 * torch.rand(rows, columns, generator=generator, dtype=torch.float64) - 1)).to(dtype)


@tries(300)
@given(tensors(), st.sampled_from([INT8, FLOAT8]), st.sampled_from(Granularity), st.sampled_from(Rounding))
@example(torch.tensor([[1.4e36, -3.4e38, 1.0]]), INT8, Granularity.PER_CHANNEL, Rounding.STOCHASTIC)
@example(torch.tensor([[9e-35, -5e-35]]), INT8, Granularity.PER_TENSOR, Rounding.STOCHASTIC)
@example(torch.tensor([[-1e-37] * 8]), INT8, Granularity.PER_TENSOR, Rounding.FLOOR)
@example(torch.tensor([[0.0], [3.0]]), INT8, Granularity.PER_CHANNEL, Rounding.STOCHASTIC)
@example(torch.tensor([[0.0], [3.0]]), INT8, Granularity.PER_ROW, Rounding.STOCHASTIC)
def test_no_value_moves_by_more_than_a_step(x, precision, granularity, rounding):
    q, scale = quantize(x, precision, granularity, rounding, seed=3)
    steps = scale_view(scale.double(), 2, granularity, x.shape).expand(x.shape)
    absmax = x.double().abs()
    absmax = (
        absmax.amax().expand(x.shape) if granularity is Granularity.PER_TENSOR else absmax.amax(1, keepdim=True).expand(x.shape)
    )
    expected = (absmax / LARGEST[precision]).clamp(min=TINY).masked_fill(absmax == 0, OF_ZEROS[granularity])
    assert torch.allclose(steps, expected, rtol=2.0**-22, atol=0)
    if precision is FLOAT8:  # spacing doubles with the value's exponent, and a stochastic value may end on the next one's
        exponent = torch.floor(torch.log2((x.double().abs() / steps).clamp(min=2.0**-6)))
        steps = steps * torch.exp2(exponent - 3)
    error = q.double() * scale_view(scale.double(), 2, granularity, x.shape) - x.double()
    assert (error.abs() <= steps * (0.5 if rounding is Rounding.NEAREST else 1.0) * (1 + 1e-3)).all()
    if rounding is Rounding.FLOOR:
        assert (error <= steps * 1e-3).all()
    assert torch.isfinite(dequantize(q, scale, granularity, torch.float32)[x.float().abs() < 3.4e38]).all()


@tries(100)
@given(tensors(), st.sampled_from([INT8, FLOAT8]), st.sampled_from(Granularity), st.sampled_from(Rounding))
@example(torch.tensor([[1e-45, 0.0]]), INT8, Granularity.PER_TENSOR, Rounding.NEAREST)
def test_noise_of_every_magnitude_is_a_number(x, precision, granularity, rounding):
    """In float64: squares of float32's extremes are beyond float32, which observing reports."""
    scale = cast_scale(x.float(), precision, granularity)
    assert (scale >= TINY).all()
    variance = element_variance(x.double(), precision, granularity, rounding)
    assert torch.isfinite(variance).all()
    assert (variance >= 0).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("granularity", Granularity)
def test_what_is_not_finite_raises_on_a_cpu(granularity, value):
    x = torch.tensor([[1.0, 2.0], [3.0, value]])
    with pytest.raises(NumericsError, match=r"a tensor of shape \(2, 2\) to be quantized to int8 holds NaN or infinite values"):
        quantize(x, INT8, granularity)


def _outcome(run):
    """What it gives, or the words in which it refuses."""
    try:
        return run(), ""
    except RuntimeError as refusal:
        return None, str(refusal)


SIZES = st.integers(1, 3)
PAIRS = st.tuples(SIZES, SIZES)
VARIANT = Variant.of(INT8, output=Precision.FLOAT32)
GRADIENTS = {"bfloat16": VARIANT, "int8": attrs.evolve(VARIANT, grad_input=INT8)}


@tries(400)
@given(
    x=st.tuples(st.integers(0, 2), st.sampled_from([1, 2, 4, 6]), st.integers(1, 5), st.integers(1, 5)),
    w=st.tuples(st.sampled_from([1, 2, 4, 6]), st.sampled_from([1, 2, 4]), st.integers(1, 4), st.integers(1, 4)),
    stride=PAIRS,
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)) | st.sampled_from(["same", "valid"]),
    dilation=PAIRS,
    groups=st.sampled_from([1, 1, 2, 4]),
    bias=st.sampled_from([None, None, 1, 4]),
)
@example(x=(1, 2, 2, 2), w=(4, 2, 3, 3), stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1, bias=None)
@example(x=(1, 4, 5, 5), w=(4, 1, 3, 3), stride=(1, 1), padding=(0, 0), dilation=(3, 3), groups=4, bias=None)
@example(x=(1, 6, 5, 5), w=(2, 2, 1, 1), stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=2, bias=None)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_a_convolution_that_pytorch_refuses_is_refused_in_its_words(x, w, stride, padding, dilation, groups, bias):
    image, filters, biases = torch.ones(x), torch.ones(w), None if bias is None else torch.ones(bias)
    arguments = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    expected, refusal = _outcome(lambda: F.conv2d(image, filters, biases, **arguments))
    found, mine = _outcome(lambda: conv2d(image, filters, biases, VARIANT, **arguments))
    assert bool(mine) == bool(refusal)
    if padding != "same" and bias is None:  # an image that is padded on one side is another one
        assert mine == refusal
    assert refusal or torch.allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("variant", GRADIENTS.values(), ids=GRADIENTS)
@pytest.mark.parametrize("groups", [1, 2, 4], ids=["dense", "grouped", "depthwise"])
def test_gradients_of_no_convolution_are_refused(groups, variant):
    binding = operator_binding(variant, geometry=Geometry(dilation=(2, 2), groups=groups))
    x, w = torch.ones(2, 4, 5, 5, dtype=torch.int8), torch.ones(4, 4 // groups, 2, 2, dtype=torch.int8)
    wrong, small = torch.ones(2, 4, 2, 2).bfloat16(), torch.ones(2, 4, 2, 2, dtype=torch.int8)
    scale = torch.ones(1)
    for run in (
        lambda: convolution_grad_input(wrong, w, scale, x.shape, binding),
        lambda: convolution_grad_weight(wrong, x, scale, w, binding),
        lambda: torch.ops.qsync.convolution_grad_input(wrong, w, scale, list(x.shape), binding.key),
    ):
        with pytest.raises(RuntimeError, match=r"gives \[2, 4, 3, 3\], and its gradient has the shape \[2, 4, 2, 2\]"):
            run()
    for run in (
        lambda: convolution_grad_input(wrong, w, scale, small.shape, binding),
        lambda: convolution_grad_weight(wrong, small, scale, w, binding),
    ):
        with pytest.raises(RuntimeError, match="Kernel size can't be greater than actual input size"):
            run()


@tries(100)
@given(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3))
def test_products_of_operands_that_do_not_fit_are_refused(m, k, other, n):
    a, b = torch.ones(m, k, dtype=torch.int8), torch.ones(n, other, dtype=torch.int8)
    if k == other:
        assert torch.equal(int8_product(a, b), torch.full((m, n), k, dtype=torch.int32))
        return
    with pytest.raises(RuntimeError, match=rf"mat1 and mat2 shapes cannot be multiplied \({m}x{k} and {other}x{n}\)"):
        int8_product(a, b)
