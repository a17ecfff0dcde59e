"""Why the activation of an operator that a plan may run in 8 bit is quantized by itself: no chain of the graph writes its copy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import attrs

from qsync_core.chains.finding import found_in
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.op_id import OpId

_NORMS = {
    "batch_norm": "it is in evaluation mode, on a tensor of other than four dimensions, or its weight is computed",
    "layer_norm": "it normalizes several dimensions, or its weight is computed",
}
_NO_PRODUCER = "no producer computes it"


@attrs.frozen
class Unchained:
    """An activation that no chain delivers, to the operators that read it.

    Attributes:
        what: made it, the kind of an operator or a function; ``readers``: last parts of their names.
        why: no chain writes its copy.
    """

    what: str
    readers: tuple[str, ...]
    why: str

    def __str__(self) -> str:
        """Such as ``scaled_dot_product_attention before o_proj: no producer computes it``."""
        return f"{self.what} before {', '.join(self.readers)}: {self.why}"


def unchained(dag: PrecisionDag) -> Iterator[Unchained]:
    """Every activation that an adjustable operator reads and no chain writes an 8-bit copy of; inputs of the model are none."""
    found = found_in(dag)
    served = {reader for chain in found.chains for reader in chain.product_readers}
    ends = {chain.last for chain in found.chains}
    readers: dict[OpId, list[str]] = {}
    for operator in dag.adjustable:
        if operator.op_id not in served:
            readers.setdefault(operator.inputs[0], []).append(operator.op_id.fqn.rpartition(".")[2])
    for name in sorted(readers, key=dag.index.__getitem__):
        source = dag[name]
        if source.kind != "input":
            why = "a view of it is read" if name in ends else found.reasons.get(name) or _NORMS.get(source.kind, _NO_PRODUCER)
            yield Unchained(source.kind, tuple(dict.fromkeys(readers[name])), why)


def unchained_line(dag: PrecisionDag) -> str:
    """All of them in a line, each kind with how often it is there; empty where there is none."""
    counts = Counter(map(str, unchained(dag)))
    return "; ".join(f"{count} × {what}" for what, count in counts.items())
