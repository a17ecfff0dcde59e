"""Operators that run again in C++ (docs/decisions/replays.md) give the bits of Python's calls."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch")

ALL = "int8;out=bfloat16;save=int8;gi=int8;gw=int8;x={};w=channel;round=stochastic;sym=true"
VARIANTS = ["int8>bfloat16", ALL.format("tensor"), ALL.format("row")]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.pointwise = torch.nn.Conv2d(16, 64, 3, padding=1), torch.nn.Conv2d(64, 64, 1)
        self.a, self.b, self.c = torch.nn.Linear(64, 256), torch.nn.Linear(64, 256, bias=False), torch.nn.Linear(256, 64)

    def forward(self, x):
        x = self.pointwise(torch.relu(self.conv(x))).flatten(2).transpose(1, 2)
        return self.c(torch.relu(self.a(x)) * self.b(x))


@pytest.fixture(scope="module")
def extension():
    from qsync_torch.replaying import extension

    extension._load()
    return extension


def steps(backend, variant, compiles):
    """Losses and gradients of six steps, of which the later ones are replayed, where anything is."""
    from qsync_core.ir.precision import Precision
    from qsync_torch import apply_

    torch.manual_seed(0)
    model = Net().to("cuda", memory_format=torch.channels_last)
    x = torch.randn(8, 16, 8, 8, device="cuda").to(memory_format=torch.channels_last)
    plan = {f"{name}#0": variant for name in "abc"} | {f"{name}#0": "int8>bfloat16" for name in ("conv", "pointwise")}
    applied = apply_(model, plan, base=Precision.BFLOAT16, backend=backend)
    run = torch.compile(model) if compiles else model
    optimizer, found = torch.optim.SGD(model.parameters(), lr=1e-3), []
    for step in range(6):
        with torch.autocast("cuda", torch.bfloat16):
            loss = run(x + step).float().square().mean()
        loss.backward()
        found += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    applied.remove()
    return found


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("backend", ["triton+aten", "cutlass+triton+aten"])
def test_steps_are_bit_equal_to_python_s(backend, variant, compiles, extension, monkeypatch):
    for name in backend.split("+")[:-1]:
        pytest.importorskip(f"qsync_kernels_{name}")
    module = extension.loaded()
    with monkeypatch.context() as patch:
        patch.setenv("QSYNC_REPLAY", "0")
        patch.setenv("QSYNC_WAIT_FOR_KERNELS", "1")
        patch.setattr(extension, "_loaded", None)
        expected = steps(backend, variant, compiles)
        torch.compiler.reset()
        patch.setattr(extension, "_loaded", module)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="a recorded call gave other bits")
            found = steps(backend, variant, compiles)
    assert all(torch.isfinite(one).all() for one in expected)
    for place, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert torch.equal(one, other), place
    if not compiles:
        from qsync_torch.operators.replays import REPLAY_OF

        assert sum(sum(run.programs()) for run in REPLAY_OF.values()) >= 4


@pytest.mark.parametrize("storage", ["nf4", "int8-row", "int8-block"])
def test_products_with_stored_weights_are_bit_equal_to_python_s(storage, extension, monkeypatch):
    from qsync_core.ir.precision import Precision
    from qsync_torch import apply_
    from qsync_torch.operators import stored

    pytest.importorskip("qsync_kernels_triton")
    x, found, module = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16), [], extension.loaded()
    for loaded in (None, module):
        monkeypatch.setattr(extension, "_loaded", loaded)
        stored.REPLAY_OF_STORED.clear()
        torch.manual_seed(0)
        frozen = [torch.nn.Linear(256, 512), torch.nn.Linear(512, 256, bias=False)]
        model, seen = torch.nn.Sequential(*frozen).to("cuda", torch.bfloat16).requires_grad_(False), []
        applied = apply_(model, {f"{name}#0": f"bfloat16@{storage}" for name in "01"}, base=Precision.BFLOAT16)
        for step in range(6):
            inputs = (x * (step + 1)).requires_grad_()
            y = model(inputs)
            y.float().square().sum().backward()
            seen += [y.detach(), inputs.grad]
        found.append(seen)
        applied.remove()
    assert [run.programs() for run in stored.REPLAY_OF_STORED.values()] == [(1, 1), (1, 1)]
    assert all(torch.isfinite(one).all() for one in found[0])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def trained(device, stream):
    """Gradients of five steps on a stream of a device, the first one being current, and by how much memory rises in the last."""
    from qsync_torch import apply_
    from qsync_torch.operators.replays import REPLAY_OF

    REPLAY_OF.clear()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256)).to(device)
    applied = apply_(model, {"0#0": ALL.format("tensor"), "2#0": "int8"}, base="bfloat16", backend="triton+aten")
    x, found = torch.randn(256, 512, device=device).t()[:256], []
    with torch.cuda.device(0):
        for step in range(5):
            model.zero_grad()
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream), torch.cuda.device(0), torch.autocast("cuda", torch.bfloat16):
                loss = model((x + step).t().contiguous().t()).float().square().mean()
            loss.backward()
            torch.cuda.synchronize(device)
            rise = torch.cuda.max_memory_allocated(device) - before
            found += [parameter.grad.clone() for parameter in model.parameters()]
    applied.remove()
    return found, rise


@pytest.mark.parametrize("index", [0, 1])
def test_programs_run_on_the_device_and_stream_of_a_call_in_python_s_memory(index, extension, monkeypatch):
    pytest.importorskip("qsync_kernels_triton")
    if index >= torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    device, module = torch.device("cuda", index), extension.loaded()
    stream, ways = torch.cuda.Stream(device), []
    for loaded in (None, module):
        monkeypatch.setattr(extension, "_loaded", loaded)
        monkeypatch.setattr(extension, "_asked", {"cuda"})
        ways.append(trained(device, stream))
    (expected, python), (found, replayed) = ways
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert replayed <= python


def test_a_captured_step_replays_programs(extension):
    """What was recorded before is captured in a CUDA graph as Python's launches are."""
    from qsync_torch import apply_

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64)).cuda()
    applied = apply_(model, {"0#0": "int8;out=float32;save=int8;gi=int8;gw=int8;x=tensor;w=channel;round=nearest;sym=true"},
                     backend="triton+aten")  # fmt: skip
    x = torch.randn(32, 64, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            expected = torch.autograd.grad(model(x).square().sum(), model[0].weight)[0]
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = torch.autograd.grad(model(x).square().sum(), model[0].weight)[0]
    graph.replay()
    assert torch.equal(expected, found)
    applied.remove()
