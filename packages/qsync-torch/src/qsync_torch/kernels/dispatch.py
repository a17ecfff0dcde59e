"""Calling a custom operator's implementation straight from Python where nobody looks at the dispatcher.

A call through ``torch.ops`` costs several microseconds: boxing, schema matching, and the way back into Python.  Compilers, fake
tensors and dispatch modes need it; a plain eager call does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types of tensors that nobody else handles."""


def is_plain_eager() -> bool:
    """Whether neither a compiler nor a dispatch mode (fake tensors) wants to see custom operators."""
    return not (torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack())


def eager_or_dispatched(implementation: Callable[..., Any], op: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs ``implementation`` in plain eager mode, else ``op`` (compiler, dispatch mode, tensor subclass).

    The first argument must be a tensor.
    """

    def call(first: torch.Tensor, *rest: Any) -> Any:
        if is_plain_eager() and type(first) in PLAIN:
            return implementation(first, *rest)
        return op(first, *rest)

    return call
