"""What a profile measures of operators: each distinct one in each variant, on kernels that are right here.

See docs/shared-gpus.md#canary.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from qsync_core.errors import BackendError
from qsync_core.ir.dag import OpClass, Operator, PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import DeviceKind, WrongKernels
from qsync_core.ir.semantics import Autocast
from qsync_core.ir.variant import Variant
from qsync_core.kernels.choice import KernelChoice
from qsync_core.kernels.requests import CallShapes
from qsync_torch.kernels.canary import Canary, WrongKernel
from qsync_torch.profiling.cast_cost import activation_precisions
from qsync_torch.tracing.aten_call import AtenCall
from qsync_torch.tuning.chooser import KernelChooser

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

    Adjustable operators in every variant of the ladder, dependent and guarded ones in every format an activation can arrive in,
    fixed ones in float32 and those that ``apply_`` cannot address in the base, unless autocast runs them in another format.  Graph
    inputs cost nothing and are left out.
    """
    formats = [Variant.plain(precision) for precision in activation_precisions(ladder)]
    autocast = Autocast.of(dag.base, device)
    holders: dict[tuple[object, ...], list[Operator]] = {}
    for operator in dag.operators:
        if operator.is_adjustable or AtenCall.of(operator) is not None:
            key = (operator.cost_key, operator.op_class, operator.is_adjustable, operator.no_grad_inputs)
            holders.setdefault(key, []).append(operator)
    items: list[Item] = []
    for operators in holders.values():
        first = operators[0]
        forced = None if autocast is None else autocast.format_of(first.kind)
        variants: Sequence[Variant] = [Variant.plain(dag.base if first.op_class is OpClass.ADJUSTABLE else Precision.FLOAT32)]
        if first.is_adjustable:
            variants = ladder
        elif forced is not None:
            variants = [Variant.plain(forced)]
        elif first.op_class in (OpClass.DEPENDENT, OpClass.GUARDED):
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
        elif canary.device.type != "cpu" and (call := AtenCall.of(item.operator)) is not None:
            found = canary.of_call(call, item.variant, dag.base)
            choice = None if found and item.variant not in (base, FLOAT32) else choice
        if choice is not None:
            choices[item] = choice
        wrong += [WrongKernels(item.holders, item.variant, f"{one.role} of {one.backend}", one.problem) for one in found]
        if found and (choice is None or not item.operator.is_adjustable) and item.variant == base:
            of_base += found
    return RightKernels(choices, tuple(wrong), tuple(of_base))


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
