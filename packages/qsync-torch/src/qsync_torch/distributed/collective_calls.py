"""PyTorch's functions with which ranks communicate: which of their tensors are sent, and which received.

All of them ask modes of functions first (:class:`torch.overrides.TorchFunctionMode`), which is how ``torch.export`` follows them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
import torch.distributed as dist

from qsync_torch.torch_internals import OpOverload, OpOverloadPacket

Function = Callable[..., Any]

_SENT_AND_RECEIVED: dict[str, tuple[str, str]] = {
    "send": ("tensor", ""),
    "isend": ("tensor", ""),
    "recv": ("", "tensor"),
    "irecv": ("", "tensor"),
    "broadcast": ("tensor", "tensor"),
    "all_reduce": ("tensor", "tensor"),
    "all_reduce_coalesced": ("tensors", "tensors"),
    "reduce": ("tensor", "tensor"),
    "all_gather": ("tensor", "tensor_list"),
    "all_gather_single": ("input_tensor", "output_tensor"),
    "all_gather_into_tensor": ("input_tensor", "output_tensor"),
    "all_gather_coalesced": ("input_tensor_list", "output_tensor_lists"),
    "gather": ("tensor", "gather_list"),
    "scatter": ("scatter_list", "tensor"),
    "reduce_scatter": ("input_list", "output"),
    "reduce_scatter_single": ("input", "output"),
    "reduce_scatter_tensor": ("input", "output"),
    "all_to_all_single": ("input", "output"),
    "all_to_all": ("input_tensor_list", "output_tensor_list"),
}


@attrs.frozen
class Collective:
    """A function of ``torch.distributed``.

    Attributes:
        sent, received: names of the arguments that it sends and writes into; empty where there is none.
    """

    name: str
    signature: inspect.Signature
    sent: str
    received: str


def _collectives() -> dict[Function, Collective]:
    found: dict[Function, Collective] = {}
    for name, (sent, received) in _SENT_AND_RECEIVED.items():
        if (function := getattr(dist, name, None)) is not None:  # newer names for some; none in builds without distributed
            found[function] = Collective(name, inspect.signature(function), sent, received)
    return found


COLLECTIVES = _collectives()


def is_functional(function: Any) -> bool:
    """Whether it is a collective that autograd and compilers follow: an operator that is told the name of a group of processes."""
    return isinstance(function, (OpOverload, OpOverloadPacket)) and any(
        argument.name == "group_name" for argument in schema_of(function).arguments
    )


def schema_of(function: Any) -> Any:
    """The signature of an operator, or of the first of its name."""
    return (function if isinstance(function, OpOverload) else getattr(function, function.overloads()[0]))._schema


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors of an argument: one, none, or lists of them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
