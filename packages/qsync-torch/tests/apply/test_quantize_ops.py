"""The quantizations beside the plain one, with a multiplier and with a transposed copy, and their streams."""

import pytest
import torch

from qsync_core.errors import BackendError
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.semantics import CastTarget
from qsync_core.kernels.choice import KernelChoice
from qsync_torch.kernels.binding import quantization
from qsync_torch.quantize import quantize

MULTIPLIED, TRANSPOSED = "multiplied", "transposed"


def key(*flags, granularity=Granularity.PER_TENSOR, rounding=Rounding.STOCHASTIC, symmetric=True):
    target = CastTarget(Precision.INT8, granularity, rounding, symmetric)
    return quantization(target, KernelChoice(), MULTIPLIED in flags, TRANSPOSED in flags).key


def signed(number):
    """The int64 that a number wraps around to."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "channels_last"])
def test_a_multiplier_comes_first_and_is_not_rounded(device, layout):
    shape = (3, 5, 4, 6) if layout == "channels_last" else (7, 5)
    x = torch.randn(shape, device=device).to(torch.bfloat16)
    x = x.t().contiguous().t() if layout == "transposed" else x
    x = x.to(memory_format=torch.channels_last) if layout == "channels_last" else x
    factors = torch.logspace(-3, 3, 5, device=device)
    q, scale, stream = torch.ops.qsync.quantize(x, key(MULTIPLIED), 5, 6, factors)
    product = x.float() * (factors.view(1, -1, 1, 1) if x.ndim == 4 else factors)
    factor = 0x9E3779B9 << 32
    assert stream.item() == signed(6 + factor * int(x.view(torch.int16).sum()))
    offset = signed(stream.item() - factor * int(product.view(torch.int32).sum()))  # under which the product has the same stream
    expected, expected_scale = quantize(product, Precision.INT8, rounding=Rounding.STOCHASTIC, seed=5, offset=offset)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(q, expected)
    assert q.stride() == x.stride()


@pytest.mark.parametrize("shape", [(6, 5), (2, 3, 5), (1, 1), (0, 5), (4, 1)])
@pytest.mark.parametrize("granularity", [Granularity.PER_TENSOR, Granularity.PER_ROW])
def test_a_transposed_copy_has_the_same_values_or_by_row_scales_of_its_own(device, shape, granularity):
    x = torch.randn(shape, device=device)
    q, scale, stream, transposed = torch.ops.qsync.quantize_transposed(x, key(TRANSPOSED, granularity=granularity), 5, 6)
    assert torch.equal(stream, torch.ops.qsync.quantize(x, key(granularity=granularity), 5, 6)[2])
    expected, expected_scale = quantize(x, Precision.INT8, granularity, Rounding.STOCHASTIC, seed=5, offset=6)
    assert torch.equal(q, expected)
    assert torch.equal(scale[: expected_scale.numel()], expected_scale)
    assert transposed.is_contiguous()
    if granularity is Granularity.PER_TENSOR:
        assert torch.equal(transposed, q.view(-1, shape[-1]).t())
        return
    turned = x.view(-1, shape[-1]).t().contiguous()
    expected, of_columns = quantize(turned, Precision.INT8, granularity, Rounding.STOCHASTIC, seed=5, offset=6)
    assert torch.equal(transposed, expected)
    assert torch.equal(scale[expected_scale.numel() :], of_columns)


def test_both_at_once(device):
    x, factors = torch.randn(6, 5, device=device), torch.rand(5, device=device) + 0.5
    q, _, _, transposed = torch.ops.qsync.quantize_transposed(x, key(MULTIPLIED, TRANSPOSED), 5, 6, factors)
    assert torch.equal(q, torch.ops.qsync.quantize(x, key(MULTIPLIED), 5, 6, factors)[0])
    assert torch.equal(transposed, q.t())


def test_only_a_matrix_has_a_transposed_copy():
    with pytest.raises(BackendError, match=r"only a matrix has a transposed copy, and this tensor has the shape \[2, 3, 4\]"):
        torch.ops.qsync.quantize(torch.randn(2, 3, 4), key(TRANSPOSED), 0, 0)


def test_operators_have_sound_schemas_and_fakes():
    tests = ("test_schema", "test_faketensor")
    x, factors = torch.randn(4, 6), torch.rand(6)
    for op, arguments in (
        (torch.ops.qsync.quantize, (x, key(MULTIPLIED), 1, 2, factors)),
        (torch.ops.qsync.quantize, (x, key(granularity=Granularity.PER_ROW, symmetric=False), 1, 2)),
        (torch.ops.qsync.quantize_transposed, (torch.randn(2, 4, 6), key(TRANSPOSED), 1, 2)),
        (torch.ops.qsync.quantize_transposed, (x, key(MULTIPLIED, TRANSPOSED), 1, 2, factors)),
    ):
        torch.library.opcheck(op.default, arguments, test_utils=tests)
