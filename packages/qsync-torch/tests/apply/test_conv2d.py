import itertools

import attrs
import pytest
import torch
import torch.nn.functional as F

from qsync_core.errors import BackendError
from qsync_core.ir.precision import Precision
from qsync_torch.operators import conv2d

from .operator_reference import check_operator
from .test_linear import saved_tensors
from .variants import CONVOLUTIONS, INT8, INT8_INPUT_GRADIENT, ROWS

GEOMETRIES = [
    {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    for stride, padding, dilation, groups in itertools.product((1, (2, 1)), (0, (1, 2)), (1, (2, 1)), (1, 2, 4))
]


def check(device, variant, shape, out_channels, kernel, *, channels_last=False, bias=True, **geometry):
    layout = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.randn(shape, device=device).to(memory_format=layout)
    weight = torch.randn(out_channels, shape[1] // geometry.get("groups", 1), *kernel, device=device)
    b = torch.randn(out_channels, device=device, requires_grad=True) if bias else None
    y = check_operator(
        lambda *operands: conv2d(*operands, variant, **geometry),
        lambda *operands: F.conv2d(*operands, **geometry),
        x,
        weight,
        b,
        variant,
    )
    assert y.stride() == F.conv2d(x, weight, b, **geometry).stride()


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_int8_in_every_geometry(device, geometry, channels_last):
    check(device, INT8, (2, 4, 7, 8), 8, (3, 2), channels_last=channels_last, **geometry)


@pytest.mark.parametrize("kernel", [(1, 1), (3, 3)])
@pytest.mark.parametrize("variant", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_every_variant(device, variant, kernel):
    stride = 1 if variant.grad_input is Precision.INT8 else 2
    padding = 0 if kernel == (1, 1) else 1
    check(device, variant, (2, 6, 5, 5), 4, kernel, channels_last=True, padding=padding, stride=stride)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dilation", [1, (2, 1)])
@pytest.mark.parametrize("padding", [0, (1, 1), (2, 0)])
def test_an_int8_input_gradient_in_every_geometry_of_stride_1(device, padding, dilation, groups, channels_last):
    geometry = {"padding": padding, "dilation": dilation, "groups": groups}
    check(device, INT8_INPUT_GRADIENT, (2, 4, 7, 8), 8, (3, 2), channels_last=channels_last, **geometry)


@pytest.mark.parametrize("padding, kernel", [("same", (3, 3)), ("same", (2, 3)), ("valid", (3, 3))])
def test_named_paddings(device, padding, kernel):
    check(device, INT8, (2, 3, 6, 7), 4, kernel, padding=padding, bias=False)


def test_a_single_image_without_batch_dimension():
    x, weight = torch.randn(3, 6, 6), torch.randn(4, 3, 3, 3)
    assert torch.equal(conv2d(x, weight, None, INT8), conv2d(x[None], weight, None, INT8)[0])


def test_an_empty_batch_has_empty_gradients_and_a_zero_weight_gradient(device):
    x = torch.randn(0, 3, 6, 6, device=device, requires_grad=True)
    weight = torch.randn(4, 3, 3, 3, device=device, requires_grad=True)
    y = conv2d(x, weight, None, INT8)
    assert y.shape == (0, 4, 4, 4)
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert weight.grad.abs().sum().item() == 0


def test_only_int8_copies_are_kept_for_backward(device):
    x = torch.randn(2, 8, 6, 6, device=device, requires_grad=True)
    weight = torch.randn(4, 8, 3, 3, device=device, requires_grad=True)
    _, kept = saved_tensors(lambda: conv2d(x, weight, None, INT8))
    sizes = {dtype: sum(t.untyped_storage().nbytes() for t in kept if t.dtype is dtype) for dtype in {t.dtype for t in kept}}
    assert sizes == {torch.int8: x.numel() + weight.numel(), torch.float32: 4 + 4 * 4}


@pytest.mark.parametrize(
    "changes, geometry, reason",
    [
        ({"grad_input": Precision.INT8}, {"stride": 2}, r"needs stride 1, got \[2, 2\]; keep grad_input in 16 bit"),
        ({"grad_input": Precision.INT8}, {"padding": 3}, r"needs a padding within the filter's reach \[2, 2\], got \[3, 3\]"),
        (
            {"grad_weight": Precision.INT8},
            {},
            "conv2d.grad_weight of int8 operands in bfloat16, .*, not in int8; choose one of those",
        ),
    ],
)
def test_int8_gradients_that_are_no_convolution_are_refused(changes, geometry, reason):
    x, weight = torch.randn(1, 2, 6, 6, requires_grad=True), torch.randn(2, 2, 3, 3, requires_grad=True)
    y = conv2d(x, weight, None, attrs.evolve(INT8, **changes), **geometry)
    with pytest.raises(BackendError, match=reason):
        y.sum().backward()


def test_scales_by_row_are_refused():
    with pytest.raises(BackendError, match="rows of a convolution's patches overlap"):
        conv2d(torch.randn(1, 2, 4, 4), torch.randn(2, 2, 3, 3), None, ROWS)
