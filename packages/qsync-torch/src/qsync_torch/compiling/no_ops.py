"""Calls that give back what they are given, which would hide a chain that a trace shows."""

from __future__ import annotations

import operator

from torch.fx import Graph, GraphModule, Node

from qsync_torch.compiling import graph_nodes as nodes


def drop_no_ops(module: GraphModule) -> int:
    """Let what reads a cast to the format that a tensor has, or all of a tensor (``x[:, 0:]``), read the tensor itself.

    What a graph delivers stays what it was, and what is written to.

    Args:
        module: from ``torch.compile``, changed in place, and with it its checkpointed parts.

    Returns:
        How many calls are no longer there.
    """
    dropped = _drop(module.graph)
    if dropped:
        module.recompile()
    return dropped + sum(map(drop_no_ops, nodes.checkpointed_parts(module)))


def _drop(graph: Graph) -> int:
    dropped = 0
    for node in list(graph.nodes):
        source = _source_of(node)
        if source is None or any(user.op == "output" or node in nodes.changed_by(user) for user in node.users):
            continue
        node.replace_all_uses_with(source)
        graph.erase_node(node)
        dropped += 1
    return dropped


def _source_of(node: Node) -> Node | None:
    """What a node gives back as it is."""
    value, source = nodes.value_of(node), nodes.cast_of(node)
    if source is None and node.target is operator.getitem and isinstance(node.args[0], Node):
        places = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        source = node.args[0] if all(map(_is_whole, places)) else None
    given = nodes.value_of(source)
    if value is None or given is None or value.dtype is not given.dtype or not nodes.same_shape(value, given):
        return None
    return source if value.stride() == given.stride() else None


def _is_whole(place: object) -> bool:
    return place is Ellipsis or (isinstance(place, slice) and place.start in (None, 0) and place.step in (None, 1))
