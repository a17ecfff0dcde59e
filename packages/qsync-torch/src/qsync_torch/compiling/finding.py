"""Chains in a graph of ``torch.compile``, as :func:`qsync_core.chains.finding.chains_of` finds them in a trace.

The graph is as the model was written: in-place functions are still in place, and views share memory.  A chain is taken only where
running all of it at the place of its last member changes nothing: its members but the last are read by the next one alone, nothing
between writes to what it reads, and nothing writes to its result.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch.fx import Graph, Node

from qsync_core.ir.chain import Activation, ChainForm, Producer
from qsync_core.ir.precision import Precision
from qsync_core.ir.semantics import readable_copy
from qsync_torch.compiling import graph_nodes as nodes
from qsync_torch.kernels.binding import BOUND, OperatorBinding, Quantization
from qsync_torch.operators.products import LOWERED
from qsync_torch.torch_internals import version_of


@attrs.frozen
class Parts:
    """What a chain could be, before it is known who reads it.

    Attributes:
        producer: what it is built around.
        head: the node that it is named after (:attr:`qsync_core.ir.chain.Chain.name`).
        members: in the order of the graph.
        x, residual, factor: what it reads; ``factor``: what a gated unit multiplies with.
        activation: applied last, but for the product of a gated unit.
        norm: the node whose result is the norm's; None where there is no norm.
    """

    producer: Producer
    head: Node
    members: tuple[Node, ...]
    x: Node
    residual: Node | None = None
    activation: Activation = Activation.NONE
    factor: Node | None = None
    norm: Node | None = None

    @property
    def last(self) -> Node:
        """The member that delivers the result."""
        return self.members[-1]


@attrs.frozen
class FoundChain(Parts):
    """A chain of a graph.

    Attributes:
        copy: how the copy is quantized that operators of a plan read; None where none does.
        consumers: the operators that read the copy, in the order of the graph.
        float_result: something else reads the result.
    """

    copy: Quantization | None = None
    consumers: tuple[Node, ...] = ()
    float_result: bool = True

    @property
    def call(self) -> dict[str, Any]:
        """The arguments of the norm, by their names."""
        if self.producer is Producer.RMS_NORM:
            found = nodes.rms_norm_of(self.norm)
            assert found is not None
            return {"weight": found.weight, "bias": None, "eps": eps_of(found)}
        call = (nodes.batch_norm_of if self.producer is Producer.BATCH_NORM else nodes.layer_norm_of)(self.norm)
        assert call is not None
        return call

    @property
    def form(self) -> ChainForm:
        """What its kernels are asked for."""
        return ChainForm(self.activation, self.residual is not None, self.float_result)

    def __str__(self) -> str:
        """Such as ``batch_norm + residual + relu (relu_3), 2 readers, float``."""
        what = described(self.producer, self.form)
        return f"{what} ({self.last.name}), {len(self.consumers)} readers" + (", float" if self.float_result else "")


def eps_of(norm: nodes.RmsNorm) -> float | None:
    """What is added to the mean square; None where versions of PyTorch differ in what they take by themselves (of 16 bits)."""
    if norm.eps is None:
        value = nodes.value_of(norm.x)
        return torch.finfo(torch.float32).eps if value is not None and value.dtype is torch.float32 else None
    return float(norm.eps) if isinstance(norm.eps, (int, float)) else None


def described(producer: Producer, form: ChainForm) -> str:
    """What is fused, such as ``batch_norm + residual + relu``."""
    parts = [] if producer is Producer.ACTIVATION else [str(producer)]
    parts += ["residual"] if form.residual else []
    parts += [] if form.activation is Activation.NONE else [str(form.activation)]
    return " + ".join(parts)


def find_chains(graph: Graph) -> list[FoundChain]:
    """The chains of a graph that write a copy, by their last members in the order of the graph; no node is in two."""
    found: list[FoundChain] = []
    order = {node: place for place, node in enumerate(graph.nodes)}
    taken: set[Node] = set()
    for last in graph.nodes:
        if not any(_reads(reader, last) for reader in last.users):
            continue
        for shape in _shapes_ending_in(last, order):
            chain = with_readers(shape, order)
            if chain.copy is not None and taken.isdisjoint(chain.members) and runs_as_one(chain, order):
                taken.update(chain.members)
                found.append(chain)
                break
    return found


def planned_chains(graph: Graph, heads: Collection[Node]) -> tuple[list[FoundChain], list[FoundChain]]:
    """The chains that are named after some nodes, whatever reads them, by their last members in the order of the graph.

    Returns:
        Those that can run as one, and those that cannot.
    """
    order = {node: place for place, node in enumerate(graph.nodes)}
    found: list[FoundChain] = []
    refused: list[FoundChain] = []
    taken: set[Node] = set()
    decided: set[Node] = set()
    for last in reversed(list(graph.nodes)):  # so that the longest chain of a name comes first
        for shape in _shapes_ending_in(last, order):
            if shape.head not in heads or shape.head in decided:
                continue
            decided.add(shape.head)
            chain = with_readers(shape, order)
            fits = taken.isdisjoint(chain.members) and runs_as_one(chain, order)
            (found if fits else refused).append(chain)
            taken.update(chain.members)
            break
    return found[::-1], refused[::-1]


def norms_behind_products(graph: Graph, found: Sequence[FoundChain]) -> list[FoundChain]:
    """Chains of batch norms that write no copy, of the results of 8-bit operators.

    Args:
        graph: of which these are.
        found: its other chains (:func:`find_chains`), whose members are left alone.
    """
    taken = {member for chain in found for member in chain.members}
    heads = [
        node
        for node in graph.nodes
        if (call := nodes.batch_norm_of(node)) is not None and node not in taken and nodes.is_quantized(call["input"])
    ]
    return [chain for chain in planned_chains(graph, heads)[0] if chain.copy is None and taken.isdisjoint(chain.members)]


def last_parts(last: Node, graph: Graph) -> Parts | None:
    """The longest chain that a node may be the last member of, whoever reads it."""
    return next(_shapes_ending_in(last, {node: place for place, node in enumerate(graph.nodes)}), None)


def readers_of(last: Node, producer: Producer) -> tuple[Node, ...]:
    """The operators of a plan that would read the copy of a producer whose result a node is."""
    return tuple(reader for reader in last.users if _reads(reader, last) and _wanted(reader, producer) is not None)


def _reads(node: Node, source: Node) -> bool:
    """Whether it is an operator of a plan that reads a node as its activation, and makes its copy itself."""
    if node.target is not LOWERED or len(node.args) != 8 or node.kwargs:
        return False
    return node.args[0] is source and source not in node.args[1:]


def _shapes_ending_in(last: Node, order: dict[Node, int]) -> Iterator[Parts]:
    """What a node may be the last member of, the longest chain first."""
    value = nodes.float_of(last)
    if value is None or (sizes := nodes.sizes(value)) is None or 0 in sizes:
        return
    activation, behind = Activation.NONE, last
    if (function := nodes.activation_of(last)) is not None:
        activation, behind = function
    tail = () if behind is last else (last,)
    if activation in (Activation.NONE, Activation.RELU) and (behind is last or _only_reader(behind)):
        shape = _batch_norm(behind, tail, activation, order)
        if shape is not None:
            yield shape
    if activation is Activation.NONE:
        yield from _layer_norms(last, order)
        yield from _rms_norms(last, order)
        yield from _gated_units(last)
    elif nodes.float_of(behind) is not None and (not nodes.is_in_place(last) or _is_its_own(behind, order[last], order)):
        yield Parts(Producer.ACTIVATION, last, (last,), behind, activation=activation)


def _is_its_own(node: Node, place: int, order: dict[Node, int]) -> bool:
    """Whether a tensor may be written to at a place of the graph without another reader seeing it."""
    if node.op == "placeholder" or node.op == "get_attr" or not _only_reader(node):
        return False
    memory = nodes.storage_of(node)
    return not any(nodes.storage_of(other) == memory for other in order if other is not node and order[other] < place)


def _only_reader(node: Node) -> bool:
    """Whether one node reads it, once."""
    if len(node.users) != 1:
        return False
    reader = next(iter(node.users))
    return sum(argument is node for argument in (*reader.args, *reader.kwargs.values())) == 1


def _batch_norm(node: Node, tail: tuple[Node, ...], activation: Activation, order: dict[Node, int]) -> Parts | None:
    """A batch norm, or the sum of one with a residual; of two batch norms the one that runs later is the chain's."""
    if (call := nodes.batch_norm_of(node)) is not None:
        x = call["input"]
        return Parts(Producer.BATCH_NORM, node, (node, *tail), x, None, activation, norm=node) if _is_image_norm(node) else None
    summands = nodes.summands_of(node)
    if summands is None or not _same(node, *summands):
        return None
    norms = [norm for norm in summands if _is_image_norm(norm) and _only_reader(norm)]
    if not norms or (nodes.is_in_place(node) and summands[0] not in norms):  # a sum in place may change what is the chain's alone
        return None
    norm = max(norms, key=order.__getitem__)
    residual = summands[summands[0] is norm]
    call = nodes.batch_norm_of(norm)
    assert call is not None
    return Parts(Producer.BATCH_NORM, norm, (norm, node, *tail), call["input"], residual, activation, norm=norm)


def _layer_norms(node: Node, order: dict[Node, int]) -> Iterator[Parts]:
    """A layer norm; where it alone reads a sum, with that: the summand that was there first is the residual."""
    call = nodes.layer_norm_of(node)
    if call is None or not _are_vectors(call["weight"], call["bias"]):
        return
    x = call["input"]
    summands = nodes.summands_of(x)
    if summands is not None and _only_reader(x) and not nodes.is_in_place(x) and _same(x, *summands):
        residual, added = sorted(summands, key=order.__getitem__)
        yield Parts(Producer.LAYER_NORM, node, (x, node), added, residual, norm=node)
    if nodes.float_of(x) is not None:
        yield Parts(Producer.LAYER_NORM, node, (node,), x, norm=node)


def _rms_norms(node: Node, order: dict[Node, int]) -> Iterator[Parts]:
    """An RMS norm; where it alone reads a sum, with that: the summand that was there first is the residual."""
    norm = nodes.rms_norm_of(node)
    if norm is None or reason_against_norm(norm) or not _same(node, norm.x):
        return
    members, summands = tuple(sorted(norm.members, key=order.__getitem__)), nodes.summands_of(norm.x)
    if summands is not None and set(norm.x.users) <= set(members) and not nodes.is_in_place(norm.x) and _same(norm.x, *summands):
        residual, added = sorted(summands, key=order.__getitem__)
        yield Parts(Producer.RMS_NORM, norm.head, (norm.x, *members), added, residual, norm=node)
    yield Parts(Producer.RMS_NORM, norm.head, members, norm.x, norm=node)


def reason_against_norm(norm: nodes.RmsNorm) -> str:
    """Why no producer computes an RMS norm; empty where one does."""
    value, weight = nodes.float_of(norm.x), nodes.value_of(norm.weight)
    if value is None:
        return "it runs on a tensor that is neither in float32 nor in 16 bits"
    if eps_of(norm) is None:
        return "without eps, what is added to 16-bit numbers is up to PyTorch's version: give eps"
    if norm.weight is not None and (weight is None or not _are_vectors(norm.weight) or weight.shape[0] != value.shape[-1]):
        return "its weight is not a float32 vector of the length of its rows"
    return ""


def _gated_units(node: Node) -> Iterator[Parts]:
    """A function that one product alone reads, times another tensor."""
    for function, factor in (pair for factors in [nodes.factors_of(node)] if factors for pair in (factors, factors[::-1])):
        found = nodes.activation_of(function)
        if found is None or nodes.is_in_place(function) or not _only_reader(function) or function is factor:
            continue
        activation, x = found
        if _same(node, x, function, factor):
            yield Parts(Producer.GLU, function, (function, node), x, activation=activation, factor=factor)


def _is_image_norm(node: Node) -> bool:
    """Whether it is a batch norm of (B, C, H, W) whose parameters and statistics are float32 vectors."""
    call = nodes.batch_norm_of(node)
    x = None if call is None else nodes.float_of(call["input"])
    if call is None or x is None or x.ndim != 4 or not all(isinstance(call[name], (int, float)) for name in ("momentum", "eps")):
        return False
    sizes = nodes.sizes(x)
    if sizes is None or sizes[0] * sizes[2] * sizes[3] < 2:  # which a batch norm refuses
        return False
    has_statistics = (call["running_mean"] is None) == (call["running_var"] is None)
    return has_statistics and _are_vectors(*(call[name] for name in ("weight", "bias", "running_mean", "running_var")))


def _are_vectors(*vectors: object) -> bool:
    values = [nodes.value_of(vector) for vector in vectors if vector is not None]
    return all(value is not None and value.dtype is torch.float32 and value.ndim == 1 for value in values)


def _same(node: Node, *summands: Node) -> bool:
    """Whether a sum broadcasts nothing."""
    whole = nodes.float_of(node)
    parts = [nodes.float_of(summand) for summand in summands]
    return whole is not None and all(part is not None and nodes.same_shape(part, whole) for part in parts)


def with_readers(shape: Parts, order: dict[Node, int]) -> FoundChain:
    """The chain with the operators that take its copy: all that want the one that the first of them wants."""
    last = shape.members[-1]
    readers = sorted(last.users, key=order.__getitem__)
    wanted = {reader: _wanted(reader, shape.producer) for reader in readers if _reads(reader, last)}
    copy = next((quantization for quantization in wanted.values() if quantization is not None), None)
    kind = None if copy is None else copy.kind
    consumers = tuple(reader for reader in readers if (found := wanted.get(reader)) is not None and found.kind == kind)
    parts = {field.name: getattr(shape, field.name) for field in attrs.fields(Parts)}
    return FoundChain(**parts, copy=copy, consumers=consumers, float_result=copy is None or len(consumers) < len(readers))


def _wanted(consumer: Node, producer: Producer) -> Quantization | None:
    """The copy that an operator reads, if a producer can write it."""
    if reason_against_copy(consumer, producer):
        return None
    binding = BOUND[str(consumer.args[3])]
    assert isinstance(binding, OperatorBinding)
    return binding.x


def reason_against_copy(consumer: Node, producer: Producer) -> str:
    """Why a producer cannot write the copy that an operator of a plan reads; empty where it can."""
    binding = BOUND[str(consumer.args[3])]
    assert isinstance(binding, OperatorBinding)
    value, seeds = nodes.value_of(consumer.args[0]), consumer.args[4:7]
    if value is None or not all(isinstance(seed, int) for seed in seeds):
        return "its graph does not say which random numbers the reader takes"
    if not binding.of_rows and (value.ndim != 4 or producer is Producer.GLU):
        return "the reader convolves what no such producer writes"
    if binding.of_rows and producer is Producer.BATCH_NORM:
        return "a batch norm writes images, and the reader takes rows"
    if of_its_own := reason_for_own_copy(consumer):
        return of_its_own
    # An 8-bit product for the weight's gradient reads the copy transposed, which its operator makes of the copy.
    if readable_copy(producer, attrs.evolve(binding.variant, grad_weight=Precision.FLOAT32)) is None:
        return f"no producer writes the copy that {binding.variant.label} reads"
    return ""


def reason_for_own_copy(consumer: Node) -> str:
    """Why an operator of a plan reads a copy that no producer writes; empty where that is up to the producer."""
    binding = BOUND[str(consumer.args[3])]
    assert isinstance(binding, OperatorBinding)
    return "the reader's channels have factors, so it makes a copy of its own" if binding.factored else ""


def runs_as_one(chain: FoundChain, order: dict[Node, int]) -> bool:
    """Whether nothing notices that all members run where the last one stands, and consumers read what is written then."""
    last, value = chain.last, nodes.value_of(chain.last)
    # Writing to a tensor raises its version, also through views and inside operators that say nothing of it.
    if value is None or value.is_inference():
        return False
    if version_of(value) != _trailing_writes(chain.members) and not _is_summed_in_place(chain):
        return False
    span = _between(chain.members[0], max((last, *chain.consumers), key=order.__getitem__))
    if any(nodes.is_switch(node) for node in span):
        return False
    read = {nodes.storage_of(node) for node in (chain.x, chain.residual, chain.factor) if node is not None}
    statistics: set[int | None] = set()
    if chain.norm is not None:
        read |= {nodes.storage_of(chain.call[name]) for name in ("weight", "bias")}
        statistics = {nodes.storage_of(chain.call.get(name)) for name in ("running_mean", "running_var")}
    read, statistics = read - {None}, statistics - {None}
    for node in _between(chain.members[0], last):
        if node in chain.members:
            continue
        if any(nodes.storage_of(argument) in read for argument in nodes.changed_by(node)):
            return False
        if any(nodes.storage_of(argument) in statistics for argument in node.all_input_nodes):
            return False
    return all(_streams_reach(chain, consumer, order) for consumer in chain.consumers[:1])


def _is_summed_in_place(chain: FoundChain) -> bool:
    """Whether a sum alone reads the result, and is written over it: the residual of a batch norm that runs later is."""
    last = chain.last
    if chain.consumers or not _only_reader(last):
        return False
    reader = next(iter(last.users))
    summands = nodes.summands_of(reader)
    return summands is not None and summands[0] is last and nodes.is_in_place(reader)


def _trailing_writes(members: Sequence[Node]) -> int:
    """How often the last members have written to the result's memory."""
    count = 0
    for member in reversed(members):
        if not nodes.is_in_place(member):
            break
        count += 1
    return count


def _between(first: Node, last: Node) -> Iterator[Node]:
    """The nodes after one node and before a later one; none where they are the same."""
    node = first
    while node is not last and (node := node.next) is not last:
        yield node


def _streams_reach(chain: FoundChain, consumer: Node, order: dict[Node, int]) -> bool:
    """Whether the offset of the consumer's random numbers can be had where the chain runs."""
    offset = consumer.args[7]
    assert isinstance(offset, Node)
    if order[offset] < order[chain.last]:
        return True
    sources = {nodes.storage_of(node) for node in offset.all_input_nodes}
    early = all(order[node] < order[chain.last] for node in offset.all_input_nodes)
    changed = (argument for node in _between(chain.last, offset) for argument in nodes.changed_by(node))
    return early and not any(nodes.storage_of(argument) in sources for argument in changed)
