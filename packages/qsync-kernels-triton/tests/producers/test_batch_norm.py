"""Batch normalization that writes 8-bit copies, run by Triton's interpreter, against float64 and the reference of quantization."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from hypothesis_profiles import tries  # noqa: E402
from nightly import each_once, in_pairs  # noqa: E402
from qsync_core.errors import BackendError  # noqa: E402
from qsync_core.ir.chain import Activation  # noqa: E402
from qsync_core.ir.precision import Rounding  # noqa: E402
from qsync_kernels_triton.config import ProducerConfig  # noqa: E402
from qsync_kernels_triton.producers.batch_norm_plans import build_batch_norm_grad_input, build_batch_norm_output  # noqa: E402

_spec = importlib.util.spec_from_file_location("triton_producer_checking", Path(__file__).with_name("checking.py"))
checking = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(checking)
EPS, random, assert_close = checking.EPS, checking.random, checking.assert_close

SMALL = ProducerConfig(block=512, strip=32, reduce=3, apply=2)
"""Small, so that small images already take several programs, several partial sums and ragged last tiles."""
SEED, X_SEED, OFFSET = 5 + (1 << 40), 6, (1 << 33) + 7
NONE, RELU = Activation.NONE, Activation.RELU


@pytest.fixture
def outputs():
    found = checking.Outputs()
    yield found
    found.check()


def image(*shape, **how):
    return random(*shape, **how).contiguous(memory_format=torch.channels_last)


def vector(x):
    return x.view(1, -1, 1, 1)


class Case:
    """One batch norm: its operands, what the kernel wrote, and the same in float64."""

    def __init__(self, shape, activation=RELU, residual=False, dtype=torch.float32, seed=0, affine=True, **how):
        channels = shape[1]
        self.activation, self.dtype, self.shape = activation, dtype, shape
        self.x = image(*shape, dtype=dtype, seed=seed, **how)
        self.weight = random(channels, seed=seed + 1) if affine else None
        self.bias = random(channels, seed=seed + 2) if affine else None
        self.residual = image(*shape, dtype=dtype, seed=seed + 3) if residual else None
        x = self.x.double()
        self.mean, self.var = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
        self.rstd = (self.var + EPS).rsqrt()
        self.xhat = (x - vector(self.mean)) * vector(self.rstd)
        self.affine = self.xhat * vector(self.weight.double()) + vector(self.bias.double()) if affine else self.xhat
        self.z = self.affine + self.residual.double() if residual else self.affine
        self.r = self.z.relu() if activation is RELU else self.z
        size = (x.abs() + vector(x.abs().mean((0, 2, 3)))) * vector(self.rstd) + 1
        weights = vector(self.weight.double().abs()) + 1 if affine else 2.0
        self.terms = size * weights + self.z.abs() + 1

    def run(self, outputs, config=SMALL, rounding=Rounding.STOCHASTIC, form=torch.int8, out=torch.float32, copies=True,
            offset=OFFSET):  # fmt: skip
        b, c, h, w = self.shape
        self.mean_out, self.var_out = outputs.empty((c,)), outputs.empty((c,))
        self.out, self.absmax = outputs.empty(self.shape, out, True), outputs.empty((1,))
        self.q, self.scale = (outputs.empty(self.shape, form, True), outputs.empty((1,))) if copies else (None, None)
        self.stream = outputs.empty((1,), torch.int64) if copies else None
        self.x_q, self.x_scale = (outputs.empty(self.shape, form, True), outputs.empty((c,))) if copies else (None, None)
        self.open = outputs.empty((b, h, w, -(-c // 8)), torch.uint8)
        most = None if self.residual is None else self.residual.abs().amax().float().view(1)
        kernel = build_batch_norm_output(self.activation, rounding, config)
        kernel(self.x, self.weight, self.bias, EPS, self.residual, most, self.mean_out, self.var_out, self.out, self.absmax, self.q,
               self.scale, self.stream, self.x_q, self.x_scale, self.open, SEED, X_SEED, offset)  # fmt: skip
        return self

    def check_floats(self):
        assert_close(self.mean_out, self.mean, self.x.double().abs().mean((0, 2, 3)) + 1, "mean")
        deviations = (self.x.double() - vector(self.mean)).square().amax((0, 2, 3))
        assert_close(self.var_out, self.var, deviations + self.mean.abs() * self.var.sqrt(), "variance")
        assert_close(self.out, self.r, self.terms, "result")
        assert self.absmax.item() == self.out.float().abs().max().item()
        is_open = checking.in_memory(self.z) > 0
        clear = checking.packed(checking.in_memory(self.z.abs() > 1e-3 * self.terms))
        found = self.open.view(-1, self.open.shape[-1])
        assert ((found ^ checking.packed(is_open)) & clear == 0).all()
        unused = (checking.packed(torch.ones(1, self.shape[1])) ^ 0xFF) & found
        assert not unused.any()

    def check_copies(self):
        """Of a float32 result; with a residual the scale may be larger, up to the sum of both magnitudes."""
        exact, streams = self.out.abs().max().item() / 127, checking.streams(self.x, OFFSET)
        assert self.stream.item() == checking.reference.signed(streams[0])
        if self.residual is None:
            checking.assert_is_quantized(self.q, self.scale, self.out, seed=SEED, streams=streams)
        else:
            bound = self.affine.abs().max().item() + self.residual.double().abs().max().item()
            assert exact * (1 - 1e-6) <= self.scale.item() <= bound / 127 * (1 + 1e-5)
            checking.assert_is_rounded(self.q, self.scale, self.out, SEED, streams)
        largest = self.xhat.abs().amax((0, 2, 3)) / 127
        assert torch.allclose(self.x_scale.double(), largest, rtol=1e-5)
        checking.assert_is_rounded(self.x_q, self.x_scale, self.xhat, X_SEED, streams)


CHAINS = [(NONE, False), (RELU, False), (NONE, True), (RELU, True)]


@pytest.mark.parametrize(("activation", "residual"), CHAINS)
@pytest.mark.parametrize("shape", [(2, 20, 5, 3), (3, 64, 4, 5), (1, 7, 3, 1)])
def test_everything_it_writes(outputs, shape, activation, residual):
    case = Case(shape, activation, residual, mean=0.5, deviation=2.0).run(outputs)
    case.check_floats()
    case.check_copies()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_tensors(outputs, dtype):
    case = Case((2, 40, 4, 3), RELU, True, dtype, mean=0.5).run(outputs, out=dtype)
    case.check_floats()
    assert abs(in_steps(case.q, case.scale, case.r)).max() < 1.02


def in_steps(q, scale, value):
    return q.double() - value / scale.double()


def test_an_offset_in_a_tensor_is_read_when_the_kernel_runs(outputs):
    live = torch.zeros(1, dtype=torch.int64)
    case = Case((2, 20, 4, 3)).run(outputs, offset=live)
    live.fill_(OFFSET)
    case.run(outputs, offset=live).check_copies()
    with pytest.raises(BackendError, match=r"batch_norm.output: offset must be a number or one int64 on cpu, got torch.int32"):
        case.run(outputs, offset=live.int())


def test_other_roundings_and_formats(outputs):
    case = Case((2, 24, 3, 3)).run(outputs, rounding=Rounding.NEAREST)
    checking.assert_is_quantized(case.q, case.scale, case.out, rounding="nearest")
    case = Case((2, 24, 3, 3)).run(outputs, form=torch.float8_e4m3fn)
    checking.assert_is_quantized(case.q, case.scale, case.out, "float8_e4m3fn", seed=SEED, streams=checking.streams(case.x, OFFSET))


def test_a_mean_that_is_large_beside_the_deviation_costs_no_digits(outputs):
    """Half of these channels have a mean 4,000 times the deviation; sums of squares in float32 would have no digit left."""
    shape = (4, 16, 9, 8)
    case = Case(shape, NONE)
    x = case.x + vector(torch.arange(16) % 2 * 4096.0)
    exact = x.double()
    case.x, case.mean, case.var = x, exact.mean((0, 2, 3)), exact.var((0, 2, 3), unbiased=False)
    case.run(outputs)
    assert ((case.var_out - case.var).abs() / case.var).max() < 2e-6
    assert (case.mean_out - case.mean).abs().max() < 4096 * 2.0**-23


@pytest.mark.parametrize("first", ["outlier", "constant"])
def test_a_first_tile_unlike_the_rest_costs_no_digits(outputs, first):
    """Sums are taken about the mean of a program's first tile, which these data put far off."""
    case = Case((8, 8, 8, 4), NONE)
    if first == "outlier":
        case.x[0, :, 0, 0] = 3000.0
    else:
        case.x[0] = 500.0
    case.mean, case.var = case.x.double().mean((0, 2, 3)), case.x.double().var((0, 2, 3), unbiased=False)
    case.run(outputs, ProducerConfig(block=64, strip=8, reduce=2, apply=1))
    assert ((case.var_out - case.var).abs() / case.var).max() < 1e-5
    assert (case.mean_out - case.mean).abs().max() < 1e-3


def test_channels_that_do_not_vary_and_single_positions(outputs):
    case = Case((2, 8, 3, 3), NONE, mean=3.0, deviation=0.0).run(outputs)
    assert case.var_out.abs().max() == 0
    assert not case.x_q.any()
    assert torch.equal(case.out, vector(case.bias).expand(case.shape))
    case = Case((1, 5, 1, 1), RELU).run(outputs)
    assert torch.equal(case.mean_out, case.x.flatten())
    assert torch.equal(case.out.flatten(), case.bias.relu())


def test_without_weights_copies_and_other_results(outputs):
    case = Case((2, 12, 3, 3), NONE, affine=False).run(outputs, copies=False)
    case.check_floats()
    kernel = build_batch_norm_output(NONE, Rounding.STOCHASTIC, SMALL)
    mean, var = outputs.empty((12,)), outputs.empty((12,))
    kernel(case.x, None, None, EPS, None, None, mean, var, *[None] * 8, 1, 2, 3)
    assert torch.equal(mean, case.mean_out)
    assert torch.equal(var, case.var_out)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("residual", [False, True])
def test_a_value_that_is_not_finite_makes_the_scale_infinite(outputs, bad, residual):
    case = Case((2, 20, 3, 3), RELU, residual)
    case.x[1, 13, 2, 0] = bad
    case.run(outputs)
    assert torch.isinf(case.scale).all()
    assert torch.isinf(case.x_scale).nonzero().flatten().tolist() == [13]
    assert not torch.isfinite(case.absmax).any()
    if residual:
        case = Case((2, 20, 3, 3), RELU, residual)
        case.residual[1, 13, 2, 0] = bad
        case.run(outputs)
        assert torch.isinf(case.scale).all()


@pytest.mark.filterwarnings("ignore:var")
def test_images_without_positions(outputs):
    case = Case((0, 4, 3, 3), RELU).run(outputs)
    assert case.mean_out.tolist() == case.var_out.tolist() == [0.0] * 4
    assert (case.absmax.item(), case.scale.item(), case.x_scale.tolist()) == (0.0, 1.0, [1.0] * 4)
    assert case.stream.item() == OFFSET


def test_images_in_another_layout_are_copied_inside(outputs):
    case = Case((2, 20, 3, 5), RELU, True)
    first = case.run(outputs)
    q, x_q, out = first.q.clone(), first.x_q.clone(), first.out.clone()
    case.x, case.residual = case.x.contiguous(), case.residual.contiguous()
    case.weight, case.bias = (torch.stack([v, v], 1)[:, 0] for v in (case.weight, case.bias))
    case.run(outputs)
    assert torch.equal(case.q, q)
    assert torch.equal(case.x_q, x_q)
    assert torch.equal(case.out, out)


def backward(case, grad, outputs, kept, scale, bits, config=SMALL, dtype=torch.float32):
    c = case.shape[1]
    found = [outputs.empty(case.shape, dtype, True), outputs.empty(case.shape, dtype, True) if case.residual is not None else None]
    found += [outputs.empty((c,)), outputs.empty((c,))]
    kernel = build_batch_norm_grad_input(case.activation, Rounding.STOCHASTIC, config)
    kernel(grad, kept, scale, case.mean_out, case.var_out, case.weight, case.bias, EPS, bits, *found)
    return found


def check_gradients(case, grad, found, xhat, is_open):
    h = torch.where(is_open, grad.double(), 0.0)
    n = h.numel() // h.shape[1]
    factor = vector(case.rstd * (1.0 if case.weight is None else case.weight.double()))
    total, product = h.sum((0, 2, 3)), (h * xhat).sum((0, 2, 3))
    grad_input, grad_residual, grad_weight, grad_bias = found
    assert_close(grad_bias, total, h.abs().sum((0, 2, 3)), "gradient of the bias")
    sizes = (h.abs() * (1 + xhat.abs())).sum((0, 2, 3)) * (1 + (case.mean * case.rstd).abs())
    assert_close(grad_weight, product, sizes, "gradient of the weight")
    expected = factor * (h - vector(total) / n - xhat * vector(product) / n)
    assert_close(grad_input, expected, factor.abs() * (h.abs() + vector(sizes) * (1 + xhat.abs()) / n), "gradient of the input")
    if grad_residual is not None:
        assert_close(grad_residual, h, 0.0 * h, "gradient of the residual")


SHAPES = [(2, 20, 5, 3), (2, 64, 3, 6)]
"""Channels beyond and at a multiple of a tile's; positions of two strips, and of five tiles of which the last is ragged."""


@each_once({"activation, residual": CHAINS, "shape": SHAPES})
def test_gradients_from_x_and_from_its_8_bit_copy(outputs, shape, activation, residual):
    case = Case(shape, activation, residual, mean=0.5).run(outputs)
    grad = image(*shape, seed=9)
    again = activation is RELU and not residual
    is_open = (case.out > 0) if activation is RELU else torch.ones_like(case.out, dtype=torch.bool)
    found = backward(case, grad, outputs, case.x, None, None if again else case.open)
    check_gradients(case, grad, found, case.xhat, is_open)
    found = backward(case, grad, outputs, case.x_q, case.x_scale, case.open)
    check_gradients(case, grad, found, case.x_q.double() * vector(case.x_scale.double()), is_open)


@each_once({"activation, residual": CHAINS, "shape": SHAPES})
@pytest.mark.slow
def test_the_copy_of_a_gradient(outputs, shape, activation, residual):
    """The other gradients to the bit; the copy rounds ∂x times the multiplier, with a scale that nothing exceeds."""
    case = Case(shape, activation, residual, mean=0.5).run(outputs)
    grad, multiplier = image(*shape, seed=9), random(shape[1], seed=10).abs() + 0.1
    h = torch.where(case.out > 0, grad.double(), 0.0) if activation is RELU else grad.double()
    kernel = build_batch_norm_grad_input(activation, Rounding.STOCHASTIC, SMALL)
    for kept, scale in ((case.x, None), (case.x_q, case.x_scale)):
        alone = backward(case, grad, outputs, kept, scale, case.open)
        xhat = case.xhat if scale is None else kept.double() * vector(scale.double())
        means = h.mean((0, 2, 3)).abs(), (h * xhat).mean((0, 2, 3)).abs()
        reach = h.abs().amax((0, 2, 3)) + means[0] + xhat.abs().amax((0, 2, 3)) * means[1]
        reach = reach * (case.rstd * case.weight.double()).abs()
        for times, offset in ((multiplier, OFFSET), (None, torch.tensor(OFFSET))):
            found = [None if g is None else outputs.empty(g.shape, channels_last=g.ndim == 4) for g in alone]
            q, q_scale = outputs.empty(shape, torch.int8, True), outputs.empty((1,))
            given = (grad, kept, scale, case.mean_out, case.var_out, case.weight, case.bias, EPS, case.open)
            kernel(*given, *found, times, q, q_scale, SEED, offset)
            for one, other in zip(found, alone, strict=True):
                assert one is other or torch.equal(one, other)
            gradient = found[0] if times is None else found[0] * vector(times)
            expected = (reach if times is None else reach * times.double()).max().item() / 127
            assert q_scale.item() == pytest.approx(expected, rel=1e-5)
            assert gradient.abs().max() <= 127 * q_scale
            checking.assert_is_rounded(q, q_scale, gradient, SEED, checking.streams(grad, OFFSET))


@in_pairs(
    {
        "activation, residual": CHAINS, "shape": SHAPES, "dtype": [torch.float32, torch.float16],
        "from_copy": [False, True], "copied": [False, True], "wanted": ["all", "the input's", "all but the input's"],
    }
)  # fmt: skip
def test_a_gradient_in_two_parts_gives_the_bits_of_their_sum(
    outputs, shape, activation, residual, dtype, from_copy, copied, wanted
):
    """From x and from its copy, with a copy of the gradient and without; also where no gradient of the residual is wanted.

    Of bfloat16 the conformance suite asks the same on a GPU: the interpreter cuts it off where hardware rounds.
    """
    case = Case(shape, activation, residual, mean=0.5).run(outputs)
    grad, other = image(*shape, seed=9, dtype=dtype), image(*shape, seed=11, dtype=dtype)
    bits = case.open if from_copy or activation is not RELU or residual else None
    kept, scale = (case.x_q, case.x_scale) if from_copy else (case.x, None)
    given = (kept, scale, case.mean_out, case.var_out, case.weight, case.bias, EPS, bits)
    likes = [(shape, dtype), (shape, dtype), (shape[1:2], torch.float32), (shape[1:2], torch.float32)]
    wants = {
        "all": (True, residual, True, True), "the input's": (True, False, False, False),
        "all but the input's": (False, residual, False, True),
    }  # fmt: skip
    results = []
    for of_sum, gradients in ((False, (grad + other,)), (True, (grad, other.contiguous()))):
        kernel = build_batch_norm_grad_input(activation, Rounding.STOCHASTIC, SMALL, of_sum)
        found = [
            outputs.empty(size, form, len(size) == 4) if want else None
            for want, (size, form) in zip(wants[wanted], likes, strict=True)
        ]
        copy = [outputs.empty(shape, torch.int8, True), outputs.empty((1,))] if copied else []
        kernel(*gradients, *given, *found, *([None, *copy, SEED, OFFSET] if copied else []))
        results.append([*found, *copy])
    for one, two in zip(*results, strict=True):
        assert one is two or torch.equal(one, two)


@pytest.mark.parametrize(("dtype", "written"), [(torch.float32, torch.float16), (torch.float16, torch.float32)])
def test_the_gradient_of_a_residual_in_another_format_than_the_parts(outputs, dtype, written):
    case = Case((2, 20, 5, 3), RELU, True, mean=0.5).run(outputs)
    grad, other = image(*case.shape, seed=9, dtype=dtype), image(*case.shape, seed=11, dtype=dtype)
    given = (case.x, None, case.mean_out, case.var_out, case.weight, case.bias, EPS, case.open)
    results = []
    for of_sum, gradients in ((False, (grad + other,)), (True, (grad, other))):
        kernel = build_batch_norm_grad_input(RELU, Rounding.STOCHASTIC, SMALL, of_sum)
        found = [outputs.empty(case.shape, written, True) for _ in range(2)]
        kernel(*gradients, *given, *found, None, None)
        results.append(found)
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def test_parts_of_a_gradient_in_two_formats_are_refused(outputs):
    case = Case((2, 12, 3, 3), RELU, True).run(outputs)
    kernel = build_batch_norm_grad_input(RELU, Rounding.STOCHASTIC, SMALL, True)
    grad, gradients = image(*case.shape, seed=9), [None] * 4
    with pytest.raises(BackendError, match=r"batch_norm.grad_input: other must be torch.float32 like grad, got torch.float16"):
        kernel(grad, grad.half(), case.x, None, case.mean_out, case.var_out, case.weight, case.bias, EPS, case.open, *gradients)


def test_a_gradient_that_is_not_finite_makes_the_scale_of_its_copy_infinite(outputs):
    case = Case((2, 12, 3, 3), RELU, True).run(outputs)
    kernel = build_batch_norm_grad_input(RELU, Rounding.STOCHASTIC, SMALL)
    for bad in (float("nan"), float("inf")):
        grad = image(*case.shape, seed=9)
        case.open.fill_(255)
        grad[1, 3, 0, 2] = bad
        q, q_scale = outputs.empty(case.shape, torch.int8, True), outputs.empty((1,))
        kernel(grad, case.x, None, case.mean_out, case.var_out, case.weight, case.bias, EPS, case.open, None, None, None, None,
               None, q, q_scale, SEED, OFFSET)  # fmt: skip
        assert q_scale.isinf()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_in_16_bit_and_without_weights(outputs, dtype):
    case = Case((2, 12, 3, 3), RELU, False, dtype, affine=False).run(outputs, copies=False)
    grad = image(*case.shape, seed=9, dtype=dtype)
    found = backward(case, grad.contiguous(), outputs, case.x.contiguous(), None, None, dtype=dtype)
    check_gradients(case, grad, found, case.xhat, case.out > 0)


def test_single_gradients_are_what_they_are_beside_the_others(outputs):
    case = Case((2, 12, 3, 3), RELU, True).run(outputs)
    grad = image(*case.shape, seed=9)
    together = backward(case, grad, outputs, case.x, None, case.open)
    kernel = build_batch_norm_grad_input(RELU, Rounding.STOCHASTIC, SMALL)
    for place, expected in enumerate(together):
        alone = [outputs.empty(e.shape, channels_last=e.ndim == 4) if i == place else None for i, e in enumerate(together)]
        kernel(grad, case.x, None, case.mean_out, case.var_out, case.weight, case.bias, EPS, case.open, *alone)
        assert torch.equal(alone[place], expected)
    kernel(grad[:0], case.x[:0], None, case.mean_out, case.var_out, case.weight, case.bias, EPS, case.open[:0], None, None,
           together[2], together[3])  # fmt: skip
    assert not torch.cat(together[2:]).any()


@tries(10)
@given(
    batch=st.integers(1, 2), channels=st.integers(1, 45), height=st.integers(1, 6), width=st.integers(1, 6),
    chain=st.sampled_from(CHAINS), block=st.sampled_from([256, 2048]), strip=st.sampled_from([8, 32, 256]),
    reduce=st.integers(1, 6), apply=st.integers(0, 3), mean=st.sampled_from([0.0, 300.0]), seed=st.integers(0, 1000),
)  # fmt: skip
def test_a_random_sweep(batch, channels, height, width, chain, block, strip, reduce, apply, mean, seed):
    outputs = checking.Outputs()
    config = ProducerConfig(block=block, strip=strip, reduce=reduce, apply=apply)
    case = Case((batch, channels, height, width), *chain, seed=seed, mean=mean).run(outputs, config)
    case.check_floats()
    if chain[1]:
        assert abs(in_steps(case.q, case.scale, case.out.double())).max() < 1.001
    else:
        checking.assert_is_quantized(case.q, case.scale, case.out, seed=SEED, streams=checking.streams(case.x, OFFSET))
    grad = image(*case.shape, seed=seed + 5)
    found = backward(case, grad, outputs, case.x_q, case.x_scale, case.open, config)
    kept = case.x_q.double() * vector(case.x_scale.double())
    is_open = case.out > 0 if chain[0] is RELU else torch.ones_like(case.out, dtype=torch.bool)
    check_gradients(case, grad, found, kept, is_open)
    outputs.check()


def test_operands_of_another_type_size_or_layout_are_refused_by_name(outputs):
    case = Case((2, 4, 3, 3), RELU, True).run(outputs)
    kernel = build_batch_norm_output(RELU, Rounding.STOCHASTIC, SMALL)

    def call(**other):
        given = {
            "x": case.x, "weight": case.weight, "bias": case.bias, "eps": EPS, "residual": case.residual,
            "residual_absmax": case.scale, "mean_out": case.mean_out, "var_out": case.var_out, "out": case.out,
            "absmax_out": case.absmax, "q_out": case.q, "scale_out": case.scale, "stream_out": case.stream, "x_q_out": case.x_q,
            "x_scale_out": case.x_scale, "open_out": case.open,
        }  # fmt: skip
        kernel(**(given | other), seed=1, x_seed=2, offset=3)

    with pytest.raises(BackendError, match=r"x must be \(B, C, H, W\), got shape \(4, 3\)"):
        call(x=torch.zeros(4, 3))
    with pytest.raises(BackendError, match=r"residual must be float32, .*of shape \(2, 4, 3, 3\), got torch.int8"):
        call(residual=case.q)
    with pytest.raises(BackendError, match=r"weight must be 4 float32, got torch.float32 \(3,\)"):
        call(weight=torch.ones(3))
    with pytest.raises(BackendError, match=r"out must be channels-last, and has shape \(2, 4, 3, 3\) with strides \(36, 9, 3, 1\)"):
        call(out=torch.zeros(2, 4, 3, 3))
    with pytest.raises(BackendError, match="q_out and scale_out come together, and one of them is None"):
        call(scale_out=None)
    with pytest.raises(BackendError, match=r"open_out must be contiguous uint8 of shape \(2, 3, 3, 1\)"):
        call(open_out=torch.zeros(2, 3, 3, 4, dtype=torch.uint8))
    with pytest.raises(BackendError, match="residual_absmax is needed beside a residual"):
        call(residual_absmax=None)


def test_a_relu_that_cannot_be_worked_out_again_needs_its_bits(outputs):
    case = Case((2, 4, 3, 3), RELU, True).run(outputs)
    with pytest.raises(BackendError, match="open is needed where x̂ was kept in 8 bit"):
        backward(case, case.x, outputs, case.x_q, case.x_scale, None)
    with pytest.raises(BackendError, match="open is needed beside a residual"):
        backward(case, case.x, outputs, case.x, None, None)
    with pytest.raises(BackendError, match=r"x_scale goes with an x of 8 bit and with no other, and x is torch.int8"):
        backward(case, case.x, outputs, case.x_q, None, case.open)
