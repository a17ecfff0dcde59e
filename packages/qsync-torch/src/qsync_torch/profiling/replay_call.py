"""Repeating one operator's aten call on random operands, in any precision it can run in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch.utils import _pytree as pytree

from qsync_core.ir.dag import Operator
from qsync_core.ir.precision import Precision
from qsync_torch.dtypes import TORCH_DTYPE
from qsync_torch.tracing.aten_call import AtenCall


@attrs.frozen(eq=False)
class Armed:
    """A forward call that is ready to run once, and its backward.

    Attributes:
        run: the forward call.
        wanted: where the gradients of its backward are wanted.
        backward: takes the output's gradient and runs the backward without autograd; None for autograd's own.
    """

    run: Callable[[], Any]
    wanted: tuple[torch.Tensor, ...]
    backward: Callable[[torch.Tensor], Any] | None = None

    def backward_thunk(self, result: Any, gradients: Sequence[torch.Tensor]) -> Callable[[], Any] | None:
        """A call of the backward for one forward's result; None where there is nothing to differentiate."""
        sources = differentiable_outputs(result)
        if not sources or not self.wanted:
            return None
        if self.backward is not None:
            return partial(self.backward, gradients[0])
        return partial(torch.autograd.grad, sources, self.wanted, gradients, allow_unused=True)


@attrs.frozen(eq=False)
class Prepared:
    """Operands of one call and how to run it.

    Attributes:
        arm: makes the forward call ready; what happens here is not timed.
        activations, parameters: tensors, for telling what autograd keeps.
        gradient_dtype: format in which the output's gradient arrives; None for the output's own.
    """

    arm: Callable[[], Armed]
    activations: tuple[torch.Tensor, ...]
    parameters: tuple[torch.Tensor, ...]
    gradient_dtype: torch.dtype | None = None


def prepare_call(operator: Operator, device: torch.device, precision: Precision) -> Prepared:
    """Random operands for an operator's call, its activations in ``precision``.

    Args:
        operator: one that carries its call (:class:`~qsync_torch.tracing.aten_call.AtenCall`).
        device: where.
        precision: a floating-point format of the lattice.
    """
    call = AtenCall.of(operator)
    assert call is not None, f"{operator.op_id} carries no call"
    inputs = call.make_inputs([TORCH_DTYPE[precision]] * len(operator.inputs), device)
    parameters = call.make_parameters(device)
    for index, tensor in enumerate(inputs):
        tensor.requires_grad_(index not in operator.no_grad_inputs)
    for tensor in parameters:
        tensor.requires_grad_()
    wanted = tuple(tensor for tensor in (*inputs, *parameters) if tensor.requires_grad)
    bound = call.bind(inputs, parameters, device)
    armed = Armed(bound, wanted)
    return Prepared(lambda: armed, tuple(inputs), (*parameters, *_buffers(bound, {id(t) for t in (*inputs, *parameters)})))


def _buffers(bound: Callable[[], Any], known: set[int]) -> list[torch.Tensor]:
    """Other floating-point tensors that a bound call reads: running statistics and the like, which live anyway."""
    if not isinstance(bound, partial):
        return []
    leaves = pytree.tree_leaves((bound.args, bound.keywords))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and id(leaf) not in known]


def differentiable_outputs(result: Any) -> list[torch.Tensor]:
    """The outputs of a call through which gradients flow back."""
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
