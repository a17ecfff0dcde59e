"""Every call is watched under the operator that the graph says it is."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_torch.job import Batch, Job
from qsync_torch.observing.watch import watched
from qsync_torch.trace import trace


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


class Watcher:
    """Notes for every call the operator that it is said to be, and the parameter that it reads."""

    def __init__(self, model):
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.seen = []

    def start_forward(self):
        self.seen.clear()

    def call(self, operator, x, weight, bias, geometry):
        self.seen.append((operator.op_id, self.names.get(id(weight))))
        return geometry.product(x, weight, bias)


@pytest.mark.parametrize("kind", [Sliced, Decoder, Repeated])
def test_each_call_is_told_by_its_own_name(kind):
    job = Job(
        "net",
        kind(),
        lambda step, size: Batch((torch.randn(size, 8),), target=torch.arange(size) % 3),
        lambda output, batch: F.cross_entropy(output, batch.target),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=4,
    )
    dag, model = trace(job), copy.deepcopy(job.model)
    watcher = Watcher(model)
    with watched(model, dag.adjustable, watcher):
        for _ in range(2):
            job.compute_loss(job.batch(0, 4), model)
    assert watcher.seen == [(operator.op_id, operator.parameters[0]) for operator in dag.adjustable]
    assert len(watcher.seen) == {Sliced: 2, Decoder: 6, Repeated: 4}[kind]
