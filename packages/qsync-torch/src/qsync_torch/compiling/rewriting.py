"""Producers in the place of the chains of a graph."""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.fx import Graph, GraphModule, Node

from qsync_core.ir.chain import ChainForm, Producer
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Granularity, Precision, Rounding, promote
from qsync_core.ir.variant import Variant
from qsync_core.kernels.choice import FLOAT_BACKEND, KernelChoice
from qsync_torch.compiling import graph_nodes as nodes
from qsync_torch.compiling.finding import FoundChain, described, find_chains, norms_behind_products, planned_chains
from qsync_torch.compiling.unfused import tell, unfused
from qsync_torch.dtypes import PRECISION
from qsync_torch.kernels.binding import BOUND, OperatorBinding
from qsync_torch.kernels.library_ops import is_channels_last
from qsync_torch.kernels.producers import ProducerBinding, producer_binding, producer_choice
from qsync_torch.kernels.selection import find_backends
from qsync_torch.operators.casts import X
from qsync_torch.operators.chains import CHAINS

_LOG = logging.getLogger(__name__)


def fuse_chains(module: GraphModule, saved: Precision | None = None) -> list[FoundChain]:
    """Put producers into a graph wherever a named backend has their kernels; everything else stays as it is.

    These are chains before operators in 8 bit, and large batch norms behind one that no such operator reads.

    Args:
        module: from ``torch.compile``; changed in place.
        saved: the format in which producers keep their input for backward; None, or where no backend has that: as it is.

    Returns:
        What was fused, in the order of the graph; its members are no longer there.
    """
    reasons: dict[Node, str] = {}
    fused = _fuse_found(module, saved, reasons)
    tell(fused, list(unfused(module, lambda node: reasons.get(node, ""))))
    return fused


def _fuse_found(module: GraphModule, saved: Precision | None, reasons: dict[Node, str]) -> list[FoundChain]:
    """The same; ``reasons`` receives why a chain that was found was not fused, by its last member."""

    def way_of(chain: FoundChain) -> _Way:
        choice, rounding = producer_choice(_neighbour(chain).choice), _neighbour(chain).variant.rounding
        way = _way_of(chain, saved, choice, rounding)
        return _way_of(chain, None, choice, rounding) if way.against else way

    found = find_chains(module.graph)
    found += [chain for chain in norms_behind_products(module.graph, found) if _is_faster(chain, way_of(chain))]
    found.sort(key=lambda chain: chain.last)
    said = _fuse(module, found, way_of)
    reasons |= {chain.last: why for chain, why in said if why}
    fused = [chain for chain, why in said if not why]
    for part in nodes.checkpointed_parts(module):
        fused += _fuse_found(part, saved, reasons)
    return fused


LEAST_ELEMENTS = 1 << 24
"""Elements from which on a batch norm that writes no copy is fused without a plan that says so.

On an H200 (rows K11) the producers take .64 of the time of PyTorch's operators at 103 million elements, keeping float16, and about
twice their time at 3 million, where launches are what counts: 27 µs and 1.6 ps an element against 12 µs and 2.7 ps, which meet at
13 million.
"""


def _neighbour(chain: FoundChain) -> OperatorBinding:
    """The 8-bit operator that says how a chain runs: the first that reads its copy, else the one before it."""
    binding = BOUND[str((chain.consumers[0] if chain.consumers else chain.x).args[3])]
    assert isinstance(binding, OperatorBinding)
    return binding


def _is_faster(chain: FoundChain, way: _Way) -> bool:
    """Whether a chain that writes no copy is large enough, and runs on kernels that are not the reference."""
    x = nodes.value_of(chain.x)
    sizes = None if x is None else nodes.sizes(x)
    if x is None or sizes is None or math.prod(sizes) < LEAST_ELEMENTS or way.against:
        return False
    names = tuple(backend.name for backend in find_backends(way.binding.choice.chain) if backend.name != FLOAT_BACKEND)
    if not names:
        return False
    binding = way.binding
    ours = producer_binding(binding.producer, binding.variant, KernelChoice(names, binding.choice.pins), binding.chain)
    return not ours.reasons_against(x.device, sizes)


@attrs.frozen
class WantedChain:
    """What a plan says of a chain of a graph.

    Attributes:
        saved: the format in which it keeps its input for backward; None: as it is.
        form: what the plan counts on; None where it does not say.
    """

    name: OpId
    saved: Precision | None
    choice: KernelChoice
    form: ChainForm | None

    def difference_from(self, found: FoundChain) -> str:
        """What a graph has in place of what the plan counts on; empty where that is there.

        Readers are not compared: those in another graph, or in another part that is checkpointed, are not seen here, and those in
        another graph are warned of (:mod:`qsync_torch.compiling.cuts`).
        """
        if self.form is None or (self.form.activation, self.form.residual) == (found.activation, found.residual is not None):
            return ""
        return (
            f"its graph has {described(found.producer, found.form)} in place of {described(found.producer, self.form)}: train the "
            "model as it was traced, or trace and plan it as it is now"
        )


def fuse_planned(module: GraphModule, wanted: Mapping[Node, WantedChain]) -> dict[OpId, str]:
    """Put producers into a graph where a plan wants them, and nowhere else.

    Args:
        module: from ``torch.compile``; changed in place.
        wanted: by the nodes of the graph, and of parts of it that are checkpointed, that chains are named after.

    Returns:
        By the names of those that were found, why one was not fused; empty where it was.
    """
    found, refused = planned_chains(module.graph, wanted)
    reasons = {wanted[chain.head].name: "what stands between its operators has to run between them" for chain in refused}
    differing = {chain: why for chain in found if (why := wanted[chain.head].difference_from(chain))}
    reasons |= {wanted[chain.head].name: why for chain, why in differing.items()}
    fused = _fuse(
        module,
        [chain for chain in found if chain not in differing],
        lambda chain: _way_of(chain, wanted[chain.head].saved, wanted[chain.head].choice),
    )
    reasons |= {wanted[chain.head].name: why for chain, why in fused}
    for part in nodes.checkpointed_parts(module):
        reasons |= fuse_planned(part, wanted)
    return reasons


@attrs.frozen
class _Result:
    """What stands in a graph for the result of a chain: its float tensor, and the largest magnitude of that."""

    out: Node
    absmax: Node | None


@attrs.frozen
class _Way:
    """How a chain runs, and why no backend runs it so."""

    binding: ProducerBinding
    against: tuple[str, ...]


def _fuse(
    module: GraphModule,
    chains: Sequence[FoundChain],
    way_of: Callable[[FoundChain], _Way],
) -> list[tuple[FoundChain, str]]:
    """The chains, and why one was not fused; empty where it was."""
    said: list[tuple[FoundChain, str]] = []
    results: dict[Node, _Result] = {}
    for chain in chains:
        way = way_of(chain)
        against, streams = way.against, None
        if not against and (streams := _streams(module.graph, chain, way.binding)) is None:
            against = ("nothing before it in its graph says which random numbers this step takes",)
        said.append((chain, "; ".join(against)))
        if streams is None:
            _LOG.info("%s stays unfused: %s", chain, said[-1][1])
            continue
        results[chain.last] = _replace(module.graph, chain, way.binding, streams, results)
        _LOG.info("fused: %s", chain)
    if results:
        module.graph.lint()
        module.recompile()
    return said


def _way_of(chain: FoundChain, saved: Precision | None, choice: KernelChoice, rounding: Rounding = Rounding.NEAREST) -> _Way:
    """How a chain runs that keeps its input in a format (None: as it is) on a backend's kernels.

    ``rounding``: of a chain that writes no copy, and keeps its input as it is: that of a copy of its gradient.
    """
    x, out = nodes.value_of(chain.x), nodes.value_of(chain.last)
    assert x is not None
    assert out is not None
    other = nodes.value_of(chain.residual if chain.factor is None else chain.factor)
    kept = PRECISION[x.dtype] if other is None else promote(PRECISION[x.dtype], PRECISION[other.dtype])
    copy = None if chain.copy is None else chain.copy.target
    of_itself = rounding if saved is None else Rounding.STOCHASTIC
    sizes = nodes.sizes(x)
    assert sizes is not None
    if chain.producer is not Producer.BATCH_NORM:
        width = sizes[1 if _is_of_images(chain) else -1]
        sizes = math.prod(sizes) // width, width
    variant = Variant(
        compute=PRECISION[out.dtype] if copy is None else copy.precision,
        output=PRECISION[out.dtype],
        saved=saved or kept,
        grad_input=PRECISION[x.dtype],
        grad_weight=Precision.FLOAT32,
        x_granularity=Granularity.PER_TENSOR if copy is None else copy.granularity,
        rounding=of_itself if copy is None else copy.rounding,
    )
    binding = producer_binding(chain.producer, variant, choice, chain.form)
    if chain.producer is Producer.BATCH_NORM:
        # Known by their keys to backward graphs that inductor has in its cache.
        binding.backward_with(grad_sum=True)
        binding.backward_with(grad_copy=True).backward_with(grad_sum=True)
    if chain.producer is Producer.GLU:
        binding.backward_with(copy_again=True)
        binding.backward_with(grad_maxima=True)
    return _Way(binding, tuple(binding.reasons_against(x.device, sizes)))


def _streams(graph: Graph, chain: FoundChain, binding: ProducerBinding) -> tuple[Any, Node] | None:
    """Seed and offset of a chain's random numbers: those of the first operator that reads its copy; None where a graph has none.

    A node that works out an offset behind the chain is copied before it.
    """
    last = chain.last
    if chain.consumers:
        first = chain.consumers[0]
        offset = first.args[7]
        assert isinstance(offset, Node)
        if not offset < last:
            with graph.inserting_before(last):
                offset = graph.node_copy(offset)
        return first.args[4], offset
    if binding.variant.rounding is not Rounding.STOCHASTIC:
        x = nodes.value_of(chain.x)
        assert x is not None
        with graph.inserting_before(last):
            return 0, graph.call_function(torch.zeros, ((1,),), {"dtype": torch.int64, "device": x.device})
    known = next((offset for offset in nodes.offsets(graph) if offset < last), None)
    return None if known is None else (X, known)


def _replace(
    graph: Graph, chain: FoundChain, binding: ProducerBinding, streams: tuple[Any, Node], results: Mapping[Node, _Result]
) -> _Result:
    """Put a producer where the chain's last member stands.

    Args:
        graph: changed in place.
        chain: one of its chains.
        streams: seed and offset of its random numbers.
        results: of the chains that are no longer in the graph, by their last members.
    """
    last = chain.last
    with graph.inserting_before(last):
        produced = graph.call_function(CHAINS[chain.producer], _arguments(chain, results, (binding.key, *streams)))
        count = 4 if binding.writes_copy else 1
        out, *copy = (graph.call_function(operator.getitem, (produced, place)) for place in range(count))
        has_absmax = chain.producer is Producer.BATCH_NORM and chain.float_result
        absmax = graph.call_function(operator.getitem, (produced, count)) if has_absmax else None
        if (order := _other_layout(chain)) is not None:
            out = _laid_out(out, order) if chain.float_result else out
            if copy and chain.norm is not None:  # as it lies, a convolution's result does
                copy[0] = _laid_out(copy[0], order)
    for node in (produced, out, *copy):
        node.meta |= {key: last.meta[key] for key in ("stack_trace", "nn_module_stack") if key in last.meta}
    last.replace_all_uses_with(out)
    for consumer in chain.consumers:
        consumer.args = (*consumer.args, *copy)
    for member in reversed(chain.members):
        graph.erase_node(member)
    return _Result(out, absmax)


def _other_layout(chain: FoundChain) -> list[int] | None:
    """The dimensions as a chain's members would lay its result out, the slowest first; None where its operator does so too.

    What is behind it was traced with that layout, and may view it.
    """
    x, value = nodes.value_of(chain.x), nodes.value_of(chain.last)
    assert x is not None
    assert value is not None
    if chain.norm is not None and chain.residual is None:
        return None
    by_position = chain.producer is Producer.BATCH_NORM or (chain.norm is None and _is_of_images(chain))
    given = torch.channels_last if by_position and is_channels_last(x) else torch.contiguous_format
    return None if value.is_contiguous(memory_format=given) else sorted(range(value.ndim), key=value.stride, reverse=True)


def _laid_out(tensor: Node, order: list[int]) -> Node:
    graph = tensor.graph
    dense = graph.call_method("contiguous", (graph.call_method("permute", (tensor, order)),))
    return graph.call_method("permute", (dense, [order.index(dimension) for dimension in range(len(order))]))


def _arguments(chain: FoundChain, results: Mapping[Node, _Result], streams: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of the chain's operator (:mod:`qsync_torch.operators.chains`)."""
    before = results.get(chain.residual) if chain.residual is not None else None
    x = results[chain.x].out if chain.x in results else chain.x
    residual = chain.residual if before is None else before.out
    if chain.factor is not None:
        return x, results[chain.factor].out if chain.factor in results else chain.factor, *streams
    if chain.norm is None:
        return x, _is_of_images(chain), *streams
    call = chain.call
    if chain.producer is Producer.LAYER_NORM:
        return x, call["weight"], call["bias"], call["eps"], residual, *streams
    if chain.producer is Producer.RMS_NORM:
        return x, call["weight"], call["eps"], residual, *streams
    statistics = (call[name] for name in ("weight", "bias", "running_mean", "running_var", "momentum", "eps"))
    return x, *statistics, residual, None if before is None else before.absmax, *streams


def _is_of_images(chain: FoundChain) -> bool:
    """Whether rows are positions: as convolutions read a copy, or without a copy as the input lies in memory."""
    if chain.consumers:
        return not _neighbour(chain).of_rows
    x = nodes.value_of(chain.x)
    return x is not None and is_channels_last(x)
