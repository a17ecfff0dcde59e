"""The largest value at every edge: first and last rows, columns and elements, and where blocks of a power of two begin and end.

A maximum that leaves out a tail gives a scale that clips; random numbers hardly ever have their largest one there.
"""

from __future__ import annotations

import attrs
import pytest
import torch

from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.kernels.backend import Op
from qsync_torch.conformance.operands import Outputs, floats
from qsync_torch.conformance.producer_checks import check_forward
from qsync_torch.conformance.producers import BATCH_NORM, FORMS, GradCopy, Producer, given, variant_of
from qsync_torch.conformance.subject import Subject
from qsync_torch.conformance.test_producer_gradients import Kept, gradient
from qsync_torch.conformance.test_quantize import CHANNEL, ROW, TENSOR, run, scale_count
from qsync_torch.conformance.test_quantize import variant_of as quantization

LARGEST = 127.0
"""Makes the scale 1, exactly."""
SHAPES = [(7, 129), (129, 7), (33, 1000), (3, 5, 4, 9), (5000,), (1, 1)]
NEAREST = Rounding.NEAREST


def edges(count: int) -> list[int]:
    """The first two and last two of so many elements, and those around powers of two, where a block may end."""
    around = {(1 << bit) + side for bit in range(3, count.bit_length()) for side in (-1, 0)}
    return sorted({0, 1, count - 2, count - 1, *around} & set(range(count)))


def corners(rows: int, columns: int) -> list[tuple[int, int]]:
    """Places of a matrix: edges of the first and of the last row, and of the first and of the last column."""
    along = [(row, column) for row in (0, rows - 1) for column in edges(columns)]
    return sorted({*along, *((row, column) for row in edges(rows) for column in (0, columns - 1))})


@pytest.mark.parametrize("layout", ["dense", "other order"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_scale(subject: Subject, outputs: Outputs, shape: tuple[int, ...], layout: str) -> None:
    """The largest value counts at every edge of the memory, and of the last dimension."""
    memory = floats(shape, torch.float32, subject.device, 1).clamp(-3, 3)
    order = tuple(reversed(range(len(shape)))) if layout != "dense" and len(shape) == 2 else tuple(range(len(shape)))
    if layout != "dense" and len(shape) == 4:
        order = (0, 3, 1, 2)  # channels-last
    elif layout != "dense" and len(shape) != 2:
        pytest.skip("it has one order only")
    x, flat, columns = memory.permute(order), memory.view(-1), shape[-1]
    places = sorted({*edges(x.numel()), *(columns * row + column for row, column in corners(x.numel() // columns, columns))})
    for kernel in subject.kernels(Op.QUANTIZE, quantization(NEAREST), (tuple(x.shape),)):
        for number, place in enumerate(places):
            kept = flat[place].item()
            flat[place] = LARGEST * (-1) ** number
            q, scale = run(kernel, x, outputs)
            found = q.permute(tuple(order.index(d) for d in range(len(shape)))).reshape(-1)[place].item()
            assert (scale.item(), found) == (1.0, flat[place].item()), f"the largest value was overlooked at element {place}"
            flat[place] = kept


@pytest.mark.parametrize("granularity", [CHANNEL, ROW])
@pytest.mark.parametrize("columns", [1, 7, 129, 1000])
def test_scales_of_rows(subject: Subject, outputs: Outputs, columns: int, granularity: Granularity) -> None:
    """Row i has its largest value at place i: each place in turn."""
    x = floats((columns, columns), torch.float32, subject.device, 1).clamp(-3, 3)
    x.diagonal().fill_(-LARGEST)
    for kernel in subject.kernels(Op.QUANTIZE, quantization(NEAREST, granularity), ((columns, columns),)):
        q, scale = run(kernel, x, outputs, granularity)
        overlooked = (scale != 1).nonzero().flatten().tolist()
        assert not overlooked, f"the largest value was overlooked at the places {overlooked[:10]} of rows of {columns}"
        assert bool((q.diagonal() == -127).all())


@pytest.mark.parametrize("granularity", [TENSOR, ROW])
@pytest.mark.parametrize("end", ["smallest", "largest"])
def test_ends_of_a_range(subject: Subject, outputs: Outputs, end: str, granularity: Granularity) -> None:
    """Both ends of a range count wherever they are, with a zero point."""
    variant = attrs.evolve(quantization(NEAREST, granularity), symmetric=False)
    for shape in ((9, 129), (129, 9)):
        for kernel in subject.kernels(Op.QUANTIZE, variant, (shape,)):
            for row, column in corners(*shape):
                x = floats(shape, torch.float32, subject.device, 1).clamp(-3, 3)
                x[row, column] = -254.0 if end == "smallest" else 254.0
                count = scale_count(x, granularity)
                q, both = outputs.like(x, torch.int8), outputs.empty((2 * count,), torch.float32)
                kernel(x, q, both, None, 11, 12)
                group = row if granularity is ROW else 0
                found = (q[row, column].item() - both[count + group].item()) * both[group].item()
                assert abs(found - x[row, column].item()) < 2, f"the {end} value was overlooked at {(row, column)} of {shape}"


@pytest.mark.parametrize("form", FORMS)
def test_copies_of_producers(subject: Subject, outputs: Outputs, form: str) -> None:
    """The largest value at an edge counts: in copies of the result and of what is kept, and in the result's largest magnitude."""
    saved = Precision.FLOAT32 if form == "relu" else Precision.INT8
    shape, places = (21, 65), ((0, 0), (0, 64), (20, 0), (20, 64), (10, 64), (20, 33), (15, 0), (16, 63))
    problem = Producer.of(form, variant_of(saved=saved, rounding=NEAREST), shape, subject.device, 3)
    problem = attrs.evolve(problem, weight=None if problem.weight is None else problem.weight.abs() + 0.1)
    for kernel in problem.kernels(subject):
        for row, column in places:
            kept = problem.x[row, column].item()
            problem.x[row, column] = 300.0
            check_forward(problem, problem.run(kernel, outputs))
            problem.x[row, column] = kept


@pytest.mark.parametrize("form", [form for form, (name, _) in FORMS.items() if name != BATCH_NORM])
def test_copies_of_rows_of_producers(subject: Subject, outputs: Outputs, form: str) -> None:
    """Row i has its largest value at place i."""
    saved = Precision.FLOAT32 if form == "relu" else Precision.INT8
    variant = variant_of(saved=saved, granularity=ROW, rounding=NEAREST)
    for columns in (7, 129):
        problem = Producer.of(form, variant, (columns, columns), subject.device, 3)
        problem.x.diagonal().fill_(300.0)
        for kernel in problem.kernels(subject):
            check_forward(problem, problem.run(kernel, outputs))


@pytest.mark.parametrize("form", [form for form, (name, _) in FORMS.items() if name == BATCH_NORM])
def test_the_copy_of_a_gradient(subject: Subject, outputs: Outputs, form: str) -> None:
    """The scale of a gradient's copy is made for the largest gradient, wherever that is."""
    shape = (42, 40)
    problem = Producer.of(form, variant_of(), shape, subject.device, 30)
    problem = attrs.evolve(
        problem, chain=attrs.evolve(problem.chain, grad_copy=True), bias=torch.full((40,), 9.0, device=subject.device)
    )
    kept, grad = Kept.of(problem), gradient(problem)
    bits = torch.full((42, 5), 255, dtype=torch.uint8, device=subject.device) if problem.wants_bits else None
    for kernel in problem.kernels(subject, "grad_input"):
        for row, column in corners(*shape):
            value = grad[row, column].item()
            grad[row, column] = 300.0
            copy = GradCopy(None, outputs.empty(shape, torch.int8), outputs.empty((1,), torch.float32))
            found = problem.run_backward(kernel, outputs, grad, kept.x, kept.scale, kept.mean, kept.spread, bits, copy)
            most, bound = given(found.x).abs().max().item(), copy.scale.item() * 127
            assert bound >= most * (1 - 2.0**-18), f"the largest gradient, at {(row, column)}, is clipped from {most} to {bound}"
            grad[row, column] = value
