"""Many tensors at once give, bit for bit, what one at a time gives."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from qsync_core.errors import BackendError  # noqa: E402
from qsync_core.ir.precision import Granularity, Rounding  # noqa: E402
from qsync_kernels_triton.config import QuantizeConfig  # noqa: E402
from qsync_kernels_triton.quantize import many as quantize_many  # noqa: E402
from qsync_kernels_triton.quantize.many import QuantizeMany  # noqa: E402
from qsync_kernels_triton.quantize.single import build_quantize, scale_count  # noqa: E402

CONFIG = QuantizeConfig(block=64, warps=1, programs=6)
SHAPES = [(7, 30), (4, 3, 3, 8), (5, 256), (1, 1), (3, 1400), (0, 4), (19, 8), (1, 5000)]


def tensors(dtype=torch.float32, form=torch.int8, granularity=Granularity.PER_TENSOR):
    generator = torch.Generator().manual_seed(0)
    xs = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    return xs, [torch.empty_like(x, dtype=form) for x in xs], [torch.empty(scale_count(tuple(x.shape), granularity)) for x in xs]


@pytest.mark.parametrize("rounding", [Rounding.STOCHASTIC, Rounding.NEAREST])
@pytest.mark.parametrize("granularity", list(Granularity))
@pytest.mark.parametrize(("dtype", "form"), [(torch.float32, torch.int8), (torch.bfloat16, torch.float8_e4m3fn)])
def test_every_tensor_gets_the_bits_of_a_call_of_its_own(dtype, form, granularity, rounding):
    xs, qs, scales = tensors(dtype, form, granularity)
    seeds = [5 + (i << 33) for i in range(len(xs))]
    QuantizeMany(granularity, rounding, CONFIG)(xs, qs, scales, seeds, 7 + (1 << 35))
    single = build_quantize(granularity, rounding, CONFIG)
    for x, q, scale, seed in zip(xs, qs, scales, seeds, strict=True):
        expected, expected_scale = torch.empty_like(q), torch.empty_like(scale)
        single(x, expected, expected_scale, seed, 7 + (1 << 35))
        assert torch.equal(q.view(torch.int8), expected.view(torch.int8))
        assert torch.equal(scale, expected_scale)


def test_a_longer_list_than_a_table_takes_several(monkeypatch):
    monkeypatch.setattr(quantize_many, "MAX_TENSORS", 3)
    xs, qs, scales = tensors()
    QuantizeMany(Granularity.PER_TENSOR, Rounding.NEAREST, CONFIG)(xs, qs, scales, [0] * len(xs), 0)
    for x, q, scale in zip(xs, qs, scales, strict=True):
        assert torch.equal(q, (x / scale).round().to(torch.int8))


@pytest.mark.parametrize("granularity", [Granularity.PER_CHANNEL, Granularity.PER_ROW])
def test_programs_that_take_several_groups_of_rows_take_each_once(granularity, monkeypatch):
    monkeypatch.setattr(quantize_many, "ENOUGH_PROGRAMS", 2)
    xs = [torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in ((150, 40), (3, 40), (61, 300), (5, 5000))]
    qs, scales = [torch.empty_like(x, dtype=torch.int8) for x in xs], [torch.empty(x.shape[0]) for x in xs]
    QuantizeMany(granularity, Rounding.NEAREST, CONFIG)(xs, qs, scales, [0] * len(xs), 0)
    for x, q, scale in zip(xs, qs, scales, strict=True):
        assert torch.equal(scale, x.abs().amax(1) / 127)
        assert torch.equal(q, (x / scale[:, None]).round().to(torch.int8))


def test_launches_do_not_grow_with_the_number_of_tensors(monkeypatch):
    launched = []
    monkeypatch.setattr(quantize_many.Launch, "__call__", lambda self, grid, *_: launched.append(grid))
    xs = [torch.ones(32, 320) for _ in range(50)] + [torch.ones(32, 64) for _ in range(50)]
    qs = [torch.empty_like(x, dtype=torch.int8) for x in xs]
    for granularity, launches in ((Granularity.PER_CHANNEL, 2), (Granularity.PER_TENSOR, 2)):
        launched.clear()
        scales = [torch.empty(scale_count(tuple(x.shape), granularity)) for x in xs]
        QuantizeMany(granularity, Rounding.NEAREST, CONFIG)(xs, qs, scales, [0] * 100, 0)
        assert len(launched) == launches


@pytest.mark.parametrize("granularity", [Granularity.PER_TENSOR, Granularity.PER_CHANNEL])
def test_an_offset_in_a_tensor_gives_the_bits_of_the_number(granularity):
    kernel, offset = QuantizeMany(granularity, Rounding.STOCHASTIC, CONFIG), torch.zeros(1, dtype=torch.int64)
    found = []
    for value in (3 << 32, (1 << 62) + 1):
        for given in (value, offset.fill_(value)):
            xs, qs, scales = tensors(granularity=granularity)
            kernel(xs, qs, scales, list(range(len(xs))), given)
            found.append(torch.cat([q.flatten() for q in qs]))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[2], found[3])
    assert not torch.equal(found[0], found[2])


def test_lists_of_different_lengths_are_refused():
    xs, qs, scales = tensors()
    with pytest.raises(BackendError, match="lists have different lengths: 8 xs, 8 qs, 8 scales, 1 seeds"):
        QuantizeMany(Granularity.PER_TENSOR, Rounding.NEAREST, CONFIG)(xs, qs, scales, [0], 0)


def test_an_operand_of_another_type_is_refused_by_name():
    xs, _, scales = tensors()
    with pytest.raises(BackendError, match=r"q_out must be int8, float8_e4m3fn or float8_e5m2 of shape \(7, 30\)"):
        QuantizeMany(Granularity.PER_TENSOR, Rounding.NEAREST, CONFIG)(xs, xs, scales, [0] * len(xs), 0)
