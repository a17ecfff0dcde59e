"""CUTLASS's linear products on a GPU against exact references: every path, odd sizes, any strides, streams, graphs, bad input."""

from __future__ import annotations

import attrs
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("qsync_kernels_cutlass")

from qsync_core.errors import BackendError  # noqa: E402
from qsync_core.ir.precision import Granularity, Precision  # noqa: E402
from qsync_core.ir.variant import Variant  # noqa: E402
from qsync_core.kernels.backend import KernelConfig, KernelRequest, Op  # noqa: E402
from qsync_kernels_cutlass.architectures import architecture_of  # noqa: E402
from qsync_kernels_cutlass.backend import CutlassBackend, parse_config  # noqa: E402
from qsync_kernels_cutlass.compiling.compile import compile_files  # noqa: E402
from qsync_kernels_cutlass.sources import request_sources  # noqa: E402

pytestmark = pytest.mark.gpu

INT8 = attrs.evolve(Variant.of(Precision.INT8, output=Precision.FLOAT32), grad_input=Precision.INT8, grad_weight=Precision.INT8)
INT8_BFLOAT16 = attrs.evolve(INT8, output=Precision.BFLOAT16)
INT8_FLOAT16 = attrs.evolve(INT8, output=Precision.FLOAT16)
SIXTEEN = Variant.of(Precision.INT8, output=Precision.FLOAT32)
HALF = Variant.of(Precision.INT8, sixteen_bit=Precision.FLOAT16, output=Precision.FLOAT16)
PER_ROW = attrs.evolve(INT8, x_granularity=Granularity.PER_ROW)
FLOAT8 = Variant.of(Precision.FLOAT8_E4M3FN)
FLOAT8_GRADIENTS = attrs.evolve(FLOAT8, grad_input=Precision.FLOAT8_E4M3FN, grad_weight=Precision.FLOAT8_E4M3FN)

TMA = "path=tma;tile=128x128x128;cluster=2x1;schedule=pingpong"
STREAM_K = "path=tma;tile=128x128x128;cluster=2x1;scheduler=streamk"
FLOAT8_TMA = "path=tma;tile=64x128x128;cluster=2x1;schedule=pingpong"
MMA = "path=mma;tile=128x64x64;warp=64x32x64;instruction=16x8x32;stages=3"
SIMT = "path=simt;tile=64x64x32;warp=32x32x32;instruction=1x1x4;stages=2"
MMA_16 = "path=mma;tile=128x64x32;warp=64x32x32;instruction=16x8x16;stages=3"
TMA_16 = "path=tma;tile=128x128x64;cluster=2x1;schedule=pingpong"

DTYPES = {
    Precision.FLOAT32: torch.float32,
    Precision.FLOAT16: torch.float16,
    Precision.BFLOAT16: torch.bfloat16,
    Precision.INT8: torch.int8,
    Precision.FLOAT8_E4M3FN: torch.float8_e4m3fn,
}

BUILDS = [
    (Op.LINEAR_OUTPUT, INT8, TMA),
    (Op.LINEAR_OUTPUT, INT8, STREAM_K),
    (Op.LINEAR_OUTPUT, INT8, MMA),
    (Op.LINEAR_OUTPUT, INT8, SIMT),
    (Op.LINEAR_OUTPUT, INT8_BFLOAT16, TMA),
    (Op.LINEAR_OUTPUT, INT8_BFLOAT16, MMA),
    (Op.LINEAR_OUTPUT, INT8_FLOAT16, TMA),
    (Op.LINEAR_OUTPUT, INT8_FLOAT16, SIMT),
    (Op.LINEAR_OUTPUT, FLOAT8, FLOAT8_TMA),
    (Op.LINEAR_OUTPUT, FLOAT8, MMA),
    (Op.LINEAR_GRAD_INPUT, FLOAT8_GRADIENTS, FLOAT8_TMA),
    (Op.LINEAR_GRAD_WEIGHT, FLOAT8_GRADIENTS, FLOAT8_TMA),
    (Op.LINEAR_GRAD_INPUT, SIXTEEN, TMA_16),
    (Op.LINEAR_GRAD_INPUT, SIXTEEN, MMA_16),
    (Op.LINEAR_GRAD_INPUT, HALF, TMA_16),
    (Op.LINEAR_GRAD_WEIGHT, SIXTEEN, TMA_16),
    (Op.LINEAR_GRAD_WEIGHT, SIXTEEN, MMA_16),
    (Op.LINEAR_GRAD_WEIGHT, HALF, TMA_16),
]
SIZES = [
    (1, 1, 1),
    (1, 16, 1),
    (2, 3, 5),
    (64, 64, 64),
    (127, 129, 65),
    (130, 100, 36),
    (257, 1000, 8),
    (33, 48, 999),
    (300, 513, 77),
]


def request(op: str, variant: Variant, m: int = 1024, k: int = 1024, n: int = 1024) -> KernelRequest:
    shapes = {
        Op.LINEAR_OUTPUT: ((m, k), (n, k)),
        Op.LINEAR_GRAD_INPUT: ((m, n), (n, k)),
        Op.LINEAR_GRAD_WEIGHT: ((m, n), (m, k)),
    }[op]
    major, minor = torch.cuda.get_device_capability()
    return KernelRequest(op, variant, shapes, device_kind="cuda", compute_capability=f"{major}.{minor}")


@pytest.fixture(scope="session")
def build():
    """Kernels by operator, variant and configuration; all of this file are compiled at once, in parallel."""
    backend, built = CutlassBackend(), {}
    arch = architecture_of(request(Op.LINEAR_OUTPUT, INT8).compute_capability)
    sources = {}
    for op, variant, text in BUILDS:
        asked = request(op, variant)
        if text.startswith("path=tma") and not arch.tma:
            continue
        sources |= dict.fromkeys(request_sources(asked, parse_config(asked, text), arch))
    compile_files(list(sources))

    def make(op: str, variant: Variant, text: str):
        if text.startswith("path=tma") and not arch.tma:
            pytest.skip("this device has no TMA")
        if (op, variant, text) not in built:
            built[op, variant, text] = backend.build(request(op, variant), KernelConfig(text))
        return built[op, variant, text]

    return make


def integers(generator, *shape: int) -> torch.Tensor:
    return torch.randint(-127, 128, shape, generator=generator, device="cuda", dtype=torch.int8)


def scales(generator, count: int) -> torch.Tensor:
    return torch.rand(count, generator=generator, device="cuda") * 0.02 + 0.001


@pytest.fixture
def generator():
    return torch.Generator("cuda").manual_seed(20)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a (m, k) times b (n, k), exact for integers and accurate to 1e-15 otherwise."""
    return a.double() @ b.double().t()


def strided(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values with other strides."""
    if layout == "transposed":
        return x.t().contiguous().t()
    if layout == "sliced":
        wide = torch.zeros(x.shape[0], x.shape[1] + 7, dtype=x.dtype, device=x.device)
        wide[:, 3 : 3 + x.shape[1]] = x
        return wide[:, 3 : 3 + x.shape[1]]
    if layout == "every second":
        wide = torch.zeros(2 * x.shape[0], 2 * x.shape[1], dtype=x.dtype, device=x.device)
        wide[::2, ::2] = x
        return wide[::2, ::2]
    return x


LAYOUTS = ["contiguous", "transposed", "sliced", "every second"]


@pytest.mark.parametrize("text", [TMA, STREAM_K, MMA, SIMT])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_int32_sums_are_exact(build, generator, text, size):
    m, k, n = size
    kernel, one = build(Op.LINEAR_OUTPUT, INT8, text), torch.ones(1, device="cuda")
    x, w = integers(generator, m, k), integers(generator, n, k)
    out = torch.full((m, n), torch.nan, device="cuda")
    kernel(x, one, w, one, None, out)
    assert k * 127**2 < 2**24  # so that float32 holds every sum exactly
    assert torch.equal(out.double(), product(x, w))


@pytest.mark.parametrize("splits", [2, 3, 8])
def test_sums_in_parts_are_exact(build, generator, splits):
    kernel, one = build(Op.LINEAR_OUTPUT, INT8, f"{STREAM_K};splits={splits}"), torch.ones(1, device="cuda")
    for m, k, n in ((64, 1024, 64), (300, 1030, 77), (257, 1040, 640)):
        x, w = integers(generator, m, k), integers(generator, n, k)
        out = torch.full((m, n), torch.nan, device="cuda")
        kernel(x, one, w, one, None, out)
        assert torch.equal(out.double(), product(x, w))


@pytest.mark.parametrize("text", [TMA, STREAM_K, MMA, SIMT])
def test_sums_beyond_24_bits_are_exact_too(build, text):
    """The largest sums of 16384 products, which differ from a multiple of 1024 by what rounding in between would lose."""
    kernel = build(Op.LINEAR_OUTPUT, INT8, text)
    k = 16384
    x, w = (torch.full((n, k), 127, dtype=torch.int8, device="cuda") for n in (128, 128))
    x[:, 0] = torch.arange(128, device="cuda")  # sums of all 128 rows differ by 127
    exact = product(x, w)
    offset = exact.max()
    out = torch.empty(128, 128, device="cuda")
    one = torch.ones(1, device="cuda")
    kernel(x, one, w, one, None, out)
    # float32 rounds the exact int32 sum once, to nearest.
    assert torch.equal(out, exact.float())
    assert offset > 2**27


@pytest.mark.parametrize("variant", [INT8, INT8_BFLOAT16, INT8_FLOAT16], ids=lambda v: str(v.output))
@pytest.mark.parametrize("text", [TMA, MMA, SIMT])
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_fused_dequantization_is_as_accurate_as_unfused(build, generator, variant, text, per_row, per_channel, biased):
    if (Op.LINEAR_OUTPUT, variant, text) not in BUILDS:
        pytest.skip("not among the compiled combinations")
    m, k, n = 200, 320, 144
    kernel = build(Op.LINEAR_OUTPUT, variant, text)
    x, w = integers(generator, m, k), integers(generator, n, k)
    x_scale, w_scale = scales(generator, m if per_row else 1), scales(generator, n if per_channel else 1)
    bias = torch.randn(n, generator=generator, device="cuda") if biased else None
    dtype = DTYPES[variant.output]
    out = torch.full((m, n), torch.nan, device="cuda", dtype=dtype)
    kernel(x, x_scale, w, w_scale, bias, out)
    sums = product(x, w)
    exact = sums * x_scale.double()[:, None] * w_scale.double()[None, :] + (0 if bias is None else bias.double())
    unfused = sums.float() * x_scale[:, None] * w_scale[None, :]
    unfused = (unfused if bias is None else unfused + bias).to(dtype)
    assert (out.double() - exact).abs().max() <= 2 * (unfused.double() - exact).abs().max() + 1e-30


@pytest.mark.parametrize("x_layout", LAYOUTS)
@pytest.mark.parametrize("w_layout", LAYOUTS)
@pytest.mark.parametrize("text", [TMA, MMA, SIMT])
def test_operands_of_any_strides(build, generator, text, x_layout, w_layout):
    kernel, one = build(Op.LINEAR_OUTPUT, INT8, text), torch.ones(1, device="cuda")
    for m, k, n in ((96, 160, 64), (65, 45, 43)):
        x, w = integers(generator, m, k), integers(generator, n, k)
        out = strided(torch.full((m, n), torch.nan, device="cuda"), x_layout)
        kernel(strided(x, x_layout), one, strided(w, w_layout), one, None, out)
        assert torch.equal(out.double(), product(x, w))


@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_bias_of_any_float_format_and_stride(build, generator, bias_dtype):
    kernel, one = build(Op.LINEAR_OUTPUT, INT8, TMA), torch.ones(1, device="cuda")
    x, w = integers(generator, 40, 64), integers(generator, 24, 64)
    bias = torch.arange(48, device="cuda", dtype=bias_dtype)[::2]
    out = torch.empty(40, 24, device="cuda")
    kernel(x, one, w, one, bias, out)
    assert torch.equal(out.double(), product(x, w) + bias.double())


@pytest.mark.parametrize("text", [TMA, MMA, SIMT])
def test_int8_gradients(build, generator, text):
    one_scale = scales(generator, 1)
    for m, k, n in ((128, 96, 64), (100, 77, 43), (1, 5, 3)):
        grad, w, x = integers(generator, m, n), integers(generator, n, k), integers(generator, m, k)
        grad_x, grad_w = torch.empty(m, k, device="cuda"), torch.empty(n, k, device="cuda")
        build(Op.LINEAR_GRAD_INPUT, INT8, text)(grad, w, one_scale, grad_x)
        channel_scale = scales(generator, n)
        build(Op.LINEAR_GRAD_WEIGHT, INT8, text)(grad, x, channel_scale, grad_w)
        assert torch.equal(grad_x, product(grad, w.t()).float() * one_scale)
        assert torch.equal(grad_w, product(grad.t(), x.t()).float() * channel_scale[:, None])


def test_int8_gradients_take_transposed_copies_in_place(build, generator):
    """A copy that the quantization wrote transposed is read as it is: its columns are contiguous."""
    m, k, n = 128, 96, 64
    grad, x, scale = integers(generator, m, n), integers(generator, m, k), scales(generator, 1)
    out = torch.empty(n, k, device="cuda")
    build(Op.LINEAR_GRAD_WEIGHT, INT8, TMA)(strided(grad, "transposed"), strided(x, "transposed"), scale, out)
    assert torch.equal(out, product(grad.t(), x.t()).float() * scale)


@pytest.mark.parametrize(("variant", "text"), [(SIXTEEN, TMA_16), (SIXTEEN, MMA_16), (HALF, TMA_16)])
@pytest.mark.parametrize("many_scales", [False, True])
@pytest.mark.parametrize("size", [(128, 64, 192), (100, 77, 43), (3, 5, 1), (513, 260, 130)], ids=str)
def test_16_bit_gradients(build, generator, variant, text, many_scales, size):
    m, k, n = size
    dtype = DTYPES[variant.grad_input]
    grad = torch.randn(m, n, generator=generator, device="cuda").to(dtype)
    w, x = integers(generator, n, k), integers(generator, m, k)
    w_scale, x_scale = (scales(generator, count if many_scales else 1) for count in (n, m))
    grad_x = torch.empty(m, k, device="cuda", dtype=DTYPES[request(Op.LINEAR_GRAD_INPUT, variant).variant.grad_input])
    build(Op.LINEAR_GRAD_INPUT, variant, text)(grad, w, w_scale, grad_x)
    exact = grad.double() @ (w.double() * w_scale.double()[:, None])
    reference = grad.float() @ (w.float() * w_scale[:, None]).to(dtype).float()
    bound = 2 * (reference.to(dtype).double() - exact).abs().max() + 1e-6 * exact.abs().max()
    assert (grad_x.double() - exact).abs().max() <= bound

    grad_w = torch.empty(n, k, device="cuda")
    build(Op.LINEAR_GRAD_WEIGHT, variant, text)(grad, x, x_scale, grad_w)
    exact = grad.double().t() @ (x.double() * x_scale.double()[:, None])
    dequantized = (x.float() * x_scale[:, None]).to(dtype).double()
    bound = 2 * (grad.double().t() @ dequantized - exact).abs().max() + 1e-5 * exact.abs().max()
    assert (grad_w.double() - exact).abs().max() <= bound


@pytest.mark.parametrize("text", [FLOAT8_TMA, MMA])
@pytest.mark.parametrize("size", [(128, 64, 192), (100, 77, 43), (257, 1040, 24)], ids=str)
def test_float8_output(build, generator, text, size):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("float8 tensor cores came with compute capability 8.9")
    m, k, n = size
    x, w = (torch.randn(rows, k, generator=generator, device="cuda").to(torch.float8_e4m3fn) for rows in (m, n))
    x_scale, w_scale = scales(generator, 1), scales(generator, n)
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    build(Op.LINEAR_OUTPUT, FLOAT8, text)(x, x_scale, w, w_scale, None, out)
    exact = product(x, w) * x_scale.double() * w_scale.double()
    unfused = (x.float() @ w.float().t() * x_scale * w_scale).bfloat16()
    # Float8 tensor cores add in fewer than float32's bits, which shows only before rounding to bfloat16.
    bound = 2 * (unfused.double() - exact).abs().max() + 2e-3 * exact.abs().max()
    assert (out.double() - exact).abs().max() <= bound


@pytest.mark.parametrize("size", [(128, 64, 192), (100, 77, 43)], ids=str)
def test_float8_gradients(build, generator, size):
    m, k, n = size
    grad = torch.randn(m, n, generator=generator, device="cuda").to(torch.float8_e5m2)
    w, x = (torch.randn(rows, k, generator=generator, device="cuda").to(torch.float8_e4m3fn) for rows in (n, m))
    scale = scales(generator, 1)
    grad_x, grad_w = torch.empty(m, k, device="cuda", dtype=torch.bfloat16), torch.empty(n, k, device="cuda")
    build(Op.LINEAR_GRAD_INPUT, FLOAT8_GRADIENTS, FLOAT8_TMA)(grad, w, scale, grad_x)
    build(Op.LINEAR_GRAD_WEIGHT, FLOAT8_GRADIENTS, FLOAT8_TMA)(grad, x, scale, grad_w)
    exact_x, exact_w = product(grad, w.t()) * scale.double(), product(grad.t(), x.t()) * scale.double()
    assert (grad_x.double() - exact_x).abs().max() <= 6e-3 * exact_x.abs().max()
    assert (grad_w.double() - exact_w).abs().max() <= 2e-3 * exact_w.abs().max()


@pytest.mark.parametrize("text", [TMA, STREAM_K, MMA, SIMT])
def test_empty_batches_and_empty_sums(build, generator, text):
    kernel, one = build(Op.LINEAR_OUTPUT, INT8, text), torch.ones(1, device="cuda")
    out = torch.empty(0, 32, device="cuda")
    kernel(integers(generator, 0, 64), one, integers(generator, 32, 64), one, None, out)
    bias = torch.arange(32.0, device="cuda")
    out = torch.full((4, 32), torch.nan, device="cuda")
    kernel(integers(generator, 4, 0), one, integers(generator, 32, 0), one, bias, out)
    assert torch.equal(out, bias.expand(4, 32))


def test_more_than_2_31_elements(build, generator):
    """Operand and output have more elements than 32 bits count; their far ends are right."""
    m, k, n = 2**22 + 100, 528, 520
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free device memory")
    x, w = integers(generator, m, k), integers(generator, n, k)
    out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    assert min(x.numel(), out.numel()) > 2**31
    scale = torch.full((1,), 2.0**-12, device="cuda")
    one = torch.ones(1, device="cuda")
    for text in (TMA, MMA):
        out.zero_()
        build(Op.LINEAR_OUTPUT, INT8_BFLOAT16, text)(x, scale, w, one, None, out)
        for rows in (slice(0, 64), slice(m // 2, m // 2 + 64), slice(m - 64, m)):
            assert torch.equal(out[rows], (product(x[rows], w) * scale.double()).float().bfloat16())


@pytest.mark.parametrize("text", [TMA, STREAM_K, MMA, SIMT])
def test_runs_on_the_current_stream_and_in_a_graph(build, generator, text):
    kernel, one = build(Op.LINEAR_OUTPUT, INT8, text), torch.ones(1, device="cuda")
    x, w = integers(generator, 100, 84), integers(generator, 36, 84)  # padded: workspaces are used
    out = torch.zeros(100, 36, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)  # what runs on another stream would be overtaken
        x.fill_(1)
        kernel(x, one, w, one, None, out)
    side.synchronize()
    assert torch.equal(out.double(), product(torch.ones_like(x), w))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(x, one, w, one, None, out)
    for value in (2, 3):
        x.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out.double(), product(x, w))


def test_runs_on_the_tensors_device(build, generator):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    kernel = build(Op.LINEAR_OUTPUT, INT8, TMA)
    x, w = integers(generator, 100, 84), integers(generator, 36, 84)
    expected = product(x, w).cpu()
    out = torch.zeros(100, 36, device="cuda:1")
    one = torch.ones(1, device="cuda:1")
    kernel(x.to("cuda:1"), one, w.to("cuda:1"), one, None, out)
    assert torch.equal(out.double().cpu(), expected)
    assert torch.cuda.current_device() == 0


def test_bad_calls_are_named(build, generator):
    kernel, one = build(Op.LINEAR_OUTPUT, INT8, TMA), torch.ones(1, device="cuda")
    x, w, out = integers(generator, 8, 16), integers(generator, 4, 16), torch.empty(8, 4, device="cuda")
    where = r"linear.output \(int8 x int8 -> float32\) of shapes .* with the configuration path=tma.* cannot run: "
    with pytest.raises(BackendError, match=where + r"operands of these shapes do not give an output of shape \(8, 5\)"):
        kernel(x, one, w, one, None, torch.empty(8, 5, device="cuda"))
    with pytest.raises(BackendError, match="cannot run: the kernel was built for int8 x int8 -> float32"):
        kernel(x.half(), one, w, one, None, out)
    with pytest.raises(BackendError, match="the first operand has 3 scales, expected 1 or 8"):
        kernel(x, torch.ones(3, device="cuda"), w, one, None, out)
    with pytest.raises(BackendError, match=r"the second operand's scale is torch\.float16"):
        kernel(x, one, w, one.half(), None, out)
    with pytest.raises(BackendError, match="the bias has 5 elements"):
        kernel(x, one, w, one, torch.zeros(5, device="cuda"), out)
    with pytest.raises(BackendError, match="expected one CUDA device"):
        kernel(x, one, w.cpu(), one, None, out)
    filters = torch.empty(16, 4, dtype=torch.int8, device="cuda")
    with pytest.raises(BackendError, match=r"takes one scale, or one for each of .* rows, got 16"):
        build(Op.LINEAR_GRAD_INPUT, INT8, TMA)(x, filters, torch.ones(16, device="cuda"), out)
