"""``apply_``: make a model run as a precision plan says, in place and reversibly.

See docs/design/precision-semantics.md#parameters-and-gradients.

Parameters stay plain float32 under their old names; modules keep their identity; what changes is the ``forward`` that an instance
has.  ``Applied.remove()`` takes that away again.
"""

from __future__ import annotations

import contextlib
import functools
import os
import types
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from qsync_core.errors import PlanError
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment, PrecisionPlan
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_core.kernels.choice import split_chain
from qsync_torch.apply.functional_calls import CallSite, CallSites, may_call_functions, places
from qsync_torch.apply.interception import Interception, is_indifferent
from qsync_torch.apply.kernel_check import check_backends, prebuild
from qsync_torch.apply.lowered_call import LoweredCall, WeightBatch
from qsync_torch.apply.plan_fit import Addressed, Assigned, assignments_of, locate, unplanned_modules
from qsync_torch.apply.step_counter import StepCounter
from qsync_torch.dtypes import LOW_FLOATS, TORCH_DTYPE
from qsync_torch.kernels.selection import default_backend
from qsync_torch.operators.cast_cache import CastCache
from qsync_torch.operators.norms import in_float32, layer_norm

_MARK = "_qsync_applied"
_ABSENT: Any = object()


class Applied:
    """A plan in force on a model.  ``remove()`` restores the model exactly.

    Attributes:
        model: the model.
        variants: what every named operator runs as.
        group: the device group, where a plan was applied.
        running: the model's forward is running now, interception is active.
    """

    def __init__(self, model: nn.Module, variants: Mapping[OpId, Variant], group: str | None) -> None:
        self.model, self.variants, self.group = model, dict(variants), group
        self.cache = CastCache()
        self.sites = CallSites()
        self.running = False
        self._steps = StepCounter()
        self._weights = WeightBatch(())
        self._replaced: list[tuple[nn.Module, Any, Any]] = []

    @property
    def step(self) -> int:
        """How many forwards the model has run; it picks the random numbers.  Set it when training resumes from a checkpoint."""
        return self._steps.step

    @step.setter
    def step(self, value: int) -> None:
        self._steps.step = value

    def replace_forward(self, module: nn.Module, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Give an instance a forward; ``make`` gets the present one as a function of (module, ...)."""
        earlier = module.__dict__.get("forward", _ABSENT)
        if earlier is _ABSENT:
            inner: Callable[..., Any] = type(module).forward
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
            PlanError: when somebody else has replaced a forward since; take that back first.
        """
        for module, _, forward in reversed(_last_per_module(self._replaced)):
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
        self.model.__dict__.pop(_MARK, None)


def _last_per_module(replaced: list[tuple[nn.Module, Any, Any]]) -> list[tuple[nn.Module, Any, Any]]:
    return list({id(entry[0]): entry for entry in replaced}.values())


def apply_(
    model: nn.Module,
    plan: PrecisionPlan | str | os.PathLike[str] | Mapping[OpId, Variant | Assignment] | Mapping[str, Variant | Assignment | str],
    *,
    group: str | None = None,
    backend: str | None = None,
    seed: int = 0,
) -> Applied:
    """Make ``model`` run as planned, in place.

    Call it before wrapping the model in DistributedDataParallel or ``torch.compile``, and after ``init_process_group``: then all
    ranks compare their plans and versions first, so every rank must call it.

    Args:
        model: any module; its parameters stay as they are.
        plan: a plan, the path of one, or variants (or whole assignments) by operator; operators and variants may be texts, as in
            ``{"encoder.0#0": "int8"}``.  Operators for which only a variant is given run on the kernels that were tuned fastest on
            a GPU, on PyTorch's own on a CPU.
        group: which device group of the plan this process belongs to; found by :func:`qsync_torch.distributed.ranks.which_group`
        if omitted.
        backend: run every operator on this kernel backend instead of the planned one; ``a+b`` takes b for what a does not offer,
            ``auto`` whatever was tuned fastest here.
        seed: of the stochastic rounding; ranks draw different numbers from the same seed.

    Returns:
        A handle with ``remove()``.

    Raises:
        PlanError: when the plan is for another model, names an operator the model does not have, the model has a plan already,
            the ranks hold different plans, or rank 0 is not of a training group.
        CompatibilityError: when the ranks run different versions of QSync.
        BackendError: when a planned backend is missing, or refuses a kernel that an operator needs forward or backward, with all
            reasons.
    """
    if _MARK in model.__dict__:
        raise PlanError("this model has a plan already; call remove() on what apply_ returned before applying another")
    if isinstance(model, nn.parallel.DistributedDataParallel) or hasattr(model, "_orig_mod"):
        raise PlanError(f"call apply_ on the model itself, before it is wrapped ({type(model).__name__})")
    if isinstance(plan, (str, os.PathLike)):
        from qsync_core.artifacts.files import load

        plan = load(Path(plan), PrecisionPlan)
    if backend is not None:
        split_chain(backend)
    whole_plan = isinstance(plan, PrecisionPlan)
    if isinstance(plan, PrecisionPlan):
        from qsync_torch.distributed.ranks import check_rank0, check_ranks_agree, which_group

        check_ranks_agree(plan)
        group = which_group(plan) if group is None else group
        check_rank0(plan, group)
    device = _device_of(model)
    entries = plan if isinstance(plan, PrecisionPlan) else _read(plan)
    assigned = assignments_of(entries, group, backend, default_backend(device))
    addressed = locate(model, assigned, plan.model if isinstance(plan, PrecisionPlan) else None)
    check_backends(addressed, device)
    prebuild(addressed, device)
    applied = Applied(model, {op_id: entry.variant for op_id, entry in assigned.items()}, group if whole_plan else None)
    _install(applied, addressed, _rank_seed(seed))
    if isinstance(plan, PrecisionPlan):
        for fqn, module in unplanned_modules(model, addressed, plan):
            applied.replace_forward(module, functools.partial(_refuse, fqn))
    model.__dict__[_MARK] = True
    return applied


def _read(entries: Mapping[Any, Any]) -> dict[OpId, Variant | Assignment]:
    """Operators and variants, of which some may be texts.

    Raises:
        PlanError: when one is neither.
    """
    if not isinstance(entries, Mapping):
        raise PlanError(f"apply_ takes a plan, the path of one, or variants by operator, got {type(entries).__name__}")
    found = {}
    for op_id, entry in entries.items():
        try:
            key = OpId.parse(op_id) if isinstance(op_id, str) else op_id
            value = Variant.parse(entry) if isinstance(entry, str) else entry
        except ValueError as error:
            raise PlanError(f"not an operator and its variant: {op_id!r}: {entry!r} ({error}); write {{'0#0': 'int8'}}") from None
        if not isinstance(key, OpId) or not isinstance(value, (Variant, Assignment)):
            raise PlanError(f"not an operator and its variant: {op_id!r}: {entry!r}; write {{'0#0': 'int8'}}")
        found[key] = value
    return found


def _device_of(model: nn.Module) -> torch.device:
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def _rank_seed(seed: int) -> int:
    from qsync_torch.aten.random_bits import stream_key

    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if distributed else int(os.environ.get("RANK", "0"))
    return stream_key(seed, rank)


def _install(applied: Applied, addressed: Addressed, seed: int) -> None:
    """Replace the forwards of planned modules, of modules that make planned functional calls, and of the model itself."""
    if all(entry.variant == Variant.plain(Precision.FLOAT32) for entry in addressed.entries.values()):
        return

    def lowered(op_id: OpId, entry: Assigned) -> LoweredCall:
        return LoweredCall(op_id, entry.variant, entry.backend, entry.config, seed, applied._steps, applied.cache)

    members = [(lowered(op_id, addressed.entries[op_id]), module) for op_id, module in addressed.modules]
    applied._weights = WeightBatch(members)
    for call, module in members:
        applied.replace_forward(module, functools.partial(_lowered_module, call, module))
    interception = Interception(applied.cache, applied.sites)
    indifferent = {id(module): module for module in applied.model.modules() if is_indifferent(module)}
    for module in indifferent.values():
        applied.replace_forward(module, functools.partial(_aside, interception))
    sites = {
        owner: CallSite({name: {o.call: lowered(o, addressed.entries[o]) for o in op_ids} for name, op_ids in by_name.items()})
        for owner, by_name in addressed.functional.items()
    }
    applied.sites.all.extend(sites.values())
    for module, site in places(applied.model, sites):
        applied.replace_forward(module, functools.partial(_call_site, applied.sites, site))
    around = interception if addressed.functional or _gives_sixteen_bit(addressed) else contextlib.nullcontext()
    elsewhere = {id(applied.model), *(id(module) for _, module in addressed.modules), *indifferent}
    for module in applied.model.modules():
        if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
            applied.replace_forward(module, _recurrent)
        if id(module) not in elsewhere and may_call_functions(module):
            applied.replace_forward(module, functools.partial(_part_of_model, applied, around))
    applied.replace_forward(applied.model, functools.partial(_whole_model, applied, around))


def _gives_sixteen_bit(addressed: Addressed) -> bool:
    """Whether activations of several formats can meet; where every operator gives float32 there is nothing to intercept."""
    return any(TORCH_DTYPE[entry.variant.output] in LOW_FLOATS for entry in addressed.entries.values())


def _lowered_module(call: LoweredCall, module: nn.Module, inner: Callable[..., Any]) -> Callable[..., Any]:
    if inner is nn.Linear.forward:
        return lambda self, input: call.linear(input, self.weight, self.bias)
    call.prepare_conv2d(module.stride, module.padding, module.dilation, module.groups)
    return lambda self, input: call.conv2d(input, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


def _call_site(sites: CallSites, site: CallSite | None, inner: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        sites.enter(site)
        try:
            return inner(self, *args, **kwargs)
        finally:
            sites.leave()

    return forward


def _recurrent(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Recurrent layers are fixed operators, and their forward compares dtypes before it calls a function."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return inner(self, *in_float32(args), **in_float32(kwargs))

    return forward


def _aside(interception: Interception, inner: Callable[..., Any]) -> Callable[..., Any]:
    """A module that interception has nothing to do in runs without it: asking the mode takes longer than most functions."""
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


def _part_of_model(applied: Applied, around: AbstractContextManager[Any], inner: Callable[..., Any]) -> Callable[..., Any]:
    """A module that gradient checkpointing, or a user, may run outside the model's forward: interception is active there too."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if applied.running:
            return inner(self, *args, **kwargs)
        applied.running = True
        try:
            with around:
                return inner(self, *args, **kwargs)
        finally:
            applied.running = False
            applied.cache.end_forward()

    return forward


def _whole_model(applied: Applied, around: AbstractContextManager[Any], inner: Callable[..., Any]) -> Callable[..., Any]:
    """A step: new random numbers, fresh counts and casts; outputs leave in float32, because the loss reads float32."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        applied._steps.advance()
        applied.sites.start_step()
        applied._weights.prepare()
        applied.running = True
        try:
            with around:
                output = inner(self, *args, **kwargs)
        finally:
            applied.running = False
            applied.cache.end_forward()
            applied._weights.release()
        return tree_map_only(torch.Tensor, lambda y: y.to(torch.float32) if y.dtype in LOW_FLOATS else y, output)

    return forward


def _refuse(fqn: str, inner: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        raise PlanError(
            f"{fqn} runs but the plan does not name it, so the plan was made for another model; trace this model and plan again"
        )

    return forward
