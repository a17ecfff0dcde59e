"""Stored weights, written dense bit for bit as PyTorch's operators write them, in Triton's interpreter."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from hypothesis_profiles import tries  # noqa: E402
from qsync_core.errors import BackendError  # noqa: E402
from qsync_core.ir.precision import Storage  # noqa: E402
from qsync_core.ir.variant import Variant  # noqa: E402
from qsync_core.kernels.backend import KernelConfig, KernelRequest, Op  # noqa: E402
from qsync_kernels_triton.backend import TritonBackend  # noqa: E402
from qsync_kernels_triton.config import StoredConfig  # noqa: E402
from qsync_kernels_triton.stored import build_dequantize  # noqa: E402

stored_weights = pytest.importorskip("qsync_torch.aten.stored_weights")

STORAGES = [storage for storage in Storage if storage.is_quantized]
SMALL = StoredConfig(block=256, warps=1)


def weight_of(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def expected(stored, storage, shape, dtype):
    """By PyTorch's operators.  Triton's interpreter cuts bfloat16 off, where a GPU rounds."""
    if dtype is not torch.bfloat16:
        return stored_weights.dequantize_weight(stored, storage, shape, dtype)
    wide = stored_weights.dequantize_weight(stored, storage, shape, torch.float32)
    return (wide.view(torch.int32) & ~0xFFFF).view(torch.float32).to(dtype)


def written(stored, storage, shape, dtype, config=SMALL):
    """What the kernel writes into memory between other numbers, which stay."""
    numel = torch.Size(shape).numel()
    memory = torch.full((numel + 128,), 7.0, dtype=dtype)
    out = memory[64 : 64 + numel].view(shape)
    build_dequantize(storage, config)(*stored, out)
    assert (memory[:64] == 7).all()
    assert (memory[64 + numel :] == 7).all()
    return out


@tries(100)
@given(
    shape=st.lists(st.integers(0, 7), min_size=1, max_size=4) | st.tuples(st.integers(1, 5), st.integers(50, 300)),
    storage=st.sampled_from(STORAGES),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_the_bits_are_those_of_the_reference(storage, dtype, shape):
    stored = stored_weights.quantize_weight(weight_of(*shape), storage)
    assert torch.equal(written(stored, storage, shape, dtype), expected(stored, storage, shape, dtype))


@pytest.mark.parametrize(
    "config", TritonBackend().candidate_configs(KernelRequest(Op.DEQUANTIZE, Variant.named("bfloat16@nf4"), ()))
)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("shape", [(41, 300), (33, 512)])
def test_every_configuration_writes_the_same_bits(storage, config, shape):
    stored = stored_weights.quantize_weight(weight_of(*shape), storage)
    out = written(stored, storage, shape, torch.float16, StoredConfig.parse(config.text))
    assert torch.equal(out, expected(stored, storage, shape, torch.float16))


@pytest.mark.parametrize("storage", STORAGES)
def test_operands_with_gaps_and_at_any_address(storage):
    shape = (37, 130)
    stored = stored_weights.quantize_weight(weight_of(*shape), storage)
    strided, shifted = [], []
    for tensor in stored:
        flat = None if tensor is None else tensor.reshape(-1)
        strided.append(flat if flat is None else flat.repeat_interleave(2)[::2].view(tensor.shape[:1] if tensor.ndim < 2 else -1))
        shifted.append(flat if flat is None else torch.cat([flat[:1], flat])[1:].view(tensor.shape))
    right = expected(stored, storage, shape, torch.float32)
    strided[-1] = None if stored.offset is None else stored.offset
    assert torch.equal(written(strided, storage, shape, torch.float32), right)
    assert torch.equal(written(shifted, storage, shape, torch.float32), right)
    ones = torch.empty_strided((1, 130), (7, 1), dtype=torch.float32)
    one_row = stored_weights.quantize_weight(weight_of(1, 130), storage)
    build_dequantize(storage, SMALL)(*one_row, ones)
    assert torch.equal(ones, expected(one_row, storage, (1, 130), torch.float32))


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_blocks_of_zeros_and_magnitudes_from_subnormal_to_infinite():
    weight = torch.cat([torch.zeros(1, 200), weight_of(6, 200) * torch.logspace(-36, 36, 6)[:, None], torch.zeros(1, 200)])
    for storage in STORAGES:
        stored = stored_weights.quantize_weight(weight, storage)
        for dtype in (torch.float32, torch.float16):
            assert torch.equal(written(stored, storage, (8, 200), dtype), expected(stored, storage, (8, 200), dtype))


class Allocations(TorchDispatchMode):
    """Counts the operators that run under it: a kernel that is launched is none."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("storage", STORAGES)
def test_no_second_copy_is_made(storage, monkeypatch):
    """Beside the launch nothing runs: no operator of PyTorch that could allocate."""
    launched = []
    monkeypatch.setattr("qsync_kernels_triton.stored.Launch.__call__", lambda *args: launched.append(args))
    shape = (64, 256)
    stored, kernel, out = (
        stored_weights.quantize_weight(weight_of(*shape), storage),
        build_dequantize(storage, SMALL),
        torch.empty(shape),
    )
    kernel(*stored, out)
    with Allocations() as seen:
        kernel(*stored, out)
    assert seen.names == []
    assert len(launched) == 2


@pytest.mark.parametrize("storage, place, change, said", [
    (Storage.NF4, 0, lambda x: x[:-1], r"values of .* of shape \(8, 200\) stored as nf4 must be 800 torch.uint8, got .*\(799,\)"),
    (Storage.NF4, 1, lambda x: x.double(), "scale .* must be 1 torch.float32, got torch.float64"),
    (Storage.NF4, 2, lambda x: None, "constants .* must be 25 torch.uint8, got a NoneType"),
    (Storage.NF4, 3, lambda x: x.repeat(2), "mean .* must be 1 torch.float32"),
    (Storage.INT8_ROW, 1, lambda x: x[:3], r"scale .* must be 8 torch.float32, got torch.float32 \(3,\)"),
    (Storage.INT8_BLOCK, 1, lambda x: x[:, :1], r"scale .* must be 16 torch.float32, got torch.float32 \(8, 1\)"),
    (Storage.INT8_BLOCK, 4, lambda x: x.t(), "out must be contiguous .* with strides"),
    (Storage.INT8_ROW, 4, lambda x: x.double(), "out must be contiguous float32, float16 or bfloat16, got torch.float64"),
])  # fmt: skip
def test_operands_that_do_not_fit_are_refused(storage, place, change, said):
    operands = [*stored_weights.quantize_weight(weight_of(8, 200), storage), torch.empty(8, 200)]
    operands[place] = change(operands[place])
    with pytest.raises(BackendError, match=f"backend triton cannot run dequantize: .*{said}"):
        build_dequantize(storage, SMALL)(*operands)


@pytest.mark.parametrize("variant, shapes, capability, said", [
    ("bfloat16", ((8, 8),), "9.0", "stored as it is needs no dequantization; name a storage, as bfloat16@nf4 does"),
    ("bfloat16@nf4", ((8, 8), (8, 8)), "9.0", "takes the shape of one weight"),
    ("int8@int8-row", ((8, 8),), "9.0", "it runs dequantize in bfloat16, float16, float32, not in int8"),
    ("float16@nf4", ((8, 8),), "7.0", "need compute capability 7.5, and this device's is 7.0"),
])  # fmt: skip
def test_requests_that_it_refuses(variant, shapes, capability, said):
    request = KernelRequest(Op.DEQUANTIZE, Variant.named(variant), shapes, device_kind="cuda", compute_capability=capability)
    assert any(said in reason for reason in TritonBackend().unsupported_reasons(request))
    with pytest.raises(BackendError, match="backend triton cannot run dequantize"):
        TritonBackend().build(request, KernelConfig())


def test_it_is_asked_for_what_it_offers_on_a_t4_too():
    request = KernelRequest(Op.DEQUANTIZE, Variant.named("float16@nf4"), ((8, 8),), device_kind="cuda", compute_capability="7.5")
    assert TritonBackend().unsupported_reasons(request) == []
    kernel = TritonBackend().build(request, TritonBackend().candidate_configs(request)[1])
    stored, out = stored_weights.quantize_weight(weight_of(8, 8), Storage.NF4), torch.empty(8, 8, dtype=torch.float16)
    kernel(*stored, out)
    assert torch.equal(out, expected(stored, Storage.NF4, (8, 8), torch.float16))


@pytest.mark.parametrize("text", ["block=100", "warps=3", "blocks=128"])
def test_configurations_that_it_does_not_have(text):
    with pytest.raises(BackendError):
        StoredConfig.parse(text)
