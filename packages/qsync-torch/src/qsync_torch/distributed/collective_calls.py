"""PyTorch's functions with which ranks communicate: which of their tensors are sent, and which received.

All of them ask modes of functions first (:class:`torch.overrides.TorchFunctionMode`), which is how ``torch.export`` follows them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import traceable_collective_remaps

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
        name: its own; signature: its arguments.
        sent, received: names of the arguments that it sends and writes into; empty where there is none.
        is_compiled: whether ``torch.compile`` has a functional collective in its place.
    """

    name: str
    signature: inspect.Signature
    sent: str
    received: str
    is_compiled: bool


def _collectives() -> dict[Function, Collective]:
    found: dict[Function, Collective] = {}
    for name, (sent, received) in _SENT_AND_RECEIVED.items():
        if (function := getattr(dist, name, None)) is not None:  # newer names for some; none in builds without distributed
            found[function] = Collective(name, inspect.signature(function), sent, received, function in traceable_collective_remaps)
    return found


COLLECTIVES = _collectives()


def _functional() -> Iterator[Function]:
    """Functional collectives, which autograd and compilers follow, as packets and as single operators."""
    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast"):
        for namespace in (torch.ops._c10d_functional, torch.ops._c10d_functional_autograd):
            for several in (name, f"{name}_coalesced"):
                if (packet := getattr(namespace, several, None)) is not None:
                    yield from (packet, *(getattr(packet, overload) for overload in packet.overloads()))


FUNCTIONAL = frozenset(_functional()) if dist.is_available() else frozenset()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors of an argument: one, none, or lists of them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def _mapped(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    return [_mapped(change, item) for item in value] if isinstance(value, (list, tuple)) else value


def written_by(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[torch.Tensor]:
    """What a collective is going to write into, which changes no version of a tensor."""
    collective = COLLECTIVES[function]
    return tensors_in(collective.signature.bind(*args, **kwargs).arguments.get(collective.received))


def in_format_of_the_job(
    function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], is_lowered: Callable[[torch.Tensor], bool]
) -> Any:
    """Call a collective with float32 in place of 16 bits that a plan has brought about: other ranks send and expect float32.

    What is received into such a tensor makes it a float32 tensor, as it would be without the plan; a part of a larger one is
    written in its own format.

    Args:
        function, args, kwargs: one of :data:`COLLECTIVES`, and its call.
        is_lowered: whether a tensor has 16 bits for a plan.

    Returns:
        What the function returns.
    """
    collective = COLLECTIVES[function]
    call = collective.signature.bind(*args, **kwargs)
    given = call.arguments
    narrow_and_wide: list[tuple[torch.Tensor, torch.Tensor]] = []
    has_parts = False

    def send(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(torch.float32) if is_lowered(tensor) else tensor

    def receive(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal has_parts
        if not is_lowered(tensor):
            return tensor
        # ``data``, because a collective gives what it writes no new version either.
        narrow, wide = tensor.data, tensor.detach().to(torch.float32)
        narrow_and_wide.append((narrow, wide))
        if tensor._base is not None:
            has_parts = True
            return wide
        tensor.data = wide
        return tensor

    if collective.received != collective.sent and collective.sent in given:
        given[collective.sent] = _mapped(send, given[collective.sent])
    if collective.received in given:
        given[collective.received] = _mapped(receive, given[collective.received])
    result = function(*call.args, **call.kwargs)
    if has_parts and isinstance(result, dist.Work):
        result.wait()
    for narrow, wide in narrow_and_wide:
        narrow.copy_(wide)
    return result
