"""Hooks on the calls of a model's adjustable operators, at the places where ``apply_`` would lower them.

:func:`hooked_calls` sends every such call in a forward pass through a :class:`CallHook`.  One of these is
:class:`GradientCapture`, which keeps what each operator reads and the gradient of its output.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from qsync_core.geometry import NEUTRAL, Geometry, Pair
from qsync_core.ir.dag import Operator
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_torch.apply.installation import Installation
from qsync_torch.apply.plan_fit import Assigned, locate
from qsync_torch.observing.collector import OperatorCall, product
from qsync_torch.operators.conv2d import resolve_geometry

_ASSIGNED = Assigned(Variant.plain(Precision.FLOAT32))


class CallHook(Protocol):
    """Stands between the model and the operators it calls."""

    def start_forward(self) -> None:
        """The model's forward begins."""
        ...

    def call(
        self, operator: Operator, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, geometry: Geometry
    ) -> torch.Tensor:
        """Give the output of one call, ``product(x, weight, bias, geometry)`` in value."""
        ...


class _HookedModel(Installation):
    """Sends the calls of operators to a hook; counts the calls of weights, to know which operator runs."""

    def __init__(self, model: torch.nn.Module, operators: Mapping[OpId, Operator], hook: CallHook) -> None:
        super().__init__(model)
        self._operators, self._hook = operators, hook
        self._counts: Counter[str] = Counter()
        self._counts_at: list[Counter[str]] = []

    def start_forward(self, whole: bool) -> None:
        """The model's forward begins; a part that is called by itself belongs to the same step."""
        if whole:
            self._counts.clear()
            self._hook.start_forward()

    def end_forward(self) -> None:
        """Nothing to do."""

    def position(self) -> int:
        """Where the counts are now, for a checkpointed piece that runs again; outside a forward, the beginning."""
        self._counts_at.append(self._counts.copy() if self.here.running else Counter())
        return len(self._counts_at) - 1

    @contextmanager
    def at_position(self, position: int) -> Iterator[None]:
        """Count from there for a while: what runs again are the same calls."""
        now, self._counts = self._counts, self._counts_at[position].copy()
        try:
            yield
        finally:
            self._counts = now

    def next_of(self, fqn: str) -> OpId:
        """The call of a module or weight that begins now."""
        self._counts[fqn] += 1
        return OpId(fqn, self._counts[fqn] - 1)

    def run(
        self, op_id: OpId, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, geometry: Geometry
    ) -> torch.Tensor:
        """One call, through the hook where it is asked for."""
        operator = self._operators.get(op_id)
        # The product inside is not another call of the model.
        with torch._C.DisableTorchFunction():
            if operator is None:
                return product(x, weight, bias, geometry)
            return self._hook.call(operator, x, weight, bias, geometry)


class _HookedCall:
    """Stands where ``apply_`` puts an operator in a variant; ``op_id`` tells which call begins."""

    def __init__(self, model: _HookedModel, op_id: Callable[[], OpId]) -> None:
        self._model, self._op_id = model, op_id

    def linear(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Run the observed operator where the model calls ``F.linear``."""
        return self._model.run(self._op_id(), input, weight, bias, NEUTRAL)

    def conv2d(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        stride: Pair = 1,
        padding: Pair | str = 0,
        dilation: Pair = 1,
        groups: int = 1,
    ) -> torch.Tensor:
        """Run the observed operator where the model calls ``F.conv2d``."""
        # Where "same" pads one side more than the other, the operator reads a padded activation, as under ``apply_``.
        x, geometry = resolve_geometry(input, weight, stride, padding, dilation, groups)
        return self._model.run(self._op_id(), x, weight, bias, geometry)


@contextmanager
def hooked_calls(model: torch.nn.Module, operators: Sequence[Operator], hook: CallHook) -> Iterator[None]:
    """Send the calls of adjustable operators through a hook; the model is restored at the end.

    Raises:
        PlanError: when the model does not have one of the operators.
    """
    by_id = {operator.op_id: operator for operator in operators}
    addressed = locate(model, dict.fromkeys(by_id, _ASSIGNED))
    hooked = _HookedModel(model, by_id, hook)
    calls = {op_id: _HookedCall(hooked, functools.partial(hooked.next_of, op_id.fqn)) for op_id in addressed.planned}
    try:
        hooked.install(addressed, calls, promote=False)
        yield
    finally:
        hooked.remove()


class GradientCapture:
    """A hook that records what each operator reads in a training step, and the gradient that comes back to it."""

    def __init__(self, operators: Sequence[Operator]) -> None:
        self._operators = operators
        self._calls: dict[OpId, OperatorCall] = {}

    def start_forward(self) -> None:
        """Forget the step before."""
        self._calls = {}

    def call(
        self, operator: Operator, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, geometry: Geometry
    ) -> torch.Tensor:
        """Run the operator; the call is recorded once backward reaches it."""
        output = product(x, weight, bias, geometry)
        if output.requires_grad:
            calls, operands = self._calls, (x.detach(), weight.detach(), None if bias is None else bias.detach())

            def record(grad: torch.Tensor) -> None:
                calls[operator.op_id] = OperatorCall(operator, *operands, grad, geometry)

            output.register_hook(record)
        return output

    def calls(self) -> Iterator[OperatorCall]:
        """The calls of the last step that a gradient came back to, in order of execution; each is released after its turn."""
        for operator in self._operators:
            call = self._calls.pop(operator.op_id, None)
            if call is not None:
                yield call
