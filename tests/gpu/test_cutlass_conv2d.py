"""CUTLASS's int8 convolutions on a GPU against exact references: every path, odd sizes, layouts, streams, graphs."""

from __future__ import annotations

import threading

import attrs
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("qsync_kernels_cutlass")

from qsync_core.geometry import Geometry  # noqa: E402
from qsync_core.ir.precision import Precision  # noqa: E402
from qsync_core.ir.variant import Variant  # noqa: E402
from qsync_core.kernels.backend import KernelConfig, KernelRequest, Op  # noqa: E402
from qsync_kernels_cutlass.architectures import architecture_of  # noqa: E402
from qsync_kernels_cutlass.backend import CutlassBackend  # noqa: E402
from qsync_kernels_cutlass.compiling.compile import compile_files  # noqa: E402
from qsync_kernels_cutlass.configs.config import ConvConfig  # noqa: E402
from qsync_kernels_cutlass.kernels import conv2d  # noqa: E402
from qsync_kernels_cutlass.sources import request_sources  # noqa: E402

pytestmark = pytest.mark.gpu

INT8 = attrs.evolve(Variant.of(Precision.INT8, output=Precision.FLOAT32), grad_input=Precision.INT8)
BFLOAT16 = attrs.evolve(INT8, output=Precision.BFLOAT16)
FLOAT16 = attrs.evolve(INT8, output=Precision.FLOAT16)
DTYPES = {Precision.FLOAT32: torch.float32, Precision.FLOAT16: torch.float16, Precision.BFLOAT16: torch.bfloat16}

PINGPONG = "path=tma;tile=128x64x64;schedule=pingpong"
COOPERATIVE = "path=tma;tile=128x128x128;cluster=2x1"
MULTICAST_X = "path=tma;tile=128x64x128;cluster=1x2"
MMA = "path=mma;tile=128x64x64;warp=64x32x64;instruction=16x8x32;stages=3"
ANALYTIC = "path=mma;tile=64x64x64;warp=32x32x64;instruction=16x8x32;stages=3;iterator=analytic"
CONFIGS = (PINGPONG, COOPERATIVE, MULTICAST_X, MMA, ANALYTIC)

# x, w, stride, padding, dilation, groups
GEOMETRIES = [
    ((1, 16, 1, 1), (16, 16, 1, 1), (1, 1), (0, 0), (1, 1), 1),
    ((3, 64, 9, 11), (64, 64, 3, 3), (1, 1), (1, 1), (1, 1), 1),
    ((2, 32, 13, 7), (72, 32, 3, 3), (2, 2), (1, 1), (1, 1), 1),
    ((5, 128, 8, 8), (136, 128, 1, 1), (2, 2), (0, 0), (1, 1), 1),
    ((2, 48, 12, 12), (40, 48, 5, 3), (1, 2), (2, 0), (2, 1), 1),
    ((2, 80, 5, 17), (24, 80, 2, 4), (3, 1), (1, 3), (1, 3), 1),
    ((4, 96, 10, 10), (144, 32, 3, 3), (1, 1), (1, 1), (1, 1), 3),
    ((2, 3, 37, 41), (64, 3, 7, 7), (2, 2), (3, 3), (1, 1), 1),
    ((2, 3, 20, 20), (24, 3, 3, 3), (1, 1), (1, 1), (1, 1), 1),
    ((2, 1, 9, 9), (8, 1, 2, 2), (1, 1), (0, 1), (1, 1), 1),
    ((2, 3, 32, 48), (24, 3, 16, 16), (16, 16), (0, 0), (1, 1), 1),
    ((1, 16, 24, 21), (16, 16, 11, 3), (9, 2), (1, 1), (1, 1), 1),
    ((2, 20, 9, 9), (13, 20, 3, 3), (1, 1), (1, 1), (1, 1), 1),
    ((2, 5, 9, 9), (7, 5, 3, 3), (2, 2), (1, 1), (2, 2), 1),
]


def capability():
    major, minor = torch.cuda.get_device_capability()
    return f"{major}.{minor}"


def request(x, w, stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1, *, op=Op.CONV2D_OUTPUT, variant=INT8):
    sizes = {"stride": stride, "padding": padding, "dilation": dilation}
    return KernelRequest(op, variant, (tuple(x), tuple(w)), Geometry(**sizes, groups=groups), "cuda", capability())


def build(asked, text):
    return conv2d.build(asked, ConvConfig.parse(text), architecture_of(asked.compute_capability))


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """All kernels of this module, compiled at once."""
    arch, sources = architecture_of(capability()), {}
    for op in (Op.CONV2D_OUTPUT, Op.CONV2D_GRAD_INPUT):
        for variant in (INT8, BFLOAT16, FLOAT16):
            for text in CONFIGS if variant is INT8 else CONFIGS[:1] + CONFIGS[3:4]:
                asked = request((2, 16, 8, 8), (16, 16, 3, 3), op=op, variant=variant)
                for source in request_sources(asked, ConvConfig.parse(text), arch):
                    sources[source.name] = source
    compile_files(list(sources.values()))


def integers(*shape, seed=0, top=127):
    generator = torch.Generator("cuda").manual_seed(seed)
    values = torch.randint(-top, top + 1, shape, generator=generator, device="cuda", dtype=torch.int8)
    return values.contiguous(memory_format=torch.channels_last)


def exact(x, w, stride, padding, dilation, groups):
    """The int64 result, computed in float64, which holds every sum here exactly; on the CPU, without fast algorithms."""
    return torch.nn.functional.conv2d(x.cpu().double(), w.cpu().double(), None, stride, padding, dilation, groups).cuda()


def outputs_like(values, dtype):
    return torch.full(values.shape, torch.nan, dtype=dtype, device="cuda").contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("text", CONFIGS)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_sums_are_exact(text, geometry):
    # The largest sum, 127 * 40 * 1152 < 2^24, is exact in the float32 output.
    x, w = integers(*geometry[0], seed=1, top=40 if geometry[1][1] * geometry[1][2] > 128 else 127), integers(*geometry[1], seed=2)
    wanted = exact(x, w, *geometry[2:])
    out, one = outputs_like(wanted, torch.float32), torch.ones(1, device="cuda")
    build(request(*geometry), text)(x, one, w, one, None, out)
    assert torch.equal(out.double(), wanted)


@pytest.mark.parametrize("text", [PINGPONG, MMA])
@pytest.mark.parametrize("variant", [INT8, BFLOAT16, FLOAT16], ids=lambda variant: str(variant.output))
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_dequantization_errs_no_more_than_rounding_once(text, variant, per_channel, with_bias):
    geometry = ((3, 64, 9, 11), (72, 64, 3, 3), (1, 1), (1, 1), (1, 1), 1)
    x, w = integers(*geometry[0], seed=3), integers(*geometry[1], seed=4)
    x_scale = torch.rand(1, device="cuda") * 1e-2
    w_scale = torch.rand(72 if per_channel else 1, device="cuda") * 1e-2
    bias = torch.randn(72, device="cuda") if with_bias else None
    total = exact(x, w, *geometry[2:])
    wanted = total * x_scale.double() * w_scale.double().view(-1, 1, 1) + (0 if bias is None else bias.double().view(-1, 1, 1))
    dtype = DTYPES[variant.output]
    out = outputs_like(wanted, dtype)
    build(request(*geometry, variant=variant), text)(x, x_scale, w, w_scale, bias, out)
    unfused = total.float() * x_scale * w_scale.view(-1, 1, 1) + (0 if bias is None else bias.view(-1, 1, 1))
    error = (out.double() - wanted).abs().max()
    of_unfused = (unfused.to(dtype).double() - wanted).abs().max()
    assert error <= 2 * of_unfused


@pytest.mark.parametrize("text", CONFIGS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_gradient_of_the_input_is_autograds(text, layout):
    x = torch.zeros(2, 48, 10, 12, dtype=torch.double, device="cuda", requires_grad=True)
    w = integers(64, 48, 3, 2, seed=5).contiguous(memory_format=layout)
    y = torch.nn.functional.conv2d(x, w.double(), None, 1, (1, 2), (2, 2))
    grad = integers(*y.shape, seed=6, top=40).contiguous(memory_format=layout)
    (wanted,) = torch.autograd.grad(y, x, grad.double())
    asked = request(grad.shape, w.shape, (1, 1), (1, 2), (2, 2), op=Op.CONV2D_GRAD_INPUT)
    out = torch.full_like(wanted, torch.nan, dtype=torch.float32).contiguous(memory_format=layout)
    build(asked, text)(grad, w, torch.full((1,), 0.5, device="cuda"), out)
    torch.testing.assert_close(out.double(), 0.5 * wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("text", [PINGPONG, MMA])
def test_layouts_that_are_not_channels_last_give_the_same(text):
    x, w = integers(2, 32, 9, 9), integers(32, 32, 3, 3, seed=1)
    wanted = exact(x, w, (1, 1), (1, 1), (1, 1), 1)
    one, kernel = torch.ones(1, device="cuda"), build(request(x.shape, w.shape, padding=(1, 1)), text)
    out = torch.empty(wanted.shape, device="cuda")
    kernel(x.contiguous(), one, w.contiguous(), one, None, out)
    assert torch.equal(out.double(), wanted)
    out = torch.full((2, 40, 9, 9), torch.nan, device="cuda").contiguous(memory_format=torch.channels_last)[:, 4:36]
    kernel(torch.cat([x, x], 3)[..., 9:], one, w.flip(0).flip(0), one, None, out)
    assert torch.equal(out.double(), wanted)


@pytest.mark.parametrize("text", [PINGPONG, MMA])
def test_empty_batches_touch_nothing(text):
    kernel = build(request((2, 16, 5, 5), (16, 16, 3, 3)), text)
    one = torch.ones(1, device="cuda")
    out = torch.empty((0, 16, 3, 3), device="cuda")
    assert kernel(integers(0, 16, 5, 5), one, integers(16, 16, 3, 3), one, None, out) is None


@pytest.mark.parametrize("text", [PINGPONG, MMA])
def test_a_captured_graph_replays_with_new_values(text):
    x, w = integers(2, 3, 16, 16), integers(16, 3, 3, 3, seed=1)
    kernel, one = build(request(x.shape, w.shape, padding=(1, 1)), text), torch.ones(1, device="cuda")
    out = torch.empty((2, 16, 16, 16), device="cuda").contiguous(memory_format=torch.channels_last)
    kernel(x, one, w, one, None, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(x, one, w, one, None, out)
    x.copy_(integers(2, 3, 16, 16, seed=9))
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out.double(), exact(x, w, (1, 1), (1, 1), (1, 1), 1))


def test_launches_follow_the_current_stream():
    x, w = integers(64, 64, 56, 56), integers(64, 64, 3, 3, seed=1)
    kernel, one = build(request(x.shape, w.shape, padding=(1, 1)), PINGPONG), torch.ones(1, device="cuda")
    out = torch.zeros((64, 64, 56, 56), device="cuda").contiguous(memory_format=torch.channels_last)
    kernel(x, one, w, one, None, out)
    wanted, stream = out.clone(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        # Were it launched on another stream, it would have read x before the sleep ended.
        x.neg_()
        kernel(x, one, w, one, None, out)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(out, -wanted)


def test_threads_share_a_kernel():
    kernel, one = build(request((2, 32, 8, 8), (32, 32, 3, 3), padding=(1, 1)), PINGPONG), torch.ones(1, device="cuda")
    wrong = []

    def work(seed):
        x, w = integers(1 + seed % 3, 32, 8, 8, seed=seed), integers(32, 32, 3, 3, seed=seed + 100)
        wanted = exact(x, w, (1, 1), (1, 1), (1, 1), 1)
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                out = outputs_like(wanted, torch.float32)
                kernel(x, one, w, one, None, out)
                if not torch.equal(out.double(), wanted):
                    wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    torch.cuda.synchronize()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("text", [PINGPONG, MMA])
def test_more_than_two_to_the_31_elements(text):
    # 2.2e9 elements of x; the last images lie beyond what 32-bit offsets reach.
    images = 2**31 // (64 * 128 * 128) + 64
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of free GPU memory")
    x = torch.zeros((images, 64, 128, 128), dtype=torch.int8, device="cuda").to(memory_format=torch.channels_last)
    x[-2:] = integers(2, 64, 128, 128)
    w, one = integers(8, 64, 3, 3, seed=1), torch.ones(1, device="cuda")
    out = torch.full((images, 8, 64, 64), torch.nan, device="cuda").contiguous(memory_format=torch.channels_last)
    build(request(x.shape, w.shape, (2, 2), (1, 1)), text)(x, one, w, one, None, out)
    assert torch.equal(out[-2:].double(), exact(x[-2:], w, (2, 2), (1, 1), (1, 1), 1))
    assert not out[:-2].any()


def test_1x1_convolutions_run_as_products_and_as_convolutions():
    x, w = integers(3, 96, 7, 5, seed=1), integers(48, 96, 1, 1, seed=2)
    wanted, one = exact(x, w, (1, 1), (0, 0), (1, 1), 1), torch.ones(1, device="cuda")
    asked = request(x.shape, w.shape)
    as_product = CutlassBackend().build(asked, KernelConfig("path=mma;tile=64x64x64;warp=32x32x64;instruction=16x8x32;stages=3"))
    for kernel in (as_product, build(asked, PINGPONG)):
        out = outputs_like(wanted, torch.float32)
        kernel(x, one, w, one, None, out)
        assert torch.equal(out.double(), wanted)


def test_the_gradient_of_a_1x1_convolution_runs_as_a_product():
    grad, w = integers(3, 48, 7, 5, seed=1), integers(48, 96, 1, 1, seed=2)
    asked = request(grad.shape, w.shape, op=Op.CONV2D_GRAD_INPUT)
    kernel = CutlassBackend().build(asked, KernelConfig("path=mma;tile=64x64x64;warp=32x32x64;instruction=16x8x32;stages=3"))
    wanted = 0.5 * exact(grad, w.permute(1, 0, 2, 3), (1, 1), (0, 0), (1, 1), 1)
    out = outputs_like(wanted, torch.float32)
    kernel(grad, w, torch.full((1,), 0.5, device="cuda"), out)
    assert torch.equal(out.double(), wanted)
