"""``torch.compile`` takes an applied model whole (``fullgraph``), forward and backward, without compiling again at every step."""

import copy

import pytest
import torch

from qsync_torch import apply_

from .small_models import BFLOAT16, INT8, Attention, ConvNet, images, named


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def steps(model, run, applied, state, x, count=3):
    applied.step = 0
    model.load_state_dict(state)
    found = []
    for _ in range(count):
        model.zero_grad()
        y = run(x)
        y.square().sum().backward()
        found.append([y.detach().clone(), *(parameter.grad.clone() for parameter in model.parameters())])
    return found


@pytest.mark.parametrize(
    "model, variants, x",
    [
        (ConvNet, {"conv1": INT8, "conv2": BFLOAT16, "fc": INT8}, images),
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
    # One graph for the first step, one in which the step's number is a variable: later steps compile nothing.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_operators_have_sound_schemas_and_fakes():
    from qsync_torch.operators import conv2d_binding, linear_binding

    x, scale, one = torch.randint(-9, 9, (4, 6), dtype=torch.int8), torch.ones(3), torch.ones(1)
    w = torch.randint(-9, 9, (3, 6), dtype=torch.int8)
    linear, conv = linear_binding(INT8), conv2d_binding(INT8, padding=1)
    image, kernel = torch.randint(-9, 9, (2, 4, 5, 5), dtype=torch.int8), torch.randint(-9, 9, (3, 4, 3, 3), dtype=torch.int8)
    ops, tests = torch.ops.qsync, ("test_schema", "test_faketensor")
    calls = [
        (ops.quantize, (torch.randn(4, 6), linear.x_text, 1, 2)),
        (ops.linear_output, (x, one, w, scale, None, linear.text)),
        (ops.linear_grad_input, (torch.randn(4, 3).bfloat16(), w, scale, linear.text)),
        (ops.linear_grad_weight, (torch.randn(4, 3).bfloat16(), x, one, linear.text)),
        (ops.conv2d_output, (image, one, kernel, scale, torch.randn(3), conv.text)),
        (ops.conv2d_grad_input, (torch.randn(2, 3, 5, 5).bfloat16(), kernel, scale, (2, 4, 5, 5), conv.text)),
        (ops.conv2d_grad_weight, (torch.randn(2, 3, 5, 5).bfloat16(), image, one, kernel, conv.text)),
    ]
    for op, arguments in calls:
        torch.library.opcheck(op.default, arguments, test_utils=tests)
