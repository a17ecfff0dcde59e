"""All int8 weights of a model are quantized at the start of a forward, to the same bits as one by one."""

import attrs
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from qsync_core.ir.precision import Granularity
from qsync_torch import apply_
from qsync_torch.apply import lowered_call as weight_batch
from qsync_torch.kernels.binding import Bound

from .small_models import INT8, named


class Net(nn.Module):
    """Two layers that share a weight, one that is called twice, one in a checkpointed part, and one that never runs."""

    def __init__(self, checkpointed=False):
        super().__init__()
        self.a, self.b, self.c, self.unused = (nn.Linear(16, 16) for _ in range(4))
        self.b.weight = self.a.weight
        self.conv = nn.Conv2d(1, 16, 3, padding=1)
        self.checkpointed = checkpointed

    def part(self, x):
        return torch.relu(self.c(self.b(x)))

    def forward(self, x):
        x = self.conv(self.a(x)[:, None, None]).mean((2,))
        x = checkpoint(self.part, x, use_reentrant=False) if self.checkpointed else self.part(x)
        return self.c(x)


PLAN = named(a=INT8, b=INT8, c=INT8, conv=INT8, unused=attrs.evolve(INT8, w_granularity=Granularity.PER_TENSOR))


@pytest.fixture
def calls(monkeypatch):
    """How many tensors each call of ``quantize_many`` got."""
    found = []
    original = weight_batch.quantize_many
    monkeypatch.setattr(weight_batch, "quantize_many", lambda xs, *rest: found.append(len(xs)) or original(xs, *rest))
    return found


def on_cpu_too(monkeypatch):
    monkeypatch.setattr(weight_batch, "DEVICE_KINDS", frozenset({"cpu", "cuda"}))


def two_steps(model, x):
    found = []
    for _ in range(2):
        model.zero_grad()
        y = model(x)
        y.square().sum().backward()
        found += [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return found


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_bits_are_those_of_one_by_one(monkeypatch, calls, checkpointed):
    single, batched, x = Net(checkpointed), Net(checkpointed), torch.randn(4, 16)
    batched.load_state_dict(single.state_dict())
    apply_(single, PLAN)
    expected = two_steps(single, x)
    assert calls == []
    on_cpu_too(monkeypatch)
    applied = apply_(batched, PLAN)
    assert all(torch.equal(a, b) for a, b in zip(expected, two_steps(batched, x), strict=True))
    assert calls == [4, 4]
    assert all(call.prepared_weight is None for call, _ in applied._weights._members)


def test_an_operator_takes_its_copy_and_quantizes_no_more(monkeypatch, calls):
    on_cpu_too(monkeypatch)
    model, shapes = Net(), []
    apply_(model, PLAN)
    original = Bound.kernel

    def kernel(self, op, device, *operands):
        shapes.append((op, operands[0]))
        return original(self, op, device, *operands)

    monkeypatch.setattr(Bound, "kernel", kernel)
    model(torch.randn(4, 16))
    weights = [shape for op, shape in shapes if op == "quantize" and shape[0] == 16]
    assert weights == [(16, 16)]  # the second call of c alone
    assert [op for op, _ in shapes].count("quantize_many") == 1


def zero_in_place(module, _):
    with torch.no_grad():
        module.weight.zero_()


def put_zeros_in(module, _):
    module.weight.data = torch.zeros_like(module.weight)


def zero_unseen(module, _):
    module.weight.data.zero_()


def put_another_in(module, _):
    module.weight = nn.Parameter(torch.zeros_like(module.weight))


@pytest.mark.parametrize("change", [zero_in_place, put_zeros_in, zero_unseen, put_another_in])
def test_a_weight_that_changed_meanwhile_is_quantized_again(monkeypatch, calls, change):
    on_cpu_too(monkeypatch)
    model, seen = Net(), []
    apply_(model, PLAN)
    model.conv.register_forward_pre_hook(change)
    model.conv.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(torch.randn(4, 16))
    assert calls == [4]
    assert torch.equal(seen[0], model.conv.bias.view(1, -1, 1, 1).expand_as(seen[0]))


def test_nothing_is_prepared_without_gradients(monkeypatch, calls):
    on_cpu_too(monkeypatch)
    model = Net()
    apply_(model, PLAN)
    with torch.no_grad():
        model(torch.randn(4, 16))
    assert calls == []


def test_copies_are_let_go_when_a_forward_fails(monkeypatch, calls):
    on_cpu_too(monkeypatch)
    model = Net()
    applied = apply_(model, PLAN)
    with pytest.raises(RuntimeError):
        model(torch.randn(4, 15))
    assert all(call.prepared_weight is None for call, _ in applied._weights._members)
