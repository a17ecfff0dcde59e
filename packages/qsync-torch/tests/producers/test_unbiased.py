"""Stochastic copies over many seeds: unbiased themselves, and the gradients that are worked out from an 8-bit x as documented."""

import pytest
import torch

from qsync_core.ir.precision import Granularity, Precision
from qsync_core.kernels.backend import KernelConfig, KernelRequest
from qsync_torch.aten.backend import AtenBackend
from qsync_torch.conformance.operands import Outputs, floats
from qsync_torch.conformance.producers import ACTIVATION, BATCH_NORM, FORMS, Producer, variant_of

CPU = torch.device("cpu")
SEEDS = 400


def kernel_of(problem, part):
    request = KernelRequest(f"{problem.name}.{part}", problem.variant, (problem.shape,), chain=problem.chain)
    return AtenBackend().build(request, KernelConfig())


def rounding_variance(x, scale):
    """Of stochastic rounding: f(1 - f) with f the fraction of ``x / scale``."""
    fraction = x / scale - (x / scale).floor()
    return fraction * (1 - fraction) * scale.square()


def deviations(samples, expected, scale):
    """How many standard errors the mean of copies is off, element by element.

    What one of all draws moves counts as one: near an integer the few that do have no normal distribution.
    """
    variance = torch.maximum(rounding_variance(expected, scale), scale.square() / SEEDS)
    return (samples.mean(0) - expected).abs() / (variance / SEEDS).sqrt()


def samples(problem, grad, kept_in_float):
    """Copies of the result and of x, and gradients of x and weight, over seeds; and what backward gets from the float x."""
    outputs = Outputs(CPU)
    forward, backward = kernel_of(problem, "output"), kernel_of(problem, "grad_input")
    rows = []
    for seed in range(SEEDS):
        written = problem.run(forward, outputs, seed=2 * seed, x_seed=2 * seed + 1, offset=7)
        found = problem.run_backward(
            backward, outputs, grad, written.x_q, written.x_scale, written.mean, written.spread, written.bits
        )
        scale = written.x_scale[None] if problem.name == BATCH_NORM else written.x_scale[:, None]
        copy = written.q.double() * (written.scale.double().view(-1, 1))
        rows.append((copy, written.x_q.double() * scale.double(), found.x.double(), found.weight))
    float_x = problem.run_backward(
        kernel_of(kept_in_float, "grad_input"), outputs, grad, problem.x, None, written.mean, written.spread, written.bits
    )
    return [torch.stack(column) if column[0] is not None else None for column in zip(*rows, strict=True)], float_x, written


@pytest.mark.parametrize("form", ["batch_norm", "batch_norm+relu", "batch_norm+add+relu", "layer_norm", "gelu", "silu"])
def test_over_many_seeds(form):
    name, _ = FORMS[form]
    rows = Granularity.PER_TENSOR if name == BATCH_NORM else Granularity.PER_ROW
    problem = Producer.of(form, variant_of(saved=Precision.INT8, granularity=rows), (24, 16), CPU, 3)
    kept_in_float = Producer.of(form, variant_of(granularity=rows), (24, 16), CPU, 3)
    grad = floats((24, 16), torch.float32, CPU, 9) + 0.5
    (copy, kept, grad_x, grad_weight), exact, written = samples(problem, grad, kept_in_float)
    expected = problem.expected()
    scale = written.x_scale.double()[None] if name == BATCH_NORM else written.x_scale.double()[:, None]
    assert deviations(copy, written.out.double(), written.scale.double().view(-1, 1)).max() < 5
    assert deviations(kept, expected.xhat, scale).max() < 5
    variance = rounding_variance(expected.xhat, scale)
    if name == ACTIVATION:
        bias = third_derivative(problem, expected.xhat) * variance / 2 * grad
        slack = 0.02 * grad.abs() * scale  # of the fourth and later ones
    else:
        is_open = expected.z > 0 if "relu" in form else torch.ones_like(expected.z, dtype=torch.bool)
        inner = torch.where(is_open, grad.double(), 0.0) * (1.0 if name == BATCH_NORM else problem.weight.double())
        factor = (expected.var + 1e-5).rsqrt() * (problem.weight.double() if name == BATCH_NORM else 1.0)
        bias, slack = -factor * variance * inner / expected.s.shape[0 if name == BATCH_NORM else 1], 0.0
        off = (grad_weight.double().mean(0) - exact.weight).abs() / (grad_weight.double().std(0) / SEEDS**0.5)
        assert off.nan_to_num(0).max() < 5  # of a channel whose ReLU is closed both are 0
    spread = grad_x.std(0) / SEEDS**0.5 + 1e-5
    off = ((grad_x.mean(0) - exact.x.double() - bias).abs() - slack).clamp(min=0) / spread
    assert off.max() < 5


def third_derivative(problem, x):
    x = x.clone().requires_grad_()
    value = torch.nn.functional.gelu(x) if str(problem.chain.activation) == "gelu" else torch.nn.functional.silu(x)
    for _ in range(2):
        (value,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    (third,) = torch.autograd.grad(value.sum(), x)
    return third
