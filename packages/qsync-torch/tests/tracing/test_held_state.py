"""What a model and a loss hold is after a trace, a profile and observations what it was before."""

from __future__ import annotations

import copy
import functools
from collections import deque
from types import SimpleNamespace

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_torch.capturing.capture import capture
from qsync_torch.job import Job
from qsync_torch.observing.observe import ObserveRequest, observe
from qsync_torch.profiling.bench import Efforts
from qsync_torch.profiling.profile import ProfileRequest, profile
from qsync_torch.timing import Effort
from qsync_torch.tracing.held_state import held_state
from qsync_torch.tracing.trace import trace

ONCE = Effort(min_repeats=1, max_repeats=1, warmup=0, budget_s=0.01)
center = torch.zeros(8)


class Centred(nn.Module):
    """DINO's loss."""

    def __init__(self, reads_values: bool = False) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(8))
        self.plain, self.parts, self.history, self.steps = torch.zeros(8), {"mean": torch.zeros(8)}, [], 0
        self.recent, self.met = deque([-1], maxlen=1), {-1}
        self.reads_values = reads_values

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = ((output - self.center - self.plain) * target).square()
        mean = output.detach().mean(0)
        self.center = self.center * 0.9 + mean * 0.1
        self.plain.add_(1)
        self.parts["mean"] = mean
        self.history.append(mean)
        self.recent.append(self.steps)
        self.met.add(self.steps)
        self.steps += 1
        return loss[target > -9].mean() if self.reads_values else loss.mean()


def by_global(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    global center
    center = center * 0.9 + output.detach().mean(0)
    return F.mse_loss(output - center, target)


@attrs.define
class Slotted:
    center: torch.Tensor = attrs.field(factory=lambda: torch.zeros(8))

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.center = self.center * 0.9 + output.detach().mean(0)
        return F.mse_loss(output - self.center, target)


def by_closure():
    center = torch.zeros(8)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal center
        center = center * 0.9 + output.detach().mean(0)
        return F.mse_loss(output - center, target)

    return loss, lambda: center


def job_of(loss) -> Job:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    return capture(model, torch.optim.SGD(model.parameters(), 0.1), loss, [(torch.randn(4, 8), torch.randn(4, 8))] * 4)


def assert_untouched(loss: Centred) -> None:
    for tensor in (loss.center, loss.plain, loss.parts["mean"]):
        assert not isinstance(tensor, FakeTensor)
        assert torch.equal(tensor, torch.zeros(8))
    assert (loss.history, loss.steps, list(loss.recent), loss.met) == ([], 0, [-1], {-1})


@pytest.mark.parametrize("reads_values", [False, True])
@pytest.mark.parametrize("held", [lambda loss: loss, lambda loss: functools.partial(lambda *given, by: by(*given), by=loss)])
def test_a_trace_leaves_a_losss_state(reads_values, held):
    loss = Centred(reads_values)
    job = job_of(held(loss))
    first = trace(job)
    assert_untouched(loss)
    assert trace(job) == first


def test_measurements_leave_a_losss_state():
    loss = Centred(reads_values=True)
    job = job_of(loss)
    dag = trace(job)
    profile(job, dag, ProfileRequest(with_collectives=False, efforts=Efforts(ONCE, ONCE, ONCE)))
    assert_untouched(loss)
    observe(job, dag, ObserveRequest([Variant.plain(Precision.BFLOAT16)], warmup=0, steps=1))
    assert_untouched(loss)


def test_state_is_found_in_globals_slots_and_closures():
    slotted, (closed, now) = Slotted(), by_closure()
    for loss, held in ((by_global, lambda: center), (slotted.loss, lambda: slotted.center), (closed, now)):
        trace(job_of(loss))
        assert not isinstance(held(), FakeTensor)
        assert torch.equal(held(), torch.zeros(8))


def test_a_trace_leaves_what_a_model_holds_beside_buffers():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.state, self.seen = nn.Linear(8, 8), SimpleNamespace(mean=torch.zeros(8)), torch.zeros(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            self.state.mean = y.detach().mean(0)
            self.seen.add_(1)
            return y

    job = attrs.evolve(job_of(F.mse_loss), model=Counting())
    trace(job)
    assert torch.equal(job.model.state.mean, torch.zeros(8))
    assert job.model.seen.item() == 0


def test_writes_by_way_of_data_are_undone_and_parameters_left():
    holder = SimpleNamespace(mean=torch.zeros(2), weight=nn.Parameter(torch.zeros(2)))

    def fails() -> None:
        with held_state(holder):
            holder.mean.data.add_(1)
            holder.weight.data.add_(1)
            holder.more = 1
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert torch.equal(holder.mean, torch.zeros(2))
    assert torch.equal(holder.weight, torch.ones(2))
    assert not hasattr(holder, "more")


@pytest.mark.parametrize("assigned", [False, True])
def test_a_momentum_encoder_is_updated_by_way_of_data(assigned):
    """MoCo's forward, as published: the same operators as of an update in place."""

    class Momentum(nn.Module):
        def __init__(self, by_data: bool) -> None:
            super().__init__()
            self.by_data, self.query = by_data, nn.Linear(8, 8)
            self.key = copy.deepcopy(self.query).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query = self.query(x)
            with torch.no_grad():
                for q, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
                    if not self.by_data:
                        k.mul_(0.9).add_(q, alpha=0.1)
                    elif assigned:
                        k.data = k.data * 0.9 + q.data * 0.1
                    else:
                        k.data.mul_(0.9).add_(q.data, alpha=0.1)
                key = self.key(x)
            return query + key

    model = Momentum(True)
    before = copy.deepcopy(model.state_dict())
    found = trace(attrs.evolve(job_of(F.mse_loss), model=model))
    plain = trace(attrs.evolve(job_of(F.mse_loss), model=Momentum(False)))
    assert [(op.op_id, op.input_shapes, op.not_applicable) for op in found.adjustable] == [
        (op.op_id, op.input_shapes, op.not_applicable) for op in plain.adjustable
    ]
    assert found.buckets == plain.buckets
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
