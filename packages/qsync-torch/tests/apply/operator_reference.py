"""Independent references: float64 autograd of the dequantized operands."""

import torch

from qsync_core.ir.precision import Granularity, Precision
from qsync_torch.aten.quantize import dequantize
from qsync_torch.quantize import quantize

# Relative error of one product with that many mantissa bits; sums of many terms stay below a few of them.
TOLERANCE = {Precision.INT8: 1e-5, Precision.FLOAT32: 1e-5, Precision.FLOAT16: 3e-3, Precision.BFLOAT16: 2e-2}


def dequantized(x, variant, granularity, symmetric=True):
    """The values that the operator really multiplies, in float64."""
    if variant.compute.needs_scale:
        q, scale = quantize(x.detach(), variant.compute, granularity, variant.rounding, symmetric=symmetric)
        return dequantize(q, scale, granularity, torch.float64, symmetric=symmetric)
    dtype = getattr(torch, str(variant.compute))
    return x.detach().to(dtype).double()


def rounded(x, variant):
    """A float tensor's int8 copy in float64: with one scale, or with one for each row of its last dimension."""
    granularity = Granularity.PER_ROW if variant.x_granularity is Granularity.PER_ROW else Granularity.PER_TENSOR
    q, scale = quantize(x, Precision.INT8, granularity, rounding=variant.rounding)
    return dequantize(q, scale, granularity, torch.float64)


def quantized_gradient(grad, w_scale, variant, of_images, x_scale=None):
    """What an int8 backward product sees of the incoming gradient, in float64.

    The gradient is quantized after multiplication by the scales of the weight's channels if it is multiplied with the weight; for a
    product with an activation that has a scale for each row, also by these, ``x_scale``, and with a scale for each column.
    """
    factor = torch.ones((), device=grad.device)
    if variant.grad_input is Precision.INT8 and w_scale.numel() > 1:
        factor = w_scale.view(-1, *(1,) * (grad.ndim - 2)) if of_images else w_scale
    if x_scale is None:
        return rounded(grad.float() * factor, variant) / factor.double()
    x_scale = x_scale.view(*grad.shape[:-1], 1)
    columns = (grad.float() * factor * x_scale).reshape(-1, grad.shape[-1]).t().contiguous()
    return rounded(columns, variant).t().reshape(grad.shape) / (factor.double() * x_scale.double())


def reference(function, x, weight, bias, grad, variant):
    """Output and gradients in float64, differentiated by autograd at the dequantized operands and, for int8, gradients."""
    x64 = dequantized(x, variant, variant.x_granularity, variant.symmetric).requires_grad_()
    w64 = dequantized(weight, variant, variant.w_granularity).requires_grad_()
    b64 = None if bias is None else bias.detach().double().requires_grad_()
    y = function(x64, w64, b64)
    seen = {}
    for precision in {variant.grad_input, variant.grad_weight}:
        seen[precision] = grad.double()
        if precision is Precision.INT8:
            w_scale = quantize(weight.detach(), variant.compute, variant.w_granularity, variant.rounding)[1]
            seen[precision] = quantized_gradient(grad, w_scale, variant, weight.ndim > 2)
    (grad_x,) = torch.autograd.grad(y, x64, seen[variant.grad_input], retain_graph=True)
    of_weight = seen[variant.grad_weight]
    if variant.grad_weight is Precision.INT8 and variant.x_granularity is Granularity.PER_ROW:
        x_scale = quantize(x.detach(), variant.compute, variant.x_granularity, variant.rounding)[1]
        of_weight = quantized_gradient(grad, w_scale, variant, False, x_scale)
    (grad_w,) = torch.autograd.grad(y, w64, of_weight, retain_graph=True)
    grad_b = None if bias is None else torch.autograd.grad(y, b64, grad.double())[0]
    return y.detach(), grad_x, grad_w, grad_b


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
    expected, grad_x, grad_w, grad_b = reference(function, x, weight, bias, grad.to(y.dtype), variant)
    exact = Precision.FLOAT32 if variant.compute.needs_scale else variant.compute
    output = variant.output if TOLERANCE[variant.output] > TOLERANCE[exact] else exact
    assert_near(y, expected, TOLERANCE[output], "output")
    arriving = Precision(str(x.dtype).removeprefix("torch."))
    backward = max(TOLERANCE[variant.grad_input], TOLERANCE[variant.output], TOLERANCE[arriving])
    assert_near(x.grad, grad_x, backward, "grad_input")
    assert_near(weight.grad, grad_w, max(TOLERANCE[variant.grad_weight], TOLERANCE[variant.output]), "grad_weight")
    assert (x.grad.dtype, weight.grad.dtype) == (x.dtype, torch.float32)
    if bias is not None:
        # The sum of the copy in the wider float format, where there is one.
        assert_near(bias.grad, grad_b, max(backward, TOLERANCE[variant.grad_weight]), "grad_bias")
        assert bias.grad.dtype is torch.float32
    assert y.dtype is getattr(torch, str(variant.output))
    return y
