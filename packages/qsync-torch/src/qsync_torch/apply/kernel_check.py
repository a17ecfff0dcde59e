"""Checks before the first step: every kernel that a plan needs can run here and is right; those that take long are built."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import attrs
import torch
from torch import nn

from qsync_core.errors import BackendError
from qsync_core.ir.op_id import OpId
from qsync_core.kernels.backend import CompilingBackend, KernelBackend, KernelConfig, KernelRequest
from qsync_core.kernels.choice import ATEN, AUTO_BACKEND, FLOAT_BACKEND
from qsync_core.kernels.requests import CallShapes, OperatorRequest, operator_requests
from qsync_core.kinds import KINDS
from qsync_torch.apply.plan_fit import STORED, Addressed, Assigned, WeightPlace
from qsync_torch.caller import BY_HAND, Caller
from qsync_torch.devices import device_facts
from qsync_torch.kernels.canary import Canary, WrongKernel
from qsync_torch.kernels.installed import installed
from qsync_torch.kernels.selection import find_backends, is_for_any_sizes, reasons_against, stand_in, why_missing
from qsync_torch.kinds.kind import OperatorKind, Settings
from qsync_torch.kinds.table import OPERATOR_KINDS

_NOMINAL_ROWS = 64
"""Rows of an activation, and both sides of an image, in requests that are made before the real shapes are known."""
_MANY_ROWS, _MANY_ELEMENTS = 50176, 1 << 26
"""Rows, and elements of an operand, with which kernels are checked."""
_COMPILERS = 8
_NAMED = 3
_INSTALL = "install what is missing"


def check_backends(addressed: Addressed, device: torch.device, caller: Caller = BY_HAND) -> None:
    """Ask the backends about every kernel of every planned operator, forward and backward, before the model changes.

    Raises:
        BackendError: with every reason, and the operators it holds for.
    """
    _check_kinds(addressed)
    reasons: dict[str, list[OpId]] = {}
    first: set[str] = set()
    for name in dict.fromkeys(name for entry in addressed.entries.values() for name in entry.choice.backends):
        if name != AUTO_BACKEND and (reason := why_missing(name)):
            reasons[reason] = [op_id for op_id, entry in addressed.entries.items() if name in entry.choice.backends]
            first.add("repair what is disabled" if installed().why_disabled(name) else _INSTALL)
    if not reasons:
        reasons_of = functools.cache(lambda entry, call: tuple(_reasons(entry, call, device)))  # layers repeat
        for op_id, entry, calls in _planned_calls(addressed):
            for reason in min((reasons_of(entry, call) for call in calls), key=len, default=()):
                reasons.setdefault(reason, []).append(op_id)
    if reasons:
        refused = dict.fromkeys(op_id for op_ids in reasons.values() for op_id in op_ids)
        said = "; ".join(f"{first_named(op_ids)}: {reason}" for reason, op_ids in reasons.items())
        count = f"{len(refused)} of {len(addressed.entries)} operators"
        raise BackendError(f"{count} cannot run on {device.type} as they are planned: {said}; {_way_out(caller, sorted(first))}")


def _check_kinds(addressed: Addressed) -> None:
    """See that operators in 8 bit are, or may be called as, of a kind that has such kernels, whatever the backend.

    Raises:
        BackendError: naming those that are of none.
    """
    refused: dict[tuple[str, str], list[OpId]] = {}
    for op_id, entry, calls in _planned_calls(addressed):
        if entry.variant.compute.needs_scale and calls and not any(KINDS[call.kind].in_8_bit for call in calls):
            kinds = " or ".join(dict.fromkeys(call.kind for call in calls))
            refused.setdefault((kinds, entry.variant.label), []).append(op_id)
    if refused:
        raise BackendError("; ".join(not_in_8_bit(op_ids, *called) for called, op_ids in refused.items()))


def not_in_8_bit(op_ids: Sequence[OpId], kind: str, label: str) -> str:
    """What to say of operators that a plan has in 8 bit, and a model calls as a kind without kernels for that.

    Args:
        label: of their variant.
    """
    subject, them = ("operator {} is", "it") if len(op_ids) == 1 else ("operators {} are", "them")
    return (
        f"{subject.format(first_named(op_ids))} called as {kind}, which has no kernels in 8 bit, and the plan has {them} as "
        f"{label}: keep {them} in a float format in the plan"
    )


def check_numbers(addressed: Addressed, canary: Canary, caller: Caller = BY_HAND) -> None:
    """Run every kernel of the plan on random numbers, where they were checked on another GPU, or on another part of it.

    A plan stores no shapes: each runs on many rows.

    Raises:
        BackendError: naming kernels that are wrong, and the operators they would have run for.
    """
    wrong: dict[WrongKernel, list[OpId]] = {}
    checked = [
        (op_id, (_large(call), entry.variant, entry.choice if entry.variant.compute.needs_scale else ATEN))
        for op_id, entry, calls in _planned_calls(addressed)
        for call in calls[:1]
    ]
    canary.rehearse(operator for _, operator in checked)
    for op_id, operator in checked:
        for kernel in canary.of_operator(*operator):
            wrong.setdefault(kernel, []).append(op_id)
    if wrong:
        said = "; ".join(f"{first_named(op_ids)}: {kernel}" for kernel, op_ids in list(wrong.items())[:_NAMED])
        raise BackendError(
            f"{len(wrong)} kernels of the plan compute wrong numbers on this device: {said}; {caller.profile_again} here, which "
            "leaves them out, or see which shares of this GPU are right: 'qsync doctor' (docs/shared-gpus.md#canary)"
        )


def _large(call: CallShapes) -> CallShapes:
    """Give a call so many rows or images that a whole GPU is busy."""
    per_row = max(1, *(math.prod(shape) // shape[0] for shape in (call.x, call.y)))
    rows = max(_NOMINAL_ROWS if call.of_rows else 1, min(_MANY_ROWS, _MANY_ELEMENTS // per_row))
    return attrs.evolve(call, x=(rows, *call.x[1:]), y=(rows, *call.y[1:]))


def _way_out(caller: Caller, first: Sequence[str] = ()) -> str:
    exception = caller.with_option("backend='auto'")
    steps = "".join(f"{step}, " for step in first)
    return (
        f"{steps}{caller.plan_again} on this machine, or say which kernels to take instead: {exception} takes the fastest that are "
        "installed, backend='aten' PyTorch's own"
    )


def _reasons(entry: Assigned, call: CallShapes, device: torch.device) -> Iterator[str]:
    label, choice = entry.variant.label, entry.choice
    if not entry.variant.compute.needs_scale:
        if not {AUTO_BACKEND, FLOAT_BACKEND} & set(choice.chain):
            yield (
                f"as {label} it runs PyTorch's own kernels (backend {FLOAT_BACKEND}), and {choice.backend} was named, "
                "which is not asked for operators in float formats"
            )
            return
        choice = ATEN
    roles: dict[tuple[str, ...], list[str]] = {}
    for asked in operator_requests(call, entry.variant, *device_facts(device)):
        if reasons := reasons_against(asked.request, choice, asked.role):
            roles.setdefault(tuple(reasons), []).append(asked.role)
    for refusals, refused in roles.items():
        yield f"{', '.join(refused)} as {label} ({'; '.join(refusals)})"


def _planned_calls(addressed: Addressed) -> Iterator[tuple[OpId, Assigned, list[CallShapes]]]:
    """Every planned operator, with nominal shapes in place of those of its calls, which no plan stores.

    A plan does not store either whether functional calls take a matrix as (N, K) or as (K, N): those are two calls.
    """
    calls = [(op_id, [_nominal(module)]) for op_id, module in addressed.modules]
    calls += [(op_id, _nominal_calls(place)) for op_id, place in addressed.functional]
    for op_id, possible in calls:
        entry = addressed.entries[op_id]
        yield op_id, entry, [_as_chosen(call, entry) for call in possible]


def _as_chosen(call: CallShapes, entry: Assigned) -> CallShapes:
    """Without the gradient of the input, where kernels were chosen for both other products and none for it.

    The first operator of a model has no such gradient, and no backend need offer its kernel.
    """
    chosen = dict(entry.choice.pins)
    others = all(f"{call.kind}.{product}" in chosen for product in ("output", "grad_weight"))
    return attrs.evolve(call, input_gradient=not others or f"{call.kind}.grad_input" in chosen)


def _nominal(module: nn.Module) -> CallShapes:
    """Return nominal shapes of a module's own call."""
    held = module.__dict__.get(STORED)
    # A planned module's forward is its class's no more.
    kind = next(kind for kind in OPERATOR_KINDS.values() if isinstance(module, kind.module)) if held is None else held.kind
    weight: torch.Tensor = module.weight if held is None else held.parameter  # type: ignore[assignment]
    shape = tuple(weight.shape) if held is None else held.shape
    call = _nominal_call(kind, shape, tuple(getattr(module, name) for name in kind.settings))
    return attrs.evolve(call, weight_gradient=weight.requires_grad)


def _nominal_call(kind: OperatorKind, stored: tuple[int, ...], settings: Settings) -> CallShapes:
    """Return nominal shapes of a call with a weight of this shape, as PyTorch stores it; images are large enough for the filter."""
    if kind.prepare is None:
        n, k = stored
        return CallShapes(kind.name, (_NOMINAL_ROWS, k), (n, k), (_NOMINAL_ROWS, n))
    _, geometry = kind.prepare(torch.empty((1, 1, *stored[2:])), torch.empty(stored, device="meta"), settings)
    w = kind.row.parameter_shape(stored, geometry.groups)
    side = [max(_NOMINAL_ROWS, far + 1) for far in geometry.reach(w[2:])]
    x, y = (1, geometry.groups * w[1], *side), (1, w[0], *geometry.output_size(side, w[2:]))
    return CallShapes.as_run(kind.name, x, w, y, geometry)


def _nominal_calls(place: WeightPlace) -> list[CallShapes]:
    """Return nominal shapes of functional calls with a weight; a convolution's is taken to be a plain one."""
    weight, held = place.weight, place.module.__dict__.get(STORED)
    if held is not None:
        return [_nominal_call(held.kind, held.shape, ())]
    if weight is None:  # the script has taken it out
        return []
    kinds = [kind for kind in OPERATOR_KINDS.values() if kind.weight_dimensions == weight.dim()]
    calls = [_nominal_call(kind, tuple(weight.shape), kind.defaults) for kind in kinds]
    return calls + [
        _nominal_call(kind, tuple(weight.shape)[::-1], ()) for kind in kinds if kind.row.of_rows and len({*weight.shape}) > 1
    ]


def first_named(op_ids: Sequence[OpId]) -> str:
    """The first few of these operators by name, and how many more there are."""
    names = ", ".join(map(str, op_ids[:_NAMED]))
    return names if len(op_ids) <= _NAMED else f"{names} and {len(op_ids) - _NAMED} more"


def prebuild(addressed: Addressed, device: torch.device, caller: Caller = BY_HAND) -> None:
    """Build the kernels that a plan pins with a configuration, so that the first step does not wait for compilers.

    Nor does this where another backend of the plan stands in for what is still to be compiled.  What does not fit nominal shapes is
    left to the first step; nothing is built on a CPU.

    Raises:
        BackendError: when a kernel cannot be had for any shapes (its error's attribute ``for_any_sizes``).
    """
    if device.type == "cpu":
        return
    todo: dict[tuple[str, str, str], tuple[OperatorRequest, tuple[str, ...]]] = {}
    facts = device_facts(device)
    for _, entry, calls in _planned_calls(addressed):
        if not entry.variant.compute.needs_scale:
            continue
        wanted = ((call, asked) for call in calls for asked in operator_requests(call, entry.variant, *facts))
        for call, asked in wanted:
            pinned = entry.choice.of(asked.role)
            if pinned is not None and pinned.config:
                text = f"{entry.variant} {call.w if call.of_rows else call}"
                todo.setdefault((pinned.backend, pinned.config, f"{asked.role} {text}"), (asked, entry.choice.chain))
    now: list[tuple[KernelBackend, KernelRequest, KernelConfig]] = []
    for (name, text, _), (asked, chain) in todo.items():
        (backend,), config = find_backends((name,)), KernelConfig(text)
        if isinstance(backend, CompilingBackend) and stand_in(backend, asked.request, config, chain) is None:
            now.append((backend, asked.request, config))

    def build(item: tuple[KernelBackend, KernelRequest, KernelConfig]) -> BackendError | None:
        backend, request, config = item
        try:
            backend.build(request, config)
        except BackendError as error:
            return error if is_for_any_sizes(error) else None
        return None

    with ThreadPoolExecutor(_COMPILERS) as pool:
        errors = [error for error in pool.map(build, now) if error is not None]
    if errors:
        more = f" (and {len(errors) - 1} more like it)" if len(errors) > 1 else ""
        raise BackendError(
            f"a kernel that the plan names cannot be had here: {errors[0]}{more}; {_way_out(caller, [_INSTALL])}"
        ) from errors[0]
