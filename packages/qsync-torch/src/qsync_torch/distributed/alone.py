"""A rank that is measured alone: collectives in its model are answered here, because no other rank takes part.

Every answer is what the rank would get if all others did as it does: a gathered tensor is its own, as often as there are ranks.
Times leave the transfers out, and the wait for the slowest, as all measurements of one rank do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from qsync_torch.distributed.collective_calls import COLLECTIVES, is_functional, schema_of, tensors_in
from qsync_torch.torch_internals import process_groups, pytree, saves_through_hooks


class Done:
    """A transfer that has ended; stands for :class:`torch.distributed.Work`."""

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        """Nothing is left to be done."""
        return True

    is_completed = is_success = wait

    def get_future(self) -> torch.futures.Future[None]:
        """Return a future that is done already."""
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future


_WITHOUT_ANSWER = ("broadcast", "recv", "irecv")
"""What leaves a tensor as it is, as far as this rank knows."""
_DIFFERENTIATE = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
"""What asks the modes of functions first, and then runs without them."""


class Alone(TorchFunctionMode):
    """Answers collectives in place of the other ranks.

    Attributes:
        communicates: whether there was one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.communicates = False
        self._recomputes = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer a collective; run any other function."""
        if func in COLLECTIVES or is_functional(func):
            self.communicates = True
            # What checkpointing keeps nothing of is computed again in backward, wherever a value of it is asked for first.
            if not torch.compiler.is_compiling() and saves_through_hooks():
                self._recomputes = True
            return (_answer if func in COLLECTIVES else _functional_answer)(func, args, kwargs or {})
        if func in _DIFFERENTIATE:
            with self._followed(pytree.tree_leaves(args[0])):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def run(self, function: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        """Run a function that returns a loss, and answer what it and its backward ask."""
        with self:
            return self.follow(function(*args))

    def follow(self, loss: torch.Tensor) -> torch.Tensor:
        """Answer what the backward of a loss asks too, however it is called: no mode comes along there."""
        self._hook([loss])
        return loss

    @contextmanager
    def _followed(self, outputs: Sequence[Any]) -> Iterator[None]:
        handles = self._hook(outputs)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, outputs: Sequence[Any]) -> list[Any]:
        """Be there while autograd functions run, and what may recompute a part of the forward; the hooks' handles."""
        waiting = [getattr(output, "grad_fn", output) for output in outputs]
        waiting, met, handles = [node for node in waiting if isinstance(node, Node)], set(), []
        while waiting:
            if (node := waiting.pop()) is None or node in met:
                continue
            met.add(node)
            waiting += [source for source, _ in node.next_functions]
            if isinstance(node, BackwardCFunction) or (self._recomputes and _keeps_tensors(node.__class__)):
                handles.append(node.register_prehook(lambda grads: self._begin()))
                handles.append(node.register_hook(lambda grad_inputs, grads: self._end()))
        return handles

    def _begin(self) -> None:
        self.__enter__()  # type: ignore[no-untyped-call]

    def _end(self) -> None:
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]


@functools.cache
def _keeps_tensors(kind: type) -> bool:
    """Whether autograd's nodes of a kind keep tensors for backward."""
    return any(name.startswith("_raw_saved_") for name in dir(kind))


def _answer(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    collective = COLLECTIVES[function]
    call = collective.signature.bind(*args, **kwargs)
    call.apply_defaults()
    given, group = call.arguments, call.arguments["group"]
    rank, count = dist.get_rank(group), dist.get_world_size(group)
    name, op = collective.name, given.get("op", dist.ReduceOp.SUM)
    sent = list(tensors_in(given.get(collective.sent)))
    received = list(tensors_in(given.get(collective.received)))
    if not torch.compiler.is_compiling():  # which has no versions, and follows no ``data``
        received = [tensor.data for tensor in received]
    with torch.no_grad():
        if name in ("all_reduce", "all_reduce_coalesced", "reduce"):
            for tensor in received:
                tensor.copy_(_reduced(tensor, op, count))
        elif name in ("all_gather", "all_gather_coalesced", "gather"):
            for place, tensor in enumerate(received):
                tensor.copy_(sent[place % len(sent)])
        elif name.startswith("all_gather"):
            received[0].copy_(torch.cat([sent[0].reshape(-1)] * count).view_as(received[0]))
        elif name == "reduce_scatter":
            received[0].copy_(_reduced(sent[rank], op, count))
        elif name.startswith("reduce_scatter"):
            received[0].copy_(_reduced(sent[0].reshape(count, -1)[rank], op, count).view_as(received[0]))
        elif name == "scatter":
            # Of what another rank would send, this one knows nothing, not even that it is finite.
            received[0].copy_(sent[rank] if sent else torch.zeros_like(received[0]))
        elif name == "all_to_all":
            _exchange(received, sent, rank)
        elif name == "all_to_all_single":
            _exchange(
                _parts(received[0], given["output_split_sizes"], count), _parts(sent[0], given["input_split_sizes"], count), rank
            )
        if torch.compiler.is_compiling() and (name in _WITHOUT_ANSWER or not received):
            for tensor in received or sent:  # a graph has no transfer: what it delivers or takes is read by something all the same
                tensor.copy_(tensor.clone())
    if name in ("isend", "irecv") or given.get("async_op"):
        return Done()
    return rank if name == "recv" else None


def _functional_answer(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    schema = schema_of(function)
    given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    group = given["group_name"]
    if isinstance(group, str):
        group = next(known for known in process_groups() if known.group_name == group)
    rank, count = dist.get_rank(group), dist.get_world_size(group)
    value = given[schema.arguments[0].name]
    several = isinstance(value, (list, tuple))
    found = [_of_one(schema.name, tensor, given, rank, count) for tensor in (value if several else [value])]
    written = [given[argument.name] for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
    if written:
        values, found = found, list(written[0]) if several else written
        with torch.no_grad():
            for tensor, own in zip(found, values, strict=True):
                tensor.copy_(own)
    return found if several else found[0]


def _of_one(name: str, value: torch.Tensor, given: dict[str, Any], rank: int, count: int) -> torch.Tensor:
    op = given.get("reduce_op", "sum")
    if "all_reduce" in name:
        return _reduced(value, op, count)
    if "all_gather" in name:
        return torch.cat([value] * count)
    if "reduce_scatter" in name:
        return _reduced(value.chunk(count)[rank], op, count)
    if "alltoall" in name:  # of DTensor: from a part of one dimension to a part of another
        return torch.cat([value.chunk(count, given["shard_dim"])[rank]] * count, given["gather_dim"])
    if "all_to_all" in name:
        sizes = given.get("output_split_sizes") or [len(value) // count] * count
        own = value[: max(sizes)]
        return torch.cat([own[:size] for size in sizes])
    return value.clone()


def _reduced(value: torch.Tensor, op: Any, count: int) -> torch.Tensor:
    if op in (dist.ReduceOp.SUM, "sum"):
        return value * count
    return value**count if op in (dist.ReduceOp.PRODUCT, "product") else value.clone()


def _parts(value: torch.Tensor, sizes: Sequence[int] | None, count: int) -> Sequence[torch.Tensor]:
    return value.split(list(sizes)) if sizes else value.chunk(count)


def _exchange(received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], rank: int) -> None:
    """Others send what this rank sends to itself; as much of it as there is room for."""
    own = sent[rank]
    for tensor in received:
        size = min(len(tensor), len(own))
        tensor[:size].copy_(own[:size])
