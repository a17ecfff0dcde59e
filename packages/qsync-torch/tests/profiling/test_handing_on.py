"""Operators that copy in the graph, and where the model runs hand on their input."""

from __future__ import annotations

import torch
from torch import nn

from qsync_core.ir.op_id import OpId
from qsync_torch.job import Batch, Job
from qsync_torch.profiling.handing_on import handed_on
from qsync_torch.tracing.trace import trace


class Attention(nn.Module):
    """Two results, each in the order of its shape, as on a CPU, or of what comes after, as on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 6)
        self.as_on_gpu = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, heads, steps, width of a head)
        found = x.new_zeros(())
        for number in range(2):
            y = (x * 2.0).transpose(1, 2)
            if number < self.as_on_gpu:
                y = y.clone(memory_format=torch.contiguous_format)
            found = found + self.out(y.contiguous().flatten(2))
        return found


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 3)
        self.first, self.second = Attention(), Attention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        found: torch.Tensor = self.first(x) + self.second(x)
        return found


def job() -> Job:
    def loss(output: torch.Tensor, batch: Batch) -> torch.Tensor:
        return nn.functional.mse_loss(output, batch.target)

    def batch(step: int, size: int) -> Batch:
        return Batch((torch.randn(size, 2, 5, 3),), target=torch.randn(size, 5, 6))

    return Job("attention", Model(), batch, loss, torch.optim.SGD, 2)


def test_what_returns_its_input_in_every_call_is_handed_on() -> None:
    made = job()
    dag, batch = trace(made), made.batch(0, 2)
    copying = [operator.op_id for operator in dag.operators if operator.kind == "contiguous"]
    assert copying == [OpId(f"{name}.contiguous", call) for name in ("first", "second") for call in (0, 1)]

    def forward() -> None:
        made.model(*batch.args)

    assert handed_on(made.model, dag, forward) == ()
    made.model.first.as_on_gpu = 1  # the calls of one module look alike
    made.model.second.as_on_gpu = 2
    assert handed_on(made.model, dag, forward) == tuple(copying[2:])


def test_hooks_go_when_a_forward_fails_and_compiled_models_run_eagerly() -> None:
    made = job()
    dag, batch = trace(made), made.batch(0, 2)

    def fail() -> None:
        made.model(torch.zeros(1))

    for _ in range(2):
        try:
            handed_on(made.model, dag, fail)
        except (RuntimeError, IndexError):
            continue
        raise AssertionError
    assert not nn.modules.module._global_forward_pre_hooks
    made.model.second.as_on_gpu = 2
    expected = handed_on(made.model, dag, lambda: made.model(*batch.args))
    made.model.compile(backend=lambda graph, inputs: fail)
    assert handed_on(made.model, dag, lambda: made.model(*batch.args)) == expected != ()


def test_tensors_without_memory_are_not_handed_on() -> None:
    made = job()
    dag = trace(made)

    def forward() -> None:
        torch.vmap(lambda x: x.contiguous().flatten() + 1)(torch.ones(2, 3, 4))
        torch.ones(2, 3, device="meta").flatten()

    assert handed_on(made.model, dag, forward) == ()


def test_nothing_runs_where_no_operator_may_hand_on() -> None:
    model = nn.Linear(3, 3)
    plain = Job("linear", model, lambda step, size: Batch((torch.ones(size, 3),)), lambda y, _: y.sum(), torch.optim.SGD, 2)
    assert handed_on(model, trace(plain), lambda: 1 / 0) == ()
