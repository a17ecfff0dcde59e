"""Quantized operators that run again without Python: forward and backward are recorded as programs (:mod:`qsync_torch.replaying`).

What is recorded is :class:`~qsync_torch.operators.products.QuantizedProduct` itself, so that there is one set of rules for casts,
copies and products; a program has their allocations and launches alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from qsync_torch.kernels.binding import Memo, OperatorBinding
from qsync_torch.operators.casts import Operand, Seeds
from qsync_torch.operators.products import QuantizedProduct
from qsync_torch.replaying import extension
from qsync_torch.replaying.recording import recorded
from qsync_torch.torch_internals import running_node

Tensors = Sequence[torch.Tensor | None]


class Context:
    """What an autograd function sees of autograd."""

    saved_tensors: Tensors = ()
    kept: tuple[Any, ...] = ()
    next_functions: tuple[Any, ...] = ()

    def __init__(self, needs: Sequence[bool]) -> None:
        self.needs_input_grad = tuple(needs)

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        """Keep what backward is recorded with."""
        self.saved_tensors = tensors


class _OneCopy:
    """A cache that holds the one copy that is made."""

    value: Operand | None = None

    def applies_to(self, x: torch.Tensor) -> bool:
        return True

    def find(self, *_: Any) -> _OneCopy:
        return self


class Replayed(ABC):
    """How the extension asks for what it does not have."""

    _new_program: Callable[[], Any]

    @abstractmethod
    def _forward(self, tensors: Tensors, needs: Sequence[bool], grad_enabled: bool) -> Tensors:
        """The result, six tensors that backward is to have, and the activation's copy."""

    @abstractmethod
    def backward(self, name: str, tensors: Tensors, needs: Sequence[bool], shape: Sequence[int], dtype: torch.dtype) -> Tensors:
        """The gradients of activation, weight and bias, as a node of autograd's graph that runs now."""

    def record(self, backward: bool, tensors: Tensors, needs: Sequence[bool], *more: Any) -> Any:
        """Record a call.

        Args:
            backward: which one.
            tensors: of forward activation, weight, bias, the offset of random numbers, and an :class:`Operand` if it is there
                already; of backward the gradient and what forward saved.
            needs: which gradients are wanted.
            more: whether gradients are recorded; of backward shape and format of the activation.

        Returns:
            A program, or None.
        """
        if backward:
            return recorded(self._new_program, lambda *given: self.backward("", given, needs, *more), tensors)
        return recorded(self._new_program, lambda *given: self._forward(given, needs, more[0]), tensors)

    def runner(self) -> Callable[..., Any]:
        """What runs it in the extension."""
        module = extension.loaded()
        self._new_program = module.Program
        run: Callable[..., Any] = module.Lowered(self.record, self.backward)
        return run


class Replays(Replayed):
    """Quantized operators.

    Args:
        binding: of the operator.
    """

    def __init__(self, binding: OperatorBinding) -> None:
        self._binding = binding

    def _forward(self, tensors: Tensors, needs: Sequence[bool], grad_enabled: bool) -> Tensors:
        x, weight, bias, offset, *parts = tensors
        context, made = Context(needs), _OneCopy()
        copy = Operand(*parts) if parts else None  # type: ignore[arg-type]
        given: Any = (x, weight, bias, self._binding, Seeds(offset=offset), grad_enabled, made, None, copy)  # type: ignore[arg-type]
        y = QuantizedProduct.forward(context, *given)
        copied = made.value if copy is None else copy
        assert copied is not None
        return y, *context.saved_tensors, *copied

    def backward(self, name: str, tensors: Tensors, needs: Sequence[bool], shape: Sequence[int], dtype: torch.dtype) -> Tensors:
        """The gradients of activation, weight and bias."""
        grad, *saved = tensors
        assert grad is not None
        context, node = Context(needs), running_node()
        context.saved_tensors, context.next_functions = saved, () if node is None else node.next_functions
        context.kept = self._binding, Seeds(name=name), torch.Size(shape), dtype
        return QuantizedProduct.backward(context, grad)[:3]


REPLAY_OF: Memo[OperatorBinding, Callable[..., Any]] = Memo(lambda binding: Replays(binding).runner())
"""What runs an operator in the extension, by its binding: ``(x, weight, bias, offset, copy, wants_copy, name)`` to its result, with
the activation's copy as a tuple behind it where ``wants_copy`` is true; or None, where Python is to run it."""
