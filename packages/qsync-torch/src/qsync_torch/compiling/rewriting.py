"""Producers in the place of the chains of a graph."""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch.fx import Graph, GraphModule, Node

from qsync_core.ir.chain import ChainForm, Producer
from qsync_core.ir.precision import Precision, promote
from qsync_core.ir.variant import Variant
from qsync_torch.compiling import graph_nodes as nodes
from qsync_torch.compiling.finding import FoundChain, find_chains
from qsync_torch.dtypes import PRECISION
from qsync_torch.kernels.binding import BOUND, OperatorBinding
from qsync_torch.kernels.producers import ProducerBinding, producer_binding, producer_choice
from qsync_torch.operators.chains import CHAINS
from qsync_torch.operators.lowered_ops import LOWERED_CONV2D

_LOG = logging.getLogger(__name__)


def fuse_chains(module: GraphModule, saved: Precision | None = None) -> list[FoundChain]:
    """Put producers into a graph wherever a named backend has their kernels; everything else stays as it is.

    Args:
        module: from ``torch.compile``; changed in place.
        saved: the format in which producers keep their input for backward; None: as it is.

    Returns:
        What was fused, in the order of the graph; its members are no longer there.
    """
    fused: list[FoundChain] = []
    results: dict[Node, _Result] = {}
    for chain in find_chains(module.graph):
        binding, against = _binding_of(chain, saved)
        if binding is None:
            _LOG.info("%s stays unfused: %s", chain, "; ".join(against))
            continue
        results[chain.last] = _replace(module.graph, chain, binding, results)
        fused.append(chain)
        _LOG.info("fused: %s", chain)
    if fused:
        module.graph.lint()
        module.recompile()
    for node in module.graph.nodes:  # a checkpointed part is a graph of its own
        if node.target is torch.ops.higher_order.tag_activation_checkpoint:
            fused += fuse_chains(getattr(module, str(node.args[0].target)), saved)
    return fused


@attrs.frozen
class _Result:
    """What stands in a graph for the result of a chain: its float tensor, and the largest magnitude of that."""

    out: Node
    absmax: Node | None


def _binding_of(chain: FoundChain, saved: Precision | None) -> tuple[ProducerBinding | None, list[str]]:
    """How a chain runs, or why no backend runs it.  Where none keeps the input in 8 bit, it is kept as it is."""
    consumer = BOUND[str(chain.consumers[0].args[3])]
    assert isinstance(consumer, OperatorBinding)
    x, out = nodes.value_of(chain.x), nodes.value_of(chain.last)
    assert x is not None
    assert out is not None
    residual = nodes.value_of(chain.residual)
    kept = PRECISION[x.dtype] if residual is None else promote(PRECISION[x.dtype], PRECISION[residual.dtype])
    target = chain.copy.target
    form = ChainForm(chain.activation, chain.residual is not None, chain.float_result)
    sizes = nodes.sizes(x)
    assert sizes is not None
    if chain.producer is not Producer.BATCH_NORM:
        width = sizes[1 if _is_of_images(chain) else -1]
        sizes = math.prod(sizes) // width, width
    against: list[str] = []
    for format_ in dict.fromkeys((saved or kept, kept)):
        variant = Variant(
            compute=target.precision,
            output=PRECISION[out.dtype],
            saved=format_,
            grad_input=PRECISION[x.dtype],
            grad_weight=Precision.FLOAT32,
            x_granularity=target.granularity,
            rounding=target.rounding,
        )
        binding = producer_binding(chain.producer, variant, producer_choice(consumer.choice), form)
        against = binding.reasons_against(x.device, sizes)
        if not against:
            return binding, []
    return None, against


def _replace(graph: Graph, chain: FoundChain, binding: ProducerBinding, results: Mapping[Node, _Result]) -> _Result:
    """Put a producer where the chain's last member stands.

    Args:
        graph: changed in place.
        chain: one of its chains.
        binding: how it runs.
        results: of the chains that are no longer in the graph, by their last members.
    """
    last, first = chain.last, chain.consumers[0]
    with graph.inserting_before(last):
        streams = first.args[4], _offset_before(graph, first, last)
        produced = graph.call_function(CHAINS[chain.producer], _arguments(chain, results, (binding.key, *streams)))
        out, q, scale = (graph.call_function(operator.getitem, (produced, place)) for place in range(3))
        has_absmax = chain.producer is Producer.BATCH_NORM and chain.float_result
        absmax = graph.call_function(operator.getitem, (produced, 3)) if has_absmax else None
    for node in (produced, out, q, scale):
        node.meta |= {key: last.meta[key] for key in ("stack_trace", "nn_module_stack") if key in last.meta}
    last.replace_all_uses_with(out)
    for consumer in chain.consumers:
        consumer.args = (*consumer.args, q, scale)
    for member in reversed(chain.members):
        graph.erase_node(member)
    return _Result(out, absmax)


def _offset_before(graph: Graph, consumer: Node, last: Node) -> Node:
    """The offset of a consumer's random numbers, also where it is worked out behind a node only."""
    offset = consumer.args[7]
    assert isinstance(offset, Node)
    return offset if offset < last else graph.node_copy(offset)


def _arguments(chain: FoundChain, results: Mapping[Node, _Result], streams: tuple[Any, ...]) -> tuple[Any, ...]:
    """Those of the chain's operator (:mod:`qsync_torch.operators.chains`)."""
    before = results.get(chain.residual) if chain.residual is not None else None
    x = results[chain.x].out if chain.x in results else chain.x
    residual = chain.residual if before is None else before.out
    if chain.norm is None:
        return x, _is_of_images(chain), *streams
    call = chain.call
    if chain.producer is Producer.LAYER_NORM:
        return x, call["weight"], call["bias"], call["eps"], residual, *streams
    statistics = (call[name] for name in ("weight", "bias", "running_mean", "running_var", "momentum", "eps"))
    return x, *statistics, residual, None if before is None else before.absmax, *streams


def _is_of_images(chain: FoundChain) -> bool:
    return chain.consumers[0].target is LOWERED_CONV2D
