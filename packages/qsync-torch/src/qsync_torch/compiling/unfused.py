"""Why the activation of an 8-bit operator is quantized by itself: no chain before it, in one line a model."""

from __future__ import annotations

import logging
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from torch.fx import Graph, GraphModule, Node

from qsync_core.chains.unchained import Unchained
from qsync_core.ir.chain import Producer
from qsync_torch.compiling import graph_nodes as nodes
from qsync_torch.compiling.finding import (
    FoundChain,
    described,
    last_parts,
    reason_against_copy,
    reason_against_norm,
    reason_for_own_copy,
    runs_as_one,
    with_readers,
)
from qsync_torch.operators.chains import CHAINS
from qsync_torch.operators.products import LOWERED

_LOG = logging.getLogger(__name__)
_VIEWS = frozenset(
    {"contiguous", "expand", "flatten", "permute", "reshape", "squeeze", "transpose", "unsqueeze", "view", "view_as"}
)
"""Methods that move or repeat numbers and compute none."""
_PRODUCERS = {run: producer for producer, run in CHAINS.items()}
AN_INPUT = "an input"
"""What a graph gets from outside."""


def unfused(module: GraphModule, reasons: Callable[[Node], str]) -> Iterator[Unchained]:
    """Every activation that 8-bit operators of a graph, and of its checkpointed parts, quantize by themselves.

    Args:
        module: from ``torch.compile``, with producers in the place of its chains.
        reasons: why a chain that ends in a node was found and not fused; empty where it was not found.
    """
    for part in (module, *nodes.checkpointed_parts(module)):
        order = {node: place for place, node in enumerate(part.graph.nodes)}
        sources = (node.args[0] for node in part.graph.nodes if nodes.makes_its_copy(node))
        for source in dict.fromkeys(source for source in sources if isinstance(source, Node)):
            readers = [user for user in source.users if nodes.makes_its_copy(user) and user.args[0] is source]
            names = tuple(dict.fromkeys(map(_name_of, readers)))
            yield Unchained(_what(source), names, reasons(source) or _why(source, readers, part.graph, order))


def tell(found: Sequence[FoundChain], alone: Sequence[Unchained]) -> None:
    """Log what was fused and what was not, each kind with how often it is there: a warning where no chain was found at all."""
    if not found and not alone:
        return
    fused = Counter(described(chain.producer, chain.form) for chain in found)
    shown = ", ".join(f"{count} × {what}" for what, count in fused.items()) or "nothing"
    rest = "; ".join(f"{count} × {what}" for what, count in Counter(map(str, alone)).items())
    is_lacking = not found and any(one.what != AN_INPUT for one in alone)
    text = f"fused with the 8-bit copy that is read: {shown}" + (f"; quantized by itself: {rest}" if rest else "")
    _LOG.log(logging.WARNING if is_lacking else logging.INFO, "%s", text)


def _name_of(reader: Node) -> str:
    """The last part of the name of the module whose work an operator is."""
    stack = list((reader.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return path.rsplit(".", 1)[-1].strip("'[]\"") or "an operator"


def _origin(node: Node) -> Node:
    """What made the numbers that a node views or moves."""
    while node.op == "call_method" and node.target in _VIEWS and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _what(source: Node) -> str:
    """The function, or the chain, that made an activation."""
    origin = _origin(source)
    if (norm := nodes.rms_norm_of(origin)) is not None:
        return "RMS norm" if len(norm.members) > 1 else "rms_norm"
    if origin.op in ("placeholder", "get_attr"):
        return AN_INPUT
    if (producer := _producer_of(origin)) is not None:
        return str(producer)
    if origin.target is LOWERED:
        return f"the result of {_name_of(origin)}"
    name = origin.target if isinstance(origin.target, str) else getattr(origin.target, "__name__", str(origin.target))
    return name.strip("_")


def _why(source: Node, readers: Sequence[Node], graph: Graph, order: dict[Node, int]) -> str:
    origin = _origin(source)
    if origin.op in ("placeholder", "get_attr"):
        return "its graph gets it from outside"
    if _producer_of(origin) is not None:
        if origin is not source:
            return "a view of it is read"
        of_its_own = next(filter(None, map(reason_for_own_copy, readers)), "")
        return of_its_own or "its producer writes the copy of another kind, which others read"
    parts = last_parts(origin, graph)
    if parts is None:
        if (norm := nodes.rms_norm_of(origin)) is not None:
            return reason_against_norm(norm)
        if nodes.batch_norm_of(origin) or nodes.layer_norm_of(origin):
            return "its weight and bias are not float32 vectors, or it runs on a tensor of other than four dimensions"
        if nodes.activation_of(origin) is not None:
            return "it is written over a tensor that something else reads"
        return "no producer computes it"
    if origin is not source:
        return "a view of it is read"
    chain = with_readers(parts, order)
    if chain.copy is None:
        return next(filter(None, (reason_against_copy(reader, parts.producer) for reader in readers)), "")
    if not runs_as_one(chain, order):
        return "what stands between its operators has to run between them, or something writes to its result"
    return "another chain has some of its operators"


def _producer_of(node: Node) -> Producer | None:
    """The producer in the place of a chain whose result a node is."""
    made = node.args[0] if node.target is operator.getitem else None
    return _PRODUCERS.get(made.target) if isinstance(made, Node) else None
