"""Which operators of a plan deliver 16 bits: decided once, from the graph, so that a step needs no promotion at run time.

An operator of a plan delivers 16 bits only where every reader of its result takes them as PyTorch runs it (the table
:mod:`qsync_core.ir.functions`), and so on behind readers that pass the format on; else it delivers float32.  Which functions read a
result is a fact of the graph.  Where some of them want one format in all their operands, the decision also depends on what the plan
picks for the operators that those come from: they deliver 16 bits together or not at all.

Source: docs/design/precision-semantics.md#in-which-format-an-operator-delivers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from qsync_core.ir.dag import OpClass, Operator, PrecisionDag
from qsync_core.ir.functions import Takes, function_of
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant


@attrs.frozen
class OutputFormats:
    """What a graph says of the formats in which its operators may deliver.

    Attributes:
        together: by the FQN of every operator that may deliver 16 bits at all, the operators that then have to deliver the same
            format, itself among them, sorted.  Operators that are not named deliver float32.
        decides: False in a job under AMP, where outputs have the format of autocast in any case.
    """

    together: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)
    decides: bool = True

    @classmethod
    def of(cls, dag: PrecisionDag) -> OutputFormats:
        """Read a graph."""
        return dag.once(_formats_of)

    def delivered(self, name: str, outputs: Mapping[str, Precision]) -> Precision:
        """The format in which an operator delivers.

        Args:
            name: its FQN.
            outputs: by FQN what the variants of a plan say, of this operator and of those that it goes together with.
        """
        wanted = outputs[name]
        if not self.decides or wanted is Precision.FLOAT32:
            return wanted
        together = self.together.get(name)
        if together is None or any(outputs.get(other) is not wanted for other in together):
            return Precision.FLOAT32
        return wanted

    def decided(self, variants: Mapping[OpId, Variant]) -> dict[OpId, Variant]:
        """The variants of a whole plan with the output that each operator has."""
        outputs = {op_id.fqn: variant.output for op_id, variant in variants.items()}
        delivered = {op_id: self.delivered(op_id.fqn, outputs) for op_id in variants}
        return {
            op_id: variant if variant.output is delivered[op_id] else attrs.evolve(variant, output=delivered[op_id])
            for op_id, variant in variants.items()
        }

    def first_wrong(self, variants: Mapping[OpId, Variant]) -> tuple[OpId, str] | None:
        """The first operator of a plan that delivers 16 bits and must not, and the reason; None where there is none."""
        outputs = {op_id.fqn: variant.output for op_id, variant in variants.items()}
        for op_id, variant in variants.items():
            if self.delivered(op_id.fqn, outputs) is variant.output:
                continue
            together = self.together.get(op_id.fqn, ())
            other = next((name for name in together if outputs.get(name) is not variant.output), None)
            if other is None:
                return op_id, "what reads it takes float32"
            return op_id, f"it is read beside the result of {other}, which delivers {outputs.get(other, 'nothing')}"
        return None


@attrs.frozen
class _Value:
    """The result of an operator.

    Attributes:
        is_wide: whether it is float32 in every plan.
        roots: else the operators (FQNs) that decide its format.
        is_constant: whether no operator of the plan and no parameter is behind it.
        is_mask: whether it is a choice between constants.
        unmasked: of a sum with a mask, the operators that would decide its format without that.
        perhaps: the operators that decide the format of what is computed from a sum with a mask, in steps that leave the mask out.
    """

    is_wide: bool
    roots: frozenset[str] = frozenset()
    is_constant: bool = False
    is_mask: bool = False
    unmasked: frozenset[str] = frozenset()
    perhaps: frozenset[str] = frozenset()


def _formats_of(dag: PrecisionDag) -> OutputFormats:
    if dag.base is not Precision.FLOAT32:
        return OutputFormats(decides=False)
    return OutputFormats(_together(dag))


def _together(dag: PrecisionDag) -> dict[str, tuple[str, ...]]:
    values: dict[OpId, _Value] = {}
    wide: set[str] = set()
    needs: dict[str, set[str]] = {}
    read: set[OpId] = set()
    for operator in dag.operators:
        read.update(operator.inputs)
        if operator.is_adjustable:
            name = operator.op_id.fqn
            needs.setdefault(name, {name})
            values[operator.op_id] = _Value(False, frozenset([name]))
            continue
        inputs = [values[producer] for producer in operator.inputs]
        values[operator.op_id] = _result(operator, inputs)
        _read(operator, inputs, dag.calls_are_known, wide, needs)
    for operator in dag.operators:  # what the script or a function that is no operator reads
        if operator.also_read_by or operator.op_id not in read:
            wide |= values[operator.op_id].roots
    closed = _closed(needs)
    return {name: tuple(sorted(names)) for name, names in closed.items() if not names & wide}


def _takes(operator: Operator) -> Takes:
    """What a call takes: functions beside float32 parameters only where the table says so."""
    takes = function_of(operator.kind).takes
    if operator.op_class is OpClass.ADJUSTABLE:  # one that apply_ cannot address runs with float32 parameters
        return Takes.FLOAT32
    if operator.op_class is OpClass.FIXED and takes is not Takes.MIXED:
        return Takes.FLOAT32
    return Takes.FLOAT32 if operator.parameters and takes is Takes.ONE_FORMAT else takes


def _result(operator: Operator, inputs: list[_Value]) -> _Value:
    roots = frozenset[str]().union(*(value.roots for value in inputs))
    is_wide = operator.op_class is OpClass.FIXED or not inputs or _takes(operator) is Takes.FLOAT32
    if not is_wide and not any(value.is_wide for value in inputs):
        return _Value(False, roots)
    is_constant = not operator.parameters and all(value.is_constant for value in inputs)
    is_mask = is_constant and (operator.kind == "where" or (len(inputs) == 1 and inputs[0].is_mask))
    if operator.kind == "add" and all(value.is_mask for value in inputs if value.is_wide):
        return _Value(True, is_constant=is_constant, unmasked=roots)
    perhaps = frozenset[str]().union(*(value.perhaps for value in inputs))
    if operator.kind == "softmax":  # transformers masks scores where it is traced, and not in steps in which nothing is hidden
        perhaps = perhaps.union(*(value.unmasked for value in inputs))
    return _Value(True, is_constant=is_constant, is_mask=is_mask, perhaps=frozenset() if is_wide else perhaps)


def _read(operator: Operator, inputs: list[_Value], calls_are_known: bool, wide: set[str], needs: dict[str, set[str]]) -> None:
    """Note what a reader asks of the operators whose results it reads."""
    takes, fixed = _takes(operator), operator.op_class is OpClass.FIXED
    in_place = operator.in_place or not calls_are_known
    roots = frozenset[str]().union(*(value.roots for value in inputs))
    if takes is not Takes.MIXED and (len(inputs) > 1 or takes is Takes.FLOAT32):
        wide |= frozenset().union(*(value.perhaps for value in inputs))
    if takes is Takes.FLOAT32:
        wide |= roots
    elif takes is Takes.MIXED and not in_place:
        return  # PyTorch promotes
    elif takes is Takes.MIXED and not fixed and not operator.parameters:
        # The result has the format of the first operand, which must be as wide as the others.
        first, *others = inputs
        if first.is_wide:
            return
        if any(value.is_wide for value in others):
            wide |= first.roots
        for root in first.roots:
            needs[root].update(*(value.roots for value in others))
    elif fixed or any(value.is_wide for value in inputs):
        wide |= roots
    else:  # each operand in the format of all others
        for value in inputs:
            elsewhere = [other.roots for other in inputs if other is not value]
            for root in value.roots:
                needs[root].update(*elsewhere)


def _closed(needs: Mapping[str, Iterable[str]]) -> dict[str, frozenset[str]]:
    """What each goes together with, by way of others too."""
    closed: dict[str, frozenset[str]] = {}
    for name in needs:
        found, waiting = {name}, [name]
        while waiting:
            for other in needs[waiting.pop()]:
                if other not in found:
                    found.add(other)
                    waiting.append(other)
        closed[name] = frozenset(found)
    return closed
