"""Layer normalizations and activations that write 8-bit copies, run by Triton's interpreter, against float64."""

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
from torch.nn import functional  # noqa: E402

from hypothesis_profiles import tries  # noqa: E402
from nightly import each_once, in_pairs  # noqa: E402
from qsync_core.errors import BackendError  # noqa: E402
from qsync_core.ir.chain import Activation  # noqa: E402
from qsync_core.ir.precision import Granularity, Rounding  # noqa: E402
from qsync_kernels_triton.config import ProducerConfig  # noqa: E402
from qsync_kernels_triton.producers import row_plans  # noqa: E402
from qsync_kernels_triton.producers.glu_plans import build_glu_grad_input, build_glu_output  # noqa: E402
from qsync_kernels_triton.producers.operands import cut_by_rows  # noqa: E402
from qsync_kernels_triton.producers.row_plans import (  # noqa: E402
    build_activation_grad_input,
    build_activation_output,
    build_layer_norm_grad_input,
    build_layer_norm_output,
    build_rms_norm_grad_input,
    build_rms_norm_output,
)

_spec = importlib.util.spec_from_file_location("triton_producer_checking", Path(__file__).with_name("checking.py"))
checking = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(checking)
EPS, random, assert_close = checking.EPS, checking.random, checking.assert_close

SMALL = ProducerConfig(block=64, reduce=2, apply=2)
"""Small, so that a few rows already take several programs, and a row of 65 elements two chunks where rows are walked."""
SEED, X_SEED, OFFSET = 5 + (1 << 40), 6, (1 << 33) + 7
FACTOR_SEED = 9 + (1 << 35)
ROW, TENSOR = Granularity.PER_ROW, Granularity.PER_TENSOR
FUNCTIONS = {
    Activation.RELU: functional.relu,
    Activation.GELU: functional.gelu,
    Activation.GELU_TANH: lambda z: functional.gelu(z, approximate="tanh"),
    Activation.SILU: functional.silu,
}


@pytest.fixture
def outputs():
    found = checking.Outputs()
    yield found
    found.check()


WAYS = ["rows in registers", "long rows"]


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """Both ways to walk through rows, whatever their length."""
    if request.param == "long rows":
        monkeypatch.setattr(row_plans, "ONE_READ", 0)
    return request.param


def scales_of(q, scale):
    return scale.double().view(-1, 1).expand(q.shape)


def check_copy(q, scale, value, granularity, x, seed=SEED):
    """Of float32 values, bit for bit; the scale is exact, and the random numbers follow from ``x``."""
    groups = 1 if granularity is TENSOR else value.shape[0]
    checking.assert_is_quantized(q, scale, value, seed=seed, streams=checking.streams(x, OFFSET, groups))


def check_stream(stream, x):
    assert stream.item() == checking.reference.signed(checking.streams(x, OFFSET)[0])


class Norm:
    """One layer norm: its operands, what the kernel wrote, and the same in float64 of the sum that it kept."""

    def __init__(self, shape, residual=False, dtype=torch.float32, seed=0, affine=True, **how):
        self.shape, self.dtype = shape, dtype
        self.x = random(*shape, dtype=dtype, seed=seed, **how)
        self.weight, self.bias = (random(shape[1], seed=seed + i) if affine else None for i in (1, 2))
        self.residual = random(*shape, dtype=dtype, seed=seed + 3) if residual else None

    def run(self, outputs, granularity=ROW, config=SMALL, copies=True, keep=True, out=None, offset=OFFSET):
        rows = self.shape[0]
        self.sum = outputs.empty(self.shape, self.dtype) if self.residual is not None and keep else None
        self.mean_out, self.rstd_out = outputs.empty((rows,)), outputs.empty((rows,))
        self.out = outputs.empty(self.shape, out or torch.float32)
        self.q = outputs.empty(self.shape, torch.int8) if copies else None
        self.scale = outputs.empty((1 if granularity is TENSOR else rows,)) if copies else None
        self.x_q, self.x_scale = (outputs.empty(self.shape, torch.int8), outputs.empty((rows,))) if copies else (None, None)
        self.stream = outputs.empty((1,), torch.int64) if copies else None
        build_layer_norm_output(granularity, Rounding.STOCHASTIC, config)(
            self.x, self.weight, self.bias, EPS, self.residual, self.sum, self.mean_out, self.rstd_out, self.out, self.q,
            self.scale, self.stream, self.x_q, self.x_scale, SEED, X_SEED, offset,
        )  # fmt: skip
        s = self.x.double() + (0 if self.residual is None else self.residual.double())
        self.s = s if self.sum is None else self.sum.double()
        self.mean, var = self.s.mean(1, keepdim=True), self.s.var(1, unbiased=False, keepdim=True)
        self.rstd = (var + EPS).rsqrt()
        self.xhat = (self.s - self.mean) * self.rstd
        self.z = self.xhat if self.weight is None else self.xhat * self.weight.double() + self.bias.double()
        return self

    def check(self, granularity=ROW):
        size = self.s.abs() + self.s.abs().mean(1, keepdim=True)
        assert_close(self.mean_out, self.mean[:, 0], size.amax(1), "mean")
        assert_close(self.rstd_out, self.rstd[:, 0], (size * self.rstd).amax(1) * self.rstd[:, 0], "1/σ")
        weight = 1.0 if self.weight is None else 1 + self.weight.double().abs()
        assert_close(self.out, self.z, (size * self.rstd + self.xhat.abs()) * weight + 1, "result")
        if self.sum is not None:
            added = self.x.double() + self.residual.double()
            assert_close(self.sum, added, added.abs(), "sum")
        if self.q is not None and self.out.dtype is torch.float32:
            check_copy(self.q, self.scale, self.out, granularity, self.x)
            check_stream(self.stream, self.x)
            largest = self.xhat.abs().amax(1)
            assert torch.allclose(self.x_scale.double(), torch.where(largest == 0, 2.0**-126, largest / 127), rtol=1e-4)
            checking.assert_is_rounded(
                self.x_q, scales_of(self.x_q, self.x_scale), self.xhat, X_SEED, checking.streams(self.x, OFFSET, len(self.x))
            )


SHAPES = [(5, 37), (3, 136), (1, 8)]


@in_pairs({"way": WAYS, "shape": SHAPES, "residual": [False, True], "granularity": [ROW, TENSOR]}, ["way"])
def test_everything_a_layer_norm_writes(outputs, way, shape, residual, granularity):
    Norm(shape, residual, mean=0.5, deviation=2.0).run(outputs, granularity).check(granularity)


@in_pairs({"way": WAYS, "dtype": [torch.float16, torch.bfloat16], "keep": [False, True], "granularity": [ROW, TENSOR]}, ["way"])
def test_the_statistics_are_those_of_the_sum_as_it_is_kept(outputs, way, dtype, keep, granularity):
    Norm((5, 72), True, dtype).run(outputs, granularity, keep=keep).check(granularity)
    Norm((5, 72), False, dtype, affine=False).run(outputs, copies=False, out=dtype).check()


def test_a_mean_that_is_large_beside_the_deviation_costs_no_digits(outputs, way):
    case = Norm((4, 150), mean=4096.0, affine=False).run(outputs)
    assert ((case.rstd_out - case.rstd[:, 0]).abs() / case.rstd[:, 0]).max() < 1e-6
    assert (case.mean_out - case.mean[:, 0]).abs().max() <= 4096 * 2.0**-24 * 1.1


@pytest.mark.parametrize("granularity", [ROW, TENSOR])
def test_an_offset_in_a_tensor_is_read_when_the_kernel_runs(outputs, granularity):
    live = torch.zeros(1, dtype=torch.int64)
    for case in (Norm((5, 37)), Act((5, 40), Activation.SILU)):
        case.run(outputs, granularity, offset=live)
        live.fill_(OFFSET)
        case.run(outputs, granularity, offset=live).check(granularity)
        with pytest.raises(BackendError, match=r"offset must be a number or one int64 on cpu, got torch.int64 \(2,\)"):
            case.run(outputs, granularity, offset=live.repeat(2))


def test_rows_that_do_not_vary(outputs, way):
    case = Norm((3, 70), mean=0.1, deviation=0.0).run(outputs)
    assert torch.equal(case.out, case.bias.expand(3, 70))
    assert not case.x_q.any()


def norm_gradients(case, grad, outputs, kept, scale, config=SMALL, dtype=torch.float32):
    found = [outputs.empty(case.shape, dtype), outputs.empty(case.shape[1:]), outputs.empty(case.shape[1:])]
    build_layer_norm_grad_input(config)(grad, kept, scale, case.mean_out, case.rstd_out, case.weight, *found)
    return found


def check_norm_gradients(case, grad, found, xhat):
    g, n = grad.double(), case.shape[1]
    w = g if case.weight is None else g * case.weight.double()
    product = (w * xhat).sum(1, keepdim=True)
    expected = case.rstd * (w - w.mean(1, keepdim=True) - xhat * product / n)
    shifted = 1 + case.s.abs() * case.rstd
    sizes = (w.abs() * (shifted + xhat.abs())).sum(1, keepdim=True)
    assert_close(found[0], expected, case.rstd * (w.abs() + sizes * (shifted + xhat.abs()) / n), "gradient of the input")
    assert_close(found[1], (g * xhat).sum(0), (g.abs() * (shifted + xhat.abs())).sum(0), "gradient of the weight")
    assert_close(found[2], g.sum(0), g.abs().sum(0), "gradient of the bias")


@pytest.mark.parametrize("shape", [(7, 37), (3, 136)])
def test_layer_norm_gradients_from_x_and_from_its_8_bit_copy(outputs, way, shape):
    case = Norm(shape, mean=0.5).run(outputs)
    grad = random(*shape, seed=9)
    check_norm_gradients(case, grad, norm_gradients(case, grad, outputs, case.x, None), case.xhat)
    found = norm_gradients(case, grad, outputs, case.x_q, case.x_scale)
    check_norm_gradients(case, grad, found, case.x_q.double() * scales_of(case.x_q, case.x_scale))


def test_layer_norm_gradients_in_16_bit_without_weights_and_one_by_one(outputs, way):
    case = Norm((6, 40), True, torch.float16, affine=False).run(outputs, copies=False)
    grad = random(6, 40, seed=9, dtype=torch.float16)
    together = norm_gradients(case, grad, outputs, case.sum, None, dtype=torch.float16)
    check_norm_gradients(case, grad, together, case.xhat)
    kernel = build_layer_norm_grad_input(SMALL)
    for place, expected in enumerate(together):
        alone = [outputs.empty(e.shape, e.dtype) if i == place else None for i, e in enumerate(together)]
        kernel(grad, case.sum, None, case.mean_out, case.rstd_out, None, *alone)
        assert torch.equal(alone[place], expected)


def rms_norm(outputs, x, weight, residual, granularity, keep, config=SMALL):
    """What the kernel writes, by its names, checked against float64 of the sum that it kept."""
    rows, shape = len(x), tuple(x.shape)
    w = {"rstd": outputs.empty((rows,)), "out": outputs.empty(shape), "q": outputs.empty(shape, torch.int8)}
    w |= {"scale": outputs.empty((1 if granularity is TENSOR else rows,)), "stream": outputs.empty((1,), torch.int64)}
    w |= {"x_q": outputs.empty(shape, torch.int8), "x_scale": outputs.empty((rows,))}
    w["sum"] = outputs.empty(shape, x.dtype) if residual is not None and keep else None
    build_rms_norm_output(granularity, Rounding.STOCHASTIC, config)(
        x, weight, EPS, residual, w["sum"], w["rstd"], w["out"], w["q"], w["scale"], w["stream"], w["x_q"], w["x_scale"],
        SEED, X_SEED, OFFSET,
    )  # fmt: skip
    s = x.double() + (0 if residual is None else residual.double())
    s = s if w["sum"] is None else w["sum"].double()
    rstd = (s.square().mean(1, keepdim=True) + EPS).rsqrt()
    xhat = s * rstd
    z, size = (xhat, 1.0) if weight is None else (xhat * weight.double(), 1 + weight.double().abs())
    # Where the sum is not kept, it is read again as it is made: rounded to float32.
    assert_close(w["rstd"], rstd[:, 0], rstd[:, 0], "1 / root mean square")
    assert_close(w["out"], z, (s.abs() * rstd + 1) * size, "result")
    check_copy(w["q"], w["scale"], w["out"], granularity, x)
    check_stream(w["stream"], x)
    streams = checking.streams(x, OFFSET, rows)
    checking.assert_is_rounded(w["x_q"], scales_of(w["x_q"], w["x_scale"]), xhat, X_SEED, streams)
    largest = xhat.abs().amax(1)
    assert torch.allclose(w["x_scale"].double(), torch.where(largest == 0, 2.0**-126, largest / 127), rtol=1e-4)
    return w | {"s": s if w["sum"] is None else w["sum"], "xhat": xhat}


def check_rms_gradients(outputs, grad, kept, scale, rstd, weight, xhat, config=SMALL):
    found = outputs.empty(kept.shape, grad.dtype), outputs.empty(kept.shape[1:])
    build_rms_norm_grad_input(config)(grad, kept, scale, rstd, weight, *found)
    g, n = grad.double(), kept.shape[1]
    w, r = g if weight is None else g * weight.double(), rstd.double()[:, None]
    product, sizes = (w * xhat).sum(1, keepdim=True), (w.abs() * (1 + xhat.abs())).sum(1, keepdim=True)
    assert_close(found[0], r * (w - xhat * product / n), r * (w.abs() + sizes * (1 + xhat.abs()) / n), "gradient of the input")
    assert_close(found[1], (g * xhat).sum(0), (g.abs() * (1 + xhat.abs())).sum(0), "gradient of the weight")


@in_pairs({"shape": [(5, 37), (3, 136), (1, 8)], "residual": [False, True], "granularity": [ROW, TENSOR], "keep": [False, True]})
def test_everything_an_rms_norm_writes_and_its_gradients(outputs, way, shape, residual, granularity, keep):
    x, weight = random(*shape, mean=0.5, deviation=2.0), random(shape[1], seed=1)
    found = rms_norm(outputs, x, weight, random(*shape, seed=3) if residual else None, granularity, keep)
    grad = random(*shape, seed=9)
    check_rms_gradients(outputs, grad, found["s"].float(), None, found["rstd"], weight, found["xhat"])
    xhat = found["x_q"].double() * scales_of(found["x_q"], found["x_scale"])
    check_rms_gradients(outputs, grad, found["x_q"], found["x_scale"], found["rstd"], weight, xhat)


def test_an_rms_norm_in_16_bit_without_weight_and_gradients_one_by_one(outputs, way):
    x = random(6, 40, dtype=torch.float16)
    found = rms_norm(outputs, x, None, None, ROW, False)
    grad = random(6, 40, seed=9, dtype=torch.float16)
    check_rms_gradients(outputs, grad, x, None, found["rstd"], None, found["xhat"])
    kernel, both = build_rms_norm_grad_input(SMALL), (outputs.empty((6, 40), torch.float16), outputs.empty((40,)))
    kernel(grad, x, None, found["rstd"], None, *both)
    for place, expected in enumerate(both):
        alone = [outputs.empty(e.shape, e.dtype) if i == place else None for i, e in enumerate(both)]
        kernel(grad, x, None, found["rstd"], None, *alone)
        assert torch.equal(alone[place], expected)


def test_an_rms_norm_subtracts_no_mean(outputs, way):
    """Of equal numbers nothing is left by a layer norm; here they are 1 each."""
    found = rms_norm(outputs, torch.full((3, 136), -4.0), None, None, ROW, False)
    assert (found["out"] + 1).abs().max() < 1e-5


class Act:
    """One activation: its operand and what the kernel wrote."""

    def __init__(self, shape, activation, dtype=torch.float32, seed=0):
        self.activation, self.shape = activation, shape
        self.x = random(*shape, dtype=dtype, seed=seed, deviation=3.0)
        self.r = FUNCTIONS[activation](self.x.double())

    def run(self, outputs, granularity=ROW, config=SMALL, out=torch.float32, offset=OFFSET):
        rows = self.shape[0]
        self.out, self.q = outputs.empty(self.shape, out), outputs.empty(self.shape, torch.int8)
        self.scale = outputs.empty((1 if granularity is TENSOR else rows,))
        self.x_q, self.x_scale = outputs.empty(self.shape, torch.int8), outputs.empty((rows,))
        self.stream = outputs.empty((1,), torch.int64)
        build_activation_output(self.activation, granularity, Rounding.STOCHASTIC, config)(
            self.x, self.out, self.q, self.scale, self.stream, self.x_q, self.x_scale, SEED, X_SEED, offset
        )
        return self

    def check(self, granularity=ROW):
        assert_close(self.out, self.r, self.x.double().abs() + 1, "result")
        if self.out.dtype is torch.float32:
            check_copy(self.q, self.scale, self.out, granularity, self.x)
        check_stream(self.stream, self.x)
        check_copy(self.x_q, self.x_scale, self.x.float(), ROW, self.x, X_SEED)

    def check_gradient(self, outputs, kept, scale, config=SMALL):
        grad = random(*self.shape, seed=8, dtype=self.x.dtype)
        found = outputs.empty(self.shape, self.x.dtype)
        build_activation_grad_input(self.activation, config)(grad, kept, scale, found)
        x = kept.double() if scale is None else kept.double() * scales_of(kept, scale)
        x.requires_grad_()
        (slope,) = torch.autograd.grad(FUNCTIONS[self.activation](x).sum(), x)
        assert_close(found, slope * grad.double(), 8 * grad.double().abs() * (1 + x.detach().abs()), "gradient")


@each_once({"way": WAYS, "activation": list(FUNCTIONS), "granularity": [ROW, TENSOR]}, ["way"])
def test_everything_an_activation_writes_and_its_gradient(outputs, way, activation, granularity):
    for shape in ((5, 37), (2, 136)):
        case = Act(shape, activation).run(outputs, granularity)
        case.check(granularity)
        case.check_gradient(outputs, case.x, None)
        case.check_gradient(outputs, case.x_q, case.x_scale)


class Glu:
    """One gated unit: its operands and what the kernel wrote."""

    def __init__(self, shape, activation, dtype=torch.float32):
        self.activation, self.shape = activation, shape
        self.x, self.factor = random(*shape, dtype=dtype, deviation=3.0), random(*shape, dtype=dtype, seed=1, deviation=2.0)
        self.r = FUNCTIONS[activation](self.x.double()) * self.factor.double()

    def run(self, outputs, granularity=ROW, config=SMALL, offset=OFFSET, copies=True):
        rows, shape = self.shape[0], self.shape
        self.out, self.q = outputs.empty(shape), outputs.empty(shape, torch.int8)
        self.scale, self.stream = outputs.empty((1 if granularity is TENSOR else rows,)), outputs.empty((1,), torch.int64)
        self.x_q, self.factor_q = (outputs.empty(shape, torch.int8) if copies else None for _ in range(2))
        self.x_scale, self.factor_scale = (outputs.empty((rows,)) if copies else None for _ in range(2))
        build_glu_output(self.activation, granularity, Rounding.STOCHASTIC, config)(
            self.x, self.factor, self.out, self.q, self.scale, self.stream, self.x_q, self.x_scale, self.factor_q,
            self.factor_scale, SEED, X_SEED, FACTOR_SEED, offset,
        )  # fmt: skip
        return self

    def check(self, granularity=ROW):
        assert_close(self.out, self.r, (self.x.double().abs() + 1) * (self.factor.double().abs() + 1), "result")
        check_copy(self.q, self.scale, self.out, granularity, self.x)
        check_stream(self.stream, self.x)
        streams = checking.streams(self.x, OFFSET, len(self.x))
        for q, scale, value, seed in (
            (self.x_q, self.x_scale, self.x, X_SEED),
            (self.factor_q, self.factor_scale, self.factor, FACTOR_SEED),
        ):
            checking.assert_is_quantized(q, scale, value.float(), seed=seed, streams=streams)

    def check_gradients(self, outputs, kept, wanted=(True, True)):
        x, x_scale, factor, factor_scale = kept
        grad = random(*self.shape, seed=8, dtype=self.x.dtype)
        found = [outputs.empty(self.shape, self.x.dtype) if want else None for want in wanted]
        build_glu_grad_input(self.activation, ROW, Rounding.NEAREST, SMALL)(grad, x, x_scale, factor, factor_scale, *found)
        x = x.double() if x_scale is None else x.double() * scales_of(x, x_scale)
        factor = factor.double() if factor_scale is None else factor.double() * scales_of(factor, factor_scale)
        leaves = x.requires_grad_(), factor.requires_grad_()
        expected = torch.autograd.grad(FUNCTIONS[self.activation](x) * factor, leaves, grad.double())
        size = 8 * grad.double().abs() * (1 + x.detach().abs())
        for one, right, terms in zip(found, expected, (size * (1 + factor.detach().abs()), size), strict=True):
            if one is not None:
                assert_close(one, right, terms, "gradient")
        return found


@each_once({"activation": list(FUNCTIONS), "granularity": [ROW, TENSOR]})
def test_everything_a_gated_unit_writes_and_its_gradients(outputs, way, activation, granularity):
    for shape in ((5, 37), (2, 136)):
        case = Glu(shape, activation).run(outputs, granularity)
        case.check(granularity)
        case.check_gradients(outputs, (case.x, None, case.factor, None))
        case.check_gradients(outputs, (case.x_q, case.x_scale, case.factor_q, case.factor_scale))


def test_a_gated_unit_of_16_bit_that_keeps_its_operands_and_gradients_one_by_one(outputs):
    case = Glu((6, 40), Activation.SILU, torch.float16).run(outputs, copies=False)
    kept = case.x, None, case.factor, None
    both = case.check_gradients(outputs, kept)
    for place in range(2):
        assert torch.equal(case.check_gradients(outputs, kept, (place == 0, place == 1))[place], both[place])


@each_once({"granularity": [ROW, TENSOR], "rounding": [Rounding.NEAREST, Rounding.STOCHASTIC], "shape": [(5, 37), (6, 136)]})
def test_the_copy_that_a_gated_unit_writes_again(outputs, granularity, rounding, shape):
    """Of the same operands it is the forward's copy; of those in 8 bit their product's, and where that is larger, the largest."""
    case = Glu(shape, Activation.SILU).run(outputs, granularity)
    kernel, grad = build_glu_grad_input(Activation.SILU, granularity, rounding, SMALL), random(*shape, seed=8)
    seed, scale = 3, scales_of(case.q, case.scale)
    for kept in ((case.x, None, case.factor, None), (case.x_q, case.x_scale, case.factor_q, case.factor_scale)):
        gradients, q = [outputs.empty(shape), outputs.empty(shape)], outputs.empty(shape, torch.int8)
        kernel(grad, *kept, *gradients, case.scale, q, seed, case.stream)
        x, x_scale, factor, factor_scale = kept
        x = x.double() if x_scale is None else x.double() * scales_of(x, x_scale)
        factor = factor.double() if factor_scale is None else factor.double() * scales_of(factor, factor_scale)
        y = (FUNCTIONS[Activation.SILU](x) * factor / scale).clamp(-127, 127)
        if rounding is Rounding.STOCHASTIC:
            assert (q.double() - y).abs().max() < 1.001
            assert (q.double() - y).mean().abs() < 4 * 0.41 / q.numel() ** 0.5
        else:
            assert (q.double() - y).abs().max() < 0.501
        without = [outputs.empty(shape), outputs.empty(shape)]
        kernel(grad, *kept, *without)
        assert all(map(torch.equal, gradients, without))


@each_once(
    {
        "shape": [(5, 37), (6, 136), (70, 300), (3, 1)],
        "dtype": [torch.float32, torch.bfloat16],
        "config": [SMALL, ProducerConfig(block=64, apply=0), ProducerConfig(block=1024)],
        "multiplied": [(False, False), (True, False), (True, True)],
        "partials": [40, 2048],
    }
)
def test_the_maxima_of_a_gated_units_gradients_are_those_of_what_it_writes(outputs, shape, dtype, config, multiplied, partials):
    case = Glu(shape, Activation.SILU, dtype).run(outputs, copies=False)
    kernel, grad = build_glu_grad_input(Activation.SILU, TENSOR, Rounding.NEAREST, config), random(*shape, seed=8, dtype=dtype)
    gradients, maxima = [outputs.empty(shape, dtype) for _ in range(2)], [outputs.empty((2, partials)) for _ in range(2)]
    factors = [torch.logspace(-2, 2, shape[1]) if times else None for times in multiplied]
    named = {"multiplier": factors[0], "maxima_out": maxima[0], "factor_multiplier": factors[1], "factor_maxima_out": maxima[1]}
    kernel(grad, case.x, None, case.factor, None, *gradients, **named)
    for gradient, times, found in zip(gradients, factors, maxima, strict=True):
        values = gradient.float() if times is None else gradient.float() * times
        assert found[0].max() == values.abs().max()
        bits = gradient.view(torch.int32 if dtype is torch.float32 else torch.int16).sum(dtype=torch.int32)
        assert found[1].view(torch.int32).sum(dtype=torch.int32) == bits
    without = [outputs.empty(shape, dtype), outputs.empty(shape, dtype)]
    kernel(grad, case.x, None, case.factor, None, *without)
    assert all(map(torch.equal, gradients, without))


def test_maxima_of_a_gradient_that_is_not_finite_are_infinite(outputs):
    case = Glu((6, 40), Activation.SILU).run(outputs, copies=False)
    for bad in (float("nan"), float("inf"), float("-inf")):
        grad = random(6, 40, seed=8)
        grad[3, 17] = bad
        gradients, maxima = [outputs.empty((6, 40)) for _ in range(2)], outputs.empty((2, 40))
        build_glu_grad_input(Activation.SILU, TENSOR, Rounding.NEAREST, SMALL)(
            grad, case.x, None, case.factor, None, *gradients, factor_maxima_out=maxima
        )
        assert maxima[0].max() == float("inf")


def test_operands_of_a_gated_unit_that_do_not_fit_are_refused_by_name(outputs):
    case = Glu((6, 40), Activation.SILU)
    case.factor = case.factor[:, :39]
    with pytest.raises(BackendError, match=r"glu.output: factor must be .* of shape \(6, 40\), got torch.float32 \(6, 39\)"):
        case.run(outputs)
    grad, scale, kernel = random(6, 40), torch.ones(6), build_glu_grad_input(Activation.SILU, ROW, Rounding.NEAREST, SMALL)
    with pytest.raises(BackendError, match=r"glu.grad_input: x and factor are kept alike"):
        kernel(grad, grad.to(torch.int8), scale, grad, None, grad, None)
    for named, said in (
        ({"maxima_out": torch.ones(80)}, r"maxima_out must be contiguous float32 of shape \(2, P\), got torch.float32 \(80,\)"),
        ({"factor_maxima_out": torch.ones(2, 80)}, "factor_maxima_out is of a gradient that is not written"),
        ({"multiplier": torch.ones(6)}, r"multiplier must be 40 float32, got torch.float32 \(6,\)"),
        ({"multiplier": torch.ones(80)[::2]}, r"a multiplier must be contiguous, and has strides \(2,\)"),
        ({"maxima_out": torch.ones(2, 0)}, r"maxima of 40 columns are \(2, P\), both alike, P at least 2, got \(2, 0\)"),
    ):
        with pytest.raises(BackendError, match=f"glu.grad_input: {said}"):
            kernel(grad, grad, None, grad, None, torch.empty(6, 40), None, **named)


FEW = ProducerConfig(block=64, reduce=1, apply=1)
"""Eight programs, each of which takes several groups of rows of a matrix of forty."""


@in_pairs({"way": WAYS, "granularity": [ROW, TENSOR], "shape": [(40, 37), (40, 136)], "residual": [False, True]}, ["way"])
def test_programs_that_take_several_groups_of_rows(outputs, way, granularity, shape, residual):
    """The largest number is in the first group of a program's: one scale is that of all rows, beside copies by rows too."""
    norm, grad = Norm(shape, residual), random(*shape, seed=9)
    norm.x[0, 3] = 50.0
    norm.run(outputs, granularity, FEW).check(granularity)
    kept = norm.x if norm.sum is None else norm.sum
    check_norm_gradients(norm, grad, norm_gradients(norm, grad, outputs, kept, None, FEW), norm.xhat)
    found = rms_norm(outputs, norm.x, norm.weight, norm.residual, granularity, True, FEW)
    check_rms_gradients(outputs, grad, found["s"].float(), None, found["rstd"], norm.weight, found["xhat"], FEW)
    act, glu = Act(shape, Activation.GELU), Glu(shape, Activation.SILU)
    for case in (act, glu):
        case.x[0, 3] = 50.0
        case.r = FUNCTIONS[case.activation](case.x.double()) * (case.factor.double() if case is glu else 1)
        case.run(outputs, granularity, FEW).check(granularity)
    act.check_gradient(outputs, act.x, None, FEW)


SEVERAL = [((3, 301), 3), ((3, 768), 3), ((2, 603), 5), ((3, 640), 5)]
"""Shapes whose rows are held in several tiles, and in how many; of odd lengths too, whose random numbers are drawn one by one."""


@each_once({"shape, held": SEVERAL, "config": [SMALL, ProducerConfig()], "granularity": [ROW, TENSOR], "residual": [False, True]})
@pytest.mark.slow
def test_rows_held_in_several_tiles(outputs, shape, held, config, granularity, residual):
    assert cut_by_rows(*shape, row_plans.ONE_READ, config).held == held
    grad = random(*shape, seed=9)
    case = Norm(shape, residual, mean=0.5, deviation=2.0).run(outputs, granularity, config)
    case.check(granularity)
    kept = case.sum if residual else case.x
    check_norm_gradients(case, grad, norm_gradients(case, grad, outputs, kept, None, config), case.xhat)
    found = norm_gradients(case, grad, outputs, case.x_q, case.x_scale, config)
    check_norm_gradients(case, grad, found, case.x_q.double() * scales_of(case.x_q, case.x_scale))
    act = Act(shape, Activation.GELU).run(outputs, granularity, config)
    act.check(granularity)
    act.check_gradient(outputs, act.x, None, config)


@pytest.mark.filterwarnings("ignore:invalid value")
@each_once({"column": [0, 200, 300], "bad": [float("nan"), float("inf")]})
def test_each_tile_of_a_row_says_what_is_not_finite(outputs, column, bad):
    norm, act = Norm((3, 301)), Act((3, 301), Activation.GELU)
    for case in (norm, act):
        case.x[1, column] = bad
        for granularity, expected in ((ROW, [False, True, False]), (TENSOR, [True])):
            case.run(outputs, granularity)
            assert torch.isinf(case.scale).tolist() == expected
            assert torch.isinf(case.x_scale).tolist() == [False, True, False]


def test_gelu_is_as_exact_as_float32(outputs):
    """Where it is at its worst too: beside 0, and far below, where the error function leaves no digits."""
    x = torch.linspace(-8, 8, 4096).view(8, 512)
    case = Act((8, 512), Activation.GELU)
    case.x, exact = x, functional.gelu(x.double())
    found = case.run(outputs).out
    assert ((found - exact).abs() <= 2.0**-23 * exact.abs() + 2e-8 * x.abs()).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_activations_of_16_bit(outputs, dtype):
    case = Act((5, 48), Activation.SILU, dtype).run(outputs, out=dtype)
    case.check()
    case.check_gradient(outputs, case.x, None)


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("activation", list(FUNCTIONS))
def test_activations_far_from_zero(outputs, activation):
    """Where exponentials overflow and the error function is ±1."""
    case = Act((1, 8), activation)
    case.x = torch.tensor([[-1e4, -200.0, -90.0, -20.0, 20.0, 90.0, 200.0, 1e4]])
    case.r = FUNCTIONS[activation](case.x.double())
    case.run(outputs).check()
    case.check_gradient(outputs, case.x, None)


@pytest.mark.parametrize("activation", list(FUNCTIONS))
def test_gradients_are_about_as_exact_as_pytorchs(outputs, activation):
    """1 − sigmoid(x) worked out from a rounded sigmoid makes three times PyTorch's error."""
    case, found = Act((24, 96), activation), outputs.empty((24, 96), torch.float32)
    grad = random(24, 96, seed=8)
    build_activation_grad_input(activation, SMALL)(grad, case.x, None, found)
    plain, exact = (
        torch.autograd.grad(FUNCTIONS[activation](x), x, grad.to(x.dtype))[0]
        for x in (case.x.clone().requires_grad_(), case.x.double().requires_grad_())
    )
    assert (found - exact).norm() <= 1.5 * (plain - exact).norm() + 1e-8 * exact.norm()


@tries(8)
@given(
    rows=st.integers(1, 5), columns=st.integers(1, 150) | st.just(301),
    granularity=st.sampled_from([ROW, TENSOR]), residual=st.booleans(),
    activation=st.sampled_from([Activation.RELU, Activation.SILU]), one_read=st.sampled_from([0, 8192]),
    block=st.sampled_from([64, 256]), lane=st.sampled_from([1, 8]), programs=st.integers(1, 4), seed=st.integers(0, 1000),
)  # fmt: skip
def test_a_random_sweep(rows, columns, granularity, residual, activation, one_read, block, lane, programs, seed):
    outputs, config = checking.Outputs(), ProducerConfig(block=block, lane=lane, reduce=programs, apply=programs - 1)
    before, row_plans.ONE_READ = row_plans.ONE_READ, one_read
    try:
        case = Norm((rows, columns), residual, seed=seed, mean=0.5).run(outputs, granularity, config)
        case.check(granularity)
        grad = random(rows, columns, seed=seed + 7)
        found = norm_gradients(case, grad, outputs, case.x_q, case.x_scale, config)
        check_norm_gradients(case, grad, found, case.x_q.double() * scales_of(case.x_q, case.x_scale))
        act = Act((rows, columns), activation, seed=seed).run(outputs, granularity, config)
        act.check(granularity)
        act.check_gradient(outputs, act.x, None, config)
    finally:
        row_plans.ONE_READ = before
    outputs.check()


def test_the_launch_configuration_does_not_change_an_activations_bits(outputs, monkeypatch):
    case = Act((6, 104), Activation.GELU).run(outputs)
    expected = case.q.clone(), case.x_q.clone(), case.scale.clone(), case.stream.clone()
    for one_read, config in ((0, SMALL), (8192, ProducerConfig()), (8192, ProducerConfig(block=128, apply=0))):
        monkeypatch.setattr(row_plans, "ONE_READ", one_read)
        case.run(outputs, config=config)
        found = case.q, case.x_q, case.scale, case.stream
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_makes_its_scale_infinite(outputs, way, bad):
    norm, act = Norm((3, 70)), Act((3, 70), Activation.SILU)
    for case in (norm, act):
        case.x[1, 66] = bad
    for granularity, expected in ((ROW, [False, True, False]), (TENSOR, [True])):
        for case in (norm, act):
            case.run(outputs, granularity)
            assert torch.isinf(case.scale).tolist() == expected
            assert torch.isinf(case.x_scale).tolist() == [False, True, False]


def test_operands_with_other_strides_are_read_as_they_should_be(outputs):
    norm, act = Norm((5, 40), True), Act((5, 40), Activation.SILU)
    expected = [x.clone() for case in (norm.run(outputs), act.run(outputs)) for x in (case.q, case.x_q, case.scale, case.out)]
    for case in (norm, act):
        case.x = case.x.t().contiguous().t()
    norm.residual = torch.cat([norm.residual, norm.residual], 1)[:, :40]
    norm.weight = torch.stack([norm.weight, norm.weight], 1)[:, 0]
    found = [x for case in (norm.run(outputs), act.run(outputs)) for x in (case.q, case.x_q, case.scale, case.out)]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_matrices_without_elements(outputs):
    for shape in ((0, 5), (3, 0)):
        act = Act(shape, Activation.SILU).run(outputs)
        assert (torch.cat([act.scale, act.x_scale]) == 1).all()
        assert act.stream.item() == OFFSET
        weight = outputs.empty(shape[1:])
        kernel = build_layer_norm_grad_input(SMALL)
        kernel(act.x, act.x, None, act.x_scale, act.x_scale, None, outputs.empty(shape), weight, None)
        assert not weight.any()


def test_operands_of_another_type_size_or_layout_are_refused_by_name(outputs):
    norm, act = Norm((3, 8)), build_activation_output(Activation.SILU, ROW, Rounding.NEAREST, SMALL)
    x, q, one = torch.zeros(3, 8), torch.zeros(3, 8, dtype=torch.int8), torch.zeros(1)
    with pytest.raises(BackendError, match=r"activation.output: scale_out must be 3 float32, got torch.float32 \(1,\)"):
        act(x, None, q, one, None, None, None, 1, 2, 3)
    with pytest.raises(BackendError, match=r"x must be a matrix, got shape \(3, 8, 1\)"):
        act(x[..., None], None, None, None, None, None, None, 1, 2, 3)
    with pytest.raises(BackendError, match=r"out must be contiguous, and has shape \(3, 8\) with strides \(1, 3\)"):
        act(x, torch.zeros(8, 3).t(), None, None, None, None, None, 1, 2, 3)
    norm.weight = torch.zeros(7)
    with pytest.raises(BackendError, match=r"layer_norm.output: weight must be 8 float32, got torch.float32 \(7,\)"):
        norm.run(outputs)
    kernel = build_activation_grad_input(Activation.SILU, SMALL)
    with pytest.raises(BackendError, match=r"x_scale goes with an x of 8 bit and with no other, and x is torch.int8"):
        kernel(x, q, None, x)


def activation_alone(outputs, activation, x, factor=None, beside=False, config=SMALL):
    """The copy, its one scale and stream, of the result alone or ``beside`` it: each way looks for the maximum by itself."""
    q, scale, stream = outputs.empty(x.shape, torch.int8), outputs.empty((1,)), outputs.empty((1,), torch.int64)
    out = outputs.empty(x.shape) if beside else None
    if factor is None:
        build_activation_output(activation, TENSOR, Rounding.STOCHASTIC, config)(
            x, out, q, scale, stream, None, None, SEED, X_SEED, OFFSET
        )
    else:
        build_glu_output(activation, TENSOR, Rounding.STOCHASTIC, config)(
            x, factor, out, q, scale, stream, None, None, None, None, SEED, X_SEED, FACTOR_SEED, OFFSET
        )
    return q, scale, stream


@pytest.mark.parametrize("activation", [Activation.RELU, Activation.GELU, Activation.GELU_TANH, Activation.SILU])
@pytest.mark.parametrize("least, most", [(-4, 4), (-9, -0.2), (-0.8, 0.1), (-3, 0.25), (0, 0)])
@pytest.mark.parametrize("gated", [False, True])
def test_the_largest_result_is_found_from_inputs_alone(outputs, activation, least, most, gated):
    """Also where no input is large enough for its result to be the largest for sure."""
    x = least + (most - least) * torch.rand(37, 83, generator=torch.Generator().manual_seed(3))
    factor = random(*x.shape, seed=4) if gated else None
    alone, beside = (activation_alone(outputs, activation, x, factor, beside) for beside in (False, True))
    for one, other in zip(alone, beside, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("activation", [Activation.GELU, Activation.GELU_TANH, Activation.SILU])
def test_an_input_that_is_not_finite_makes_the_scale_infinite(outputs, activation, value):
    x = random(37, 83, seed=5)
    x[20, 50] = value
    assert torch.isinf(activation_alone(outputs, activation, x)[1]).all()


def test_a_relu_of_minus_infinity_is_zero(outputs):
    x = random(37, 83, seed=5)
    x[20, 50] = -float("inf")
    q, scale, _ = activation_alone(outputs, Activation.RELU, x)
    assert q[20, 50] == 0
    assert torch.allclose(scale, x.amax() / 127)
