"""Steps that are counted on the device draw the numbers of steps that Python counts; replays draw new ones.

There is no CUDA graph on a CPU: the count is a tensor there that kernels read, and a replay is what Python does not see: the count
advances by itself.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qsync_core.errors import BackendError, PlanError
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.semantics import CastTarget
from qsync_core.kernels.backend import KernelConfig, Op
from qsync_core.kernels.choice import KernelChoice
from qsync_torch import apply_
from qsync_torch.aten.backend import AtenBackend
from qsync_torch.aten.random_bits import known_number, remember_number, stream_key, stream_key_on_device
from qsync_torch.kernels import selection
from qsync_torch.kernels.binding import quantization
from qsync_torch.operators import step_counter
from qsync_torch.operators.step_counter import LARGEST_STEP, STEP_STRIDE, Position, StepCounter

from .small_models import INT8, Attention, named

LAYERS = named(q=INT8, k=INT8, v=INT8, out=INT8)
CPU = torch.device("cpu")


class Capturing:
    now = False


@pytest.fixture
def on_device(monkeypatch):
    """The count is a tensor, as on a GPU."""
    monkeypatch.setattr(step_counter, "DEVICE_KINDS", frozenset({"cpu"}))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: Capturing.now)
    yield
    Capturing.now = False


def attention(seed=0):
    torch.manual_seed(seed)
    return Attention(), torch.randn(2, 5, 16)


def gradients(model):
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return found


def steps(model, x, count=3):
    found = []
    for _ in range(count):
        model(x).square().sum().backward()
        found += gradients(model)
    return found


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture
def expected():
    """Three steps that Python counts."""
    model, x = attention()
    applied = apply_(model, LAYERS)
    found = steps(model, x)
    assert applied.step == 3
    return found


def test_a_count_on_the_device_draws_the_numbers_of_pythons(expected, on_device):
    model, x = attention()
    applied = apply_(model, LAYERS)
    assert same(steps(model, x), expected)
    assert applied.step == 3


def test_steps_go_on_after_a_replay_that_python_does_not_see(expected, on_device):
    model, x = attention()
    applied = apply_(model, LAYERS)
    size = len(expected) // 3
    assert same(steps(model, x, 1), expected[:size])
    Capturing.now = True
    model(x).square().sum().backward()  # captured
    Capturing.now = False
    gradients(model)
    with torch.no_grad():
        applied._steps._count.sub_(STEP_STRIDE)  # the capture itself does not run
    assert applied.step == 1
    with torch.no_grad():
        applied._steps._count.add_(STEP_STRIDE)  # a replay
    assert applied.step == 2
    assert same(steps(model, x, 1), expected[2 * size :])
    assert applied.state_dict() == {"step": 3, "seed": 0}
    applied.load_state_dict({"step": 1, "seed": 0})
    assert same(steps(model, x, 2), expected[size:])


def test_the_first_step_is_not_captured(on_device, monkeypatch):
    counter = StepCounter()
    counter.step = 5
    Capturing.now = True
    with pytest.raises(
        PlanError, match="the first step under a plan is captured in a CUDA graph: run a step before one is captured"
    ):
        counter.move_to(CPU)
    Capturing.now = False
    counter.move_to(CPU)
    assert counter.step == 5


def test_a_backward_takes_the_numbers_of_its_own_forward(on_device):
    """Also where another forward has begun since, recomputation included; the count has moved on by then."""

    def run(model, x, checkpoint, together):
        def forward():
            y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False) if checkpoint else model(x)
            return y.square().sum()

        found, losses = [], [forward(), forward()] if together else []
        for i in range(2):
            (losses[i] if together else forward()).backward()
            found += gradients(model)
        return found

    variants = named(
        q=INT8, k=INT8, v=INT8, out="int8;out=float32;save=int8;gi=int8;gw=int8;x=tensor;w=channel;round=stochastic;sym=true"
    )
    found = []
    for checkpoint, together in ((False, False), (False, True), (True, False), (True, True)):
        model, x = attention()
        applied = apply_(model, variants)
        found.append(run(model, x, checkpoint, together))
        assert applied.step == 2
    assert not same(found[0][:2], found[0][len(found[0]) // 2 :][:2])
    assert all(same(found[0], other) for other in found[1:])


def test_nobody_waits_for_a_number_that_eager_code_has_counted(on_device, monkeypatch):
    counter = StepCounter()
    counter.move_to(CPU)
    monkeypatch.setattr(torch.Tensor, "__int__", lambda self: pytest.fail("the device was asked"))
    counter.advance()
    counter.step = 7
    counter.advance()
    assert counter.step == 8
    offset = counter.offset_for(torch.empty(1))
    assert offset._version == 0
    assert getattr(offset, "qsync_number") == 8 * STEP_STRIDE  # noqa: B009


@given(seed=st.integers(0, 2**63 - 1), offset=st.integers(0, 2**63 - 1))
def test_keys_that_a_device_works_out_are_those_of_python(seed, offset):
    assert stream_key_on_device(seed, torch.tensor([offset])).item() == stream_key(seed, offset)


class NumbersOnly(AtenBackend):
    """A backend of the time before offsets were tensors."""

    name = "numbers"
    offset_tensors = False

    def build(self, request, config):
        kernel = super().build(request, config)

        def quantize(x, q, scale, stream, seed, offset, *more):
            assert type(offset) is int
            kernel(x, q, scale, stream, seed, offset, *more)

        return quantize


class Elsewhere(torch.Tensor):
    """An offset whose number only a device knows."""

    device = torch.device("cuda", 0)


def test_a_backend_that_takes_numbers_only_gets_numbers_or_is_not_captured(monkeypatch):
    import attrs

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: Capturing.now)
    x, q, scale = torch.randn(4, 6), torch.empty(4, 6, dtype=torch.int8), torch.empty(1)
    operands = (x, q, scale, None, 3)
    for rounding in (Rounding.STOCHASTIC, Rounding.NEAREST):
        bound = quantization(CastTarget(Precision.INT8, Granularity.PER_TENSOR, rounding), KernelChoice())
        request = attrs.evolve(bound.request(Op.QUANTIZE, CPU, (4, 6)), device_kind="cuda", compute_capability="9.0")
        kernel = selection._build(NumbersOnly(), request, KernelConfig())
        offset = torch.tensor([1 << 33]).as_subclass(Elsewhere)
        assert known_number(offset) is None
        found = []
        for given_offset in (1 << 33, offset):
            kernel(*operands, given_offset)
            found.append(q.clone())
        assert torch.equal(*found)
        Capturing.now = True
        try:
            if rounding is Rounding.NEAREST:
                kernel(*operands, offset)  # which draws nothing
            else:
                with pytest.raises(
                    BackendError, match=r"backend numbers runs quantize with the offset .* every replay .* would round alike"
                ):
                    kernel(*operands, offset)
            remember_number(offset, 1 << 33)
            kernel(*operands, offset)
        finally:
            Capturing.now = False
        assert torch.equal(q, found[0])


def test_a_compiler_reads_what_makes_a_position():
    """What a forward runs eagerly inside a compiled function is compiled piece by piece."""

    def eagerly(offset):
        torch._dynamo.graph_break()
        return Position(offset).offset + 1

    torch._dynamo.reset()
    assert torch.equal(torch.compile(eagerly, backend="eager")(torch.ones(1)), torch.tensor([2.0]))


def test_a_compiler_may_change_the_count_in_place(on_device):
    """``mode="reduce-overhead"`` captures graphs where everything that they change is a static input; one is for all steps."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    seen = []

    def compiled(graph, _):
        metadata = torch._guards.TracingContext.get().fw_metadata
        seen.append((set(metadata.mutated_inp_runtime_indices), set(metadata.static_input_indices)))
        return make_boxed_func(graph)

    def plain(graph, _):
        return make_boxed_func(graph)

    model, x = attention()
    applied = apply_(model, named(q=INT8, out=INT8))  # compiled, readers of one activation share no cast
    torch._dynamo.reset()
    eager = steps(model, x, 2)
    applied.step = 0
    run = torch.compile(model, backend=aot_autograd(fw_compiler=compiled, bw_compiler=plain), fullgraph=True)
    found = []
    for _ in range(2):
        run(x).square().sum().backward()
        found += gradients(model)
    torch._dynamo.reset()
    assert same(found, eager)
    ((changed, static),) = seen
    assert len(changed) == 1
    assert changed <= static
    assert applied.step == 2


def test_compiled_checkpoints_take_the_numbers_of_their_own_forward(on_device):
    class Checkpointed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Attention()

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    torch.manual_seed(0)
    model, x = Checkpointed(), torch.randn(2, 5, 16)
    applied = apply_(model, named(**{f"inner.{name}": INT8 for name in ("q", "out")}))
    torch._dynamo.reset()
    found = []
    for run in (model, torch.compile(model, backend="aot_eager")):
        applied.step = 0
        losses = [run(x).square().sum() for _ in range(2)]
        for loss in losses:
            loss.backward()
            found.append(gradients(model))
    torch._dynamo.reset()
    assert same(found[0], found[2])
    assert same(found[1], found[3])
    assert not same(found[0], found[1])


@pytest.mark.parametrize("step", [-1, 1 << 30, 1 << 31, 1 << 63, 1.0, True, "7", None])
def test_a_step_that_is_no_number_of_forwards_is_refused_and_the_count_stays(step):
    applied = apply_(Attention(), LAYERS)
    applied.step = LARGEST_STEP
    with pytest.raises(PlanError, match=rf"step is the number of forwards so far, an integer in 0\.\.{LARGEST_STEP}, got {step!r}"):
        applied.step = step
    assert applied.step == LARGEST_STEP
    with pytest.raises(PlanError, match="got"):
        applied.load_state_dict({**applied.state_dict(), "step": step})
    assert applied.step == LARGEST_STEP
