"""Every kernel a second time, after each of its operands was changed in place: nothing may be kept by a tensor's address.

The optimizer changes weights where they are, and the allocator hands freed memory to the next tensor: an address says nothing of
the numbers there.  Outputs are those of the first call, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import pytest
import torch

from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import Op
from qsync_torch.conformance.checks import Check, check_near, mismatch
from qsync_torch.conformance.operands import Outputs, floats, integers, powers_of_two
from qsync_torch.conformance.producer_checks import check_forward, packed
from qsync_torch.conformance.producers import FORMS, Producer, variant_of
from qsync_torch.conformance.subject import Subject
from qsync_torch.conformance.test_conv2d import INT8_GRADIENT, Convolution
from qsync_torch.conformance.test_linear import FLOAT32_OUTPUT, gradient_variant, product
from qsync_torch.conformance.test_producer_gradients import Kept, gradient
from qsync_torch.conformance.test_quantize import ROW, TENSOR, check_rounding, check_scales, check_stream, groups_of, scale_count
from qsync_torch.conformance.test_quantize import variant_of as quantization

Reference = Callable[..., torch.Tensor]
INT8, FLOAT32 = Precision.INT8, Precision.FLOAT32
M, K, N = 24, 40, 16


def change(x: torch.Tensor) -> None:
    """Give a tensor other numbers, of which sums stay exact: integers of another sign, float numbers twice as large."""
    if x.dtype is torch.int8:
        x.neg_()
    elif x.dtype is torch.uint8:
        x.bitwise_not_()
    else:
        x.mul_(-2.0 if bool((x < 0).any()) else 2.0)


def after_each_change(operands: Sequence[torch.Tensor | None]) -> Iterator[str]:
    """Once as they are, then with each operand changed in place, the others as they were; says which one that is."""
    yield "as it was first"
    for position, operand in enumerate(operands):
        if operand is not None and operand.numel():
            kept = operand.clone()
            change(operand)
            yield f"after operand {position} was changed in place"
            operand.copy_(kept)


def check_product(
    check: Check,
    op: str,
    variant: Variant,
    operands: Sequence[torch.Tensor | None],
    reference: Reference,
    dtype: torch.dtype,
    **more: Any,
) -> None:
    """Call each kernel again and again on the same tensors; ``reference`` is exact, or a float gradient's sum of products."""
    factors = [operands[0], operands[2 if op.endswith(".output") else 1]]
    shapes = tuple(tuple(factor.shape) for factor in factors if factor is not None)
    expected = reference(*operands)
    for kernel in check.subject.kernels(op, variant, shapes, **more):
        out = check.outputs.empty(tuple(expected.shape), dtype, channels_last=expected.dim() == 4)
        for when in after_each_change(operands):
            kernel(*operands, out)
            expected = reference(*operands).float()
            if all(factor is None or factor.dtype is torch.int8 for factor in factors):
                assert torch.equal(out, expected), f"{when}: {mismatch(out, expected)}"
            else:
                magnitude = reference(*(None if o is None else o.abs() for o in operands)).abs()
                check_near(out, expected.double(), magnitude, dtype, when=when)


def linear_output(x: torch.Tensor, x_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute the output of a linear in float64."""
    return product(x * x_scale.double().view(-1, 1), (w * w_scale.double().view(-1, 1)).t()) + b.double()


def linear_grad_input(grad: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Compute the gradient of the input in float64; the scale is the weight's where the gradient is a float one."""
    return product(grad, w * scale.double().view(-1, 1))


def linear_grad_weight(grad: torch.Tensor, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Compute the gradient of the weight in float64; the scale is the activation's, or one for each channel of an int8 gradient."""
    return scale.double().view(-1, 1) * product(grad.t(), x)


def test_linear_output(check: Check) -> None:
    """The output follows changes of activation, weight, their scales and the bias."""
    device = check.device
    x, w = integers((M, K), device, 1) // 8, integers((N, K), device, 2) // 8
    bias = torch.arange(N, dtype=torch.float32, device=device) - 7
    operands = (x, powers_of_two(1, device), w, powers_of_two(N, device), bias)
    check_product(check, Op.LINEAR_OUTPUT, FLOAT32_OUTPUT, operands, linear_output, torch.float32)


def test_linear_output_with_a_zero_point(check: Check) -> None:
    """Sums over the weight, by which a zero point is corrected, are those of now, though a kernel might compute them once."""
    device = check.device
    x, w = integers((M, K), device, 1) // 8, integers((N, K), device, 2) // 8
    bias = torch.arange(N, dtype=torch.float32, device=device) - 7
    both = torch.tensor([0.5, 3.0], device=device)

    def output(x: torch.Tensor, both: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return linear_output(x - both[1].double(), both[:1], w, w_scale, b)

    variant = attrs.evolve(FLOAT32_OUTPUT, symmetric=False)
    check_product(check, Op.LINEAR_OUTPUT, variant, (x, both, w, powers_of_two(N, device), bias), output, torch.float32)


@pytest.mark.parametrize("precision", [INT8, FLOAT32], ids=str)
def test_linear_grad_input(check: Check, precision: Precision) -> None:
    """Gradient, weight and scale."""
    w, of_int8 = integers((N, K), check.device, 2), precision is INT8
    grad = integers((M, N), check.device, 1) if of_int8 else floats((M, N), torch.float32, check.device, 1)
    operands = (grad, w, powers_of_two(1 if of_int8 else N, check.device))
    check_product(check, Op.LINEAR_GRAD_INPUT, gradient_variant(precision), operands, linear_grad_input, torch.float32)


@pytest.mark.parametrize("precision", [INT8, FLOAT32], ids=str)
def test_linear_grad_weight(check: Check, precision: Precision) -> None:
    """Gradient, activation and scale."""
    x, of_int8 = integers((M, K), check.device, 2), precision is INT8
    grad = integers((M, N), check.device, 1) if of_int8 else floats((M, N), torch.float32, check.device, 1)
    operands = (grad, x, powers_of_two(N if of_int8 else 1, check.device))
    check_product(check, Op.LINEAR_GRAD_WEIGHT, gradient_variant(precision), operands, linear_grad_weight, torch.float32)


@pytest.mark.parametrize("name", ["3x3, padded", "1x1", "depthwise"])
def test_conv2d_output(check: Check, name: str) -> None:
    """Image, filters, their scales and the bias."""
    case = Convolution(name, check.device)
    x, w = case.x // 8, case.w // 8
    filters = w.shape[0]
    bias = torch.arange(filters, dtype=torch.float32, device=check.device) - 7
    variant = Variant.of(INT8, output=FLOAT32)

    def output(x: torch.Tensor, x_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        scaled = w * w_scale.double().view(-1, 1, 1, 1)
        return torch.nn.functional.conv2d(x * x_scale.double(), scaled, b.double(), **case.geometry)

    operands = (x, powers_of_two(1, check.device), w, powers_of_two(filters, check.device), bias)
    check_product(check, Op.CONV2D_OUTPUT, variant, operands, output, torch.float32, geometry=case.asked)


@pytest.mark.parametrize("variant", [INT8_GRADIENT, Variant.of(INT8, sixteen_bit=FLOAT32, output=FLOAT32)], ids=["int8", "float32"])
def test_conv2d_grad_input(check: Check, variant: Variant) -> None:
    """Gradient, filters and scale."""
    case, of_int8 = Convolution("3x3, padded", check.device), variant.grad_input is INT8
    grad = integers(case.y_shape, check.device, 3) if of_int8 else floats(case.y_shape, torch.float32, check.device, 3)

    def gradient_of_image(grad: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return case.grad_input(grad, w * scale.double().view(-1, 1, 1, 1))

    operands = (case.channels_last(grad), case.w, powers_of_two(1 if of_int8 else case.w.shape[0], check.device))
    check_product(check, Op.CONV2D_GRAD_INPUT, variant, operands, gradient_of_image, torch.float32, geometry=case.asked)


def test_conv2d_grad_weight(check: Check) -> None:
    """Gradient, image and scale."""
    case = Convolution("3x3, padded", check.device)
    grad = case.channels_last(floats(case.y_shape, torch.float32, check.device, 3))

    def gradient_of_filters(grad: torch.Tensor, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return case.grad_weight(grad, x * scale.double())

    variant = Variant.of(INT8, sixteen_bit=FLOAT32, output=FLOAT32)
    operands = (grad, case.x, powers_of_two(1, check.device))
    check_product(check, Op.CONV2D_GRAD_WEIGHT, variant, operands, gradient_of_filters, torch.float32, geometry=case.asked)


@pytest.mark.parametrize("layout", ["dense", "channels-last"])
@pytest.mark.parametrize("granularity", list(Granularity))
def test_quantize(subject: Subject, outputs: Outputs, granularity: Granularity, layout: str) -> None:
    """The tensor; its copy and its scales are those of now."""
    if granularity is ROW and layout != "dense":
        pytest.skip("a kernel is only given rows that follow each other in memory")
    x = floats((6, 5, 4, 7), torch.float32, subject.device, 1)
    x = x.to(memory_format=torch.channels_last) if layout != "dense" else x
    for kernel in subject.kernels(Op.QUANTIZE, quantization(Rounding.NEAREST, granularity), (tuple(x.shape),)):
        q, scale = outputs.like(x, torch.int8), outputs.empty((scale_count(x, granularity),), torch.float32)
        stream = outputs.empty((1,), torch.int64)
        for _ in after_each_change((x,)):
            kernel(x, q, scale, stream, 11, 12)
            check_stream(stream, 12, x)
            check_scales(x, scale, granularity)
            check_rounding(x, q, scale, granularity, Rounding.NEAREST)


def test_quantize_with_a_multiplier_and_a_transposed_copy(subject: Subject, outputs: Outputs) -> None:
    """The tensor and the factors."""
    x, factors = floats((24, 16), torch.float32, subject.device, 1), torch.logspace(-1, 1, 16, device=subject.device)
    for kernel in subject.kernels(Op.QUANTIZE, quantization(Rounding.NEAREST), ((24, 16),), multiplied=True, transposed=True):
        q, turned, scale, stream = (outputs.empty(shape, dtype) for shape, dtype in COPIES)
        for _ in after_each_change((x, factors)):
            kernel(x, q, scale, stream, 11, 12, multiplier=factors, transposed_out=turned)
            check_scales(x * factors, scale, TENSOR)
            check_rounding(x * factors, q, scale, TENSOR, Rounding.NEAREST)
            assert torch.equal(turned, q.t()), "the transposed copy is not that of now"


COPIES = (((24, 16), torch.int8), ((16, 24), torch.int8), ((1,), torch.float32), ((1,), torch.int64))


@pytest.mark.parametrize("granularity", [TENSOR, ROW])
def test_quantize_with_a_zero_point(subject: Subject, outputs: Outputs, granularity: Granularity) -> None:
    """Scales and zero points are those of now."""
    x = floats((24, 16), torch.float32, subject.device, 1) + 0.5
    variant = attrs.evolve(quantization(Rounding.NEAREST, granularity), symmetric=False)
    for kernel in subject.kernels(Op.QUANTIZE, variant, ((24, 16),)):
        count = scale_count(x, granularity)
        q, both = outputs.like(x, torch.int8), outputs.empty((2 * count,), torch.float32)
        for when in after_each_change((x,)):
            kernel(x, q, both, None, 11, 12)
            values, scale, zero_point = groups_of(x.double(), granularity), both[:count, None].double(), both[count:, None].double()
            error = (groups_of(q.double(), granularity) - zero_point) * scale - values
            assert bool((error.abs() <= 0.5001 * scale).all()), f"{when}: values are off by more than half a step"
            width = values.amax(1).clamp(min=0) - values.amin(1).clamp(max=0)
            assert bool((scale[:, 0] * 253 < width).all()), f"{when}: scales are not those of the range"


@pytest.mark.parametrize("form", FORMS)
def test_producers(subject: Subject, outputs: Outputs, form: str) -> None:
    """What is normalized, the residual and both parameters."""
    problem = Producer.of(form, variant_of(rounding=Rounding.NEAREST), (42, 24), subject.device, 3)
    for kernel in problem.kernels(subject):
        for _ in after_each_change((problem.x, problem.residual, problem.weight, problem.bias)):
            check_forward(problem, problem.run(kernel, outputs))


@pytest.mark.parametrize("saved", [FLOAT32, INT8], ids=["kept in float", "kept in 8 bit"])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_producers(subject: Subject, outputs: Outputs, form: str, saved: Precision) -> None:
    """The gradient, what was kept, statistics, parameters and the bits of a ReLU; as from copies of all of them elsewhere."""
    problem = Producer.of(form, variant_of(saved=saved), (42, 24), subject.device, 3)
    kept, grad = Kept.of(problem), gradient(problem)
    bits = packed(grad > 0) if problem.wants_bits else None

    def copy(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x.clone()

    operands = (grad, kept.x, kept.scale, kept.mean, kept.spread, bits, problem.weight, problem.bias)
    for kernel in problem.kernels(subject, "grad_input"):
        for when in after_each_change(operands):
            found = problem.run_backward(kernel, outputs, grad, kept.x, kept.scale, kept.mean, kept.spread, bits)
            moved = attrs.evolve(problem, weight=copy(problem.weight), bias=copy(problem.bias))
            x, mean, spread = kept.x.clone(), kept.mean.clone(), kept.spread.clone()
            elsewhere = moved.run_backward(kernel, outputs, grad.clone(), x, copy(kept.scale), mean, spread, copy(bits))
            for name, value in attrs.asdict(elsewhere, recurse=False).items():
                if value is not None:
                    error = (getattr(found, name) - value).abs().max().item()
                    assert error <= 1e-3 * value.abs().max().item(), f"{when}: the gradient of {name} is not that of now"
