"""Tapping a model: what every adjustable operator reads, returns and gets back as gradient, in one training step."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import torch
import torch.nn.functional as F

from qsync_core.dag import Operator
from qsync_core.op_id import OpId
from qsync_core.precision import Precision
from qsync_core.variant import Variant
from qsync_torch.apply import Applied
from qsync_torch.functional_calls import CallSite, CallSites
from qsync_torch.interception import Interception
from qsync_torch.observing.collector import OperatorCall
from qsync_torch.operators.conv2d import pair, resolve_padding
from qsync_torch.plan_fit import Assigned, locate

_ASSIGNED = Assigned(Variant.plain(Precision.FLOAT32))


@attrs.define(eq=False)
class _Seen:
    """A forward call and, once backward has passed it, the gradient of its output."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    geometry: dict[str, Any]
    grad_output: torch.Tensor | None = None


class Tap:
    """Records the calls of adjustable operators while a model trains in float32.

    Use :func:`tapped`.  ``calls()`` gives what the last step did and forgets it.
    """

    def __init__(self, operators: Sequence[Operator]) -> None:
        self._operators = {operator.op_id: operator for operator in operators}
        self._counts: Counter[str] = Counter()
        self._seen: dict[OpId, _Seen] = {}

    def start_step(self) -> None:
        """The model's forward begins."""
        self._counts.clear()
        self._seen.clear()

    def record(
        self,
        fqn: str,
        operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
        output: torch.Tensor,
        geometry: dict[str, Any],
    ) -> torch.Tensor:
        """Note a call; its gradient is noted when backward comes by."""
        op_id = OpId(fqn, self._counts[fqn])
        self._counts[fqn] += 1
        if op_id in self._operators and output.requires_grad:
            x, weight, bias = operands
            seen = _Seen(x.detach(), weight.detach(), None if bias is None else bias.detach(), geometry)
            self._seen[op_id] = seen
            output.register_hook(functools.partial(setattr, seen, "grad_output"))
        return output

    def calls(self) -> Iterator[OperatorCall]:
        """The calls of the last step that a gradient came back to, in order of execution; each is released after its turn."""
        for op_id, operator in self._operators.items():
            seen = self._seen.pop(op_id, None)
            if seen is not None and seen.grad_output is not None:
                yield OperatorCall(operator, seen.x, seen.weight, seen.bias, seen.grad_output, **seen.geometry)


class _TappedCall:
    """Stands where ``apply_`` puts an operator in a variant: runs PyTorch's own and records it."""

    def __init__(self, tap: Tap, fqn: str) -> None:
        self._tap, self._fqn = tap, fqn

    def linear(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """In place of ``F.linear``."""
        return self._tap.record(self._fqn, (input, weight, bias), F.linear(input, weight, bias), {})

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
        output = F.conv2d(input, weight, bias, stride, padding, dilation, groups)
        x, sides = resolve_padding(input, weight, padding, pair(dilation))
        geometry = {"stride": pair(stride), "padding": sides, "dilation": pair(dilation), "groups": groups}
        return self._tap.record(self._fqn, (x, weight, bias), output, geometry)


@contextmanager
def tapped(model: torch.nn.Module, operators: Sequence[Operator]) -> Iterator[Tap]:
    """Tap the adjustable operators of a model; the model is restored at the end.

    Raises:
        PlanError: when the model does not have one of the operators.
    """
    tap = Tap(operators)
    addressed = locate(model, {operator.op_id: _ASSIGNED for operator in operators}, None)
    # The same places that apply_ takes hold of; the calls put there only record.
    applied = Applied(model, {}, None)
    with ExitStack() as stack:
        stack.callback(applied.remove)
        # First of all hooks: a functional call of the model itself is counted after this.
        stack.callback(model.register_forward_pre_hook(functools.partial(_start, tap, applied.sites)).remove)
        for op_id, module in addressed.modules:
            applied.replace_forward(module, functools.partial(_tapped_forward, _TappedCall(tap, op_id.fqn)))
        for owner, by_name in addressed.functional.items():
            calls = {name: {op_id.call: _TappedCall(tap, op_id.fqn) for op_id in ids} for name, ids in by_name.items()}
            site = CallSite(calls)
            applied.sites.all.append(site)
            module = model.get_submodule(owner)
            for place, running in ((module, site), *((child, None) for child in module.children())):
                stack.callback(place.register_forward_pre_hook(functools.partial(_enter, applied.sites, running)).remove)
                stack.callback(place.register_forward_hook(functools.partial(_leave, applied.sites), always_call=True).remove)
        applied.replace_forward(model, functools.partial(_intercepted, applied))
        yield tap


def _tapped_forward(call: _TappedCall, inner: Callable[..., Any]) -> Callable[..., Any]:
    if inner is torch.nn.Linear.forward:
        return lambda self, input: call.linear(input, self.weight, self.bias)
    return lambda self, input: call.conv2d(input, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


def _start(tap: Tap, sites: CallSites, *_: Any) -> None:
    tap.start_step()
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
