"""``quantize``: scales, every rounding, random numbers, layouts, multiplier, transposed copy, and values that have no scale."""

from __future__ import annotations

import math

import pytest
import torch

from qsync_core.errors import NumericsError
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import Op
from qsync_torch.aten.random_bits import Offset, checksum, stream_of
from qsync_torch.conformance.operands import Outputs, floats
from qsync_torch.conformance.subject import Kernel, Subject
from qsync_torch.dtypes import TORCH_DTYPE

LARGEST = {Precision.INT8: 127.0, Precision.FLOAT8_E4M3FN: 448.0}
NEAR = 127 * 2.0**-20
"""How near to a tie (or, for floor, to an integer) a quotient may lie before rounding errors of the division decide."""
TENSOR, CHANNEL, ROW = Granularity.PER_TENSOR, Granularity.PER_CHANNEL, Granularity.PER_ROW
SHAPES = [(1,), (1, 1), (3, 5), (7, 129), (64, 64), (2, 3, 4), (2, 3, 5, 7), (8, 16, 3, 3), (33, 1000)]


def variant_of(rounding: Rounding, granularity: Granularity = TENSOR, precision: Precision = Precision.INT8) -> Variant:
    """A quantization: the granularity of whatever is quantized stands in the activation's place."""
    wide = Precision.FLOAT32
    return Variant(precision, wide, precision, wide, wide, granularity, rounding=rounding)


def groups_of(x: torch.Tensor, granularity: Granularity) -> torch.Tensor:
    """(groups that share a scale, their elements)."""
    if granularity is TENSOR:
        return x.reshape(1, -1)
    return x.reshape(x.shape[0], -1) if granularity is CHANNEL else x.reshape(-1, x.shape[-1])


def scale_count(x: torch.Tensor, granularity: Granularity) -> int:
    """How many scales there are."""
    return {TENSOR: 1, CHANNEL: x.shape[0], ROW: math.prod(x.shape[:-1])}[granularity]


def run(
    kernel: Kernel, x: torch.Tensor, outputs: Outputs, granularity: Granularity = TENSOR, precision: Precision = Precision.INT8,
    seed: int = 11, offset: Offset = 12, **more: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Call a kernel on fresh outputs, and check the stream that it writes."""
    q = outputs.like(x, TORCH_DTYPE[precision])
    scale = outputs.empty((scale_count(x, granularity),), torch.float32)
    stream = outputs.empty((1,), torch.int64)
    kernel(x, q, scale, stream, seed, offset, **more)
    check_stream(stream, offset, x)
    return q, scale


def check_stream(stream: torch.Tensor, offset: Offset, x: torch.Tensor) -> None:
    """``offset + 0x9E3779B900000000 * checksum``, modulo 2⁶⁴, as an int64; the checksum is that of ``x`` as it was given."""
    expected = int(stream_of(offset, x))
    assert stream.item() == expected, (
        f"the stream of a tensor of shape {list(x.shape)} in {x.dtype} with the offset {int(offset)} is {expected}, and the kernel "
        f"wrote {stream.item()}"
    )


def check_scales(x: torch.Tensor, scale: torch.Tensor, granularity: Granularity, precision: Precision = Precision.INT8) -> None:
    """``absmax / 127`` (``/ 448``), at least 2⁻¹²⁶, to a few units in the last place; exactly 1 for zeros."""
    absmax = groups_of(x.double(), granularity).abs().amax(1)
    expected = (absmax / LARGEST[precision]).clamp(min=2.0**-126).masked_fill(absmax == 0, 1.0)
    error = ((scale.double() - expected) / expected).abs().max().item()
    assert error <= 2.0**-21, f"scales are off by a relative {error:.1e}"
    assert bool((scale[absmax == 0] == 1).all()), "a group of zeros must have the scale 1"


def check_rounding(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, granularity: Granularity, rounding: Rounding) -> None:
    """Every value is what the rounding of ``x / scale`` in float64 gives, except where the quotient's own error decides."""
    y = groups_of(x.double(), granularity) / scale.double()[:, None]
    found = groups_of(q.double(), granularity)
    assert found.abs().max().item() <= 127, "a value is outside -127..127"
    if rounding is Rounding.STOCHASTIC:
        lowest, highest = (y - NEAR).floor().clamp(min=-127), (y + NEAR).ceil().clamp(max=127)
        wrong = (found < lowest) | (found > highest)
    else:
        move = 0.5 if rounding is Rounding.NEAREST else 0.0
        low, high = (y - NEAR + move).floor().clamp(-127, 127), (y + NEAR + move).floor().clamp(-127, 127)
        if rounding is Rounding.NEAREST:  # a tie may go either way
            low = torch.minimum(low, (y + NEAR - move).ceil().clamp(-127, 127))
        wrong = (found < low) | (found > high)
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} values are not the {rounding} rounding: x/scale {y[wrong][0].item()!r} "
        f"became {found[wrong][0].item()!r}"
    )


def check_formula(
    subject: Subject, outputs: Outputs, x: torch.Tensor, rounding: Rounding, granularity: Granularity = TENSOR,
    seed: int = 11, offset: int = 12,
) -> None:  # fmt: skip
    """Scales and int8 values of all kernels are those of the formula."""
    for kernel in subject.kernels(Op.QUANTIZE, variant_of(rounding, granularity), (tuple(x.shape),)):
        q, scale = run(kernel, x, outputs, granularity, seed=seed, offset=offset)
        check_scales(x, scale, granularity)
        check_rounding(x, q, scale, granularity, rounding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("granularity", list(Granularity))
@pytest.mark.parametrize("rounding", list(Rounding))
def test_int8_equals_the_formula(
    subject: Subject, outputs: Outputs, rounding: Rounding, granularity: Granularity, dtype: torch.dtype
) -> None:
    """Scales and int8 values are those of the formula on shapes of every kind, from one element on."""
    for shape in SHAPES:
        request = subject.request(Op.QUANTIZE, variant_of(rounding, granularity), (shape,))
        if shape == SHAPES[-1] or not subject.backend.unsupported_reasons(request):  # the last one is skipped by name
            check_formula(subject, outputs, floats(shape, dtype, subject.device, len(shape)), rounding, granularity)


@pytest.mark.parametrize("rounding", list(Rounding))
def test_values_that_int8_holds_stay_what_they_are(subject: Subject, outputs: Outputs, rounding: Rounding) -> None:
    """Integers with a largest magnitude of 127 have the scale 1, whatever the rounding."""
    x = torch.arange(-127, 128, dtype=torch.float32, device=subject.device).repeat(5).view(15, 85)
    for kernel in subject.kernels(Op.QUANTIZE, variant_of(rounding), (tuple(x.shape),)):
        q, scale = run(kernel, x, outputs)
        assert scale.item() == 1.0
        assert torch.equal(q.float(), x)


@pytest.mark.parametrize("layout", ["channels-last", "transposed"])
@pytest.mark.parametrize("rounding", [Rounding.NEAREST, Rounding.STOCHASTIC])
def test_the_layout_of_the_input_is_kept(subject: Subject, outputs: Outputs, rounding: Rounding, layout: str) -> None:
    """The caller hands out dense tensors in any order of dimensions, and an output with the same strides."""
    shape = (4, 6, 5, 3) if layout == "channels-last" else (24, 15)
    x = floats(shape, torch.float32, subject.device, 3)
    x = x.to(memory_format=torch.channels_last) if layout == "channels-last" else x.t().contiguous().t()
    check_formula(subject, outputs, x, rounding)


@pytest.mark.parametrize("granularity", list(Granularity))
def test_zeros_and_equal_values(subject: Subject, outputs: Outputs, granularity: Granularity) -> None:
    """A group of zeros has the scale 1 and stays zero; one of equal values becomes 127 everywhere."""
    x = torch.zeros(6, 40, device=subject.device)
    x[3:] = 0.3
    x[4] = -2.5
    for kernel in subject.kernels(Op.QUANTIZE, variant_of(Rounding.NEAREST, granularity), (tuple(x.shape),)):
        q, scale = run(kernel, x, outputs, granularity)
        check_scales(x, scale, granularity)
        assert q[:3].abs().max().item() == 0
        assert q[4].tolist() == [-127] * 40
        if granularity is not TENSOR:
            assert q[5].tolist() == [127] * 40


def test_an_empty_tensor_is_no_error(subject: Subject, outputs: Outputs) -> None:
    """A rank may get an empty batch."""
    x = torch.empty(0, 16, device=subject.device)
    for kernel in subject.kernels(Op.QUANTIZE, variant_of(Rounding.STOCHASTIC), ((0, 16),)):
        _, scale = run(kernel, x, outputs)
        assert torch.isfinite(scale).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 77, -1])
def test_nan_and_infinity_show(subject: Subject, outputs: Outputs, value: float, place: int) -> None:
    """NaN or infinity raises an error that says so on a CPU; on a GPU that, or it gives a scale that carries the damage on."""
    x = floats((9, 50), torch.float32, subject.device, 1)
    x.view(-1)[place] = value
    for kernel in subject.kernels(Op.QUANTIZE, variant_of(Rounding.STOCHASTIC), ((9, 50),)):
        try:
            _, scale = run(kernel, x, outputs)
        except NumericsError:
            continue
        assert not torch.isfinite(scale).any(), f"a tensor with {value} got the scale {scale.item()}"
        assert subject.device.type != "cpu", f"a tensor with {value} got the scale {scale.item()}, and no NumericsError on a CPU"


@pytest.mark.parametrize("fraction", [0.03, 0.3, 0.5, 0.9])
def test_stochastic_rounding_is_unbiased(subject: Subject, outputs: Outputs, fraction: float) -> None:
    """Mean, variance and independence of neighbours of 2¹⁶ draws, within five standard errors."""
    count = 1 << 16
    x = torch.full((256, 256), 3 + fraction, device=subject.device)
    x[0, 0] = 127.0
    for kernel in subject.kernels(Op.QUANTIZE, variant_of(Rounding.STOCHASTIC), ((256, 256),)):
        q, scale = run(kernel, x, outputs, seed=5, offset=6)
        assert scale.item() == 1.0
        up = q.double().view(-1)[1:] - 3
        assert set(up.unique().tolist()) == {0.0, 1.0}
        error = abs(up.mean().item() - fraction) / (fraction * (1 - fraction) / count) ** 0.5
        assert error < 5, f"the mean of the draws is {error:.1f} standard errors away"
        centred = up - up.mean()
        correlation = (centred[1:] * centred[:-1]).mean().item() / centred.square().mean().item()
        assert abs(correlation) < 0.03, f"neighbouring draws have a correlation of {correlation:.3f}"


def test_draws_do_not_repeat(subject: Subject, outputs: Outputs) -> None:
    """2¹⁸ draws have no correlation at any distance up to half of that."""
    x = torch.full((512, 512), 3.5, device=subject.device)
    x[0, 0] = 127.0
    for kernel in subject.kernels(Op.QUANTIZE, variant_of(Rounding.STOCHASTIC), ((512, 512),)):
        q, _ = run(kernel, x, outputs, seed=5, offset=6)
        up = q.view(-1)[1:].cpu().double()
        centred = up - up.mean()
        count = centred.numel()
        spectrum = torch.fft.rfft(centred, n=2 * count)
        products = torch.fft.irfft(spectrum.abs().square(), n=2 * count)
        distances = torch.arange(1, count // 2)
        correlation = products[1 : count // 2] / (count - distances) / (products[0] / count).clamp(min=1e-12)
        worst = int(correlation.abs().argmax())
        found = correlation[worst].item()
        assert abs(found) < 0.03, f"draws that are {worst + 1} elements apart have a correlation of {found:.3f}"


def test_draws_are_below_one(subject: Subject, outputs: Outputs) -> None:
    """16 million of them: one that is 1, or so near that a sum in float32 makes it 1, raises an integer."""
    x = (torch.arange(1 << 22, device=subject.device) % 127).float().view(1 << 11, 1 << 11)
    x[0, 0] = 127.0
    for kernel in subject.kernels(Op.QUANTIZE, variant_of(Rounding.STOCHASTIC), (tuple(x.shape),))[:1]:
        for seed in range(4):
            q, _ = run(kernel, x, outputs, seed=seed, offset=9)
            raised = int((q > x).sum())
            assert not raised, f"{raised} of {x.numel()} integers were rounded up"


@pytest.mark.parametrize("shape", [(24, 15), (4, 6, 5, 3)])
def test_draws_are_numbered_in_memory_order(subject: Subject, outputs: Outputs, shape: tuple[int, ...]) -> None:
    """The same memory under another order of dimensions gives the same bits."""
    order = (1, 0) if len(shape) == 2 else (0, 2, 3, 1)
    x = floats(tuple(shape[d] for d in order), torch.float32, subject.device, 3)
    view = x.permute(1, 0) if len(shape) == 2 else x.permute(0, 3, 1, 2)
    plain = subject.kernels(Op.QUANTIZE, variant_of(Rounding.STOCHASTIC), (tuple(x.shape),))[0]
    expected, _ = run(plain, x, outputs)
    for kernel in subject.kernels(Op.QUANTIZE, variant_of(Rounding.STOCHASTIC), (shape,)):
        q, _ = run(kernel, view, outputs)
        assert torch.equal(q.permute(order), expected), "element i in memory did not take number i"


@pytest.mark.parametrize("magnitude", [1e-18, 1e-25, 1e-35, 127 * 2.0**-125, 127 * 2.0**-127])
def test_small_values_keep_their_scale(subject: Subject, outputs: Outputs, magnitude: float) -> None:
    """``absmax / 127`` down to 2⁻¹²⁶, and that for magnitudes that are smaller still."""
    x = torch.linspace(-1, 1, 15 * 16, device=subject.device).view(15, 16) * magnitude
    check_formula(subject, outputs, x, Rounding.NEAREST)


MAGNITUDES = {
    torch.float32: (
        2.0**-149,
        1e-40,
        2.0**-126,
        1e-36,
        2e-36,
        9e-35,
        1e-30,
        1e-3,
        1e30,
        1.3e36,
        1.4e36,
        torch.finfo(torch.float32).max,
    ),
    torch.bfloat16: (2.0**-133, 1e-39, 2.0**-126, 2e-36, 9e-35, 1.4e36, torch.finfo(torch.bfloat16).max),
    torch.float16: (2.0**-24, 2.0**-14, 1.0, torch.finfo(torch.float16).max),
}
"""Magnitudes from a format's smallest subnormal number to its largest, past every place where float32 arithmetic may overflow."""


@pytest.mark.parametrize("dtype", list(MAGNITUDES), ids=str)
@pytest.mark.parametrize("granularity", list(Granularity))
@pytest.mark.parametrize("rounding", list(Rounding))
def test_every_magnitude_is_quantized(
    subject: Subject, outputs: Outputs, rounding: Rounding, granularity: Granularity, dtype: torch.dtype
) -> None:
    """No value moves by more than a step, of ``absmax / 127`` or 2⁻¹²⁶; subnormal values may count as zeros."""
    sizes = torch.tensor(MAGNITUDES[dtype], dtype=torch.float64)
    ramp = torch.linspace(-1, 1, 40, dtype=torch.float64)
    every = (sizes[:, None] * ramp).to(dtype).to(subject.device)
    mixed = (sizes.expand(3, -1) * torch.tensor([[1.0], [-1.0], [0.0]])).to(dtype).to(subject.device)
    for x in (mixed, *(every.split(1) if granularity is TENSOR else [every])):
        for kernel in subject.kernels(Op.QUANTIZE, variant_of(rounding, granularity), (tuple(x.shape),)):
            q, scale = run(kernel, x, outputs, granularity)
            values = groups_of(x.double(), granularity)
            absmax = values.abs().amax(1, keepdim=True)
            step = (absmax / 127).clamp(min=2.0**-126) * (1.0 if rounding is not Rounding.NEAREST else 0.5)
            error = groups_of(q.double(), granularity) * scale.double()[:, None] - values
            allowed = torch.where(values.abs() < 2.0**-126, step.clamp(min=2.0**-126), step)
            wrong = error.abs() > allowed * (1 + 2.0**-12)
            group = int(wrong.any(1).nonzero()[0]) if wrong.any() else 0
            assert not wrong.any(), (
                f"{values[group][wrong[group]][0].item():.3g}, in a group up to {absmax[group].item():.3g}, became "
                f"{groups_of(q, granularity)[group][wrong[group]][0].item()} times {scale[group].item():.3g}"
            )


def test_every_bit_of_seed_and_offset_counts(subject: Subject, outputs: Outputs) -> None:
    """All 63 of each, of one tensor."""
    x = floats((64, 100), torch.float32, subject.device, 9)
    pairs = [(1 << bit, 2) for bit in range(63)] + [(1, 1 << bit) for bit in range(63) if bit != 1] + [(1, 0), (0, 2)]
    for kernel in subject.kernels(Op.QUANTIZE, variant_of(Rounding.STOCHASTIC), ((64, 100),))[:1]:
        seen: dict[bytes, tuple[int, int]] = {}
        for seed, offset in dict.fromkeys(pairs):
            q, _ = run(kernel, x, outputs, seed=seed, offset=offset)
            bits = bytes(q.cpu().view(torch.uint8).flatten().tolist())
            assert bits not in seen, f"seed and offset {(seed, offset)} gave the same bits as {seen[bits]}"
            seen[bits] = (seed, offset)


def test_draws_are_reproducible_and_of_another_seed_different(subject: Subject, outputs: Outputs) -> None:
    """The same seed, offset and data give the same bits, whatever the configuration; any other pair gives others."""
    x = floats((64, 100), torch.float32, subject.device, 9)
    largest = (1 << 63) - 1
    pairs = [(1, 2), (2, 1), (1, 3), (largest, 2), (1, largest), (1 + (1 << 40), 2), (1, 2 + (1 << 40))]
    first: list[torch.Tensor] = []
    for kernel in subject.kernels(Op.QUANTIZE, variant_of(Rounding.STOCHASTIC), ((64, 100),)):
        found = [run(kernel, x, outputs, seed=seed, offset=offset)[0].clone() for seed, offset in pairs]
        again = run(kernel, x, outputs, seed=1, offset=2)[0]
        assert torch.equal(again, found[0]), "the same seed and offset gave other bits the second time"
        first.append(again)
        for i, one in enumerate(found):
            for other in found[:i]:
                assert not torch.equal(one, other), "two pairs of seed and offset gave the same bits"
    assert all(torch.equal(q, first[0]) for q in first), "configurations draw differently"


def test_an_offset_in_a_tensor_gives_the_bits_of_the_number(subject: Subject, outputs: Outputs) -> None:
    """``offset_tensors``: one int64 on the operands' device, whose number counts when the kernel runs."""
    subject.skip_unless_offset_tensors()
    variant, x = variant_of(Rounding.STOCHASTIC), floats((64, 100), torch.float32, subject.device, 9)
    tensor = torch.zeros(1, dtype=torch.int64, device=subject.device)
    for kernel in subject.kernels(Op.QUANTIZE, variant, ((64, 100),)):
        for number in (2, 2 + (1 << 40), (1 << 63) - 1):
            expected = run(kernel, x, outputs, seed=3, offset=number)[0].clone()
            q, _ = run(kernel, x, outputs, seed=3, offset=tensor.fill_(number))
            assert torch.equal(q, expected), f"the offset {number} gave other bits in a tensor"
            assert tensor.item() == number, "the kernel changed its offset"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("granularity", list(Granularity))
def test_the_stream_follows_from_offset_and_bits(
    subject: Subject, outputs: Outputs, granularity: Granularity, dtype: torch.dtype
) -> None:
    """Checksums that wrap around, of both signs; offsets of 64 bits, negative ones too; none is written where None is given."""
    for value in (1.5, -3.0, -0.0, 2.0**-20):
        x = torch.full((37, 1000), value, dtype=dtype, device=subject.device)
        x[0, 0] = 77.0
        for kernel in subject.kernels(Op.QUANTIZE, variant_of(Rounding.NEAREST, granularity), ((37, 1000),)):
            for offset in (0, 5, -1, -(1 << 63), (1 << 63) - 1):
                run(kernel, x, outputs, granularity, offset=offset)
    for kernel in subject.kernels(Op.QUANTIZE, variant_of(Rounding.STOCHASTIC, granularity), ((37, 1000),)):
        q, scale = run(kernel, x, outputs, granularity)
        again, same = outputs.like(x, torch.int8), outputs.empty(tuple(scale.shape), torch.float32)
        kernel(x, again, same, None, 11, 12)
        assert torch.equal(q, again), "without stream_out a kernel drew other numbers"


@pytest.mark.parametrize("granularity", list(Granularity))
def test_other_data_round_otherwise(subject: Subject, outputs: Outputs, granularity: Granularity) -> None:
    """One bit of one element counts, under equal scales too: whatever clips gives the same largest magnitude over and over."""
    x = floats((4, 500), torch.float32, subject.device, 5).clamp(-1, 1)
    for kernel in subject.kernels(Op.QUANTIZE, variant_of(Rounding.STOCHASTIC, granularity), ((4, 500),)):
        for place in ((0, 0), (0, 499), (3, 250), (3, 499)):
            moved = x.clone()
            moved[place] = moved[place] / 2
            moved[place[0], 7] = moved[place[0], 9] = 1.0  # which keeps the scale of the group
            before = x.clone()
            before[place[0], 7] = before[place[0], 9] = 1.0
            expected, scale = (tensor.clone() for tensor in run(kernel, before, outputs, granularity))
            q, same = run(kernel, moved, outputs, granularity)
            assert torch.equal(scale, same)
            changed = int((q[place[0]] != expected[place[0]]).sum())
            assert changed > 50, f"of the group with the element {place}, which has changed, {changed} others round otherwise"


def test_draws_are_those_of_the_stream(subject: Subject, outputs: Outputs) -> None:
    """Two tensors whose offsets make up for their checksums draw the same numbers."""
    x = torch.full((64, 64), 3.5, device=subject.device)
    x[0, 0] = 127.0
    other = x.clone()
    other[5, 5] = -1.75
    difference = (int(checksum(x)) - int(checksum(other))) * (0x9E3779B9 << 32)
    offset = (12 + difference + (1 << 63)) % (1 << 64) - (1 << 63)
    for kernel in subject.kernels(Op.QUANTIZE, variant_of(Rounding.STOCHASTIC), ((64, 64),)):
        expected = run(kernel, x, outputs)[0].clone()
        q, _ = run(kernel, other, outputs, offset=offset)
        assert int((q != expected).sum()) == 1, "under one stream equal values at equal places were rounded otherwise"


def test_float8_values_are_neighbours(subject: Subject, outputs: Outputs) -> None:
    """float8_e4m3fn: the nearest value, or one of the two neighbours; the largest magnitude becomes 448."""
    x = floats((33, 65), torch.float32, subject.device, 4)
    for rounding in (Rounding.NEAREST, Rounding.STOCHASTIC):
        variant = variant_of(rounding, TENSOR, Precision.FLOAT8_E4M3FN)
        for kernel in subject.kernels(Op.QUANTIZE, variant, ((33, 65),)):
            q, scale = run(kernel, x, outputs, precision=Precision.FLOAT8_E4M3FN)
            check_scales(x, scale, TENSOR, Precision.FLOAT8_E4M3FN)
            y, found = x.double() / scale.double(), q.double()
            spacing = torch.exp2(torch.log2(y.abs().clamp(min=2.0**-6)).floor() - 3)
            allowed = spacing * (0.5001 if rounding is Rounding.NEAREST else 1.0001)
            assert bool(((found - y).abs() <= allowed).all())
            assert found.abs().max().item() == 448


@pytest.mark.parametrize("shape", [(24, 15), (2, 6, 5, 3)])
def test_a_multiplier_comes_first(subject: Subject, outputs: Outputs, shape: tuple[int, ...]) -> None:
    """``multiplier=channel``: one factor per entry of the last dimension of a matrix, of dimension 1 of four, in float32."""
    x = floats(shape, torch.bfloat16, subject.device, 3)
    x = x.to(memory_format=torch.channels_last) if len(shape) == 4 else x
    channels = shape[1]
    factors = torch.logspace(-2, 2, channels, device=subject.device)
    product = x.float() * (factors.view(1, -1, 1, 1) if len(shape) == 4 else factors)
    for kernel in subject.kernels(Op.QUANTIZE, variant_of(Rounding.NEAREST), (shape,), multiplied=True):
        q, scale = run(kernel, x, outputs, multiplier=factors)
        check_scales(product, scale, TENSOR)
        check_rounding(product, q, scale, TENSOR, Rounding.NEAREST)


@pytest.mark.parametrize("shape", [(24, 15), (64, 128), (1, 3), (3, 1)])
def test_a_transposed_copy(subject: Subject, outputs: Outputs, shape: tuple[int, int]) -> None:
    """``transposed=true``: the same values again as a dense (K, M)."""
    x = floats(shape, torch.float32, subject.device, 3)
    variant = variant_of(Rounding.STOCHASTIC)
    plain = subject.kernels(Op.QUANTIZE, variant, (shape,))
    for kernel in subject.kernels(Op.QUANTIZE, variant, (shape,), transposed=True):
        transposed = outputs.empty(shape[::-1], torch.int8)
        q, scale = run(kernel, x, outputs, transposed_out=transposed)
        assert torch.equal(transposed, q.t())
        expected, expected_scale = run(plain[0], x, outputs)
        assert torch.equal(q, expected), "the transposed copy changed the draws"
        assert torch.equal(scale, expected_scale)
