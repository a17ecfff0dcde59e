"""The Triton producers on a real GPU: against float64 beside PyTorch's own operators in the same format, and in CUDA graphs."""

from __future__ import annotations

import functools
import itertools
import random

import attrs
import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402

from qsync_core.ir.chain import Activation, ChainForm  # noqa: E402
from qsync_core.ir.precision import Granularity, Precision, Rounding  # noqa: E402
from qsync_core.ir.variant import Variant  # noqa: E402
from qsync_core.kernels.backend import KernelRequest, Op  # noqa: E402

EPS = 1e-5
DEVICE = "cuda"
NONE, RELU = Activation.NONE, Activation.RELU
FUNCTIONS = {
    NONE: lambda z: z,
    RELU: functional.relu,
    Activation.GELU: functional.gelu,
    Activation.GELU_TANH: lambda z: functional.gelu(z, approximate="tanh"),
    Activation.SILU: functional.silu,
}
ROUNDOFF = {torch.float32: 2.0**-21, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""What a correctly rounded result is off by at most; where PyTorch's is off by less, by luck, this is compared with."""


@functools.cache
def build(op, chain=None, granularity=Granularity.PER_TENSOR, rounding=Rounding.STOCHASTIC, shapes=(), configs=1):
    pytest.importorskip("triton")
    from qsync_kernels_triton.backend import TritonBackend

    base = attrs.evolve(Variant.of(Precision.INT8, rounding=rounding), x_granularity=granularity)
    keeps_floats = op.startswith("activation") and chain.activation is RELU
    variant = attrs.evolve(base, saved=Precision.FLOAT16) if keeps_floats else base
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    more = {} if chain is None else {"chain": chain}
    request = KernelRequest(op, variant, shapes, device_kind="cuda", compute_capability=capability, **more)
    backend = TritonBackend()
    if reasons := backend.unsupported_reasons(request):
        pytest.skip("; ".join(reasons))
    kernels = [backend.build(request, config) for config in backend.candidate_configs(request)[:configs]]
    return kernels[0] if configs == 1 else kernels


def normal(shape, dtype=torch.float32, seed=0, mean=0.0, deviation=1.0):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randn(shape, device=DEVICE, generator=generator) * deviation + mean).to(dtype)


def last(x):
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x


def like(x, dtype=None):
    return torch.empty_like(x, dtype=dtype)


def vector(*shape):
    return torch.empty(shape, device=DEVICE)


class Producer:
    """One producer with its operands, the way it is, the way PyTorch runs it unfused, and in float64."""

    def __init__(self, kind, shape, chain, dtype, seed, mean=0.0, granularity=Granularity.PER_TENSOR):
        self.kind, self.chain, self.granularity = kind, chain, granularity
        self.x = last(normal(shape, dtype, seed, mean))
        self.grad = last(normal(shape, dtype, seed + 1))
        columns = shape[1]
        self.weight, self.bias = normal((columns,), seed=seed + 2), normal((columns,), seed=seed + 3)
        self.residual = last(normal(shape, dtype, seed + 4)) if chain.residual else None

    def by_torch(self, dtype):
        """Result and gradients (of x, residual, weight, bias), every operator by itself in one format."""
        x, *others = [
            None if t is None else t.to(dtype).detach().clone().requires_grad_() for t in (self.x, self.residual)
        ]  # fmt: skip
        (residual,) = others
        # PyTorch keeps weights of a batch norm in float32 beside 16-bit images, and wants a layer norm's in the format of x.
        of_parameters = torch.float64 if dtype is torch.float64 else torch.float32 if self.kind == "batch_norm" else dtype
        weight, bias = (p.to(of_parameters).detach().clone().requires_grad_() for p in (self.weight, self.bias))
        if self.kind == "batch_norm":
            z = functional.batch_norm(x, None, None, weight, bias, training=True, eps=EPS)
            z = z if residual is None else z + residual
        elif self.kind == "layer_norm":
            z = functional.layer_norm(x if residual is None else x + residual, x.shape[1:], weight, bias, EPS)
        else:
            z = x
        r = FUNCTIONS[self.chain.activation](z)
        r.backward(self.grad.to(r.dtype))
        leaves = (x, residual, weight, bias)
        return r.detach(), [leaf.grad if leaf is not None else None for leaf in leaves]

    def run(self, seed=5, x_seed=6, offset=7, eight_bit=False):
        """The kernels: result, gradients, copies; backward of the float x, or of its 8-bit copy."""
        x, grad, (rows, columns) = self.x, self.grad, (self.x.shape[0], self.x.shape[1])
        forward = build(f"{self.kind}.output", self.chain, self.granularity)
        backward = build(f"{self.kind}.grad_input", self.chain, self.granularity)
        groups = columns if self.kind == "batch_norm" else rows
        keeps = not (self.kind == "activation" and self.chain.activation is RELU)
        self.out, self.q, self.scale = (
            like(x),
            like(x, torch.int8),
            vector(1 if self.granularity is Granularity.PER_TENSOR else rows),
        )
        self.x_q, self.x_scale = (like(x, torch.int8), vector(groups)) if keeps else (None, None)
        self.stream = torch.empty(1, dtype=torch.int64, device=x.device)
        copies = (self.q, self.scale, self.stream, self.x_q, self.x_scale)
        grad_input = like(x)
        if self.kind == "activation":
            forward(x, self.out, *copies, seed, x_seed, offset)
            kept = (self.x_q, self.x_scale) if eight_bit else (x, None)
            backward(grad, *kept, grad_input)
            return self.out, [grad_input, None, None, None]
        mean, spread, of_weight, of_bias = vector(groups), vector(groups), vector(columns), vector(columns)
        if self.kind == "layer_norm":
            kept_sum = None if self.residual is None else like(x)
            forward(x, self.weight, self.bias, EPS, self.residual, kept_sum, mean, spread, self.out, *copies, seed, x_seed, offset)
            kept = (self.x_q, self.x_scale) if eight_bit else (x if kept_sum is None else kept_sum, None)
            backward(grad, *kept, mean, spread, self.weight, grad_input, of_weight, of_bias)
            return self.out, [grad_input, None if self.residual is None else grad_input, of_weight, of_bias]
        b, c, h, w = x.shape
        most = None if self.residual is None else self.residual.abs().amax().float().view(1)
        self.absmax = vector(1)
        bits = torch.empty((b, h, w, -(-c // 8)), dtype=torch.uint8, device=x.device)
        given = (x, self.weight, self.bias, EPS, self.residual, most)
        forward(*given, mean, spread, self.out, self.absmax, *copies, bits, seed, x_seed, offset)
        kept = (self.x_q, self.x_scale) if eight_bit else (x, None)
        of_residual = None if self.residual is None else like(x)
        bits = bits if eight_bit or self.residual is not None else None
        backward(grad, *kept, mean, spread, self.weight, self.bias, EPS, bits, grad_input, of_residual, of_weight, of_bias)
        return self.out, [grad_input, of_residual, of_weight, of_bias]


def error(found, exact):
    norm = exact.norm().item()
    return (found.double() - exact).norm().item() / norm if norm else float((found.double() - exact).norm())


def random_producer(draw):
    choose = random.Random(draw)
    kind = choose.choice(["batch_norm", "layer_norm", "activation"])
    dtype = choose.choice([torch.float16, torch.bfloat16, torch.float32])
    residual, columns = choose.random() < 0.5, choose.choice([3, 8, 24, 40, 64, 97, 128, 256, 320, 768, 1000, 2048])
    if kind == "batch_norm":
        side = choose.choice([1, 2, 7, 14, 28])
        shape = (choose.choice([2, 3, 8, 32]), columns, side, choose.choice([side, side + 1]))
        return Producer(kind, shape, ChainForm(choose.choice([NONE, RELU]), residual), dtype, draw, choose.choice([0.0, 3.0]))
    columns = choose.choice([columns, 3072, 8192, 10_001, 16_384])
    granularity = choose.choice([Granularity.PER_ROW, Granularity.PER_TENSOR])
    shape = (choose.choice([1, 2, 33, 384, 1001]), columns)
    if kind == "layer_norm":
        return Producer(kind, shape, ChainForm(residual=residual), dtype, draw, choose.choice([0.0, 3.0]), granularity)
    function = choose.choice([f for f in FUNCTIONS if f is not NONE])
    return Producer(kind, shape, ChainForm(function), dtype, draw, 0.0, granularity)


@pytest.mark.parametrize("hundred", range(0, 200, 20))
def test_random_shapes_are_at_most_twice_as_far_from_float64_as_pytorch_unfused(hundred):
    for draw in range(hundred, hundred + 20):
        problem = random_producer(draw)
        exact, gradients = problem.by_torch(torch.float64)
        unfused, unfused_gradients = problem.by_torch(problem.x.dtype)
        out, found = problem.run()
        said = f"draw {draw}: {problem.kind} {tuple(problem.x.shape)} {problem.x.dtype} {problem.chain}"
        for name, one, other, best in zip(
            ("result", "x", "residual", "weight", "bias"), (out, *found), (unfused, *unfused_gradients), (exact, *gradients),
            strict=True,
        ):  # fmt: skip
            if one is not None and best is not None:
                allowed = 2 * max(error(other, best), ROUNDOFF[one.dtype] / 2)
                assert error(one, best) <= allowed, f"{said}: {name} {error(one, best):.2e}, PyTorch {error(other, best):.2e}"
        scale = problem.scale.double().view([-1] + [1] * (exact.ndim - 1))
        off = (problem.q.double() * scale - exact).abs() / scale
        assert off.max() < 1.05 + 200 * ROUNDOFF[problem.x.dtype], said


KINDS = [("batch_norm", (8, 64, 7, 7), ChainForm(RELU)), ("layer_norm", (64, 192), ChainForm(residual=True))]


@pytest.mark.parametrize(("kind", "shape", "chain"), KINDS)
def test_gradients_from_8_bit_copies_are_unbiased(kind, shape, chain):
    """Of the weight and of the bias exactly; of x up to what vanishes with the size of its sums."""
    problem, draws = Producer(kind, shape, chain, torch.float32, 3), 400
    problem.run()
    _, exact = problem.run()
    sums = [torch.zeros_like(g, dtype=torch.float64) if g is not None else None for g in exact]
    squares = [torch.zeros_like(g, dtype=torch.float64) if g is not None else None for g in exact]
    for offset in range(draws):
        _, found = problem.run(offset=offset, eight_bit=True)
        for total, square, g, true in zip(sums, squares, found, exact, strict=True):
            if g is not None:
                total += g.double() - true.double()
                square += (g.double() - true.double()).square()
    for place in (2, 3):
        mean, deviation = sums[place] / draws, (squares[place] / draws).sqrt()
        size = exact[place].double().abs().max()
        assert (mean.abs() <= 5 * deviation / draws**0.5 + 1e-5 * size).all()
    bias = (sums[0] / draws).norm() / exact[0].double().norm()
    noise = (squares[0] / draws).sqrt().norm() / exact[0].double().norm() / draws**0.5
    assert bias < 1.3 * noise + 2e-3


@pytest.mark.parametrize(("kind", "shape", "chain"), [*KINDS, ("activation", (96, 3072), ChainForm(Activation.SILU))])
def test_copies_have_the_scale_of_quantize_and_are_alike_every_time(kind, shape, chain):
    """Which way an element is rounded follows from the bits that a kernel reads: here the chain's input, there its result."""
    problem = Producer(kind, shape, chain, torch.float32, 4)
    _, first = problem.run()
    q, scale, stream = like(problem.x, torch.int8), vector(1), torch.empty(1, dtype=torch.int64, device=DEVICE)
    build(Op.QUANTIZE, shapes=(shape,))(problem.out, q, scale, stream, 5, 7)
    assert torch.equal(problem.scale, scale)
    assert ((problem.q.double() - problem.out.double() / scale.double()).abs() < 1 + 1e-4).all()
    assert (problem.q != q).float().mean() > 0.05
    _, again = problem.run()
    assert all(one is None or torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_every_configuration_gives_the_same_up_to_the_order_of_sums():
    problem = Producer("batch_norm", (16, 96, 14, 13), ChainForm(RELU, residual=True), torch.float16, 8)
    expected, gradients = problem.by_torch(torch.float64)
    b, c, h, w = problem.x.shape
    kernels = build("batch_norm.output", problem.chain, configs=20)
    backs = build("batch_norm.grad_input", problem.chain, configs=20)
    most = problem.residual.abs().amax().float().view(1)
    assert len(backs) >= len(kernels)
    for forward, backward in zip(itertools.cycle(kernels), backs, strict=False):
        mean, var, out, bits = (
            vector(c),
            vector(c),
            like(problem.x),
            torch.empty((b, h, w, c // 8), dtype=torch.uint8, device=DEVICE),
        )
        given = (problem.x, problem.weight, problem.bias, EPS, problem.residual, most)
        forward(*given, mean, var, out, vector(1), None, None, None, None, None, bits, 1, 2, 3)
        assert error(out, expected) < 2.0**-11
        found = [like(out), like(out), vector(c), vector(c)]
        backward(problem.grad, problem.x, None, mean, var, problem.weight, problem.bias, EPS, bits, *found)
        assert all(error(one, best) < 2.0**-10 for one, best in zip(found, gradients, strict=True))


@pytest.mark.parametrize(("kind", "shape", "chain"), [*KINDS, ("activation", (96, 3072), ChainForm(Activation.GELU))])
def test_a_captured_call_computes_anew_and_draws_new_numbers(kind, shape, chain):
    problem = Producer(kind, shape, chain, torch.float16, 6)
    counter = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    problem.run(offset=counter)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        problem.run(offset=counter)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, gradients = problem.run(offset=counter)
        counter += 1
    copies = []
    problem.x.mul_(1.5)
    for _ in range(2):
        graph.replay()
        copies.append(problem.q.clone())
    assert (copies[0] != copies[1]).float().mean() > 0.1
    exact, expected = problem.by_torch(torch.float64)
    assert error(out, exact) < 2.0**-10
    assert error(gradients[0], expected[0]) < 2.0**-9


def test_more_than_two_to_the_thirty_one_elements():
    shape = (32, 64, 1024, 1026)
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free GPU memory")
    x = torch.zeros(shape, dtype=torch.float16, device=DEVICE).to(memory_format=torch.channels_last)
    x[-1, -1, -1, -1], x[-1, -1, -1, -2] = 1000, -500
    mean, var, q, scale = vector(64), vector(64), like(x, torch.int8), vector(1)
    kernel = build("batch_norm.output", ChainForm(RELU), shapes=(shape,))
    kernel(x, None, None, EPS, None, None, mean, var, None, None, q, scale, None, None, None, None, 1, 2, 3)
    positions = shape[0] * shape[2] * shape[3]
    assert var[-1].item() == pytest.approx(1.25e6 / positions, rel=1e-4)
    assert (q[-1, -1, -1, -1].item(), int(q.count_nonzero())) == (127, 1)
