"""Training steps of an applied model in CUDA graphs: a replay computes what the eager step of its number would."""

from __future__ import annotations

import attrs
import pytest

torch = pytest.importorskip("torch")

from qsync_core.errors import BackendError, PlanError  # noqa: E402
from qsync_core.ir.op_id import OpId  # noqa: E402
from qsync_core.ir.precision import Precision  # noqa: E402
from qsync_core.ir.variant import Variant  # noqa: E402
from qsync_torch.apply.applied_plan import applied_to  # noqa: E402

INT8 = attrs.evolve(Variant.of(Precision.INT8), output=Precision.BFLOAT16)
BOTH = attrs.evolve(INT8, grad_input=Precision.INT8, grad_weight=Precision.INT8)
REPLAYS = 4_000
BACKENDS = ["triton+aten", "aten"]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(8, 32, 3, padding=1)
        self.a, self.b = torch.nn.Linear(32, 64), torch.nn.Linear(64, 16)

    def forward(self, x):
        return self.b(torch.relu(self.a(torch.relu(self.conv(x)).mean((2, 3)))))


def net(backend, variant=INT8):
    """The model under a plan, and its batch."""
    from qsync_torch import apply_

    if "triton" in backend:
        pytest.importorskip("triton")
    torch.manual_seed(0)
    model = Net().to("cuda", memory_format=torch.channels_last)
    applied = apply_(model, {OpId("conv"): INT8, OpId("a"): variant, OpId("b"): variant}, backend=backend)
    return model, applied, torch.randn(16, 8, 8, 8, device="cuda").to(memory_format=torch.channels_last)


def step(model, x):
    for parameter in model.parameters():
        parameter.grad = None
    loss = model(x).square().mean()
    loss.backward()
    applied_to(model).advance()
    return loss.detach(), [parameter.grad for parameter in model.parameters()]


def captured(run, warm_up=3):
    """A graph of ``run``, and what it returned."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_up):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    return graph, found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", [INT8, BOTH], ids=["16-bit gradients", "int8 gradients"])
def test_a_replay_computes_what_the_eager_step_does(variant, backend):
    """With stochastic rounding: a replay takes the random numbers of its own step, and eager steps go on from there."""
    model, applied, x = net(backend, variant)
    graph, (loss, gradients) = captured(lambda: step(model, x))
    assert applied.step == 3  # the capture itself does not run
    for number in (4, 5, 7):
        with torch.no_grad():
            x.normal_()
            model.a.weight.mul_(0.5)
        applied.step = number - 1
        graph.replay()
        assert applied.step == number
        found = [loss.clone(), *(gradient.clone() for gradient in gradients)]
        applied.step = number - 1
        expected_loss, expected = step(model, x)
        for a, b in zip(found, [expected_loss, *expected], strict=True):
            assert ((a - b).norm() / b.norm().clamp(min=1e-12)).item() < 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
def test_replays_round_without_bias_and_no_two_alike(backend):
    """4,000 of them: the mean of outputs and of weight gradients is within three standard errors of the exact one."""
    from qsync_torch import apply_

    if "triton" in backend:
        pytest.importorskip("triton")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 48, bias=False)).cuda()
    x, direction, other = torch.randn(32, 64, device="cuda"), torch.randn(32, 48, device="cuda"), torch.randn(48, 64, device="cuda")
    weight = model[0].weight
    # Detached: a graph kept of the default stream would tie the captured backward to that stream.
    exact_output = (x.double() @ weight.detach().double().t() * direction.double()).sum()
    exact_gradient = (direction.double().t() @ x.double() * other.double()).sum()
    variant = attrs.evolve(BOTH, output=Precision.FLOAT32)
    applied = apply_(model, {OpId("0"): variant}, backend=backend)

    def run():
        weight.grad = None
        y = model(x)
        (y * direction).sum().backward()
        applied.advance()
        found = ((y.detach().double() * direction.double()).sum(), (weight.grad.double() * other.double()).sum())
        return torch.stack(found)

    graph, found = captured(run)
    drawn = torch.empty(REPLAYS, 2, dtype=torch.float64, device="cuda")
    for i in range(REPLAYS):
        graph.replay()
        drawn[i] = found
    assert applied.step == 3 + REPLAYS
    assert drawn[:, 0].unique().numel() == REPLAYS
    assert drawn[:, 1].unique().numel() == REPLAYS
    error = (drawn.mean(0) - torch.stack([exact_output, exact_gradient])) / (drawn.std(0) / REPLAYS**0.5)
    assert error.abs().max().item() < 3, error


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiler_captures_the_steps_of_a_plan(backend):
    """``mode="reduce-overhead"``: graphs are captured, no two steps round alike, and a step that is run again rounds as it did.

    Not as the eager step of its number does: the compiler fuses what comes before a quantization, and so what is quantized may
    differ in the last bit, from which its random numbers follow.
    """
    pytest.importorskip("triton")
    torch._dynamo.reset()
    model, applied, x = net(backend)
    run = torch.compile(model, mode="reduce-overhead")
    skipped = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]

    def gradients():
        torch.compiler.cudagraph_mark_step_begin()
        return torch.cat([g.flatten() for g in step(run, x)[1]])

    first = [gradients() for _ in range(6)]
    applied.step = 0
    for number in range(6):
        again = gradients()
        own, *others = sorted((again - found).norm().item() for found in first)
        assert own == (again - first[number]).norm().item()
        assert own < others[0] / 2
    assert applied.step == 6
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == skipped
    torch._dynamo.reset()


def test_the_first_step_is_not_captured():
    from qsync_torch import apply_

    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    apply_(model, {OpId("0"): INT8}, backend="aten")
    model.cuda()
    x = torch.randn(8, 64, device="cuda")
    with pytest.raises(
        PlanError, match="the first step under a plan is captured in a CUDA graph: run a step before one is captured"
    ):
        captured(lambda: model(x), warm_up=0)


def test_a_backend_that_takes_integers_only_is_not_captured(monkeypatch):
    from qsync_torch.aten.backend import AtenBackend
    from qsync_torch.kernels import binding, selection

    monkeypatch.setattr(AtenBackend, "offset_tensors", False)
    for cached in (binding.quantization, binding.operator_binding, selection.find_backends):
        cached.cache_clear()
    try:
        model, applied, x = net("aten")
        step(model, x)
        assert applied.step == 1
        with pytest.raises(BackendError, match=r"backend aten runs quantize.* and every replay of the CUDA graph"):
            captured(lambda: step(model, x))
    finally:
        for cached in (binding.quantization, binding.operator_binding, selection.find_backends):
            cached.cache_clear()
