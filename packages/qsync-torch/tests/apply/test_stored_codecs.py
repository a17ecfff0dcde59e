"""int8 and NF4 storage of weights against their definitions element by element, and against bitsandbytes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hypothesis_profiles import tries
from qsync_core.errors import NumericsError
from qsync_core.ir.precision import Storage
from qsync_torch.aten.stored_weights import NF4_CODES, dequantize_weight, dynamic_codes, empty_stored, quantize_weight

QUANTIZED = [storage for storage in Storage if storage.is_quantized]
SHAPES = st.tuples(st.integers(1, 9), st.integers(1, 200))


def weight_of(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def nearest(value: float, codes: list[float]) -> float:
    """By distance in float64."""
    return min(codes, key=lambda code: abs(code - value))


def nf4_by_hand(weight: torch.Tensor) -> list[float]:
    """The definition: elements over their block's largest magnitude, which is itself stored in 8 bits less the mean."""
    values = weight.flatten().tolist()
    blocks = [values[i : i + 64] for i in range(0, len(values), 64)]
    largest = [max(max(map(abs, block)), 1e-38) for block in blocks]
    mean = sum(largest) / len(largest)
    dynamic = dynamic_codes(torch.device("cpu")).tolist()
    constants: list[float] = []
    for i in range(0, len(largest), 256):
        group = [one - mean for one in largest[i : i + 256]]
        scale = max(max(map(abs, group)), 1e-38)
        constants += [nearest(one / scale, dynamic) * scale + mean for one in group]
    codes = list(NF4_CODES)
    return [nearest(v / most, codes) * c for block, most, c in zip(blocks, largest, constants, strict=True) for v in block]


@pytest.mark.parametrize("unit", [1.0, 1 / 64], ids=["midpoints", "edges of cells"])
def test_elements_beside_where_codes_change_get_theirs(unit):
    codes = torch.tensor(NF4_CODES)
    near = (codes[:-1] + codes[1:]) / 2 if unit == 1 else torch.arange(-64, 65) * unit
    for _ in range(2):
        near = torch.cat([near, near.nextafter(torch.tensor(2.0)), near.nextafter(torch.tensor(-2.0))]).clamp(-1, 1).unique()
    blocks = torch.zeros(-(-near.numel() // 63), 64)
    blocks[:, 0] = 1.0  # the largest magnitude, so that elements are what is compared
    blocks[:, 1:] = torch.nn.functional.pad(near, (0, blocks[:, 1:].numel() - near.numel())).view(-1, 63)
    stored = quantize_weight(blocks, Storage.NF4)
    found = torch.stack([stored.values >> 4, stored.values & 15], 1).view(-1, 64)
    midpoints = (codes[:-1] + codes[1:]) / 2
    assert torch.equal(found, (blocks[..., None] > midpoints).sum(-1).to(torch.uint8))


@tries(20)
@given(SHAPES, st.integers(0, 99))
def test_nf4_is_its_definition(shape, seed):
    weight = weight_of(shape, seed)
    found = dequantize_weight(quantize_weight(weight, Storage.NF4), Storage.NF4, shape, torch.float32).flatten()
    wanted = torch.tensor(nf4_by_hand(weight), dtype=torch.float64)
    # One block whose mean is itself has a constant of rounding's size: what it is scaled with is chance.
    assert torch.allclose(found.double(), wanted, rtol=1e-5, atol=1e-6)


@tries(20)
@given(SHAPES, st.integers(0, 99), st.sampled_from([Storage.INT8_ROW, Storage.INT8_BLOCK]))
def test_int8_is_its_definition(shape, seed, storage):
    weight = weight_of(shape, seed)
    stored = quantize_weight(weight, storage)
    found = dequantize_weight(stored, storage, shape, torch.float32)
    block = shape[1] if storage is Storage.INT8_ROW else 128
    for row in range(shape[0]):
        for first in range(0, shape[1], block):
            group = weight[row, first : first + block].double()
            scale = group.abs().max() / 127
            off = (found[row, first : first + block].double() - group).abs().max()
            assert off <= scale * 0.5000001
    assert int(stored.values.abs().max()) == 127


@pytest.mark.parametrize("storage", QUANTIZED)
@pytest.mark.parametrize("shape", [(3, 70), (64, 256), (5, 4, 3, 3), (1, 1), (1100, 1000)])
def test_bytes_and_shapes_are_those_that_plans_count(storage, shape):
    stored = quantize_weight(weight_of(shape), storage)
    unset = empty_stored(shape, storage, "meta")
    assert stored.nbytes == unset.nbytes == storage.nbytes(shape[0], math.prod(shape[1:]), 4)
    assert [None if t is None else (t.shape, t.dtype) for t in stored] == [None if t is None else (t.shape, t.dtype) for t in unset]
    assert dequantize_weight(stored, storage, shape, torch.bfloat16).shape == shape


@pytest.mark.parametrize("storage", QUANTIZED)
def test_what_was_dequantized_is_stored_again_as_it_was(storage):
    weight = weight_of((32, 256))
    first = dequantize_weight(quantize_weight(weight, storage), storage, weight.shape, torch.float32)
    again = dequantize_weight(quantize_weight(first, storage), storage, weight.shape, torch.float32)
    assert torch.allclose(first, again, rtol=2e-2 if storage is Storage.NF4 else 1e-6)


@pytest.mark.parametrize("storage", QUANTIZED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_result_is_the_float32_one_rounded_once(storage, dtype):
    weight = weight_of((48, 200), dtype=dtype)
    stored = quantize_weight(weight, storage)
    wide = dequantize_weight(stored, storage, weight.shape, torch.float32)
    assert torch.equal(dequantize_weight(stored, storage, weight.shape, dtype), wide.to(dtype))
    assert torch.equal(quantize_weight(weight.float(), storage).values, stored.values)


@pytest.mark.parametrize("storage", QUANTIZED)
def test_zeros_stay_zeros(storage):
    stored = quantize_weight(torch.zeros(4, 130), storage)
    assert not dequantize_weight(stored, storage, (4, 130), torch.float32).any()


@pytest.fixture
def nan_in_unset_memory(monkeypatch):
    """``torch.empty`` gives NaN, as memory that was used before may."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("nan_in_unset_memory")
@pytest.mark.parametrize("storage", QUANTIZED)
@pytest.mark.parametrize("shape", [(4, 0), (0, 4), (4, 0, 3, 3), (3, 70), (64, 256)])
def test_every_element_of_what_is_stored_is_set(storage, shape):
    """A row without elements has a scale too: it was chance once, and refused as infinite on one machine of many."""
    stored = quantize_weight(weight_of(shape), storage)
    assert all(tensor is None or bool(tensor.isfinite().all()) for tensor in stored)
    assert dequantize_weight(stored, storage, shape, torch.float32).shape == shape


@pytest.mark.parametrize("storage", QUANTIZED)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_refused(storage, value):
    weight = weight_of((4, 130))
    weight[2, 3] = value
    with pytest.raises(NumericsError, match=rf"a weight of shape \[4, 130\] holds NaN or infinity, which {storage} cannot store"):
        quantize_weight(weight, storage)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(64, 64), (128, 100), (33, 70), (1000, 1100)])
def test_nf4_is_that_of_bitsandbytes(shape, dtype):
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = weight_of(shape, dtype=dtype) * 0.02
    packed, state = functional.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    mine = quantize_weight(weight, Storage.NF4)
    assert torch.equal(packed.flatten(), mine.values)
    assert torch.equal(state.offset, mine.offset)
    assert torch.equal(state.state2.absmax, mine.scale)
    assert torch.equal(functional.create_dynamic_map(), dynamic_codes(torch.device("cpu")))
    # Its CPU kernel takes the second nearest code now and then; its fallback for other formats takes the nearest.
    _, largest = torch.ops.bitsandbytes.quantize_4bit.default(weight, 64, "nf4", torch.uint8)
    exact, _ = torch.ops.bitsandbytes.quantize_blockwise.default((largest - state.offset).double(), state.state2.code, 256)
    assert torch.equal(exact, mine.constants)
    assert (state.absmax != mine.constants).float().mean() < 0.05
    theirs = mine._replace(constants=state.absmax)
    assert torch.equal(functional.dequantize_4bit(packed, state), dequantize_weight(theirs, Storage.NF4, shape, dtype))
