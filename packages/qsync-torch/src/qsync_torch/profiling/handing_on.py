"""Operators that hand on their input as it is on this device, although in the graph they copy it.

A graph is traced on a CPU, whose kernels may leave a result in another order than a GPU's: attention with dropout does, so that
``contiguous`` after it copies there and returns its input here (docs/design/memory.md#measuring-and-checking).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from qsync_core.ir.dag import OpClass, Operator, PrecisionDag
from qsync_core.ir.op_id import OpId

MAY_COPY = ("contiguous", "reshape", "flatten")
"""Kinds of operators that copy only where the order in memory asks for it."""

_Call = tuple[str, str, tuple[int, ...], tuple[int, ...]]
"""Module, kind, shapes of what is read and of what comes out."""


def handed_on(model: torch.nn.Module, dag: PrecisionDag, forward: Callable[[], object]) -> tuple[OpId, ...]:
    """The operators of a graph whose calls in a forward all return memory of what they read; compiled parts run eagerly for it.

    Args:
        model: whose forward it is.
        dag: its graph.
        forward: runs it once, where there is anything to watch.
    """
    asked = {operator.op_id: _call_of(operator) for operator in dag.operators if may_hand_on(operator)}
    if not asked:
        return ()
    with torch.compiler.set_stance("force_eager"), _stack_of_modules(model) as stack, _Watch(stack) as watch:
        forward()
    return tuple(op_id for op_id, call in asked.items() if watch.seen.get(call))


def may_hand_on(operator: Operator) -> bool:
    """Whether an operator of a graph, which copies there, may do without on another device."""
    return (
        operator.kind in MAY_COPY
        and operator.op_class is OpClass.DEPENDENT
        and len(operator.inputs) == 1
        and not operator.parameters
    )


def _call_of(operator: Operator) -> _Call:
    scope = operator.op_id.fqn
    if scope == operator.kind or scope.endswith(f".{operator.kind}"):
        scope = scope[: -len(operator.kind)].removesuffix(".")
    return scope, operator.kind, operator.input_shapes[0], operator.output_shape


class _Watch(TorchFunctionMode):
    """Notes, by call, whether every result so far has been memory of what was read."""

    def __init__(self, stack: list[str]) -> None:
        super().__init__()
        self._stack = stack
        self.seen: dict[_Call, bool] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        kind = getattr(func, "__name__", "")
        if kind in MAY_COPY and args and isinstance(args[0], torch.Tensor) and isinstance(result, torch.Tensor):
            call = (self._stack[-1], kind, tuple(args[0].shape), tuple(result.shape))
            self.seen[call] = _share_memory(result, args[0]) and self.seen.get(call, True)
        return result


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    try:
        return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # without memory of its own, as under torch.vmap
        return False


@contextmanager
def _stack_of_modules(model: torch.nn.Module) -> Iterator[list[str]]:
    """Names of the modules whose forwards run, the innermost last."""
    names = {id(module): name for name, module in model.named_modules()}
    stack = [""]

    def enter(module: torch.nn.Module, _: Any) -> None:
        stack.append(names.get(id(module), stack[-1]))

    def leave(_: torch.nn.Module, __: Any, ___: Any) -> None:
        if len(stack) > 1:
            stack.pop()

    handles = (register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True))
    try:
        yield stack
    finally:
        for handle in handles:
            handle.remove()
