"""What a profile measures of operators: each distinct one in each variant, on kernels that are right here.

See docs/shared-gpus.md#canary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import attrs
import torch

from qsync_core.errors import BackendError
from qsync_core.ir.dag import OpClass, Operator, PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import DeviceKind, WrongKernels
from qsync_core.ir.semantics import Autocast, follows_inputs
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import KernelRequest
from qsync_core.kernels.choice import KernelChoice
from qsync_core.kernels.requests import CallShapes
from qsync_torch.dtypes import TORCH_DTYPE
from qsync_torch.kernels.canary import Canary, WrongKernel
from qsync_torch.kernels.exact_attention import attention_problem, batched_problem
from qsync_torch.kernels.selection import DEFAULT_BACKEND
from qsync_torch.profiling.cast_cost import activation_precisions
from qsync_torch.sharing.right_shares import wrong_base_error
from qsync_torch.tracing.aten_call import AtenCall
from qsync_torch.tuning.chooser import KernelChooser

_Check = Callable[["partial[Any]", Sequence[torch.Tensor]], str]
FLOAT32 = Variant.plain(Precision.FLOAT32)


@attrs.frozen
class Item:
    """One distinct measurement and the operators that it holds for."""

    operator: Operator
    variant: Variant
    holders: tuple[OpId, ...]

    @property
    def name(self) -> str:
        """The name under which its measurement is kept."""
        return f"operator {self.operator.cost_key!r} {self.operator.no_grad_inputs} {self.variant}"


def distinct_items(dag: PrecisionDag, ladder: Sequence[Variant], device: DeviceKind = DeviceKind.CPU) -> list[Item]:
    """Each distinct (cost key, variant) once, with all operators that share it.

    Adjustable operators in every variant of the ladder that their kind runs in, those that follow their inputs (dependent and
    guarded ones, and under autocast sums of exponentials) in every format an activation can arrive in, fixed ones in float32 and
    those that ``apply_`` cannot address in the base, unless autocast runs them in another format.  Graph inputs cost nothing and
    are left out.
    """
    formats = [Variant.plain(precision) for precision in activation_precisions(ladder)]
    holders: dict[tuple[object, ...], list[Operator]] = {}
    for operator in dag.operators:
        if operator.is_adjustable or AtenCall.of(operator) is not None:
            key = (operator.cost_key, operator.op_class, operator.is_adjustable, operator.no_grad_inputs)
            holders.setdefault(key, []).append(operator)
    items: list[Item] = []
    for operators in holders.values():
        first = operators[0]
        forced = _under_autocast(dag.autocast_base, device, first)
        variants: Sequence[Variant] = [
            first.variant if first.op_class is OpClass.ADJUSTABLE else Variant.plain(first.result_format)
        ]
        if first.is_adjustable:
            variants = [variant for variant in ladder if first.runs_in(variant)]
        elif forced is not None:
            variants = [forced]
        elif first.op_class is not OpClass.ADJUSTABLE and follows_inputs(first, Autocast.of(dag.autocast_base, device)):
            variants = formats
        ids = tuple(operator.op_id for operator in operators)
        items.extend(Item(first, variant, ids) for variant in variants)
    return items


@attrs.frozen
class RightKernels:
    """What the canary leaves.

    Attributes:
        choices: the kernels of each item that is measured, all of them right.
        wrong: those that are not, with the operators that do without them.
        of_base: those of them that the job itself runs, without a plan.
    """

    choices: dict[Item, KernelChoice]
    wrong: tuple[WrongKernels, ...]
    of_base: tuple[WrongKernel, ...]


def right_kernels(items: Sequence[Item], dag: PrecisionDag, chooser: KernelChooser, canary: Canary) -> RightKernels:
    """Choose each item's kernels, and leave out those that are wrong: another backend's take their place where there is one, else
    the variant is not measured for these operators.

    Raises:
        BackendError: when no backend that may be asked runs a kernel, right or wrong.
    """
    base = Variant.plain(dag.base)
    choices: dict[Item, KernelChoice] = {}
    wrong: list[WrongKernels] = []
    of_base: list[WrongKernel] = []
    for item in items:
        found: list[WrongKernel] = []
        choice: KernelChoice | None = KernelChoice()
        if item.operator.is_adjustable:
            choice = _right_choice(item, chooser, canary, found)
        elif (check := _CHECKS.get(item.operator.kind)) is not None and canary.device.type != "cpu":
            found = _of_function(item, canary, check)
            choice = None if found else choice
        if choice is not None:
            choices[item] = choice
        wrong += [WrongKernels(item.holders, item.variant, f"{one.role} of {one.backend}", one.problem) for one in found]
        if choice is None and item.variant in (
            base,
            _under_autocast(dag.autocast_base, DeviceKind(canary.device.type), item.operator),
        ):
            of_base += found
    # What other operators cannot compute in a format, none may hand to them.
    formats = {item.variant.compute for item in items if item not in choices and not item.operator.is_adjustable}
    formats &= {entry.variant.compute for entry in wrong}
    for item in [item for item in choices if item.operator.is_adjustable and item.variant != base]:
        if item.variant.output in formats:
            del choices[item]
    return RightKernels(choices, tuple(wrong), tuple(of_base))


def check_base(dag: PrecisionDag, device: torch.device, share: float, name: str) -> None:
    """Check what a job runs without a plan, before anything is measured or tuned for it.

    Args:
        dag: its graph.
        device: where.
        share: of the device that the job gets.
        name: of the device, for messages.

    Raises:
        QSyncError: when it computes wrong numbers; with the nearest shares that are right.
    """
    items = distinct_items(dag, (Variant.plain(dag.base),), DeviceKind(device.type))
    right = right_kernels(items, dag, KernelChooser(device, DEFAULT_BACKEND), Canary(device))
    refuse_wrong_base(right, items, dag.base, share, name)


def refuse_wrong_base(right: RightKernels, items: Sequence[Item], base: Precision, share: float, name: str) -> None:
    """Refuse a device where kernels are wrong that the job runs without a plan.

    Raises:
        QSyncError: naming them, with the nearest shares that are right.
    """
    if right.of_base:
        adjustable = [item.operator for item in items if item.operator.is_adjustable and item.variant == Variant.plain(base)]
        raise wrong_base_error(right.of_base, [CallShapes.of(operator) for operator in adjustable], base, share, name)


def _under_autocast(base: Precision, device: DeviceKind, operator: Operator) -> Variant | None:
    """The format in which autocast runs an operator, whatever the plan."""
    autocast = Autocast.of(base, device)
    forced = None if autocast is None else autocast.format_of(operator.kind)
    return None if forced is None else Variant.plain(forced)


def _of_function(item: Item, canary: Canary, check: _Check) -> list[WrongKernel]:
    """What is wrong with an operator that runs PyTorch's own products without being adjustable."""
    operator, compute, device = item.operator, item.variant.compute, canary.device
    call = AtenCall.of(operator)
    assert call is not None

    def find() -> str:
        inputs = call.make_inputs([TORCH_DTYPE[compute]] * len(operator.inputs), device)
        for tensor in inputs:
            tensor.requires_grad_()
        bound = call.bind(inputs, call.make_parameters(device), device)
        return check(bound, inputs) if isinstance(bound, partial) else ""

    request = KernelRequest(operator.kind, item.variant, operator.input_shapes, device_kind=device.type)
    return canary.of_function((operator.cost_key, item.variant), request, find)


def _product_problem(bound: partial[Any], inputs: Sequence[torch.Tensor]) -> str:
    """Say what is wrong with a product of two activations, whose batches are the same; empty for any other call."""
    if len(inputs) != 2 or len(bound.args) < 2 or bound.args[0] is not inputs[0] or bound.args[1] is not inputs[1]:
        return ""
    a, b = inputs
    if min(a.dim(), b.dim()) < 2 or a.shape[:-2] != b.shape[:-2]:
        return ""
    with torch.enable_grad():
        y = bound()
        grad = torch.randn_like(y)
        of_a, of_b = torch.autograd.grad(y, inputs, grad)
    a, b, y = a.detach(), b.detach(), y.detach()
    problems = (batched_problem(a, b, y), batched_problem(grad, b.mT, of_a), batched_problem(a.mT, grad, of_b))
    return next(filter(None, problems), "")


def _attention_problem(bound: partial[Any], inputs: Sequence[torch.Tensor]) -> str:
    """Say what is wrong with attention without dropout; empty for a call that is not checked."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, bound.args, strict=False)), **bound.keywords, "dropout_p": 0.0}
    operands = [given[name] for name in names[:3]]
    if len(inputs) < 3 or any(x.dim() != 4 for x in operands) or any(given.get("attn_mask") is x for x in inputs[3:]):
        return ""
    with torch.enable_grad():
        y = bound.func(**given)
        grad = torch.randn_like(y)
        grads = torch.autograd.grad(y, operands, grad)
    detached = [x.detach() for x in operands]
    mask, causal, scale = given.get("attn_mask"), bool(given.get("is_causal", False)), given.get("scale")
    return attention_problem(detached, y.detach(), grad, grads, mask, causal, scale)


_CHECKS: dict[str, _Check] = {
    **dict.fromkeys(("matmul", "bmm", "mm"), _product_problem),
    "scaled_dot_product_attention": _attention_problem,
}
"""What finds wrong results of operators that multiply activations with each other, by the operator's kind."""


def _right_choice(item: Item, chooser: KernelChooser, canary: Canary, found: list[WrongKernel]) -> KernelChoice | None:
    """The first choice of kernels that are right; None where there is none.  Wrong ones are added to ``found``."""
    operator = item.operator
    call, name = CallShapes.of(operator), f"operator {operator.op_id}"
    channels_last = operator.attributes.get("memory_format") == "channels_last"
    while True:
        try:
            choice = chooser.for_operator(call, item.variant, name)
        except BackendError:
            if found:  # those that run it are wrong
                return None
            raise
        wrong = canary.of_operator(call, item.variant, choice, channels_last=channels_last)
        found += wrong
        if not wrong:
            return choice
        if not item.variant.compute.needs_scale or chooser.is_trivial:
            return None
        for one in wrong:
            chooser.leave_out(one.backend, one.request)


def layer_kinds(dag: PrecisionDag, time_of: Callable[[Operator], int]) -> list[tuple[OpId, ...]]:
    """The adjustable operators by their place in a layer, those that read one tensor together (Q, K and V), the longest first.

    Layers repeat: numbers in names count as equal, where shapes are.
    """
    kinds: dict[frozenset[tuple[object, ...]], list[Operator]] = {}
    for operator in dag.adjustable:
        read = operator.inputs[0]
        together = (reader for reader in dag.adjustable if reader.inputs[:1] == (read,))
        kinds.setdefault(frozenset(map(_place, together)), []).append(operator)
    in_order = sorted(kinds.values(), key=lambda members: -sum(map(time_of, members)))
    return [tuple(operator.op_id for operator in members) for members in in_order]


def _place(operator: Operator) -> tuple[object, ...]:
    name = ".".join("*" if part.isdigit() else part for part in operator.op_id.fqn.split("."))
    return name, operator.weight_shape, operator.output_shape
