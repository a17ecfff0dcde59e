import itertools

import pytest
import torch
import torch.nn.functional as F

from qsync_core.geometry import Geometry
from qsync_core.ir.precision import MAX_CONTRACTION
from qsync_torch.aten.int8 import im2col_channels_last, int8_conv2d, int8_product


@pytest.mark.parametrize(
    "m, k, n", [(1, 1, 1), (3, 5, 7), (17, 8, 8), (16, 1040 * 4 + 3, 5), (40, 4161, 24), (0, 8, 8), (8, 0, 8), (4, 8, 0)]
)
def test_products_are_exact(device, m, k, n):
    """Against int64, with values at the ends of the range: a float32 sum of such products is inexact beyond K = 1,040."""
    a = torch.randint(-127, 128, (m, k), dtype=torch.int8)
    b = torch.randint(-127, 128, (n, k), dtype=torch.int8)
    if k:
        a[: m // 2], b[: n // 2] = 127, -127
    found = int8_product(a.to(device), b.to(device))
    assert found.dtype is torch.int32
    assert torch.equal(found.cpu().to(torch.int64), a.to(torch.int64) @ b.to(torch.int64).t())


def test_the_longest_contraction_just_fits_an_int32():
    assert MAX_CONTRACTION * 127**2 < 2**31 <= (MAX_CONTRACTION + 1) * 127**2
    a = torch.full((1, MAX_CONTRACTION), 127, dtype=torch.int8)
    assert int8_product(a, a).item() == MAX_CONTRACTION * 127**2


GEOMETRIES = [
    (kernel, stride, padding, dilation, groups)
    for kernel in ((1, 1), (3, 3), (2, 3))
    for stride in ((1, 1), (2, 1))
    for padding in ((0, 0), (1, 2))
    for dilation in ((1, 1), (2, 1))
    for groups in (1, 2, 6)
]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("kernel, stride, padding, dilation, groups", GEOMETRIES)
def test_convolutions_are_exact(device, kernel, stride, padding, dilation, groups, channels_last):
    x = torch.randint(-127, 128, (2, 6, 7, 9), dtype=torch.int8)
    w = torch.randint(-127, 128, (12, 6 // groups, *kernel), dtype=torch.int8)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    found = int8_conv2d(x.to(device, memory_format=layout), w.to(device), Geometry(stride, padding, dilation, groups)).cpu()
    expected = F.conv2d(x.double(), w.double(), None, stride, padding, dilation, groups)
    assert torch.equal(found.double(), expected.permute(0, 2, 3, 1).reshape(-1, 12))


@pytest.mark.parametrize("channels", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("size, kernel, stride", [((2, 3), (1, 2), (1, 2)), ((5, 6), (3, 1), (1, 2)), ((5, 10), (3, 4), (3, 2))])
def test_patches_that_do_not_overlap(channels, size, kernel, stride):
    """Their rows can be a strided view of a single image, for example where one position is left in a dimension."""
    x = torch.randint(-127, 128, (1, channels, *size), dtype=torch.int8)
    w = torch.randint(-127, 128, (3, channels, *kernel), dtype=torch.int8)
    expected = F.conv2d(x.double(), w.double(), None, stride)
    assert torch.equal(int8_conv2d(x, w, Geometry(stride)).double(), expected.permute(0, 2, 3, 1).reshape(-1, 3))


def test_a_pointwise_convolution_copies_nothing():
    x = torch.randint(-127, 128, (2, 5, 5, 8), dtype=torch.int8)
    patches = im2col_channels_last(x, (1, 1), Geometry())
    assert patches.data_ptr() == x.data_ptr()
    assert im2col_channels_last(x, (1, 1), Geometry((2, 2))).shape == (2 * 3 * 3, 8)


@pytest.mark.parametrize("m, k, n", [(1, 2, 1), (1, 5, 3), (4, 2, 1), (1, 1, 1), (17, 33, 9)])
def test_operands_with_any_strides(device, m, k, n):
    """Transposed views come from backward products; a single row may have any row stride."""
    for a, b in itertools.product(_layouts(m, k, device), _layouts(n, k, device)):
        assert torch.equal(int8_product(a, b).long(), (a.cpu().long() @ b.cpu().long().t()).to(device))


def _layouts(rows, columns, device):
    x = torch.randint(-127, 128, (rows, columns), dtype=torch.int8, device=device)
    wide = torch.zeros(rows, columns + 3, dtype=torch.int8, device=device)
    wide[:, :columns] = x
    return x, x.t().contiguous().t(), wide[:, :columns]
