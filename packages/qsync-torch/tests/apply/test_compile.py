"""``torch.compile`` takes an applied model whole (``fullgraph``), forward and backward, without compiling again at every step."""

import copy

import attrs
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from nightly import each_once, nightly
from qsync_core.errors import PlanError
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_torch import apply_

from .small_models import BFLOAT16, INT8, Attention, ConvNet, images, named

INT8_INPUT_GRADIENT = attrs.evolve(INT8, grad_input=Precision.INT8)
INT8_GRADIENTS = attrs.evolve(INT8_INPUT_GRADIENT, grad_weight=Precision.INT8)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def steps(model, run, applied, state, x, count=3):
    applied.step = 0
    model.load_state_dict(state)
    return steps_on(model, run, applied, x, count)


def steps_on(model, run, applied, x, count):
    found = []
    for _ in range(count):
        model.zero_grad()
        y = run(x)
        y.square().sum().backward()
        found.append([y.detach().clone(), *(parameter.grad.clone() for parameter in model.parameters())])
        applied.advance()
    return found


@pytest.mark.parametrize(
    "model, variants, x",
    [
        (ConvNet, {"conv1": INT8, "conv2": BFLOAT16, "fc": INT8}, images),
        (ConvNet, {"conv1": INT8_INPUT_GRADIENT, "conv2": INT8_INPUT_GRADIENT, "fc": INT8_GRADIENTS}, images),
        (Attention, {"q": INT8, "k": BFLOAT16, "out": INT8}, lambda: torch.randn(2, 5, 16)),
    ],
)
def test_compiled_steps_equal_eager_ones_bit_for_bit(model, variants, x):
    """With the ``aot_eager`` backend, which traces forward and backward and runs the same kernels."""
    model, x = model(), x()
    applied = apply_(model, named(**variants))
    state = copy.deepcopy(model.state_dict())
    eager = steps(model, model, applied, state, x)
    compiled = steps(model, torch.compile(model, backend="aot_eager", fullgraph=True), applied, state, x)
    for expected, found in zip(eager, compiled, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert applied.step == 3
    # The step's number is in a tensor, so that one graph is for all steps.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


class Broken(torch.nn.Module):
    """What stands behind a graph break is compiled on its own."""

    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def forward(self, x):
        x = torch.relu(self.a(x))
        torch._dynamo.graph_break()
        return self.b(x)


class CalledTwice(torch.nn.Module):
    """Calls one parameter twice, functionally."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x):
        return torch.nn.functional.linear(torch.relu(torch.nn.functional.linear(x, self.weight)), self.weight)


@pytest.mark.parametrize("variant", [INT8_GRADIENTS, *nightly(INT8)])
def test_a_graph_break_does_not_compile_at_every_step(variant):
    model, x = Broken(), torch.randn(4, 16)
    applied = apply_(model, named(a=variant, b=variant))
    state = copy.deepcopy(model.state_dict())
    eager = steps(model, model, applied, state, x, 5)
    run = torch.compile(model, backend="aot_eager")
    compiled = steps(model, run, applied, state, x, 2)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    model.zero_grad()
    compiled += steps_on(model, run, applied, x, 3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    for expected, found in zip(eager, compiled, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_functional_calls_compile_whole():
    model, x = CalledTwice(), torch.randn(4, 16)
    applied = apply_(model, {OpId("weight", call): INT8 for call in range(2)})
    state = copy.deepcopy(model.state_dict())
    eager = steps(model, model, applied, state, x)
    compiled = steps(model, torch.compile(model, backend="aot_eager", fullgraph=True), applied, state, x)
    for expected, found in zip(eager, compiled, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


class Checkpointing(torch.nn.Module):
    """One call as a module, one of a function, in a checkpoint."""

    def __init__(self, breaks, use_reentrant):
        super().__init__()
        self.a, self.b = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
        self.breaks, self.use_reentrant = breaks, use_reentrant

    def body(self, x):
        x = torch.relu(self.a(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return torch.nn.functional.linear(x, self.b.weight.to(x.dtype), self.b.bias)

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=self.use_reentrant).float().sin()


@each_once(
    {"breaks, use_reentrant": [(False, False), (True, False), (True, True)], "variant": [Variant.of(Precision.INT8), BFLOAT16]}
)
def test_checkpoints_are_as_in_eager_mode_also_around_what_the_compiler_cannot_read(variant, breaks, use_reentrant):
    model, x = Checkpointing(breaks, use_reentrant), torch.randn(4, 16, requires_grad=True)
    applied = apply_(model, named(a=variant, b=variant))
    state = copy.deepcopy(model.state_dict())

    def twice(run):
        return lambda x: run(x) + run(2 * x)

    eager = steps(model, twice(model), applied, state, x, 2)
    compiled = steps(model, twice(torch.compile(model, backend="aot_eager")), applied, state, x, 2)
    for expected, found in zip(eager, compiled, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_compiled_and_eager_steps_are_alike():
    model, x = Broken(), torch.randn(4, 16)
    applied = apply_(model, named(a=INT8, b=INT8))
    run = torch.compile(model, backend="aot_eager")
    first = run(x)
    assert torch.equal(model(x), first)
    applied.advance()
    assert not torch.equal(run(x), first)


def test_equal_blocks_share_one_graph():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Attention() for _ in range(12)))
    apply_(model, named(**{f"{block}.{name}": INT8 for block in range(12) for name in "qkv"}))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for block in model:
        block.compile(backend="aot_eager", fullgraph=True)
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.randn(2, 5, 16, requires_grad=True)).square().sum().backward()
        optimizer.step()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_operators_have_sound_schemas_and_fakes():
    from qsync_core.geometry import Geometry
    from qsync_core.kernels.choice import KernelChoice
    from qsync_torch.kernels.binding import operator_binding

    x, scale, one = torch.randint(-9, 9, (4, 6), dtype=torch.int8), torch.ones(3), torch.ones(1)
    w = torch.randint(-9, 9, (3, 6), dtype=torch.int8)
    linear, conv = operator_binding(INT8), operator_binding(INT8, KernelChoice(), Geometry(padding=(1, 1)))
    image, kernel = torch.randint(-9, 9, (2, 4, 5, 5), dtype=torch.int8), torch.randint(-9, 9, (3, 4, 3, 3), dtype=torch.int8)
    ops, tests = torch.ops.qsync, ("test_schema", "test_faketensor")
    calls = [
        (ops.quantize, (torch.randn(4, 6), linear.x.key, 1, 2)),
        (ops.linear_output, (x, one, w, scale, None, linear.key)),
        (ops.linear_grad_input, (torch.randn(4, 3).bfloat16(), w, scale, tuple(x.shape), linear.key)),
        (ops.linear_grad_weight, (torch.randn(4, 3).bfloat16(), x, one, None, linear.key)),
        (ops.convolution_output, (image, one, kernel, scale, torch.randn(3), conv.key)),
        (ops.convolution_grad_input, (torch.randn(2, 3, 5, 5).bfloat16(), kernel, scale, (2, 4, 5, 5), conv.key)),
        (ops.convolution_grad_weight, (torch.randn(2, 3, 5, 5).bfloat16(), image, one, kernel, conv.key)),
    ]
    for op, arguments in calls:
        torch.library.opcheck(op.default, arguments, test_utils=tests)


def test_many_models_of_one_process_are_compiled_each():
    """The compiler keeps some versions of a function, and every model's forward is entered through the same few lines."""
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph

    with torch._dynamo.config.patch(recompile_limit=1):
        for number in range(3):
            model = ConvNet()
            apply_(model, named(fc=BFLOAT16))
            torch.compile(model, backend=backend)(images())
            assert len(compiled) == number + 1


@each_once({"late": [False, True], "variant": [INT8, BFLOAT16]})
def test_a_weight_of_16_bits_is_refused_in_compiled_code_too(variant, late):
    model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    apply_(model, {OpId("0"): variant})
    run, x = torch.compile(model, backend="aot_eager"), torch.randn(4, 16)
    if late:
        run(x)
    model[0].weight = torch.nn.Parameter(model[0].weight.detach().bfloat16())
    with pytest.raises(PlanError, match="the weight of 0 is bfloat16, and plans are for float32 parameters"):
        run(x)
