"""Operators that run again in C++ compute what Python computes, bit for bit: eager, and as nodes of compiled graphs.

The extension is compiled here, in half a minute.
"""

import ctypes
import itertools
import os
import struct

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton: it is read there

import attrs
import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint

from qsync_core.errors import PlanError
from qsync_core.ir.precision import Precision
from qsync_kernels_triton.backend import TritonBackend

pytest.importorskip("qsync_torch", reason="operators need qsync-torch, which the backend does not")

from qsync_torch import apply_
from qsync_torch.kernels import selection
from qsync_torch.operators import casts, products, replays, stored
from qsync_torch.profiling.memory import kept_for_backward, memory_rise
from qsync_torch.replaying import extension
from qsync_torch.replaying.recording import recorded

pytestmark = pytest.mark.nightly

ALL = "int8;out=float32;save=int8;gi=int8;gw=int8;x={};w=channel;round=stochastic;sym=true"
ALL_BY_TENSOR = ALL.format("tensor")


class OnCpu(TritonBackend):
    """Runs the kernels of a GPU in Triton's interpreter."""

    def unsupported_reasons(self, request):
        return super().unsupported_reasons(on_a_gpu(request))

    def candidate_configs(self, request):
        return super().candidate_configs(on_a_gpu(request))

    def build(self, request, config):
        return super().build(on_a_gpu(request), config)


def on_a_gpu(request):
    return attrs.evolve(request, device_kind="cuda", compute_capability="8.0")


@pytest.fixture(scope="module")
def compiled_extension(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QSYNC_TUNING", str(tmp_path_factory.mktemp("cache") / "tuning.sqlite"))
        extension._load()
        found = extension.loaded()
        yield found
        extension._loaded = None


@pytest.fixture
def triton(monkeypatch):
    real = selection.find_backends
    monkeypatch.setattr(selection, "find_backends", lambda chain: (OnCpu(),) if chain == ("triton",) else real(chain))
    for module in (casts, products):  # a GPU's products read the transposed copy
        monkeypatch.setattr(module, "wants_transposed", lambda x, binding: binding.wants_transposed)


class Attention(nn.Module):
    """Three readers of one activation, one of them without a bias."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(32, 32), nn.Linear(32, 32, bias=False), nn.Linear(32, 32)
        self.o = nn.Linear(32, 16)

    def forward(self, x):
        x = torch.tanh(x)
        return self.o(self.q(x) * self.k(x) + self.v(x))


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 1)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


class Checkpointed(Attention):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def trained(make, x, variant, module, monkeypatch, compiles=False):
    """Outputs and gradients of four steps, and how many programs there were."""
    monkeypatch.setattr(extension, "_loaded", module)
    replays.REPLAY_OF.clear()
    torch.manual_seed(0)
    model, found = make(), []
    layers = [name for name, part in model.named_modules() if isinstance(part, (nn.Linear, nn.Conv2d))]
    applied = apply_(model, {f"{name}#0": variant for name in layers}, backend="triton")
    run = torch.compile(model, backend="aot_eager") if compiles else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for step in range(4):
        y = run(x + step)
        y.square().sum().backward()
        found += [y.detach().clone(), *(parameter.grad.clone() for parameter in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    applied.remove()
    return found, [sum(counts) for counts in zip(*(run.programs() for run in replays.REPLAY_OF.values()), strict=True)]


@pytest.mark.parametrize(
    ("make", "variant"),
    [
        (Attention, "int8"),
        (Attention, ALL.format("tensor")),
        (Attention, ALL.format("row")),
        (Checkpointed, ALL.format("row")),
        (Convolutions, "int8"),
    ],
)
def test_steps_are_bit_equal_to_python_s(make, variant, compiled_extension, triton, monkeypatch):
    torch.manual_seed(1)
    x = torch.randn(2, 16, 6, 6) if make is Convolutions else torch.randn(2, 8, 32)
    expected, none = trained(make, x, variant, None, monkeypatch)
    found, programs = trained(make, x, variant, compiled_extension, monkeypatch)
    assert none == []
    assert min(programs) >= 2  # forward and backward, of layers of more than one shape
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


def test_a_compiled_graph_s_nodes_are_replayed(compiled_extension, triton, monkeypatch):
    torch.manual_seed(1)
    x = torch.randn(2, 8, 32)
    expected, _ = trained(Attention, x, ALL.format("row"), None, monkeypatch, compiles=True)
    torch.compiler.reset()
    found, _ = trained(Attention, x, ALL.format("row"), compiled_extension, monkeypatch, compiles=True)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


class Adapted(nn.Module):
    """Frozen layers whose weights are stored, and what is trained beside them."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 128).requires_grad_(False), nn.Linear(128, 64, bias=False).requires_grad_(False)
        self.c, self.adapter = nn.Linear(64, 128), nn.Linear(64, 128)
        self.c.weight.requires_grad_(False)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x) + self.adapter(x)) + self.c(x))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("storage", ["nf4", "int8-row", "int8-block"])
def test_products_with_stored_weights_are_bit_equal_to_python_s(storage, autocast, compiled_extension, triton, monkeypatch):
    monkeypatch.setattr(selection, "default_backend", lambda device: "triton")
    base = Precision.BFLOAT16 if autocast else Precision.FLOAT32
    x, found = torch.randn(2, 8, 64), []
    for module in (None, compiled_extension):
        monkeypatch.setattr(extension, "_loaded", module)
        monkeypatch.setattr(stored, "_KERNELS", type(stored._KERNELS)(stored._kernel_of))
        stored.REPLAY_OF_STORED.clear()
        torch.manual_seed(0)
        model, seen = Adapted(), []
        applied = apply_(model, {f"{name}#0": f"{base}@{storage}" for name in "abc"}, base=base)
        for step in range(5):
            inputs = (x + step).requires_grad_(step != 1)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                y = model(inputs)
            y.float().square().sum().backward()
            seen += [y.detach(), model.adapter.weight.grad.clone(), model.c.bias.grad.clone(), inputs.grad]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = model(inputs)
        (first,) = torch.autograd.grad(y.float().square().sum(), inputs, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), inputs)
        found.append([*seen, first.detach(), second])
        applied.remove()
    programs = [run.programs() for run in stored.REPLAY_OF_STORED.values()]
    assert len(programs) == 2  # of two shapes
    assert all(min(each) >= 1 for each in programs)
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def test_a_graph_may_be_the_last_that_holds_programs(compiled_extension, triton, monkeypatch):
    """PyTorch frees its nodes without Python's lock, which ends the process where one of Python's objects is freed so."""
    monkeypatch.setattr(extension, "_loaded", compiled_extension)
    monkeypatch.setattr(selection, "default_backend", lambda device: "triton")
    monkeypatch.setattr(stored, "_KERNELS", type(stored._KERNELS)(stored._kernel_of))
    stored.REPLAY_OF_STORED.clear()
    model = nn.Sequential(nn.Linear(64, 64).requires_grad_(False))
    applied = apply_(model, {"0#0": "float32@nf4"})
    for _ in range(4):
        y = model(torch.randn(4, 64, requires_grad=True))
        y.sum().backward()
    assert [run.programs() for run in stored.REPLAY_OF_STORED.values()] == [(1, 1)]
    stored.REPLAY_OF_STORED.clear()
    del y
    applied.remove()


def test_a_backend_that_does_not_tell_of_launches_is_not_recorded(compiled_extension, monkeypatch):
    monkeypatch.setattr(extension, "_loaded", compiled_extension)
    stored.REPLAY_OF_STORED.clear()
    model = nn.Sequential(nn.Linear(64, 64).requires_grad_(False))
    applied = apply_(model, {"0#0": "float32@nf4"})
    for _ in range(4):
        model(torch.randn(4, 64, requires_grad=True)).sum().backward()
    assert [run.programs() for run in stored.REPLAY_OF_STORED.values()] == [(0, 0)]
    applied.remove()


def test_what_has_no_derivative_is_refused_by_name(compiled_extension, triton, monkeypatch):
    monkeypatch.setattr(extension, "_loaded", compiled_extension)
    model = nn.Sequential(nn.Linear(32, 32))
    applied = apply_(model, {"0#0": "int8"}, backend="triton")
    x = torch.randn(4, 32, requires_grad=True)
    for _ in range(3):
        y = model(x).sum()
        torch.autograd.grad(y, x)
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    with pytest.raises(PlanError, match=r"operator 0#0 runs in int8, which has no second derivative"):
        gradient.sum().backward()
    y = model(x).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()
    applied.remove()


def steps_of(module, run, monkeypatch, variant=ALL_BY_TENSOR, count=4):
    """What ``run(model, x)`` gives in each of some steps, of which all but two are replayed where there is the extension."""
    monkeypatch.setattr(extension, "_loaded", module)
    monkeypatch.setattr(extension, "_asked", {"cpu"})
    replays.REPLAY_OF.clear()
    torch.manual_seed(0)
    model, found = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16)), []
    applied = apply_(model, {"0#0": variant, "2#0": variant}, backend="triton")
    for _ in range(count):
        model.zero_grad()
        found.append(run(model, torch.randn(8, 32, requires_grad=True)))
    applied.remove()
    assert (module is None) == (not any(sum(replay.programs()) for replay in replays.REPLAY_OF.values()))
    return found


def gradients_of_some(model, x):
    """What the gradient of a weight is rounded to depends on whether that of the activation is computed."""
    y = model(x).square().sum()
    wanted = ([model[2].weight], [model[0].weight, model[2].bias], [x])
    return [grad for some in wanted for grad in torch.autograd.grad(y, some, retain_graph=True)]


def by_compiled_autograd(model, x):
    y = model(x).square().sum()
    with compiled_autograd._enable(torch.compile(backend="eager")):
        y.backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("run", [gradients_of_some, by_compiled_autograd])
def test_gradients_are_bit_equal_to_python_s_however_they_are_asked_for(run, compiled_extension, triton, monkeypatch):
    expected, found = (steps_of(module, run, monkeypatch) for module in (None, compiled_extension))
    for one, other in zip(itertools.chain(*expected), itertools.chain(*found), strict=True):
        assert torch.equal(one, other)


def bytes_kept(model, x):
    return kept_for_backward(model(x).sum(), [*model.parameters(), x])


def memory_of_a_step(model, x):
    """Rises in forward and backward, from operands that are copied first."""
    result = []
    turned = x.detach().t().contiguous().t().requires_grad_()
    forward, _ = memory_rise(lambda: result.append(model(turned)), turned.device)
    return forward, memory_rise(lambda: result.pop().sum().backward(), turned.device)[0]


@pytest.mark.parametrize("run", [bytes_kept, memory_of_a_step])
@pytest.mark.parametrize("variant", ["int8", ALL_BY_TENSOR])
def test_a_replay_takes_the_memory_that_python_takes(run, variant, compiled_extension, triton, monkeypatch):
    expected, found = (steps_of(module, run, monkeypatch, variant)[-1] for module in (None, compiled_extension))
    assert expected == found


def test_a_number_stands_for_a_tensor_as_in_python(compiled_extension):
    def function(x):
        return x * 2, x / 3, x.to(torch.bfloat16) + 0.1

    program = recorded(compiled_extension.Program, function, (torch.randn(4),))
    x = torch.randn(4)
    for one, other in zip(function(x), program.run((x,)), strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)


def test_a_hook_sees_what_is_kept_for_backward(compiled_extension, triton, monkeypatch):
    """As checkpoints and offloading do; 8-bit copies and scales, and no float operand."""
    monkeypatch.setattr(extension, "_loaded", compiled_extension)
    model = nn.Sequential(nn.Linear(32, 32))
    applied = apply_(model, {"0#0": ALL.format("row")}, backend="triton")
    x, packed = torch.randn(4, 32, requires_grad=True), []

    def pack(kept):
        packed.append((kept.dtype, tuple(kept.shape)))
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        for _ in range(4):
            model(x).sum().backward()
    once = len(packed) // 4
    assert packed[:once] == packed[-once:]
    assert not any(dtype is torch.float32 and len(shape) > 1 for dtype, shape in packed)
    applied.remove()


@pytest.mark.parametrize("status", [0, 3])
def test_a_c_function_gets_the_addresses_of_each_call(status, compiled_extension):
    """As compiled CUTLASS kernels do, whose status becomes an error."""
    seen = []

    @ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)
    def function(arguments):
        seen.append(list((ctypes.c_uint64 * 3).from_address(arguments)))
        return status

    def fails(found):
        raise ValueError(f"status {found}")

    program, address = compiled_extension.Program(), ctypes.cast(function, ctypes.c_void_p).value
    program.slots, program.outputs = 1, [0]
    program.c_call(address, struct.pack("<3Q", 11, 0, 0), [(8, 0, 4)], 16, lambda device: 99, fails)
    for x in (torch.ones(4), torch.ones(8)):
        if status:
            with pytest.raises(ValueError, match="status 3"):
                program.run((x,))
        else:
            assert program.run((x,))[0] is x
        assert seen[-1] == [11, x.data_ptr() + 4, 99]
