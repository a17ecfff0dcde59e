"""The products of a linear operator, run by Triton's interpreter, against float64."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from hypothesis_profiles import tries  # noqa: E402
from qsync_core.errors import BackendError  # noqa: E402
from qsync_kernels_triton.config import ProductConfig  # noqa: E402
from qsync_kernels_triton.products import by_library  # noqa: E402
from qsync_kernels_triton.products.linear import build_linear_grad_input, build_linear_grad_weight, build_linear_output  # noqa: E402

CUT = ProductConfig(32, 32, 32, 1, 2, 2)
SHAPES = [(40, 50, 70), (1, 1, 1), (33, 17, 64), (5, 1, 9), (64, 96, 32)]
ONE = torch.ones(1)
FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def integers(*shape, seed=0):
    return torch.randint(-127, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


def scales(count, seed=1):
    return torch.rand(count, generator=torch.Generator().manual_seed(seed)) / 64 + 1 / 128


def strided(x, way):
    """The same matrix in another place of memory."""
    if way == "transposed":
        return x.t().contiguous().t()
    if way == "rows of a wider one":
        return torch.cat([x, x], dim=1)[:, : x.shape[1]]
    return x


def assert_close(found, expected, dtype):
    """Within the rounding of the format, and of a float32 sum relative to the largest result."""
    bound = torch.finfo(dtype).eps * expected.abs() + 2.0**-20 * expected.abs().max() + 1e-30
    assert torch.all((found.double() - expected).abs() <= bound)


@pytest.mark.parametrize("m, n, k", SHAPES)
def test_int8_sums_are_exact(m, n, k):
    x, w, grad = integers(m, k), integers(n, k, seed=1), integers(m, n, seed=2)
    out, grad_x, grad_w = torch.empty(m, n), torch.empty(m, k), torch.empty(n, k)
    build_linear_output(CUT)(x, ONE, w, ONE, None, out)
    build_linear_grad_input(CUT, True)(grad, w, ONE, grad_x)
    build_linear_grad_weight(CUT, True)(grad, x, ONE, grad_w)
    assert torch.equal(out, (x.long() @ w.long().t()).float())
    assert torch.equal(grad_x, (grad.long() @ w.long()).float())
    assert torch.equal(grad_w, (grad.long().t() @ x.long()).float())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("x_count", ["tensor", "row"])
@pytest.mark.parametrize("w_count", ["tensor", "channel"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_output_is_dequantized_with_both_scales_and_the_bias(dtype, x_count, w_count, with_bias):
    m, n, k = 40, 50, 70
    x, w = integers(m, k), integers(n, k, seed=1)
    x_scale, w_scale = scales(m if x_count == "row" else 1), scales(n if w_count == "channel" else 1, seed=2)
    bias = scales(n, seed=3) * 100 if with_bias else None
    out = torch.empty(m, n, dtype=dtype)
    build_linear_output(CUT)(x, x_scale, w, w_scale, bias, out)
    expected = (x.double() @ w.double().t()) * x_scale.double().view(-1, 1) * w_scale.double().view(1, -1)
    assert_close(out, expected if bias is None else expected + bias.double(), dtype)


@pytest.mark.parametrize("way", ["transposed", "rows of a wider one"])
def test_operands_of_any_strides_give_the_same_result(way):
    m, n, k = 40, 50, 70
    x, w, grad = integers(m, k), integers(n, k, seed=1), integers(m, n, seed=2)
    real = torch.randn(m, n, generator=torch.Generator().manual_seed(3))
    for build, operands, shape in (
        (build_linear_output(CUT), (x, ONE, w, ONE, None), (m, n)),
        (build_linear_grad_input(CUT, True), (grad, w, ONE), (m, k)),
        (build_linear_grad_weight(CUT, True), (grad, x, ONE), (n, k)),
        (build_linear_grad_input(CUT, False), (real, w, ONE), (m, k)),
        (build_linear_grad_weight(CUT, False), (real, x, ONE), (n, k)),
    ):
        dense, other = torch.empty(shape), torch.empty(shape)
        build(*operands, dense)
        build(*(strided(x, way) if isinstance(x, torch.Tensor) and x.ndim == 2 else x for x in operands), other)
        assert torch.equal(dense, other)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("m, n, k", SHAPES)
def test_float_gradients_dequantize_the_saved_operand(m, n, k, dtype):
    x, w = integers(m, k), integers(n, k, seed=1)
    grad = torch.randn(m, n, generator=torch.Generator().manual_seed(2)).to(dtype)
    for w_scale in (scales(1), scales(n)):
        out = torch.empty(m, k, dtype=dtype)
        build_linear_grad_input(CUT, False)(grad, w, w_scale, out)
        assert_close_to_product(out, grad, w.double() * w_scale.double().view(-1, 1), dtype)
    for x_scale in (scales(1), scales(m)):
        out = torch.empty(n, k)
        build_linear_grad_weight(CUT, False)(grad, x, x_scale, out)
        assert_close_to_product(out, grad.t(), x.double() * x_scale.double().view(-1, 1), dtype)


def assert_close_to_product(found, left, right, dtype):
    """Within the rounding of the dequantized operand and the result; Triton's interpreter cuts bfloat16 off."""
    bound = 2 * torch.finfo(dtype).eps * (left.double().abs() @ right.abs()) + 1e-30
    assert torch.all((found.double() - left.double() @ right).abs() <= bound)


def test_grad_weight_takes_a_scale_for_each_output_channel():
    grad, x, scale, out = integers(40, 50), integers(40, 70, seed=1), scales(50), torch.empty(50, 70)
    build_linear_grad_weight(CUT, True)(grad, x, scale, out)
    assert_close(out, grad.double().t() @ x.double() * scale.double().view(-1, 1), torch.float32)


@pytest.mark.parametrize("way", ["dense", "transposed"])
def test_int8_gradients_take_scales_of_rows_and_columns(way):
    """A column's number stands for a factor of the input channel, and in the gradient of the weight for the activation's scales."""
    m, n, k = 40, 50, 70
    grad, w, x = strided(integers(m, n), way), integers(n, k, seed=1), strided(integers(m, k, seed=2), way)
    columns, grad_x, grad_w = scales(2 * k, seed=3)[::2], torch.empty(m, k), torch.empty(n, k)
    build_linear_grad_input(CUT, True)(grad, w, scales(m), grad_x, columns)
    build_linear_grad_weight(CUT, True)(grad, x, scales(n), grad_w, columns)
    assert_close(grad_x, grad.double() @ w.double() * scales(m).double()[:, None] * columns.double(), torch.float32)
    assert_close(grad_w, grad.double().t() @ x.double() * scales(n).double()[:, None] * columns.double(), torch.float32)
    with pytest.raises(BackendError, match=r"column_scale must be None or float32 of shape \(70,\), got torch.float32 \(50,\)"):
        build_linear_grad_input(CUT, True)(grad, w, ONE, grad_x, scales(n))


@pytest.mark.parametrize("library", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("many", [False, True])
def test_float_gradients_take_a_number_for_each_column(many, dtype, library):
    m, n, k = 40, 50, 70
    x, w, columns = integers(m, k), integers(n, k, seed=1), scales(k, seed=3) * 64
    grad = torch.randn(m, n, generator=torch.Generator().manual_seed(2)).to(dtype)
    grad_x, grad_w = torch.empty(m, k, dtype=dtype), torch.empty(n, k)
    w_scale, x_scale = scales(n if many else 1), scales(m if many else 1)
    to_input = by_library.build_linear_grad_input() if library else build_linear_grad_input(CUT, False)
    to_weight = by_library.build_linear_grad_weight() if library else build_linear_grad_weight(CUT, False)
    to_input(grad, w, w_scale, grad_x, columns)
    to_weight(grad, x, x_scale, grad_w, columns)
    assert_close_to_product(grad_x, grad, w.double() * w_scale.double().view(-1, 1) * columns.double(), dtype)
    assert_close_to_product(grad_w, grad.t(), x.double() * x_scale.double().view(-1, 1) * columns.double(), dtype)


@pytest.mark.parametrize("left", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_products(left):
    generator = torch.Generator().manual_seed(0)
    grad, x, w = (
        torch.randn(shape, generator=generator).to(form)
        for shape, form in (((40, 50), left), ((40, 70), torch.float8_e4m3fn), ((50, 70), torch.float8_e4m3fn))
    )
    out, grad_x, grad_w = torch.empty(40, 50), torch.empty(40, 70), torch.empty(50, 70)
    build_linear_output(CUT)(x, ONE, w, scales(50), None, out)
    build_linear_grad_input(CUT, True)(grad, w, ONE, grad_x)
    build_linear_grad_weight(CUT, True)(grad, x, scales(50), grad_w)
    assert_close(out, x.double() @ w.double().t() * scales(50).double(), torch.float32)
    assert_close(grad_x, grad.double() @ w.double(), torch.float32)
    assert_close(grad_w, grad.double().t() @ x.double() * scales(50).double().view(-1, 1), torch.float32)


def test_descriptors_give_the_same_result_and_are_used_where_the_layout_allows_it(monkeypatch):
    from qsync_kernels_triton.products import gemm

    used = []
    described = gemm._described
    monkeypatch.setattr(gemm, "_described", lambda *arguments: used.append(1) or described(*arguments))
    cut = ProductConfig(32, 32, 32, 1, 2, 2, tma=1)
    for k, descriptors in ((96, 2), (70, 0)):
        used.clear()
        x, w, out = integers(40, k), integers(50, k, seed=1), torch.empty(40, 50)
        build_linear_output(cut)(x, scales(1), w, scales(50), scales(50), out)
        assert len(used) == descriptors
        expected = torch.empty(40, 50)
        build_linear_output(CUT)(x, scales(1), w, scales(50), scales(50), expected)
        assert torch.equal(out, expected)


@tries(25)
@given(
    m=st.integers(0, 70),
    n=st.integers(0, 70),
    k=st.integers(0, 100),
    cut=st.builds(
        ProductConfig,
        m=st.sampled_from([16, 32, 64]),
        n=st.sampled_from([16, 64]),
        k=st.sampled_from([32, 64]),
        tma=st.sampled_from([0, 1]),
    ),
)
def test_every_shape_and_every_cut_is_exact(m, n, k, cut):
    x, w = integers(m, k), integers(n, k, seed=1)
    out = torch.full((m, n), float("nan"))
    build_linear_output(cut)(x, ONE, w, ONE, None, out)
    assert torch.equal(out, (x.long() @ w.long().t()).float())


def test_the_longest_extreme_sum_does_not_overflow():
    from qsync_core.ir.precision import MAX_CONTRACTION

    x = torch.full((1, MAX_CONTRACTION), -127, dtype=torch.int8)
    out = torch.empty(1, 1, dtype=torch.float32)
    build_linear_output(ProductConfig(16, 16, 512, 1))(x, ONE, x, ONE, None, out)
    assert torch.equal(out, torch.tensor([[MAX_CONTRACTION * 127**2]]).float())


def test_operands_that_do_not_fit_are_refused_by_name():
    x, w = integers(4, 8), integers(5, 8)
    with pytest.raises(BackendError, match=r"linear.output: the operands contract dimensions of 8 and 7 elements"):
        build_linear_output(CUT)(x, ONE, w[:, :7], ONE, None, torch.empty(4, 5))
    with pytest.raises(BackendError, match=r"out must be .* of shape \(4, 5\) with contiguous rows, got torch.int32 \(4, 5\)"):
        build_linear_output(CUT)(x, ONE, w, ONE, None, torch.empty(4, 5, dtype=torch.int32))
    with pytest.raises(BackendError, match=r"second operand must be 8-bit of the first one's kind, got torch.float8_e4m3fn beside"):
        build_linear_output(CUT)(x, ONE, w.float().to(torch.float8_e4m3fn), ONE, None, torch.empty(4, 5))
    with pytest.raises(BackendError, match=r"w_scale must be 1 or 5 float32, got torch.float32 \(4,\)"):
        build_linear_output(CUT)(x, ONE, w, torch.ones(4), None, torch.empty(4, 5))
    with pytest.raises(BackendError, match=r"linear.grad_input: the first operand must be .*torch.bfloat16, got torch.int8"):
        build_linear_grad_input(CUT, False)(integers(4, 5), w, ONE, torch.empty(4, 8))


def between_others(x):
    """The same vector with other numbers between its elements."""
    return torch.stack([x, torch.full_like(x, 77.0)], dim=1)[:, 0]


def test_strided_scales_and_bias_are_taken_as_they_are():
    m, n, k = 40, 50, 70
    x, w, grad = integers(m, k), integers(n, k, seed=1), integers(m, n, seed=2)
    real = torch.randn(m, n, generator=torch.Generator().manual_seed(3))
    for build, operands, shape in (
        (build_linear_output(CUT), (x, scales(m), w, scales(n, seed=2), scales(n, seed=3) * 100), (m, n)),
        (build_linear_output(CUT), (x, ONE, w, ONE, torch.full((1,), 2.5).expand(n)), (m, n)),
        (build_linear_grad_input(CUT, False), (real, w, scales(n)), (m, k)),
        (build_linear_grad_weight(CUT, True), (grad, x, scales(n)), (n, k)),
        (build_linear_grad_weight(CUT, False), (real, x, scales(m)), (n, k)),
    ):
        dense, other = torch.empty(shape), torch.empty(shape)
        build(*(t.contiguous() if isinstance(t, torch.Tensor) else t for t in operands), dense)
        build(*(between_others(t) if isinstance(t, torch.Tensor) and t.ndim == 1 else t for t in operands), other)
        assert torch.equal(dense, other)


X, W = integers(4, 8), integers(5, 8)


@pytest.mark.parametrize(
    ("operands", "message"),
    [
        ((X, ONE, W, ONE, torch.ones(4), torch.empty(4, 5)), r"bias must be .* of shape \(5,\), got torch.float32 \(4,\)"),
        ((X, ONE, W, ONE, torch.ones(5, 1), torch.empty(4, 5)), r"bias must be .* got torch.float32 \(5, 1\)"),
        ((X, ONE, W, ONE, torch.ones(5, dtype=torch.int64), torch.empty(4, 5)), r"bias must be .* got torch.int64 \(5,\)"),
        ((X, ONE, W, ONE, None, torch.empty(3, 5)), r"out must be .* of shape \(4, 5\) .* got torch.float32 \(3, 5\)"),
        ((X, ONE, W, ONE, None, torch.empty(4, 1).expand(4, 5)), r"out must be .* with strides \(1, 0\)"),
        ((X, ONE, W, ONE, None, torch.empty(5).expand(4, 5)), r"out must be .* with strides \(0, 1\)"),
        ((X, None, W, ONE, None, torch.empty(4, 5)), r"x_scale must be 1 or 4 float32, got a NoneType"),
        ((X, ONE, W, ONE.double(), None, torch.empty(4, 5)), r"w_scale must be 1 or 5 float32, got torch.float64 \(1,\)"),
        (
            (X, ONE, W.view(5, 2, 4), ONE, None, torch.empty(4, 5)),
            r"w must be a tensor of 2 dimensions, got .* \(5, 2, 4\)",
        ),
        ((X, ONE, W.to("meta"), ONE, None, torch.empty(4, 5)), r"the operands lie on different devices, cpu, meta"),
    ],
)
def test_whatever_does_not_fit_is_refused_before_memory_is_touched(operands, message):
    with pytest.raises(BackendError, match="backend triton cannot run linear.output: " + message):
        build_linear_output(CUT)(*operands)


def test_a_refused_bias_is_refused_after_one_that_fits_too():
    kernel, out = build_linear_output(CUT), torch.empty(4, 5)
    kernel(X, ONE, W, ONE, torch.ones(5), out)
    with pytest.raises(BackendError, match="bias must be"):
        kernel(X, ONE, W, ONE, torch.ones(3), out)
    kernel(X, ONE, W, ONE, torch.ones(10)[::2], out)
    assert torch.equal(out, (X.long() @ W.long().t()).float() + 1)


def test_gradients_refuse_scales_and_outputs_that_do_not_fit():
    grad, out = integers(4, 5), torch.empty(4, 8)
    with pytest.raises(BackendError, match=r"linear.grad_input: scale must be 1 or 4 float32, got torch.float32 \(5,\)"):
        build_linear_grad_input(CUT, True)(grad, W, torch.ones(5), out)
    with pytest.raises(BackendError, match=r"linear.grad_input: out must be .* of shape \(4, 8\)"):
        build_linear_grad_input(CUT, False)(grad.float(), W, ONE, torch.empty(8, 4))
    with pytest.raises(BackendError, match=r"linear.grad_weight: the operands contract dimensions of 4 and 3 elements"):
        build_linear_grad_weight(CUT, True)(grad, X[:3], ONE, torch.empty(5, 8))


def test_nothing_to_sum_gives_the_bias_or_zeros():
    for bias in (None, between_others(scales(5))):
        out = torch.full((4, 5), 7.0)
        build_linear_output(CUT)(X[:, :0], ONE, W[:, :0], ONE, bias, out)
        assert torch.equal(out, torch.zeros(4, 5) if bias is None else bias.expand(4, 5))


def test_steps_between_blocks_of_huge_strides_do_not_wrap():
    """33 rows that lie 2**26 bytes apart: the second block of 32 begins 2**31 bytes after the first."""
    stride = 1 << 26
    memory = torch.empty(32 * stride + 5, dtype=torch.int8)  # hardly any of it is ever touched
    w = memory.as_strided((33, 5), (stride, 1))
    w.copy_(integers(33, 5))
    grad, out = torch.randn(4, 33, generator=torch.Generator().manual_seed(1)), torch.empty(4, 5)
    build_linear_grad_input(CUT, False)(grad, w, ONE, out)
    assert_close_to_product(out, grad, w.double(), torch.float32)
