"""Random requests: shapes of no particular kind, in every combination of formats, granularities, roundings and layouts.

The draws are the same in every run.  Requests that the backend refuses are passed over; one that it takes must come out right.
"""

from __future__ import annotations

import random

import attrs
import pytest
import torch

from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import Op
from qsync_torch.conformance.checks import FLOATS, Check
from qsync_torch.conformance.operands import LAYOUTS, Outputs, floats, integers, laid_out, powers_of_two
from qsync_torch.conformance.subject import Subject
from qsync_torch.conformance.test_quantize import check_formula
from qsync_torch.dtypes import TORCH_DTYPE

DRAWS = 24
TENSOR, CHANNEL, ROW = Granularity.PER_TENSOR, Granularity.PER_CHANNEL, Granularity.PER_ROW


def values(choose: random.Random, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Normal values, sometimes with outliers, zeros, equal values, or a very small or large magnitude."""
    x = floats(shape, torch.float32, device, choose.randrange(1000)) * 10.0 ** choose.choice((0, 0, -6, 4))
    kind = choose.choice(("plain", "plain", "outlier", "zero", "equal", "sparse"))
    if kind == "outlier":
        x.view(-1)[choose.randrange(x.numel())] *= 1000
    elif kind == "zero":
        x.zero_()
    elif kind == "equal":
        x.fill_(x.view(-1)[0].item())
    elif kind == "sparse":
        x.mul_(torch.rand(shape, generator=torch.Generator().manual_seed(1)).to(device) < 0.1)
    return x.clamp(-6e4, 6e4).to(dtype)


@pytest.mark.parametrize("draw", range(DRAWS))
def test_quantization(subject: Subject, outputs: Outputs, draw: int) -> None:
    """Scales and every value, against float64."""
    subject.skip_unless_offered(Op.QUANTIZE)
    choose = random.Random(draw)
    shape = tuple(choose.choice((1, 2, 3, 5, 17, 33, 64, 129)) for _ in range(choose.randint(1, 4)))
    granularity, rounding = choose.choice(list(Granularity)), choose.choice(list(Rounding))
    x = values(choose, shape, choose.choice((torch.float32, torch.bfloat16, torch.float16)), subject.device)
    if granularity is TENSOR and len(shape) == 4 and choose.random() < 0.5:
        x = x.to(memory_format=torch.channels_last)
    check_formula(subject, outputs, x, rounding, granularity, seed=choose.getrandbits(63), offset=choose.getrandbits(63))


@pytest.mark.parametrize("draw", range(DRAWS))
def test_linear_products(check: Check, draw: int) -> None:
    """Output and both int8 gradients, exactly, with scales that are powers of two."""
    subject = check.subject
    subject.skip_unless_offered(Op.LINEAR_OUTPUT, Op.LINEAR_GRAD_INPUT, Op.LINEAR_GRAD_WEIGHT)
    choose, device = random.Random(draw), subject.device
    m, k, n = (choose.choice((1, 2, 7, 8, 16, 31, 64, 100, 257)) for _ in range(3))
    output = choose.choice(FLOATS)
    x_granularity, w_granularity = choose.choice((TENSOR, ROW)), choose.choice((TENSOR, CHANNEL))
    variant = attrs.evolve(
        Variant.of(Precision.INT8), output=output, x_granularity=x_granularity, w_granularity=w_granularity,
        grad_input=Precision.INT8, grad_weight=Precision.INT8,
    )  # fmt: skip
    x, w, grad = (integers(shape, device, draw + i) for i, shape in enumerate(((m, k), (n, k), (m, n))))
    x_scale = powers_of_two(m if x_granularity is ROW else 1, device)
    w_scale = powers_of_two(n if w_granularity is CHANNEL else 1, device)
    one = torch.full((1,), 2.0 ** choose.randint(-9, 3), device=device)
    per_channel = powers_of_two(n, device)

    def operand(tensor: torch.Tensor) -> torch.Tensor:
        return laid_out(tensor, choose.choice(LAYOUTS))

    cases = (
        (
            Op.LINEAR_OUTPUT,
            ((m, k), (n, k)),
            (operand(x), x_scale, operand(w), w_scale, None),
            (x.double() * x_scale.double().view(-1, 1)) @ (w.double() * w_scale.double().view(-1, 1)).t(),
            TORCH_DTYPE[output],
        ),
        (
            Op.LINEAR_GRAD_INPUT,
            ((m, n), (n, k)),
            (operand(grad), operand(w), one),
            (grad.double() @ w.double()) * one,
            TORCH_DTYPE[output],
        ),
        (
            Op.LINEAR_GRAD_WEIGHT,
            ((m, n), (m, k)),
            (operand(grad), operand(x), per_channel),
            (grad.double().t() @ x.double()) * per_channel.double().view(-1, 1),
            torch.float32,
        ),
    )
    ran = 0
    for op, shapes, operands, exact, dtype in cases:
        if not subject.refuses(op, variant, shapes):
            ran += check.exact(op, variant, operands, exact.float().to(dtype))
    if not ran:
        pytest.skip(f"{subject.backend.name} refuses these products of {m}, {k} and {n}")
