"""Copies that backward writes again: a gated unit's backward kernel reads both operands, and makes the copy of their product.

The operator that reads a gated unit's 8-bit copy keeps it for its weight's gradient, until backward has come so far.  Where the
unit keeps its operands in 8 bit, memory is what is short, and its backward kernel writes the copy once more, a moment before it is
read (docs/design/fused-chains.md#backward): of a Llama-like layer of width H that is 4 bytes a token and element of H.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import cast

import torch
from torch.fx import Graph, Node

from qsync_torch.aten.random_bits import stream_key
from qsync_torch.compiling.graph_nodes import described_as, move_before, needs
from qsync_torch.kernels.binding import BOUND
from qsync_torch.kernels.library_ops import GRAD_WEIGHT_OF_ROWS
from qsync_torch.kernels.producers import ProducerBinding
from qsync_torch.operators.casts import AGAIN

_OUTPUT = torch.ops.qsync.glu_output.default
_GRADIENT = torch.ops.qsync.glu_grad_input.default
_WITH_COPY = torch.ops.qsync.glu_grad_copy.default
_ATEN = torch.ops.aten
_LAYOUTS = frozenset(getattr(_ATEN, name).default for name in ("view", "_unsafe_view", "reshape", "t", "permute", "clone", "alias"))
_LAYOUTS |= {_ATEN.transpose.int, _ATEN.detach.default}
"""Operators that give the numbers of a copy in another layout."""


def write_copies_again(graph: Graph) -> int:
    """Let the backward of gated units write the copy of their result, wherever their operands are kept in 8 bit and a backend can.

    Args:
        graph: of ATen operators, forward and backward together, before autograd parts them; changed in place.

    Returns:
        How many copies are kept for backward no longer.
    """
    return sum(_rewrite(graph, node) for node in list(graph.find_nodes(op="call_function", target=_GRADIENT)))


def _rewrite(graph: Graph, node: Node) -> bool:
    made = _forward_of(cast(Node, node.args[1]))
    if made is None or not isinstance(seed := made.args[4], int):
        return False
    binding, value = cast(ProducerBinding, BOUND[str(node.args[5])]), made.meta["val"][0]
    if not (binding.saves_copy and binding.writes_copy):
        return False
    if binding.backward_with(copy_again=True).reasons_backward(value.device, tuple(value.shape)):
        return False
    q, scale, stream = (_part(graph, made, name) for name in ("q", "scale", "stream"))
    before = needs(node)
    readers = [(reader, layouts) for reader, layouts in _readers(q) if reader not in before]
    if not readers:
        return False
    arguments = (*node.args[:5], binding.backward_with(copy_again=True).key, scale, stream_key(seed, AGAIN), stream)
    with graph.inserting_before(node):
        again = graph.call_function(_WITH_COPY, arguments)
    again.meta |= described_as(node) | {"val": (*node.meta["val"], q.meta["val"])}
    node.replace_all_uses_with(again)
    graph.erase_node(node)
    move_before(again, min(reader for reader, _ in readers))
    with graph.inserting_after(again):
        copy = graph.call_function(operator.getitem, (again, 2))
    copy.meta |= described_as(again) | {"val": q.meta["val"]}
    for reader, layouts in readers:
        numbers = copy
        with graph.inserting_before(reader):
            for layout in layouts:
                numbers = graph.node_copy(layout, functools.partial(_instead, layout.args[0], numbers))
                numbers.meta = described_as(again) | {"val": layout.meta["val"]}
        reader.args = (reader.args[0], numbers, *reader.args[2:])
    return True


def _forward_of(kept: Node) -> Node | None:
    """The forward of a gated unit, from what it keeps in 8 bit."""
    while kept.target in _LAYOUTS:
        kept = cast(Node, kept.args[0])
    made = kept.args[0] if kept.target is operator.getitem else None
    return made if isinstance(made, Node) and made.target is _OUTPUT else None


def _instead(source: object, other: Node, node: Node) -> Node:
    """Let a layout read another tensor; what it reads beside, such as sizes of a dynamic shape, stays."""
    return other if node is source else node


def _part(graph: Graph, made: Node, name: str) -> Node:
    """The node of one tensor that a gated unit's forward writes."""
    binding = cast(ProducerBinding, BOUND[str(made.args[2])])
    place = binding.names[bool(made.args[3])].index(name)
    for user in made.users:
        if user.target is operator.getitem and user.args[1] == place:
            return user
    with graph.inserting_after(made):
        part = graph.call_function(operator.getitem, (made, place))
    part.meta |= described_as(made) | {"val": made.meta["val"][place]}
    return part


def _readers(q: Node) -> Iterator[tuple[Node, list[Node]]]:
    """Products for a weight's gradient that read a copy, and the layouts that it goes through on the way."""
    waiting: list[tuple[Node, list[Node]]] = [(q, [])]
    while waiting:
        numbers, layouts = waiting.pop()
        for user in numbers.users:
            if user.target is GRAD_WEIGHT_OF_ROWS and user.args[1] is numbers:
                yield user, layouts
            elif user.target in _LAYOUTS:
                waiting.append((user, [*layouts, user]))
