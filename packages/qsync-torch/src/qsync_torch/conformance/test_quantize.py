"""``quantize``: the statistics of its random numbers, their streams, and magnitudes at which float32 arithmetic may break."""

from __future__ import annotations

import pytest
import torch

from qsync_core.ir.precision import Granularity, Rounding
from qsync_torch.aten.random_bits import checksum
from qsync_torch.conformance.operands import Outputs, floats
from qsync_torch.conformance.quantization import DTYPES, RANGES, TENSOR, Quantization, check_unbiased, groups_of, variant_of
from qsync_torch.conformance.subject import Subject

STOCHASTIC = Rounding.STOCHASTIC


def constant(value: float, shape: tuple[int, ...], subject: Subject) -> Quantization:
    """One value everywhere but at the first place, whose 127 makes the scale 1."""
    x = torch.full(shape, value, device=subject.device)
    x.view(-1)[0] = 127.0
    return Quantization(variant=variant_of(STOCHASTIC), x=x, seed=5, offset=6)


@pytest.mark.parametrize("fraction", [0.03, 0.3, 0.5, 0.9])
def test_stochastic_rounding_is_unbiased(subject: Subject, outputs: Outputs, fraction: float) -> None:
    """Mean, variance and independence of neighbours of 2¹⁶ draws."""
    call = constant(3 + fraction, (256, 256), subject)
    for written in call.put_to(subject, outputs):
        up = written["q"].double().view(-1)[1:]
        check_unbiased(up, call.x.double().view(-1)[1:])
        centred = up - up.mean()
        correlation = (centred[1:] * centred[:-1]).mean().item() / centred.square().mean().item()
        assert abs(correlation) < 0.03, f"neighbouring draws have a correlation of {correlation:.3f}"


@pytest.mark.parametrize("fraction", [2.0**-12, 1 - 2.0**-12], ids=["up", "down"])
def test_rare_draws_are_as_frequent_as_they_should_be(subject: Subject, outputs: Outputs, fraction: float) -> None:
    """256 of 2²⁰ draws round otherwise: random numbers of 8 bits make it none, or 4096."""
    call = constant(3 + fraction, (1024, 1024), subject)
    expected = (call.x.numel() - 1) * 2.0**-12
    for kernel in call.kernels(subject):
        q = call.run(kernel, outputs)["q"].view(-1)[1:]
        found = int((q != round(3 + fraction)).sum())
        assert abs(found - expected) <= 5 * expected**0.5, (
            f"{found} of {q.numel()} numbers of the fraction {fraction} round to the integer that is farther away, and not "
            f"{expected:.0f}: draws have too few bits"
        )


@pytest.mark.parametrize("values", RANGES)
def test_stochastic_rounding_is_unbiased_to_the_ends(subject: Subject, outputs: Outputs, values: str) -> None:
    """Rounding has no bias at the ends of a range with a zero point either, where too small a scale would clip."""
    low, high = RANGES[values]
    ends = torch.tensor([low, high, 0.999 * low + 0.001 * high, 0.6 * high + 0.4 * low], device=subject.device)
    x = ends.repeat(1 << 14, 1).t().contiguous()
    call = Quantization(variant=variant_of(STOCHASTIC, symmetric=False), x=x, seed=5)
    for kernel in call.kernels(subject):
        written = call.run(kernel, outputs)
        scale, zero_point = written["scale"].double()
        for row, value in zip(written["q"].double() - zero_point, ends.double() / scale, strict=True):
            check_unbiased(row, value.expand_as(row))


def test_draws_do_not_repeat(subject: Subject, outputs: Outputs) -> None:
    """2¹⁸ draws have no correlation at any distance up to half of that."""
    for written in constant(3.5, (512, 512), subject).put_to(subject, outputs):
        up = written["q"].view(-1)[1:].cpu().double()
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
    call = Quantization(variant=variant_of(STOCHASTIC), x=x)
    for kernel in call.kernels(subject)[:1]:
        for seed in range(4):
            raised = int((call.run(kernel, outputs, seed=seed, offset=9)["q"] > x).sum())
            assert not raised, f"{raised} of {x.numel()} integers were rounded up"


@pytest.mark.parametrize("symmetric", [True, False], ids=["", "zero point"])
@pytest.mark.parametrize("order", [(1, 0), (0, 2, 3, 1)], ids=["transposed", "channels-last"])
def test_draws_are_numbered_in_memory_order(
    subject: Subject, outputs: Outputs, order: tuple[int, ...], symmetric: bool
) -> None:  # fmt: skip
    """The same memory under another order of dimensions gives the same bits."""
    x = floats((24, 15) if len(order) == 2 else (4, 6, 5, 3), torch.float32, subject.device, 3)
    view = x.permute((1, 0) if len(order) == 2 else (0, 3, 1, 2))
    plain = Quantization(variant=variant_of(STOCHASTIC, symmetric=symmetric), x=x)
    expected = plain.put_to(subject, outputs)[0]["q"]
    for written in plain.changed(x=view).put_to(subject, outputs):
        assert torch.equal(written["q"].permute(order), expected), "element i in memory did not take number i"


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
        call = Quantization(variant=variant_of(rounding, granularity), x=x)
        for kernel in call.kernels(subject):
            written = call.run(kernel, outputs)
            values, found = groups_of(x.double(), granularity), groups_of(written["q"].double(), granularity)
            absmax = values.abs().amax(1, keepdim=True)
            step = (absmax / 127).clamp(min=2.0**-126) * (1.0 if rounding is not Rounding.NEAREST else 0.5)
            error = found * written["scale"].double()[:, None] - values
            allowed = torch.where(values.abs() < 2.0**-126, step.clamp(min=2.0**-126), step)
            wrong = error.abs() > allowed * (1 + 2.0**-12)
            group = int(wrong.any(1).nonzero()[0]) if wrong.any() else 0
            assert not wrong.any(), (
                f"{values[group][wrong[group]][0].item():.3g}, in a group up to {absmax[group].item():.3g}, became "
                f"{found[group][wrong[group]][0].item()} times {written['scale'][group].item():.3g}"
            )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("granularity", list(Granularity))
def test_the_stream_follows_from_offset_and_bits(
    subject: Subject, outputs: Outputs, granularity: Granularity, dtype: torch.dtype
) -> None:
    """Checksums that wrap around, of both signs; offsets of 64 bits, negative ones too; none is written where None is given."""
    for value in (1.5, -3.0, -0.0, 2.0**-20):
        x = torch.full((37, 1000), value, dtype=dtype, device=subject.device)
        x[0, 0] = 77.0
        for offset in (0, 5, -1, -(1 << 63), (1 << 63) - 1):
            Quantization(variant=variant_of(Rounding.NEAREST, granularity), x=x, offset=offset).put_to(subject, outputs)
    call = Quantization(variant=variant_of(STOCHASTIC, granularity), x=x)
    for kernel in call.kernels(subject):
        q = call.run(kernel, outputs)["q"]
        written = call.allocate(outputs)
        del written["stream"]
        call.launch(kernel, written)
        assert torch.equal(q, written["q"]), "without stream_out a kernel drew other numbers"


@pytest.mark.parametrize("granularity", list(Granularity))
def test_other_data_round_otherwise(subject: Subject, outputs: Outputs, granularity: Granularity) -> None:
    """One bit of one element counts, under equal scales too: whatever clips gives the same largest magnitude over and over."""
    x = floats((4, 500), torch.float32, subject.device, 5).clamp(-1, 1)
    for place in ((0, 0), (0, 499), (3, 250), (3, 499)):
        x[place[0], 7] = x[place[0], 9] = 1.0  # which keeps the scale of the group
        moved = x.clone()
        moved[place] = moved[place] / 2
        calls = [Quantization(variant=variant_of(STOCHASTIC, granularity), x=each) for each in (x, moved)]
        for kernel in calls[0].kernels(subject):
            before, after = (call.run(kernel, outputs) for call in calls)
            assert torch.equal(before["scale"], after["scale"])
            changed = int((after["q"][place[0]] != before["q"][place[0]]).sum())
            assert changed > 50, f"of the group with the element {place}, which has changed, {changed} others round otherwise"


def test_draws_are_those_of_the_stream(subject: Subject, outputs: Outputs) -> None:
    """Two tensors whose offsets make up for their checksums draw the same numbers."""
    call = constant(3.5, (64, 64), subject)
    other = call.x.clone()
    other[5, 5] = -1.75
    difference = (int(checksum(call.x)) - int(checksum(other))) * (0x9E3779B9 << 32)
    offset = (6 + difference + (1 << 63)) % (1 << 64) - (1 << 63)
    for kernel in call.kernels(subject):
        expected = call.run(kernel, outputs)["q"]
        q = call.changed(x=other, offset=offset).run(kernel, outputs)["q"]
        assert int((q != expected).sum()) == 1, "under one stream equal values at equal places were rounded otherwise"
