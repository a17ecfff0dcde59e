"""Copies of weights in forward graphs: what a graph is given and quantizes is quantized in a few launches, together.

An operator quantizes its own weight, in two launches of a few microseconds each: 126 of them in a step of ResNet50.  Backends that
offer ``quantize_many`` take any number of tensors in as many launches, and make the same bits.
"""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from qsync_core.kernels.backend import Op
from qsync_torch.compiling.graph_nodes import stand_for
from qsync_torch.kernels.binding import BOUND, Quantization

_QUANTIZE, _MANY = torch.ops.qsync.quantize.at, torch.ops.qsync.quantize_many.at


def quantize_weights_together(graph: Graph) -> int:
    """Put one quantization in the place of those of a graph's inputs that are alike, wherever a backend of theirs offers it.

    On a CPU, where launches cost nothing, it would only empty the caches.

    Args:
        graph: of ATen operators, without mutation, as AOTAutograd makes it; changed in place.

    Returns:
        How many quantizations are gone.
    """
    alike: dict[tuple[Any, ...], list[Node]] = {}
    for node in graph.nodes:
        if node.target is not _QUANTIZE or len(node.args) != 4:  # a fifth is a multiplier
            continue
        x, key, seed, offset = node.args
        if isinstance(x, Node) and x.op == "placeholder" and isinstance(seed, int) and _is_known(x.meta["val"]):
            alike.setdefault((key, offset, x.meta["val"].device), []).append(node)
    gone = 0
    for (key, _, device), members in alike.items():
        quantization = cast(Quantization, BOUND[key])
        shapes = [tuple(cast(Node, node.args[0]).meta["val"].shape) for node in members]
        if len(members) > 1 and quantization.is_offered(Op.QUANTIZE_MANY, device, *shapes):
            _replace(graph, members)
            gone += len(members) - 1
    return gone


def _is_known(x: torch.Tensor) -> bool:
    """Whether it lies on a GPU, and its sizes are numbers, as a weight's are."""
    return x.device.type == "cuda" and all(isinstance(size, int) for size in x.shape)


def _replace(graph: Graph, members: list[Node]) -> None:
    """Put one call in front of the first of some quantizations, and let go of these."""

    def together(*each: Any) -> tuple[Any, ...]:
        """The arguments of all as those of the one."""
        xs, keys, seeds, offsets = zip(*each, strict=True)
        return list(xs), keys[0], list(seeds), offsets[0]

    with graph.inserting_before(members[0]):
        made = graph.call_function(_MANY, together(*(node.args for node in members)))
        parts = [graph.call_function(operator.getitem, (made, place)) for place in range(2)]
    values = [list(column) for column in zip(*(node.meta["val"] for node in members), strict=True)]
    stand_for(made, members, together, tuple(values))
    for part, value in zip(parts, values, strict=True):
        part.meta["val"] = value
    for place, node in enumerate(members):
        for reader in list(node.users):
            reader.args = (parts[cast(int, reader.args[1])], place)
        graph.erase_node(node)
