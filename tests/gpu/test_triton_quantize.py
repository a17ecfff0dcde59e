"""The Triton quantization kernels on a real GPU, against the same formulas on that GPU."""

from __future__ import annotations

import attrs
import pytest

torch = pytest.importorskip("torch")

from qsync_core.ir.precision import Granularity, Precision, Rounding  # noqa: E402
from qsync_core.ir.variant import Variant  # noqa: E402
from qsync_core.kernels.backend import KernelRequest, Op  # noqa: E402
from qsync_torch.aten.random_bits import checksum, stream_of  # noqa: E402

SHAPES = [(16, 64, 56, 56), (4608, 768), (3, 1001), (5, 100_003), (1, 1), (33, 65), (2048, 40), (12, 70_000)]


def build(granularity, rounding, shapes, op=Op.QUANTIZE, precision=Precision.INT8, configs=None):
    pytest.importorskip("triton")
    from qsync_kernels_triton.backend import TritonBackend

    variant = attrs.evolve(Variant.of(precision, rounding=rounding), x_granularity=granularity)
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    request = KernelRequest(op, variant, shapes, device_kind="cuda", compute_capability=capability)
    backend = TritonBackend()
    if reasons := backend.unsupported_reasons(request):
        pytest.skip("; ".join(reasons))
    return [backend.build(request, config) for config in backend.candidate_configs(request)[:configs]]


def random(shape, dtype=torch.float32, seed=0):
    return (torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)) * 3).to(dtype)


def groups(shape, granularity):
    numel = 1
    for size in shape:
        numel *= size
    return {Granularity.PER_TENSOR: 1, Granularity.PER_CHANNEL: shape[0], Granularity.PER_ROW: numel // shape[-1]}[granularity]


def run(kernel, x, rows, seed=5, offset=9, form=torch.int8, **extras):
    q, scale = torch.empty_like(x, dtype=form), torch.empty(rows, device=x.device)
    stream = torch.empty(1, dtype=torch.int64, device=x.device)
    kernel(x, q, scale, stream, seed, offset, **extras)
    assert torch.equal(stream, stream_of(offset, x))
    return q, scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rounding", [Rounding.NEAREST, Rounding.FLOOR])
@pytest.mark.parametrize("granularity", list(Granularity))
@pytest.mark.parametrize("shape", SHAPES)
def test_nearest_and_floor_equal_the_formula_exactly(shape, granularity, rounding, dtype):
    x, rows = random(shape, dtype), groups(shape, granularity)
    flat = x.reshape(rows, -1).float()
    expected_scale = (flat.abs().amax(dim=1).double() / 127).float()
    y = flat / expected_scale[:, None]
    expected = (y.round() if rounding is Rounding.NEAREST else y.floor()).clamp(-127, 127).to(torch.int8).reshape(shape)
    for kernel in build(granularity, rounding, (shape,), configs=None if dtype is torch.float32 else 1):
        q, scale = run(kernel, x, rows)
        assert torch.equal(scale, expected_scale)
        assert torch.equal(q, expected)


@pytest.mark.parametrize("granularity", list(Granularity))
@pytest.mark.parametrize("shape", SHAPES)
def test_stochastic_rounding_is_unbiased_and_independent_of_the_configuration(shape, granularity):
    x, rows = random(shape), groups(shape, granularity)
    results = [run(kernel, x, rows) for kernel in build(granularity, Rounding.STOCHASTIC, (shape,))]
    for q, scale in results[1:]:
        assert torch.equal(q, results[0][0])
        assert torch.equal(scale, results[0][1])
    q, scale = results[0]
    error = q.reshape(rows, -1).double() - x.reshape(rows, -1).double() / scale.double()[:, None]
    assert error.abs().max() < 1.0001
    # Over a unit interval the residual's variance is a sixth in the mean.
    assert abs(error.mean().item()) < 5 * (1 / 6 / x.numel()) ** 0.5 + 2.0**-16


CHECKSUMS = {(64, 1001): -5463672, (3, 5, 67): 44536}
"""Of integers that Triton's interpreter gave on a CPU."""


@pytest.mark.parametrize("shape", list(CHECKSUMS))
def test_the_bits_are_those_of_the_interpreter(shape):
    numel = torch.Size(shape).numel()
    x = ((torch.arange(numel, dtype=torch.float32) * 0.37) % 7 - 3.5).reshape(shape).cuda()
    (kernel,) = build(Granularity.PER_TENSOR, Rounding.STOCHASTIC, (shape,), configs=1)
    q, _ = run(kernel, x, 1, seed=123456789012345, offset=98765432109876)
    weights = torch.arange(numel, device="cuda") % 1009
    assert int((q.reshape(-1).long() * weights).sum()) == CHECKSUMS[shape]


@pytest.mark.parametrize("form", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_rounded_to_nearest_is_the_cast_of_torch(form):
    x = random((100, 1000)) * torch.logspace(-9, 0, 1000, device="cuda")
    (kernel,) = build(Granularity.PER_TENSOR, Rounding.NEAREST, ((100, 1000),), precision=Precision.FLOAT8_E4M3FN, configs=1)
    q, scale = run(kernel, x, 1, form=form)
    assert torch.equal(q.float(), (x / scale).to(form).float())


@pytest.mark.parametrize("shape", [(100, 1000), (4608, 768), (33, 65)])
def test_multiplier_and_transposed_result(shape):
    x, multiplier = random(shape, torch.bfloat16), torch.rand(shape[1], device="cuda") + 0.5
    (kernel,) = build(Granularity.PER_TENSOR, Rounding.STOCHASTIC, (shape,), configs=1)
    transposed = torch.empty(shape[::-1], dtype=torch.int8, device="cuda")
    q, scale = run(kernel, x, 1, multiplier=multiplier, transposed_out=transposed)
    product = x.float() * multiplier
    difference = (int(checksum(x)) - int(checksum(product))) * (0x9E3779B9 << 32)
    expected, expected_scale = run(kernel, product, 1, offset=(9 + difference + (1 << 63)) % (1 << 64) - (1 << 63))
    assert torch.equal(q, expected)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(transposed, q.t())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("granularity", list(Granularity))
def test_a_value_that_is_not_finite_makes_its_scale_infinite(bad, granularity):
    x = random((4, 50_000))
    x[2, 777] = bad
    for kernel in build(granularity, Rounding.STOCHASTIC, ((4, 50_000),)):
        _, scale = run(kernel, x, groups((4, 50_000), granularity))
        assert torch.isinf(scale).tolist() == ([True] if granularity is Granularity.PER_TENSOR else [False, False, True, False])


def test_more_than_two_to_the_thirty_one_elements():
    numel = 2**31 + 4096 + 24
    if torch.cuda.mem_get_info()[0] < 12 * numel:  # counting takes eight bytes an element
        pytest.skip(f"needs {12 * numel >> 30} GiB of free GPU memory")
    x = torch.zeros(numel, dtype=torch.float16, device="cuda")
    x[-1], x[-2], x[2**31] = 127, 5, -3
    (kernel,) = build(Granularity.PER_TENSOR, Rounding.STOCHASTIC, ((numel,),), configs=1)
    q, scale = run(kernel, x, 1)
    assert scale.item() == 1.0
    assert (q[-1].item(), q[-2].item(), q[2**31].item()) == (127, 5, -3)
    assert int(q.count_nonzero()) == 3


def test_it_runs_on_the_current_stream_and_in_a_graph():
    shape = (512, 4096)
    x = random(shape)
    for granularity in (Granularity.PER_TENSOR, Granularity.PER_ROW):
        (kernel,) = build(granularity, Rounding.STOCHASTIC, (shape,), configs=1)
        expected, expected_scale = run(kernel, x, groups(shape, granularity))
        static = torch.zeros_like(x)
        q, scale, streams = torch.empty_like(expected), torch.empty_like(expected_scale), torch.empty(1, dtype=torch.int64).cuda()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kernel(static, q, scale, streams, 5, 9)
        static.copy_(x)
        graph.replay()
        assert torch.equal(q, expected)
        assert torch.equal(scale, expected_scale)
        assert torch.equal(streams, stream_of(9, x))
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)
            later = x * 2
            found, found_scale = run(kernel, later, scale.numel())
        stream.synchronize()
        assert torch.equal(found, run(kernel, x * 2, scale.numel())[0])
        assert torch.equal(found_scale, expected_scale * 2)
