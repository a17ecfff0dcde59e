"""The chains of a graph, as :mod:`qsync_torch.compiling.finding` finds them in compiled graphs (docs/design/fused-chains.md)."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

import attrs

from qsync_core.chains import calls
from qsync_core.ir.chain import Activation, Chain, Producer
from qsync_core.ir.dag import Operator, PrecisionDag
from qsync_core.ir.op_id import OpId


def chains_of(dag: PrecisionDag) -> tuple[Chain, ...]:
    """Every chain of a graph, by its last member in the order of execution; no operator is in two.

    They follow from the graph alone.  A chain may be a single operator: its copy, and what it keeps for backward, are a plan's
    choice too.  In none is what the kernels do not compute (docs/design/fused-chains.md): a batch norm of other than four
    dimensions or in evaluation mode, a norm over several dimensions, a weight that is computed (but for an RMS norm that is
    written out), an addition that broadcasts or scales, a function other than ReLU, GELU and SiLU.
    """
    return found_in(dag).chains


@attrs.frozen
class Found:
    """The chains of a graph, and why what looks like one is none, by the operator whose result it would be."""

    chains: tuple[Chain, ...]
    reasons: Mapping[OpId, str]


def found_in(dag: PrecisionDag) -> Found:
    """The chains of a graph with the reasons against others; found once."""
    return dag.once(_find)


def _find(dag: PrecisionDag) -> Found:
    finder = _Finder(dag)
    found: list[Chain] = []
    for operator in dag.operators:
        if calls.is_batch_norm(operator):
            found.append(finder.batch_norm(operator))
        elif calls.is_layer_norm(operator):
            found.append(finder.row_norm(Producer.LAYER_NORM, operator, [operator], operator.inputs[0]))
    for operator in dag.operators:
        if (rms_norm := finder.rms_norm(operator)) is not None:
            found.append(rms_norm)
    taken = {member for chain in found for member in chain.members}
    for operator in dag.operators:
        if (unit := finder.gated_unit(operator, taken)) is not None:
            found.append(unit)
            taken.update(unit.members)
    for operator in dag.operators:
        activation = calls.activation_of(operator)
        if activation is not Activation.NONE and operator.op_id not in taken:
            found.append(finder.chain(Producer.ACTIVATION, operator, [operator], operator.inputs[0], activation=activation))
    return Found(tuple(sorted(found, key=lambda chain: dag.index[chain.last])), finder.reasons)


class _Finder:
    """Follows the operators around a norm or a function."""

    def __init__(self, dag: PrecisionDag) -> None:
        self._dag = dag
        self._added: set[OpId] = set()
        self.reasons: dict[OpId, str] = {}

    def batch_norm(self, norm: Operator) -> Chain:
        """The chain around a batch norm: of two that are added the one that runs later takes the other's result as its residual."""
        members, residual, activation = [norm], None, Activation.NONE
        addition = self._only_reader(norm)
        if addition is not None and addition.op_id not in self._added and (other := _other_summand(addition, norm.op_id)):
            rival = self._dag[other]
            later = self._dag.index[other] > self._dag.index[norm.op_id]
            if not (later and calls.is_batch_norm(rival) and self._only_reader(rival) is addition):
                members, residual = [norm, addition], other
                self._added.add(addition.op_id)
        after = self._only_reader(members[-1])
        if after is not None and calls.activation_of(after) is Activation.RELU:
            members, activation = [*members, after], Activation.RELU
        return self.chain(Producer.BATCH_NORM, norm, members, norm.inputs[0], residual, activation)

    def row_norm(self, producer: Producer, norm: Operator, members: list[Operator], x: OpId, weight: OpId | None = None) -> Chain:
        """The chain around a norm of rows, and an addition before it: of two summands the one that was there first is the residual.

        Args:
            producer: of which it is.
            norm: it is named after; ``members``: that read x, and what is behind them.
            x: what they read; ``weight``: what they multiply with, where that is computed.
        """
        addition, residual = self._dag[x], None
        summands = None if addition.op_id in self._added or addition.in_place else calls.summands_of(addition)
        if summands is not None and self._is_read_by(addition, members):
            self._added.add(addition.op_id)
            residual, x = sorted(summands, key=self._dag.index.__getitem__)
            members = [addition, *members]
        return self.chain(producer, norm, members, x, residual, weight=weight)

    def rms_norm(self, norm: Operator) -> Chain | None:
        """The chain around an RMS norm: PyTorch's function, or x·rsqrt(mean(x²) + eps) written out, perhaps times a weight."""
        if norm.kind == "rms_norm":
            if reason := calls.reason_against_rms_norm(norm, self._dag.base):
                self.reasons[norm.op_id] = reason
                return None
            return self.row_norm(Producer.RMS_NORM, norm, [norm], norm.inputs[0])
        written = self._written_out(norm) if norm.kind == "rsqrt" and calls.call_of(norm) and not norm.in_place else None
        if written is None:
            return None
        weighted = self._weighted(written[-1])
        if weighted is None:
            return self.row_norm(Producer.RMS_NORM, norm, written, written[0].inputs[0])
        product, weight = weighted
        return self.row_norm(Producer.RMS_NORM, norm, [*written, product], written[0].inputs[0], weight)

    def _written_out(self, root: Operator) -> list[Operator] | None:
        """Square, mean, addition, root and product of a norm without its weight; None where they are something else."""
        dag = self._dag
        inside = dag[root.inputs[0]] if root.inputs else None
        total = dag[inside.inputs[0]] if inside is not None and calls.number_added_by(inside) is not None else None
        squares = dag[total.inputs[0]] if total is not None and calls.is_mean_of_rows(total) else None
        position = None if squares is None else calls.squared_by(squares)
        if inside is None or total is None or squares is None or position is None:
            return None
        product = self._only_reader(root)
        factors = None if product is None else calls.factors_of(product)
        if product is None or factors is None or product.output_shape != squares.output_shape:
            return None
        for one, other in (factors, factors[::-1]):
            if one.position is None or other.position is None or product.inputs[other.position] != root.op_id:
                continue
            same = squares.inputs[position] == product.inputs[one.position]
            same = same and squares.view(position) == product.view(one.position)
            members = [squares, total, inside, root, product]
            if same and all(self._only_reader(member) is after for member, after in itertools.pairwise(members)):
                return members
            self.reasons[product.op_id] = "something else reads a part of the norm, which is written out"
        return None

    def _weighted(self, normalized: Operator) -> tuple[Operator, OpId | None] | None:
        """The product of a norm with its weight, and what computes that; None where it has none."""
        product = self._only_reader(normalized)
        factors = None if product is None else calls.factors_of(product)
        if product is None or factors is None or product.output_shape != normalized.output_shape:
            return None
        width = normalized.output_shape[-1]
        for one, weight in (factors, factors[::-1]):
            if one.position is None or product.inputs[one.position] != normalized.op_id:
                continue
            if weight.position is None:
                if calls.is_plain(weight.argument) and weight.argument["shape"] == [width]:
                    return product, None
            elif product.input_shapes[weight.position] == (width,):
                return product, product.inputs[weight.position]
        return None

    def gated_unit(self, product: Operator, taken: Collection[OpId]) -> Chain | None:
        """A function that one product alone reads, times another tensor; None where it is something else."""
        factors = calls.factors_of(product)
        if factors is None or len(product.inputs) != 2 or calls.call_of(product) is None:
            return None
        if any(shape != product.output_shape for shape in product.input_shapes):
            return None
        for one, other in (factors, factors[::-1]):
            if one.position is None or other.position is None:
                continue
            function, factor = self._dag[product.inputs[one.position]], product.inputs[other.position]
            activation = calls.activation_of(function)
            if activation is Activation.NONE or function.op_id in taken or function.op_id == factor:
                continue
            if function.in_place or self._only_reader(function) is not product:
                self.reasons[product.op_id] = f"something else reads its {activation}, or that is written over its operand"
                continue
            members = [function, product]
            return self.chain(Producer.GLU, function, members, function.inputs[0], activation=activation, factor=factor)
        return None

    def chain(
        self,
        producer: Producer,
        named: Operator,
        members: Sequence[Operator],
        x: OpId,
        residual: OpId | None = None,
        activation: Activation = Activation.NONE,
        factor: OpId | None = None,
        weight: OpId | None = None,
    ) -> Chain:
        """A chain with its readers."""
        dag, last = self._dag, members[-1]
        readers = [dag.operators[position] for position in dict.fromkeys(dag.consumers[dag.index[last.op_id]])]
        whole = (o for o in readers if o.is_adjustable and o.input_shapes[0] == last.output_shape)
        images = len(last.output_shape) == 4 and producer is not Producer.GLU
        served = tuple(o.op_id for o in whole if o.row.of_rows or images)  # copies are of rows, or of 2-d images
        names, read_by = tuple(member.op_id for member in members), tuple(o.op_id for o in readers)
        kept = (self._as_it_lies(members, source) for source in (x, factor) if source is not None)
        operands = tuple(source for source in kept if source is not None)
        return Chain(producer, named.op_id, names, x, residual, activation, read_by, served, operands, factor, weight)

    def _as_it_lies(self, members: Sequence[Operator], source: OpId) -> OpId | None:
        """An operand, where members read it laid out as their kernels do; images may lie otherwise, and be read so."""
        reads = [(member, i) for member in members for i, read in enumerate(member.inputs) if read == source]
        images = len(members[-1].output_shape) == 4 and members[0].kind in ("batch_norm", "relu", "gelu", "silu")
        return source if images or all(calls.is_dense(member, i) for member, i in reads) else None

    def _only_reader(self, operator: Operator) -> Operator | None:
        """What alone reads an operator's whole result, once."""
        dag = self._dag
        readers = dag.consumers[dag.index[operator.op_id]]
        if len(readers) != 1:
            return None
        reader = dag.operators[readers[0]]
        return reader if reader.input_shapes[reader.inputs.index(operator.op_id)] == operator.output_shape else None

    def _is_read_by(self, operator: Operator, members: Collection[Operator]) -> bool:
        """Whether these operators alone read the whole of an operator's result."""
        dag, names = self._dag, {member.op_id for member in members}
        for reader in (dag.operators[position] for position in dag.consumers[dag.index[operator.op_id]]):
            reads = (shape for source, shape in zip(reader.inputs, reader.input_shapes, strict=True) if source == operator.op_id)
            if reader.op_id not in names or any(shape != operator.output_shape for shape in reads):
                return False
        return True


def _other_summand(addition: Operator, summand: OpId) -> OpId | None:
    """What is added to a summand; None where it is no plain addition of two tensors of one shape."""
    summands = calls.summands_of(addition)
    return None if summands is None else summands[summands[0] == summand]
