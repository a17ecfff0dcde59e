"""Every call is hooked under the operator that the graph says it is."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_torch.apply.apply import apply_
from qsync_torch.apply.operator import Operator
from qsync_torch.job import Batch, Job
from qsync_torch.observing.call_hooks import hooked_calls
from qsync_torch.observing.collector import product
from qsync_torch.tracing.trace import trace


class Sliced(nn.Module):
    """Functional calls that no plan can lower, between those that it can."""

    def __init__(self):
        super().__init__()
        self.both = nn.Parameter(torch.randn(16, 8))
        self.middle = nn.Parameter(torch.randn(8, 8))
        self.last = nn.Parameter(torch.randn(3, 8))

    def forward(self, x):
        y = torch.tanh(F.linear(x, self.both[:8]))
        y = F.linear(torch.tanh(F.linear(y, self.middle)), self.middle * 2)
        return F.linear(torch.tanh(y), self.last)


class Decoder(nn.Module):
    """PyTorch's own; its attention to the memory slices one weight for two calls."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        y = x.unsqueeze(1).repeat(1, 3, 1)
        return self.last(self.layer(y, 2 * y)[:, 0])


class Repeated(nn.Module):
    """A module, and a functional weight, called twice each."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.last = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        y = self.fc(torch.tanh(self.fc(x)))
        return F.linear(torch.tanh(F.linear(y, self.last)), self.last)


class Tied(nn.Module):
    """A head that reads the embedding's weight, and attention, as direct children of one module: both make functional calls."""

    def __init__(self, before=False):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.first = nn.Parameter(torch.randn(8, 8)) if before else None

    def forward(self, x):
        y = self.embedding((x.abs() * 3).long().clamp(max=10))
        if self.first is not None:
            y = F.linear(y, self.first)
        y = y + self.attention(y, y, y, need_weights=False)[0]
        return F.linear(y, self.embedding.weight).mean(1)


class Scaled(nn.Module):
    """A functional call that no plan can lower."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return torch.tanh(F.linear(x, self.weight * 2))


class Listed(nn.Module):
    """Blocks in a list, which has no forward of its own, before functional calls; one block is called past its parent."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Scaled(), nn.Linear(8, 8), nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))])
        self.chain = nn.Sequential(nn.Sequential(Scaled(), nn.ReLU()), nn.Linear(8, 8))
        self.middle, self.last = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(3, 8))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        x = self.chain[0][0](x) + self.chain(x)
        return F.linear(torch.tanh(F.linear(x, self.middle)), self.last)


class Hook:
    """Notes for every call the operator that it is said to be, and the parameter that it reads."""

    def __init__(self, model):
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.seen = []

    def start_forward(self):
        self.seen.clear()

    def call(self, operator, x, weight, bias, geometry):
        self.seen.append((operator.op_id, self.names.get(id(weight))))
        return product(x, weight, bias, geometry)


KINDS = {"sliced": (Sliced, 2), "decoder": (Decoder, 6), "repeated": (Repeated, 4), "tied": (Tied, 3)}
KINDS["listed"] = (Listed, 5)
KINDS["tied behind a function"] = (lambda: Tied(before=True), 4)


@pytest.mark.parametrize(("kind", "count"), KINDS.values(), ids=KINDS)
def test_each_call_is_told_by_its_own_name(kind, count, monkeypatch):
    """As the graph has it, and as ``apply_`` lowers it."""
    job = Job(
        "net",
        kind(),
        lambda step, size: Batch((torch.randn(size, 8),), target=torch.arange(size) % 3),
        lambda output, batch: F.cross_entropy(output, batch.target),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=4,
    )
    dag, model = trace(job), copy.deepcopy(job.model)
    hook = Hook(model)
    with hooked_calls(model, dag.adjustable, hook):
        for _ in range(2):
            job.compute_loss(job.batch(0, 4), model)
    # The weight of blocks.2 is computed from parameters.
    assert hook.seen == [
        (operator.op_id, None if operator.op_id.fqn == "blocks.2" else operator.parameters[0]) for operator in dag.adjustable
    ]
    assert len(hook.seen) == count
    lowered = []
    run = Operator.run
    monkeypatch.setattr(Operator, "run", lambda self, *args: lowered.append(self.op_id) or run(self, *args))
    # All calls with one weight are one there.
    expected = [OpId(o.op_id.fqn) for o in dag.adjustable]
    for precision in (Precision.INT8, Precision.BFLOAT16):
        lowered.clear()
        applied = apply_(model, {operator.op_id: Variant.of(precision) for operator in dag.adjustable})
        job.compute_loss(job.batch(0, 4), model)
        assert lowered == expected
        applied.remove()
