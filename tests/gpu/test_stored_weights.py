"""Stored weights on a real GPU: the bits of the reference, whoever dequantizes, under a compiler too, and no second copy."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from compatibility.adapted_layers import WIDTH, adapted, plan_of_adapted  # noqa: E402
from qsync_core.ir.precision import Precision, Storage  # noqa: E402
from qsync_core.ir.profile import DeviceKind, DeviceType  # noqa: E402
from qsync_core.ir.variant import Variant  # noqa: E402
from qsync_core.kernels.backend import KernelRequest, Op  # noqa: E402

STORAGES = [storage for storage in Storage if storage.is_quantized]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(4096, 4096), (2048, 5632), (64, 64), (1000, 1100), (33, 70), (7, 1), (1, 7), (8, 16, 3, 3), (129, 5)]


def weight_of(shape):
    return torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(0)) * 0.02


def kernels(storage, shape):
    """Every configuration of Triton's."""
    pytest.importorskip("triton")
    from qsync_kernels_triton.backend import TritonBackend

    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    variant = Variant.named(f"bfloat16@{storage}")
    request = KernelRequest(Op.DEQUANTIZE, variant, (shape,), device_kind="cuda", compute_capability=capability)
    backend = TritonBackend()
    if reasons := backend.unsupported_reasons(request):
        pytest.skip("; ".join(reasons))
    return [backend.build(request, config) for config in backend.candidate_configs(request)]


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_bits_are_those_of_the_reference(storage, shape):
    from qsync_torch.aten.stored_weights import dequantize_weight, quantize_weight

    stored = quantize_weight(weight_of(shape), storage)
    on_cpu = type(stored)(*(None if tensor is None else tensor.cpu() for tensor in stored))
    for dtype in DTYPES:
        right = dequantize_weight(on_cpu, storage, shape, dtype)
        assert torch.equal(dequantize_weight(stored, storage, shape, dtype).cpu(), right)
        for kernel in kernels(storage, shape):
            out = torch.full(shape, float("nan"), device="cuda", dtype=dtype)
            kernel(*stored, out)
            assert torch.equal(out.cpu(), right)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nf4_is_what_bitsandbytes_reads(dtype):
    functional = pytest.importorskip("bitsandbytes.functional")
    from qsync_torch.aten.stored_weights import StoredWeight

    shape = (1000, 1100)
    packed, state = functional.quantize_4bit(weight_of(shape).to(dtype), blocksize=64, compress_statistics=True, quant_type="nf4")
    theirs = StoredWeight(packed.flatten(), state.state2.absmax, state.absmax, state.offset)
    for kernel in kernels(Storage.NF4, shape):
        out = torch.empty(shape, device="cuda", dtype=dtype)
        kernel(*theirs, out)
        assert torch.equal(out, functional.dequantize_4bit(packed, state))


@pytest.mark.parametrize("storage", STORAGES)
def test_one_dense_copy_lives_in_each_pass(storage):
    """Stored 4096 x 4096: of the weight, forward and backward take the memory of one bfloat16 copy, and give it back."""
    from qsync_torch import apply_

    model = torch.nn.Sequential(torch.nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16)).requires_grad_(False)
    apply_(model, {"0": f"bfloat16@{storage}"}, base=Precision.BFLOAT16)
    model.to("cuda")
    x = torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for _ in range(2):
        model(x).sum().backward()
    x.grad = None
    torch.cuda.synchronize()
    dense, before = 2 * 4096 * 4096, torch.cuda.memory_allocated()

    def rise(run):
        torch.cuda.reset_peak_memory_stats()
        found = run()
        return found, torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before

    y, most, kept = rise(lambda: model(x).sum())
    assert dense <= most < dense + (2 << 20)
    assert kept < 2 << 20
    _, most, kept = rise(y.backward)
    assert dense <= most < dense + (2 << 20)
    assert kept < 2 << 20


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    """The result and the gradients of a step on the device."""
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16().cuda().requires_grad_()
    y = model(x)
    y.float().square().mean().backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters() if parameter.requires_grad)]


@pytest.mark.parametrize("group", ["train", "infer"])
def test_a_model_may_come_to_its_device_after_its_plan(group):
    """What is stored is read as a plain copy reads it; what another group stores, as by a model that came before its plan."""
    from qsync_torch import apply_

    card = DeviceType(torch.cuda.get_device_name(), DeviceKind.CUDA)
    model, twin = adapted(), adapted().cuda()
    apply_(model, plan_of_adapted(card), group=group, seed=1, allow_flags=["share"])
    if group == "train":
        apply_(twin, plan_of_adapted(card), group=group, seed=1, allow_flags=["share"])
    model.cuda()
    found, wanted = gradients(model), gradients(twin if group == "train" else copy.deepcopy(model))
    assert [torch.equal(mine, theirs) for mine, theirs in zip(found, wanted, strict=True)] == [True] * 6


def test_a_compiled_model_reads_the_same():
    from qsync_torch import apply_

    torch.manual_seed(0)
    model = (
        torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64)).bfloat16().requires_grad_(False)
    )
    apply_(model, {"0": "bfloat16@nf4", "2": "bfloat16@int8-block"}, base=Precision.BFLOAT16)
    model.to("cuda")
    x = torch.randn(32, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    right = model(x)
    (grad,) = torch.autograd.grad(right.float().square().sum(), x)
    y = torch.compile(model)(x)
    assert torch.allclose(y.float(), right.float(), rtol=2e-2, atol=2e-2)
    assert torch.allclose(torch.autograd.grad(y.float().square().sum(), x)[0].float(), grad.float(), rtol=2e-2, atol=2e-2)


def test_triton_is_what_a_gpu_takes():
    pytest.importorskip("triton")
    from qsync_core.kernels.choice import KernelChoice
    from qsync_torch.kernels.selection import backend_of, default_backend

    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    request = KernelRequest(
        Op.DEQUANTIZE, Variant.named("bfloat16@nf4"), ((64, 64),), device_kind="cuda", compute_capability=capability
    )
    assert backend_of(request, KernelChoice((default_backend(torch.device("cuda")),))) == "triton"
