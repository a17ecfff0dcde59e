"""Independent references: float64 autograd of the dequantized operands."""

import torch

from qsync_core.precision import Precision
from qsync_torch.quantization import dequantize
from qsync_torch.quantize import quantize

# Relative error of one product with that many mantissa bits; sums of many terms stay below a few of them.
TOLERANCE = {Precision.FLOAT32: 1e-5, Precision.FLOAT16: 3e-3, Precision.BFLOAT16: 2e-2}


def dequantized(x, variant, granularity):
    """The values that the operator really multiplies, in float64."""
    if variant.compute.needs_scale:
        q, scale = quantize(x.detach(), variant.compute, granularity, variant.rounding)
        return dequantize(q, scale, granularity, torch.float64)
    dtype = getattr(torch, str(variant.compute))
    return x.detach().to(dtype).double()


def reference(function, x, weight, bias, grad, variant):
    """Output and gradients in float64, differentiated by autograd at the dequantized operands."""
    x64 = dequantized(x, variant, variant.x_granularity).requires_grad_()
    w64 = dequantized(weight, variant, variant.w_granularity).requires_grad_()
    b64 = None if bias is None else bias.detach().double().requires_grad_()
    y = function(x64, w64, b64)
    y.backward(grad.double())
    return y.detach(), x64.grad, w64.grad, None if bias is None else b64.grad


def assert_near(found, expected, tolerance, what):
    """Largest error relative to the largest magnitude."""
    if expected.numel() == 0:
        assert found.shape == expected.shape, what
        return
    error = (found.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
    assert error.item() <= tolerance, f"{what}: relative error {error.item():.2e}, at most {tolerance:.0e} expected"


def check_operator(run, function, x, weight, bias, variant):
    """Compare an operator's output and gradients with the reference; returns the output."""
    x, weight = x.requires_grad_(), weight.requires_grad_()
    y = run(x, weight, bias)
    grad = torch.randn(y.shape, device=y.device)
    y.backward(grad.to(y.dtype))
    expected, grad_x, grad_w, grad_b = reference(function, x, weight, bias, grad, variant)
    exact = Precision.FLOAT32 if variant.compute.needs_scale else variant.compute
    output = variant.output if TOLERANCE[variant.output] > TOLERANCE[exact] else exact
    assert_near(y, expected, TOLERANCE[output], "output")
    arriving = Precision(str(x.dtype).removeprefix("torch."))
    backward = max(TOLERANCE[variant.grad_input], TOLERANCE[variant.output], TOLERANCE[arriving])
    assert_near(x.grad, grad_x, backward, "grad_input")
    assert_near(weight.grad, grad_w, max(TOLERANCE[variant.grad_weight], TOLERANCE[variant.output]), "grad_weight")
    assert (x.grad.dtype, weight.grad.dtype) == (x.dtype, torch.float32)
    if bias is not None:
        assert_near(bias.grad, grad_b, backward, "grad_bias")
        assert bias.grad.dtype is torch.float32
    assert y.dtype is getattr(torch, str(variant.output))
    return y
