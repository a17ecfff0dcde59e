"""Hooks on the calls of a model's adjustable operators, at the places where ``apply_`` would lower them.

:func:`hooked_calls` sends every such call in a forward pass through a :class:`CallHook`.  One of these is
:class:`GradientCapture`, which keeps what each operator reads and the gradient of its output.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import attrs
import torch

from qsync_core.geometry import NEUTRAL, Geometry, pair
from qsync_core.ir.dag import Operator
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_torch.apply.apply import Applied
from qsync_torch.apply.functional_calls import CallSite, CallSites, places
from qsync_torch.apply.interception import Interception
from qsync_torch.apply.plan_fit import Assigned, locate
from qsync_torch.observing.collector import OperatorCall, product
from qsync_torch.operators.conv2d import resolve_padding

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


@attrs.define(eq=False)
class _Calls:
    """Counts the calls of modules, to know which operator runs now."""

    operators: dict[OpId, Operator]
    hook: CallHook
    counts: Counter[str] = attrs.field(factory=Counter)

    def start(self) -> None:
        self.counts.clear()
        self.hook.start_forward()

    def next_of(self, fqn: str) -> OpId:
        """The call of a module that begins now."""
        self.counts[fqn] += 1
        return OpId(fqn, self.counts[fqn] - 1)

    def run(
        self, op_id: OpId, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, geometry: Geometry
    ) -> torch.Tensor:
        operator = self.operators.get(op_id)
        if operator is None:
            return product(x, weight, bias, geometry)
        return self.hook.call(operator, x, weight, bias, geometry)


class _HookedCall:
    """Stands where ``apply_`` puts an operator in a variant; ``op_id`` tells which call begins."""

    def __init__(self, calls: _Calls, op_id: Callable[[], OpId]) -> None:
        self._calls, self._op_id = calls, op_id

    def linear(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """In place of ``F.linear``."""
        return self._calls.run(self._op_id(), input, weight, bias, NEUTRAL)

    def conv2d(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> torch.Tensor:
        """In place of ``F.conv2d``."""
        # Where "same" pads one side more than the other, the operator reads a padded activation, as under ``apply_``.
        x, sides = resolve_padding(input, weight, padding, pair(dilation))
        return self._calls.run(self._op_id(), x, weight, bias, Geometry(pair(stride), sides, pair(dilation), groups))


@contextmanager
def hooked_calls(model: torch.nn.Module, operators: Sequence[Operator], hook: CallHook) -> Iterator[None]:
    """Send the calls of adjustable operators through a hook; the model is restored at the end.

    Raises:
        PlanError: when the model does not have one of the operators.
    """
    by_id = {operator.op_id: operator for operator in operators}
    calls = _Calls(by_id, hook)
    addressed = locate(model, dict.fromkeys(by_id, _ASSIGNED), None)
    # The same places that apply_ takes hold of; the calls put there only pass on.
    applied = Applied(model, {}, None)
    with ExitStack() as stack:
        stack.callback(applied.remove)
        # First of all hooks: a functional call of the model itself is counted after this.
        stack.callback(model.register_forward_pre_hook(functools.partial(_start, calls, applied.sites)).remove)
        for op_id, module in addressed.modules:
            call = _HookedCall(calls, functools.partial(calls.next_of, op_id.fqn))
            applied.replace_forward(module, functools.partial(_hooked_forward, call))
        # Sites also count the calls that no hook sees.
        sites = {
            owner: CallSite(
                {
                    name: {o.call: _HookedCall(calls, functools.partial(OpId, o.fqn, o.call)) for o in op_ids}
                    for name, op_ids in by_name.items()
                }
            )
            for owner, by_name in addressed.functional.items()
        }
        applied.sites.all.extend(sites.values())
        for module, site in places(model, sites):
            stack.callback(module.register_forward_pre_hook(functools.partial(_enter, applied.sites, site)).remove)
            stack.callback(module.register_forward_hook(functools.partial(_leave, applied.sites), always_call=True).remove)
        applied.replace_forward(model, functools.partial(_intercepted, applied))
        yield


def _hooked_forward(call: _HookedCall, inner: Callable[..., Any]) -> Callable[..., Any]:
    if inner is torch.nn.Linear.forward:
        return lambda self, input: call.linear(input, self.weight, self.bias)
    return lambda self, input: call.conv2d(input, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


def _start(calls: _Calls, sites: CallSites, *_: Any) -> None:
    calls.start()
    sites.start_step()


def _enter(sites: CallSites, site: Any, *_: Any) -> None:
    sites.enter(site)


def _leave(sites: CallSites, *_: Any) -> None:
    sites.leave()


def _intercepted(applied: Applied, inner: Callable[..., Any]) -> Callable[..., Any]:
    interception = Interception(applied.cache, applied.sites)

    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        with interception:
            return inner(self, *args, **kwargs)

    return forward


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

            output.register_hook(record)  # type: ignore[no-untyped-call]
        return output

    def calls(self) -> Iterator[OperatorCall]:
        """The calls of the last step that a gradient came back to, in order of execution; each is released after its turn."""
        for operator in self._operators:
            call = self._calls.pop(operator.op_id, None)
            if call is not None:
                yield call
