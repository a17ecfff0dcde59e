"""Hooks on the calls of a model's adjustable operators, at the places where ``apply_`` would lower them.

:func:`hooked_calls` sends every such call in a forward pass through a :class:`CallHook`.  One of these is
:class:`GradientCapture`, which keeps what each operator reads and the gradient of its output.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from qsync_core.geometry import NEUTRAL, Geometry
from qsync_core.ir.dag import Operator
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_torch.apply.handles import in_backward
from qsync_torch.apply.plan_fit import Assigned, locate
from qsync_torch.apply.planned_modules import put_plan
from qsync_torch.kinds.kind import OperatorKind, Settings
from qsync_torch.kinds.products import operand_of, product
from qsync_torch.observing.collector import OperatorCall
from qsync_torch.torch_internals import DisableTorchFunction

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


class _HookedModel:
    """Sends the calls of operators to a hook; counts the calls of weights, to know which operator runs.

    A call in a backward pass repeats one of the forward pass (gradient checkpointing), which is known by what it reads.
    """

    def __init__(self, model: torch.nn.Module, operators: Mapping[OpId, Operator], hook: CallHook) -> None:
        self.model = model
        self._operators, self._hook = operators, hook
        self._read: defaultdict[str, list[int]] = defaultdict(list)

    def around(self, model: torch.nn.Module, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward of the model begins; a part that is called by itself belongs to the same step."""
        if not in_backward():
            self._read.clear()
            self._hook.start_forward()
        return inner(model, *args, **kwargs)

    def next_of(self, fqn: str, x: torch.Tensor) -> OpId:
        """The call of a module or weight that begins now."""
        read, bits = self._read[fqn], _checksum(x)
        if not in_backward():
            read.append(bits)
            return OpId(fqn, len(read) - 1)
        return OpId(fqn, 0 if len(read) < 2 else read.index(bits) if bits in read else len(read))

    def run(
        self, op_id: OpId, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, geometry: Geometry
    ) -> torch.Tensor:
        """One call, through the hook where it is asked for."""
        operator = self._operators.get(op_id)
        # The product inside is not another call of the model.
        with DisableTorchFunction():
            if operator is None:
                return product(x, weight, bias, geometry)
            return self._hook.call(operator, x, weight, bias, geometry)


def _checksum(x: torch.Tensor) -> int:
    """A number that follows from the bits of a tensor."""
    return int(x.detach().contiguous().view(torch.uint8).to(torch.int64).sum()) if x.numel() else 0


class _HookedCall:
    """Stands where ``apply_`` puts an operator in a variant."""

    follows_casts = lowers = True
    label = ""

    def __init__(self, model: _HookedModel, fqn: str) -> None:
        self.forms: set[tuple[str, bool]] = set()
        self.model, self._hooked, self._fqn = model.model, model, fqn

    def is_on(self, owner: torch.nn.Module) -> bool:
        """Whether calls are observed now: they are in every mode of the model."""
        return True

    def run(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kind: OperatorKind, settings: Settings = ()
    ) -> torch.Tensor:
        """Run the observed operator where the model calls the function of its kind."""
        geometry = NEUTRAL
        if kind.prepare is not None:
            # Where "same" pads one side more than the other, the operator reads a padded activation, as under ``apply_``.
            input, geometry = kind.prepare(input, weight, settings)
        return self._hooked.run(self._hooked.next_of(self._fqn, input), input, operand_of(weight, geometry), bias, geometry)


@contextmanager
def hooked_calls(model: torch.nn.Module, operators: Sequence[Operator], hook: CallHook) -> Iterator[None]:
    """Send the calls of adjustable operators through a hook; the model is restored at the end.

    Raises:
        PlanError: when the model does not have one of the operators.
    """
    by_id = {operator.op_id: operator for operator in operators}
    addressed = locate(model, dict.fromkeys(by_id, _ASSIGNED))
    hooked = _HookedModel(model, by_id, hook)
    calls = {op_id: _HookedCall(hooked, op_id.fqn) for op_id in addressed.planned}
    remove = put_plan(model, addressed.places(calls, model), hooked.around)
    try:
        yield
    finally:
        remove()


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
