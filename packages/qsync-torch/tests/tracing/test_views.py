"""Which of a producer's tensors an operator reads, and how a linear's activation lies."""

from __future__ import annotations

import torch
from torch import nn

from qsync_core.ir.dag import Operator
from qsync_torch.job import Batch, Job
from qsync_torch.tracing.trace import trace


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.same, self.again = (nn.Linear(4, 8) for _ in range(4))
        self.whole, self.flat, self.along, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(6, 6), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x)
        a, b = y.chunk(2, -1)
        parts = self.first(a) + self.second(b) + self.same(b) + self.again(y.narrow(-1, 4, 4))
        z = parts + self.whole(y) + self.flat(y.flatten(0, 1)).unflatten(0, (-1, 6))
        found: torch.Tensor = self.out(self.along(z.transpose(1, 2)).transpose(1, 2).contiguous())
        return found


def operators() -> dict[str, Operator]:
    def batch(step: int, size: int) -> Batch:
        return Batch((torch.randn(size, 6, 8),), target=torch.randn(size, 6, 3))

    loss = lambda output, batch: nn.functional.mse_loss(output, batch.target)  # noqa: E731
    job = Job("views", Views(), batch, loss, lambda parameters: torch.optim.SGD(parameters, 0.1), 5)
    return {operator.op_id.fqn: operator for operator in trace(job).adjustable}


def test_one_tensor_has_one_number_and_each_view_its_own() -> None:
    found = operators()
    names = ("first", "second", "same", "again", "whole", "flat")
    first, second, same, again, whole, flat = (found[name].view(0) for name in names)
    assert second == same
    assert len({first, second, again, whole, flat}) == 5
    assert found["out"].views == ()  # the only reader


def test_only_an_activation_that_is_no_matrix_has_its_strides() -> None:
    found = operators()
    assert found["along"].input_stride == (48, 1, 8)
    assert {name for name, operator in found.items() if operator.input_stride} == {"along"}
