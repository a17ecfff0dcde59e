"""The front-end of linear products against torch, with simulated kernels: every layout and size comes out right on every path."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypothesis_profiles import tries

torch = pytest.importorskip("torch")

from simulated_kernels import SimulatedLibrary  # noqa: E402

from qsync_core.errors import BackendError  # noqa: E402
from qsync_core.ir.precision import Precision  # noqa: E402
from qsync_core.ir.variant import Variant  # noqa: E402
from qsync_core.kernels.backend import KernelRequest, Op  # noqa: E402
from qsync_kernels_cutlass.architectures import SM_90A  # noqa: E402
from qsync_kernels_cutlass.configs.config import GemmConfig  # noqa: E402
from qsync_kernels_cutlass.kernels import linear, operands, product  # noqa: E402

INT8 = attrs.evolve(Variant.of(Precision.INT8, output=Precision.BFLOAT16), grad_input=Precision.INT8, grad_weight=Precision.INT8)
SIXTEEN = Variant.of(Precision.INT8, output=Precision.BFLOAT16)
PATHS = {
    "tma": ("path=tma;tile=128x128x128", "path=tma;tile=128x128x64"),
    "streamk": ("path=tma;tile=128x128x128;scheduler=streamk", "path=tma;tile=128x128x64;scheduler=streamk"),
    "mma": (
        "path=mma;tile=128x64x64;warp=64x32x64;instruction=16x8x32;stages=3",
        "path=mma;tile=128x64x32;warp=64x32x32;instruction=16x8x16;stages=3",
    ),
    "simt": (
        "path=simt;tile=64x64x32;warp=32x32x32;instruction=1x1x4;stages=2",
        "path=simt;tile=64x64x8;warp=32x32x8;instruction=1x1x1;stages=2",
    ),
}
SHAPES = {
    Op.LINEAR_OUTPUT: ((64, 64), (64, 64)),
    Op.LINEAR_GRAD_INPUT: ((64, 64), (64, 64)),
    Op.LINEAR_GRAD_WEIGHT: ((64, 64), (64, 64)),
}


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    for module in (product, operands):
        monkeypatch.setattr(module, "compiled", SimulatedLibrary)
        monkeypatch.setattr(module, "sm_count", lambda device: 132)
        monkeypatch.setattr(module, "current_stream", lambda device: 0)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda x: 0 if x.device.type == "cpu" else -1)
    operands.operand_copies.cache_clear()
    yield
    operands.operand_copies.cache_clear()


def build(op, variant, path):
    text = PATHS[path][0 if variant is INT8 or op == Op.LINEAR_OUTPUT else 1]
    request = KernelRequest(op, variant, SHAPES[op], device_kind="cuda", compute_capability="9.0")
    return linear.build(request, GemmConfig.parse(text), SM_90A)


def laid_out(x, layout):
    """The same values with other strides or another address."""
    rows, columns = x.shape
    if layout == "transposed":
        return x.t().contiguous().t()
    if layout == "shifted":
        return torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(rows, columns)
    if layout == "sliced":
        wide = torch.full((rows, columns + 32), 1, dtype=torch.int8).to(x.dtype)
        wide[:, 16 : 16 + columns] = x
        return wide[:, 16 : 16 + columns]
    if layout == "expanded":
        return x[:1].expand(rows, columns)
    if layout == "every second":
        wide = torch.full((2 * rows, 2 * columns), 1, dtype=torch.int8).to(x.dtype)
        wide[::2, ::2] = x
        return wide[::2, ::2]
    return x


LAYOUTS = ["contiguous", "transposed", "shifted", "sliced", "expanded", "every second"]
sizes = st.integers(1, 40)
layouts = st.sampled_from(LAYOUTS)
seeds = st.integers(0, 2**30)


def integers(generator, *shape):
    return torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)


@pytest.mark.parametrize("path", PATHS)
@tries(60)
@given(sizes, sizes, sizes, layouts, layouts, layouts, seeds, st.booleans(), st.booleans(), st.booleans())
def test_output(path, m, k, n, x_layout, w_layout, out_layout, seed, per_row, per_channel, biased):
    generator = torch.Generator().manual_seed(seed)
    x, w = laid_out(integers(generator, m, k), x_layout), laid_out(integers(generator, n, k), w_layout)
    x_scale, w_scale = (torch.rand(count, generator=generator) for count in (m if per_row else 1, n if per_channel else 1))
    bias = torch.rand(n, generator=generator).half() if biased else None
    out = laid_out(torch.zeros(m, n, dtype=torch.bfloat16), "contiguous" if out_layout == "expanded" else out_layout)
    kernel = build(Op.LINEAR_OUTPUT, INT8, path)
    expected = (x.double() @ w.double().t()).float() * w_scale * x_scale[:, None] + (0 if bias is None else bias.float())
    for _ in range(2):  # the second call takes what the first worked out
        out.fill_(torch.nan)
        kernel(x, x_scale, w, w_scale, bias, out)
        assert torch.equal(out, expected.bfloat16())


@pytest.mark.parametrize("path", PATHS)
@tries(30)
@given(sizes, sizes, sizes, layouts, layouts, seeds)
def test_int8_gradients(path, m, k, n, grad_layout, other_layout, seed):
    generator = torch.Generator().manual_seed(seed)
    grad = laid_out(integers(generator, m, n), grad_layout)
    w, x = laid_out(integers(generator, n, k), other_layout), laid_out(integers(generator, m, k), other_layout)
    scale, channel_scale = torch.rand(1, generator=generator), torch.rand(n, generator=generator)
    grad_x, grad_w = torch.empty(m, k, dtype=torch.bfloat16), torch.empty(n, k)
    build(Op.LINEAR_GRAD_INPUT, INT8, path)(grad, w, scale, grad_x)
    build(Op.LINEAR_GRAD_WEIGHT, INT8, path)(grad, x, channel_scale, grad_w)
    assert torch.equal(grad_x, ((grad.double() @ w.double()).float() * scale).bfloat16())
    assert torch.equal(grad_w, (grad.double().t() @ x.double()).float() * channel_scale[:, None])
    rows, columns = torch.rand(m, generator=generator), torch.rand(k, generator=generator)
    build(Op.LINEAR_GRAD_INPUT, INT8, path)(grad, w, rows, grad_x, columns)
    build(Op.LINEAR_GRAD_WEIGHT, INT8, path)(grad, x, channel_scale, grad_w, columns)
    # The kernel multiplies by the column's number first.
    assert torch.equal(grad_x, ((grad.double() @ w.double()).float() * columns * rows[:, None]).bfloat16())
    assert torch.equal(grad_w, (grad.double().t() @ x.double()).float() * columns * channel_scale[:, None])


@pytest.mark.parametrize("path", PATHS)
@tries(30)
@given(sizes, sizes, sizes, layouts, layouts, seeds, st.booleans())
def test_16_bit_gradients(path, m, k, n, grad_layout, other_layout, seed, many_scales):
    generator = torch.Generator().manual_seed(seed)
    grad = laid_out(torch.randn(m, n, generator=generator).bfloat16(), grad_layout)
    w, x = laid_out(integers(generator, n, k), other_layout), laid_out(integers(generator, m, k), other_layout)
    w_scale, x_scale = (torch.rand(count if many_scales else 1, generator=generator) for count in (n, m))
    grad_x, grad_w = torch.empty(m, k, dtype=torch.bfloat16), torch.empty(n, k)
    build(Op.LINEAR_GRAD_INPUT, SIXTEEN, path)(grad, w, w_scale, grad_x)
    build(Op.LINEAR_GRAD_WEIGHT, SIXTEEN, path)(grad, x, x_scale, grad_w)

    def dequantized(q, scale):
        return (q.float() * scale[:, None]).bfloat16().double() if scale.numel() > 1 else q.double() * scale

    torch.testing.assert_close(grad_x, (grad.double() @ dequantized(w, w_scale)).bfloat16(), rtol=2**-7, atol=1e-5)
    torch.testing.assert_close(grad_w, (grad.double().t() @ dequantized(x, x_scale)).float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("path", PATHS)
def test_empty_batches_and_empty_sums(path):
    kernel, one, bias = build(Op.LINEAR_OUTPUT, INT8, path), torch.ones(1), torch.arange(4.0)
    out = torch.empty(0, 4, dtype=torch.bfloat16)
    kernel(torch.empty(0, 8, dtype=torch.int8), one, torch.ones(4, 8, dtype=torch.int8), one, None, out)
    out = torch.full((3, 4), torch.nan, dtype=torch.bfloat16)
    kernel(torch.empty(3, 0, dtype=torch.int8), one, torch.empty(4, 0, dtype=torch.int8), one, bias, out)
    assert torch.equal(out, bias.bfloat16().expand(3, 4))
    grad_x = torch.full((3, 5), torch.nan, dtype=torch.bfloat16)
    empty = torch.empty(3, 0, dtype=torch.bfloat16)
    build(Op.LINEAR_GRAD_INPUT, SIXTEEN, path)(empty, torch.empty(0, 5, dtype=torch.int8), torch.empty(0), grad_x)
    assert torch.equal(grad_x, torch.zeros_like(grad_x))


def test_operands_in_place_are_not_copied(monkeypatch):
    """Aligned operands and outputs reach the kernel by their own addresses, gradients' transposed copies too."""

    def refuse(*_):
        raise AssertionError("copied")

    generator = torch.Generator().manual_seed(0)
    grad, x, out = integers(generator, 32, 48), integers(generator, 32, 64), torch.empty(48, 64)
    kernel = build(Op.LINEAR_GRAD_WEIGHT, INT8, "mma")
    monkeypatch.setattr(operands.OperandCopies, "_run", refuse)
    kernel(laid_out(grad, "transposed"), laid_out(x, "transposed"), torch.ones(1), out)
    assert torch.equal(out, (grad.double().t() @ x.double()).float())
    with pytest.raises(AssertionError, match="copied"):
        kernel(grad, x, torch.ones(1), out)


@pytest.mark.parametrize("path", ["tma", "mma"])
def test_an_int8_gradient_is_delivered_in_the_activations_format(path):
    """Which behind a LayerNorm is float32, though the operators' outputs are in 16 bit."""
    generator = torch.Generator().manual_seed(0)
    grad, w = integers(generator, 32, 16), integers(generator, 16, 48)
    kernel = build(Op.LINEAR_GRAD_INPUT, INT8, path)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float32):
        out = torch.empty(32, 48, dtype=dtype)
        kernel(grad, w, torch.full((1,), 2.0**-12), out)
        assert torch.equal(out, (grad.double() @ w.double() * 2.0**-12).to(dtype))
    with pytest.raises(BackendError, match="float64"):
        kernel(grad, w, torch.ones(1), torch.empty(32, 48, dtype=torch.float64))


@pytest.mark.parametrize("strided", ["x_scale", "w_scale", "bias"])
@pytest.mark.parametrize("path", ["tma", "mma", "simt"])
def test_scales_and_bias_may_be_strided(path, strided):
    """A column of a parameter is a scale too; the numbers beside it are not read, in a repeated call neither."""
    generator = torch.Generator().manual_seed(0)
    x, w = integers(generator, 16, 32), integers(generator, 48, 32)
    vectors = {"x_scale": 2.0 ** (torch.arange(16) % 5), "w_scale": 2.0 ** -(torch.arange(48) % 7), "bias": torch.arange(48.0) - 9}
    scaled = (x.double() @ w.double().t()) * vectors["x_scale"][:, None].double() * vectors["w_scale"].double()
    expected = (scaled + vectors["bias"].double()).float().bfloat16()
    vectors[strided] = torch.stack([vectors[strided], torch.full_like(vectors[strided], 1e6)], dim=1)[:, 0]
    kernel, out = build(Op.LINEAR_OUTPUT, INT8, path), torch.empty(16, 48, dtype=torch.bfloat16)
    for _ in range(2):
        kernel(x, vectors["x_scale"], w, vectors["w_scale"], vectors["bias"], out.zero_())
        assert torch.equal(out, expected)


def test_scales_along_the_sum_are_refused():
    kernel = build(Op.LINEAR_GRAD_INPUT, INT8, "tma")
    grad, w = torch.ones(4, 8, dtype=torch.int8), torch.ones(8, 16, dtype=torch.int8)
    with pytest.raises(BackendError, match="sums over output channels and takes one scale, or one for each of 4 rows, got 8"):
        kernel(grad, w, torch.ones(8), torch.empty(4, 16, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out": torch.empty(4, 9, dtype=torch.bfloat16)}, r"operands of these shapes do not give an output of shape \(4, 9\)"),
        ({"x": torch.ones(4, 17, dtype=torch.int8)}, "operands of these shapes do not give"),
        ({"x": torch.ones(4, 16)}, "the kernel was built for int8 x int8 -> bfloat16"),
        ({"out": torch.empty(4, 8)}, r"\(int8 x int8 -> float32\) .* was built for int8 x int8 -> bfloat16"),
        ({"x": torch.ones(4, 16, 1, dtype=torch.int8)}, "the operands are matrices, got 3 and 2 dimensions"),
        ({"x_scale": torch.ones(3)}, "the first operand has 3 scales, expected 1 or 4"),
        ({"w_scale": torch.ones(8).double()}, r"the second operand's scale is torch\.float64 on cpu, expected float32"),
        ({"bias": torch.ones(7)}, "the bias has 7 elements on cpu, expected 8"),
        (
            {"w": torch.ones(8, 16, dtype=torch.int8, device="meta")},
            "tensors are on cpu, meta and cpu, expected one CUDA device",
        ),
    ],
)
def test_bad_calls_are_named(change, message):
    good = {
        "x": torch.ones(4, 16, dtype=torch.int8),
        "x_scale": torch.ones(1),
        "w": torch.ones(8, 16, dtype=torch.int8),
        "w_scale": torch.ones(8),
        "bias": torch.ones(8),
        "out": torch.empty(4, 8, dtype=torch.bfloat16),
    }
    kernel = build(Op.LINEAR_OUTPUT, INT8, "tma")
    kernel(*good.values())  # remembered: the checks hold for repeated calls too
    with pytest.raises(
        BackendError, match=r"^linear\.output .* with the configuration path=tma;tile=128x128x128 cannot run: "
    ) as error:
        kernel(*(good | change).values())
    assert error.match(message)
