"""Tapping a model: what every adjustable operator reads and gets back as gradient, in one training step."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import attrs
import torch

from qsync_core.ir.dag import Operator
from qsync_core.ir.op_id import OpId
from qsync_torch.observing.collector import OperatorCall
from qsync_torch.observing.geometry import Geometry
from qsync_torch.observing.watch import watched


@attrs.define(eq=False)
class _Seen:
    """A forward call and, once backward has passed it, the gradient of its output."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    geometry: Geometry
    grad_output: torch.Tensor | None = None


class Tap:
    """Records the calls of adjustable operators while a model trains in float32.

    Use :func:`tapped`.  ``calls()`` gives what the last step did and forgets it.
    """

    def __init__(self, operators: Sequence[Operator]) -> None:
        self._operators = {operator.op_id: operator for operator in operators}
        self._seen: dict[OpId, _Seen] = {}

    def start_forward(self) -> None:
        """The model's forward begins."""
        self._seen.clear()

    def call(
        self, operator: Operator, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, geometry: Geometry
    ) -> torch.Tensor:
        """Note a call; its gradient is noted when backward comes by."""
        output = geometry.product(x, weight, bias)
        if output.requires_grad:
            seen = _Seen(x.detach(), weight.detach(), None if bias is None else bias.detach(), geometry)
            self._seen[operator.op_id] = seen
            output.register_hook(functools.partial(setattr, seen, "grad_output"))
        return output

    def calls(self) -> Iterator[OperatorCall]:
        """The calls of the last step that a gradient came back to, in order of execution; each is released after its turn."""
        for op_id, operator in self._operators.items():
            seen = self._seen.pop(op_id, None)
            if seen is not None and seen.grad_output is not None:
                yield OperatorCall(operator, seen.x, seen.weight, seen.bias, seen.grad_output, seen.geometry)


@contextmanager
def tapped(model: torch.nn.Module, operators: Sequence[Operator]) -> Iterator[Tap]:
    """Tap the adjustable operators of a model; the model is restored at the end.

    Raises:
        PlanError: when the model does not have one of the operators.
    """
    tap = Tap(operators)
    with watched(model, operators, tap):
        yield tap
