"""The reference producers against PyTorch's own operators and autograd: no worse than twice their error, in every format."""

import attrs
import torch
from hypothesis import given as drawn
from hypothesis import strategies as st
from torch.nn import functional

from hypothesis_profiles import tries
from qsync_core.ir.chain import Activation
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.kernels.backend import KernelConfig, KernelRequest, Op
from qsync_torch.aten.backend import AtenBackend
from qsync_torch.aten.quantize import build_copy
from qsync_torch.conformance.operands import Outputs, floats
from qsync_torch.conformance.producers import (
    ACTIVATION,
    BATCH_NORM,
    EPS,
    FORMS,
    GLU,
    LAYER_NORM,
    ROW_NORMS,
    Producer,
    variant_of,
)
from qsync_torch.conformance.quantization import LARGEST
from qsync_torch.dtypes import TORCH_DTYPE

CPU = torch.device("cpu")
FLOATS = (Precision.FLOAT32, Precision.BFLOAT16, Precision.FLOAT16)
FUNCTIONS = {
    Activation.NONE: lambda z: z,
    Activation.RELU: functional.relu,
    Activation.GELU: functional.gelu,
    Activation.GELU_TANH: lambda z: functional.gelu(z, approximate="tanh"),
    Activation.SILU: functional.silu,
}


def kernel_of(problem, part="output"):
    request = KernelRequest(f"{problem.name}.{part}", problem.variant, (problem.shape,), chain=problem.chain)
    return AtenBackend().build(request, KernelConfig())


def in_pytorch(problem, grad, dtype):
    """Result and gradients (x, residual, weight, bias) as PyTorch's operators give them in one format; parameters in float32."""
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    x, residual = (None if t is None else t.detach().clone().to(dtype).requires_grad_() for t in (problem.x, problem.residual))
    weight, bias = (None if t is None else t.detach().clone().to(wide).requires_grad_() for t in (problem.weight, problem.bias))
    if problem.name == BATCH_NORM:
        parameters = (weight, bias) if dtype is not torch.float16 else (weight.half(), bias.half())
        z = functional.batch_norm(problem.argument(x), None, None, *parameters, training=True, eps=EPS)
        z = z.permute(0, 2, 3, 1).reshape(problem.x.shape)
        z = z if residual is None else z + residual
    elif problem.name in ROW_NORMS:
        s = x if residual is None else x + residual
        if residual is not None:  # rounded to the format of both in float64 as well: all three normalize the same numbers
            s = s + ((problem.x + problem.residual).to(dtype) - s).detach()
        if problem.name == LAYER_NORM:
            z = functional.layer_norm(s, s.shape[1:], weight.to(dtype), bias.to(dtype), EPS)
        else:
            z = functional.rms_norm(s, s.shape[1:], weight.to(dtype), EPS)
    else:
        z = x
    y = FUNCTIONS[problem.chain.activation](z)
    factor = None if problem.factor is None else problem.factor.detach().clone().to(dtype).requires_grad_()
    y = y if factor is None else y * factor
    leaves = [leaf for leaf in (x, residual, factor, weight, bias) if leaf is not None]
    return [y.detach(), *torch.autograd.grad(y, leaves, grad.to(dtype))]


def fused(problem, grad):
    """The same from the producer's two kernels, backward reading what forward kept."""
    outputs = Outputs(CPU)
    written = problem.run(kernel_of(problem), outputs)
    kept = next(t for t in (written.x_q, written.sum, problem.x) if t is not None)
    found = problem.run_backward(
        kernel_of(problem, "grad_input"), outputs, grad, kept, written.x_scale, written.mean, written.spread, written.bits
    )
    outputs.check()
    residual = found.x if problem.name in ROW_NORMS and problem.residual is not None else found.residual
    return [written.out, *(t for t in (found.x, residual, found.factor, found.weight, found.bias) if t is not None)]


@tries(80)
@drawn(
    form=st.sampled_from(list(FORMS)),
    dtype=st.sampled_from(FLOATS),
    rows=st.sampled_from((2, 5, 12, 60, 210, 840)),
    columns=st.sampled_from((1, 3, 8, 17, 64, 200)),
    mean=st.sampled_from((0.0, 0.5, 8.0)),
    deviation=st.sampled_from((0.1, 1.0, 20.0)),
    seed=st.integers(0, 1000),
)
def test_errors_are_at_most_twice_those_of_pytorch(form, dtype, rows, columns, mean, deviation, seed):
    variant = variant_of(saved=dtype, output=dtype)
    problem = Producer.of(form, variant, (rows, columns), CPU, seed, mean=mean, deviation=deviation)
    grad = floats((rows, columns), torch.float32, CPU, seed + 5).to(TORCH_DTYPE[dtype])
    exact = in_pytorch(problem, grad, torch.float64)
    if problem.chain.activation is Activation.RELU and problem.name == BATCH_NORM:
        grad = torch.where(problem.expected().z.abs() > 0.05, grad, 0.0)  # on which side of 0 a z lies is not what is asked here
        exact = in_pytorch(problem, grad, torch.float64)
    theirs, ours = in_pytorch(problem, grad, TORCH_DTYPE[dtype]), fused(problem, grad)
    of_mean, of_slope = floors(problem)
    names = ("result", "x", "residual or weight", "weight or bias", "bias")[: len(ours)]
    for name, right, unfused, found in zip(names, exact, theirs, ours, strict=True):
        of_format = 2.0**-24 if found.dtype is torch.float32 else torch.finfo(found.dtype).eps / 2
        g = grad.abs().double()
        terms = {"result": of_mean, "x": 2.0**-22 * (1 + of_slope) * (1 + g.max())}
        of_terms = terms.get(name, (2.0**-22 + of_mean) * (1 + g.sum(0).max()))
        floor = of_format * right.abs().max() + of_terms
        error, allowed = (found.double() - right).abs().max(), 2 * (unfused.double() - right).abs().max() + floor
        assert error <= allowed, f"{name}: {error:.3e}, and PyTorch's is {(allowed - floor) / 2:.3e}"


def floors(problem):
    """What float32 may be off by in a normalized number, which few numbers escape by luck; and the slope of normalization."""
    if problem.name == ACTIVATION:
        return 2.0**-22, 1.0
    if problem.name == GLU:
        largest = 1 + problem.factor.abs().double().max()
        return 2.0**-22 * (1 + problem.x.abs().double().max()) * largest, largest
    expected = problem.expected()
    slope = (expected.var + EPS).rsqrt() * problem.weight.double().abs()
    return 2.0**-23 * (2 + (expected.s.abs() * slope).max()), slope.max()


@tries(60)
@drawn(
    form=st.sampled_from(list(FORMS)),
    compute=st.sampled_from((Precision.INT8, Precision.FLOAT8_E4M3FN)),
    rounding=st.sampled_from(list(Rounding)),
    by_row=st.booleans(),
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    seed=st.integers(0, 1 << 62),
)
def test_copies_are_bit_for_bit_those_of_quantize(form, compute, rounding, by_row, rows, columns, seed):
    by_row = by_row and FORMS[form][0] != BATCH_NORM
    variant = variant_of(compute, granularity=Granularity.PER_ROW if by_row else Granularity.PER_TENSOR, rounding=rounding)
    problem = Producer.of(form, variant, (rows, columns), CPU, seed % 1000)
    written = problem.run(kernel_of(problem), Outputs(CPU), seed=seed, offset=seed // 3)
    # With a residual the scale is that of a bound; an element more that has this magnitude gives it to quantize as well.
    bounded = problem.residual is not None and problem.name == BATCH_NORM
    r = torch.cat([written.out.view(-1), written.scale * LARGEST[compute]]) if bounded else written.out
    q, scale = torch.empty_like(r, dtype=written.q.dtype), torch.empty_like(written.scale)
    build_copy(variant)(r, q, scale, seed, int(written.stream))
    torch.testing.assert_close(scale, written.scale, rtol=2.0**-23 if bounded else 0.0, atol=0.0)
    if torch.equal(scale, written.scale):
        assert torch.equal(q.view(torch.int8).view(-1)[: rows * columns], written.q.view(torch.int8).view(-1))


def test_the_bound_of_a_residual_does_not_grow_from_block_to_block():
    """Each block's largest magnitude is its own result's, which the next one adds to."""
    x, weight = floats((240, 16), torch.float32, CPU, 1), torch.ones(16)
    residual = x.relu()
    for block in range(8):
        problem = Producer.of("batch_norm+add+relu", variant_of(), (240, 16), CPU, block)
        problem = attrs.evolve(problem, residual=residual, weight=weight * 0.2, bias=weight * 0)
        written = problem.run(kernel_of(problem), Outputs(CPU))
        assert written.absmax == written.out.max()
        assert written.scale * 127 <= problem.expected().affine.max() + residual.max() + 1e-5
        residual = written.out


def test_every_operator_has_a_builder():
    for op in Op.PRODUCERS:
        name = op.partition(".")[0]
        chain = next(chain for form, (producer, chain) in FORMS.items() if producer == name)
        assert callable(AtenBackend().build(KernelRequest(op, variant_of(), (), chain=chain), KernelConfig()))
    assert ACTIVATION in {op.partition(".")[0] for op in Op.PRODUCERS}
