"""Replacing the calls that a model makes: one installation, which ``apply_`` and observing share.

It finds each operator where the model calls it (a Linear or Conv2d module, or ``F.linear`` and ``F.conv2d`` inside another module's
forward) and puts an :class:`OperatorCall` there.  Modules keep their identity; what changes is the ``forward`` that an instance
has, and :meth:`Installation.remove` takes that away again.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import types
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from qsync_core.errors import PlanError
from qsync_core.ir.op_id import OpId
from qsync_torch.apply.functional_calls import CallSite, CallSites, OperatorCall, may_call_functions, places
from qsync_torch.apply.interception import Interception, is_indifferent
from qsync_torch.apply.plan_fit import Addressed
from qsync_torch.dtypes import LOW_FLOATS
from qsync_torch.operators.casts import CastCache
from qsync_torch.operators.norms import in_float32, layer_norm

Forward = Callable[..., Any]
_ABSENT: Any = object()


class Installation(abc.ABC):
    """Replaced forwards of a model and its modules.

    Attributes:
        model: the model.
        cache: casts that consumers share within a forward.
        running: whether the model's forward runs now, with interception active.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.cache = CastCache()
        self.running = False
        self._sites = CallSites()
        self._replaced: list[tuple[nn.Module, Any, Any]] = []

    @abc.abstractmethod
    def start_forward(self) -> None:
        """The model's forward begins."""

    @abc.abstractmethod
    def end_forward(self) -> None:
        """The model's forward has ended, or failed."""

    def install(self, addressed: Addressed, calls: Mapping[OpId, OperatorCall], *, intercept: bool) -> None:
        """Put the calls in their places.

        Args:
            addressed: where the operators are.
            calls: by operator; modules that are called several times have one, under their first call.
            intercept: whether formats can mix, so that functions that refuse mixed ones need their operands promoted; functional
                calls are intercepted in any case.
        """
        for op_id, module in addressed.modules:
            self.replace_forward(module, functools.partial(_operator_forward, calls[op_id]))
        interception = Interception(self.cache, self._sites)
        indifferent = {id(module): module for module in self.model.modules() if is_indifferent(module)}
        for module in indifferent.values():
            self.replace_forward(module, functools.partial(_aside, interception))
        sites = {
            owner: CallSite({name: {o.call: calls[o] for o in op_ids} for name, op_ids in by_name.items()})
            for owner, by_name in addressed.functional.items()
        }
        self._sites.all.extend(sites.values())
        for module, site in places(self.model, sites):
            self.replace_forward(module, functools.partial(_call_site, self._sites, site))
        around = interception if addressed.functional or intercept else contextlib.nullcontext()
        elsewhere = {id(self.model), *(id(module) for _, module in addressed.modules), *indifferent}
        for module in self.model.modules():
            if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
                self.replace_forward(module, _recurrent)
            if id(module) not in elsewhere and may_call_functions(module):
                self.replace_forward(module, functools.partial(self._part_of_model, around))
        self.replace_forward(self.model, functools.partial(self._whole_model, around))

    def replace_forward(self, module: nn.Module, make: Callable[[Forward], Forward]) -> None:
        """Give an instance a forward; ``make`` gets the present one as a function of (module, ...)."""
        earlier = module.__dict__.get("forward", _ABSENT)
        if earlier is _ABSENT:
            inner: Forward = type(module).forward
        elif isinstance(earlier, types.MethodType):
            inner = earlier.__func__
        else:
            inner = lambda _, *args, **kwargs: earlier(*args, **kwargs)  # noqa: E731
        forward = types.MethodType(functools.wraps(inner)(make(inner)), module)
        self._replaced.append((module, earlier, forward))
        module.__dict__["forward"] = forward

    def remove(self) -> None:
        """Take every change back.

        Raises:
            PlanError: when a forward was replaced again since; take that replacement back first.
        """
        for module, _, forward in {id(entry[0]): entry for entry in self._replaced}.values():
            if module.__dict__.get("forward") is not forward:
                raise PlanError(
                    f"the forward of {type(module).__name__} was replaced after apply_; take that replacement back before remove()"
                )
        for module, earlier, _ in reversed(self._replaced):
            if earlier is _ABSENT:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = earlier
        self._replaced.clear()
        self.cache.clear()

    def _part_of_model(self, around: AbstractContextManager[Any], inner: Forward) -> Forward:
        """A module that gradient checkpointing or a user may run outside the model's forward, with the same interception."""

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self.running:
                return inner(module, *args, **kwargs)
            self.running = True
            try:
                with around:
                    return inner(module, *args, **kwargs)
            finally:
                self.running = False
                self.cache.end_forward()

        return forward

    def _whole_model(self, around: AbstractContextManager[Any], inner: Forward) -> Forward:
        """A step, with counts and casts of its own; outputs leave in float32, because the loss reads float32."""

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self.start_forward()
            self._sites.start_step()
            self.running = True
            try:
                with around:
                    output = inner(module, *args, **kwargs)
            finally:
                self.running = False
                self.cache.end_forward()
                self.end_forward()
            return tree_map_only(torch.Tensor, lambda y: y.to(torch.float32) if y.dtype in LOW_FLOATS else y, output)

        return forward


def _operator_forward(call: OperatorCall, inner: Forward) -> Forward:
    if inner is nn.Linear.forward:
        return lambda self, input: call.linear(input, self.weight, self.bias)
    return lambda self, input: call.conv2d(input, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


def _call_site(sites: CallSites, site: CallSite | None, inner: Forward) -> Forward:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        sites.enter(site)
        try:
            return inner(self, *args, **kwargs)
        finally:
            sites.leave()

    return forward


def _recurrent(inner: Forward) -> Forward:
    """Recurrent layers are fixed operators, and their forward compares dtypes before it calls a function."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return inner(self, *in_float32(args), **in_float32(kwargs))

    return forward


def _aside(interception: Interception, inner: Forward) -> Forward:
    """A module whose functions are not intercepted runs without the mode, which takes longer than most functions do."""
    if inner is nn.LayerNorm.forward:
        inner = layer_norm

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not interception.step_out():
            return inner(self, *args, **kwargs)
        try:
            return inner(self, *args, **kwargs)
        finally:
            interception.step_in()

    return forward
