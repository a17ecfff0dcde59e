"""Shapes and problems: what a job asks for, the work of it, its operands and its result in float64."""

import itertools
from importlib import resources

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qsync_core.artifacts import files as artifact
from qsync_core.errors import QSyncError
from qsync_core.geometry import Geometry
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.precision import Granularity, Precision
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import Op
from qsync_torch.benchmarking.contenders import Backends, RefusedError, in_16_bit
from qsync_torch.benchmarking.errors import Reference
from qsync_torch.benchmarking.problems import Problem, problems, quantization
from qsync_torch.benchmarking.shapes import ShapeSet, convolution, product_of_rows, read_shapes, shapes_of, usual_shapes
from qsync_torch.job import Batch, Job
from qsync_torch.tracing.trace import trace

CPU = torch.device("cpu")
INT8 = Variant.of(Precision.INT8)
IMAGES = (2, 4, 7, 6)
SMALL = ShapeSet(
    "small",
    (
        product_of_rows(5, 6, 7),
        convolution(IMAGES, (8, 4, 3, 3), Geometry(padding=(1, 1))),
        convolution(IMAGES, (6, 2, 3, 2), Geometry(stride=(2, 1), groups=2)),
    ),
    ((5, 6), IMAGES),
)
PROBLEMS = list(problems(SMALL, float8=False))
PRODUCTS = [problem for problem in PROBLEMS if problem.part]


def label(problem):
    return problem.label


def test_a_jobs_products_are_there_once_with_how_often():
    path = resources.files("qsync_torch.demo") / "h200_resnet50" / "dag.qsync"
    dag = artifact.load(path, PrecisionDag)
    found = shapes_of(dag)
    assert found.name == dag.model
    assert [(shape.label, shape.count) for shape in found.products if shape.call.of_rows] == [(f"{dag.batch_size}×2048×1000", 1)]
    images = [shape for shape in found.products if not shape.call.of_rows]
    assert sum(shape.count for shape in images) == 53
    assert len({shape.call for shape in images}) == len(images) == 23
    # A convolution of volumes has no kernels in 8 bit, and is not among them.
    volumes = attrs.evolve(dag, operators=tuple(attrs.evolve(one, kind=one.kind.replace("2d", "3d")) for one in dag.operators))
    assert [shape.label for shape in shapes_of(volumes).products] == [f"{dag.batch_size}×2048×1000"]


def test_shapes_are_read_as_people_write_them():
    found = read_shapes(["16x32x8", "16×32×8", "5x7", "16x32x8"])
    assert [shape.label for shape in found.products] == ["16×32×8"]
    assert (found.products[0].call.x, found.products[0].call.w, found.products[0].call.y) == ((16, 32), (8, 32), (16, 8))
    assert found.quantize == ((5, 7),)


@given(st.lists(st.integers(1, 10**9 - 1), min_size=2, max_size=3), st.sampled_from("x×"))
def test_any_sizes_are_read(sizes, sign):
    found = read_shapes([sign.join(map(str, sizes))])
    assert [*found.quantize, *((*one.call.x, one.call.w[0]) for one in found.products)] == [tuple(sizes)]


@pytest.mark.parametrize(
    "text", ["", "x", "16", "16x", "0x4x4", "-1x4", "4x4x4x4", "4 x 4", "4x4.0", "٤x4", "9999999999x4", "4x4\n"]
)
def test_any_other_text_is_refused_with_how_to_write_one(text):
    with pytest.raises(QSyncError) as caught:
        read_shapes([text])
    assert f"--shape {text!r} is no shape" in str(caught.value)
    assert "ROWSxCONTRACTEDxCOLUMNS, for example 4096x4096x1024" in str(caught.value)
    assert "ROWSxCOLUMNS, for example 4096x1024" in str(caught.value)


def test_output_shapes_of_convolutions_are_pytorchs():
    for shape in SMALL.products[1:]:
        call, g = shape.call, shape.call.geometry
        x, w = torch.empty(call.x, device="meta"), torch.empty(call.w, device="meta")
        assert tuple(torch.nn.functional.conv2d(x, w, None, g.stride, g.padding, g.dilation, g.groups).shape) == call.y


def test_work_and_bytes_of_a_product_worked_by_hand():
    shape = product_of_rows(4, 6, 10)
    for op in (Op.LINEAR_OUTPUT, Op.LINEAR_GRAD_INPUT, Op.LINEAR_GRAD_WEIGHT):
        assert Problem(op, shape, INT8).flops == 2 * 4 * 6 * 10
    assert Problem(Op.LINEAR_OUTPUT, shape, INT8).floor_bytes == 4 * 6 + 10 * 6 + 4 * 10 * 2
    assert Problem(Op.LINEAR_GRAD_INPUT, shape, INT8).floor_bytes == 4 * 10 * 2 + 10 * 6 + 4 * 6 * 2
    assert Problem(Op.LINEAR_GRAD_WEIGHT, shape, INT8).floor_bytes == 4 * 10 * 2 + 4 * 6 + 10 * 6 * 4
    assert quantization((3, 5)).floor_bytes == 15 * (4 + 4 + 1)
    assert quantization((3, 5), flags=("transposed",)).floor_bytes == 15 * (4 + 4 + 2)
    grouped = Problem(Op.CONV2D_OUTPUT, SMALL.products[2], INT8)
    assert grouped.flops == 2 * (2 * 6 * 3 * 5) * (2 * 3 * 2)


class Beside(torch.nn.Module):
    """Convolutions of the same images, as segmentation models have with several dilations."""

    def __init__(self):
        super().__init__()
        plain = itertools.product((3, (1, 4)), (1, 2, (1, 2)), (0, 1, (1, 0)), (1, 2, (2, 1)), (1, 2))
        spread = itertools.product((3,), (2, (2, 3)), (0, 1), (0, 1, (0, 1)), (1, 2))
        self.all = torch.nn.ModuleList(
            [torch.nn.Conv2d(4, 4, *one) for one in plain] + [torch.nn.ConvTranspose2d(4, 4, *one) for one in spread]
        )

    def forward(self, x):
        return sum(one(x).mean() for one in self.all)


def test_labels_tell_convolutions_of_the_same_images_apart():
    job = Job(
        "beside",
        Beside(),
        lambda step, size: Batch((torch.randn(size, 4, 9, 9),), target=None),
        lambda output, batch: output,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=2,
    )
    found = shapes_of(trace(job))
    assert sum(shape.count for shape in found.products) == len(found.products) == 108 + 24
    assert len({shape.label for shape in found.products}) == len(found.products)


@pytest.mark.parametrize(
    ("filters", "geometry", "text"),
    [
        ((64, 3, 7, 7), Geometry((2, 2), (3, 3)), "7×7/2"),
        ((64, 3, 1, 1), Geometry(), "1×1/1"),
        ((64, 3, 3, 3), Geometry(), "3×3/1, padding 0"),
        ((64, 3, 3, 3), Geometry((1, 1), (12, 12), (12, 12)), "3×3/1, dilation 12"),
        ((64, 3, 3, 1), Geometry((2, 1), (0, 1), (1, 2)), "3×1/2×1, padding 0×1, dilation 1×2"),
        ((64, 1, 3, 3), Geometry(padding=(1, 1), groups=3), "3×3/1, 3 groups"),
    ],
)
def test_labels_say_what_is_unusual_of_a_convolution(filters, geometry, text):
    assert convolution((8, 3, 32, 32), filters, geometry).label == f"8×3×32×32 → 64, {text}"


def test_labels_of_a_set_are_distinct():
    for shapes in (SMALL, usual_shapes("cpu"), usual_shapes("cuda")):
        labels = [problem.label for problem in problems(shapes)]
        assert len(labels) == len(set(labels))


@pytest.mark.parametrize("problem", PROBLEMS, ids=label)
def test_operands_have_the_shapes_of_the_request(problem):
    request = problem.request(CPU)
    for operands in problem.operands(CPU)[:2]:
        tensors = [operand for operand in operands if isinstance(operand, torch.Tensor) and operand.ndim > 1]
        assert tuple(tensors[0].shape) == request.shapes[0]
        assert len(request.shapes) == 1 or tuple(tensors[1].shape) == request.shapes[1]


def test_bell_shaped_operands_are_mostly_small():
    uniform, bell = (Problem(Op.LINEAR_OUTPUT, product_of_rows(64, 64, 64), INT8, bell_shaped=flag) for flag in (False, True))
    mean = [problem.operands(CPU)[0][0].double().abs().mean().item() for problem in (uniform, bell)]
    assert mean[0] == pytest.approx(63.5, rel=0.05)
    assert mean[1] < 35


@pytest.mark.parametrize("problem", [one for one in PRODUCTS if one.shape is SMALL.products[0]], ids=label)
def test_the_reference_of_rows_is_the_sum_of_products_times_scales(problem):
    first, *rest = problem.operands(CPU)[0]
    a = first.double()
    if problem.part == "output":
        x_scale, w, w_scale, bias, _ = rest
        expected = torch.einsum("mk,nk->mn", a, w.double()) * x_scale.double() * w_scale.double() + bias.double()
    else:
        other, scale, _ = rest
        b, s = other.double(), scale.double()
        if problem.part == "grad_input":
            per_channel = problem.variant.grad_input is not Precision.INT8
            expected = torch.einsum("mn,nk,n->mk", a, b, s if per_channel else s.expand(7))
        else:
            per_channel = problem.variant.grad_weight is Precision.INT8
            expected = torch.einsum("mn,mk,n->nk", a, b, s if per_channel else s.expand(7))
    found = Reference.of(problem, (first, *rest)).expected
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", SMALL.products[1:], ids=lambda shape: shape.label)
def test_the_reference_of_a_convolution_is_a_sum_over_filters(shape):
    problem = Problem(Op.CONV2D_OUTPUT, shape, INT8)
    x, x_scale, w, w_scale, _, _ = operands = problem.operands(CPU)[0]
    found = Reference.of(problem, operands).expected
    g, (channels, height, width) = shape.call.geometry, shape.call.w[1:]
    padded = torch.nn.functional.pad(x.long(), (g.padding[1],) * 2 + (g.padding[0],) * 2)
    per_group = shape.call.w[0] // g.groups
    for b, o, i, j in itertools.product(*map(range, shape.call.y)):
        first = o // per_group * channels
        i0, j0 = i * g.stride[0], j * g.stride[1]
        part = padded[b, first : first + channels, i0 : i0 + height, j0 : j0 + width]
        total = int((part * w[o].long()).sum())
        assert found[b, o, i, j].item() == pytest.approx(total * x_scale.item() * w_scale[o].item(), rel=1e-6, abs=1e-9)


COPIES = [quantization((5, 6), by, flags=("transposed",)) for by in Granularity]


@pytest.mark.parametrize("problem", [*PROBLEMS, *COPIES], ids=label)
def test_right_kernels_are_within_what_their_formats_explain(problem):
    operands = problem.operands(CPU)
    found, left_out = Backends(chain=("aten",)).accepting(problem, operands, CPU)
    assert not left_out
    reference = Reference.of(problem, operands[0])
    assert reference.error_of(found[0]) <= reference.allowed
    if not problem.part:
        with pytest.raises(RefusedError, match="16 bit needs no quantization"):
            in_16_bit(problem, Precision.BFLOAT16, CPU)
        return
    for precision in (Precision.BFLOAT16, Precision.FLOAT16):
        own = in_16_bit(problem, precision, CPU)
        theirs = Reference.of(own.problem, own.operands)
        assert own.thunks[0]().dtype == getattr(torch, precision)
        assert tuple(own.thunks[0]().shape) == tuple(reference.expected.shape)
        assert 0 < theirs.error_of(own) <= theirs.allowed
