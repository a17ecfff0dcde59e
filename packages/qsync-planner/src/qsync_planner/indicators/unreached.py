"""Operators that no gradient came back to: what their rounding does to others' gradients is not known, and may be much.

An operator under ``no_grad``, or whose output is detached, still feeds what comes after it.
"""

from __future__ import annotations

from collections.abc import Sequence

from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.observations import Observations
from qsync_core.ir.op_id import OpId
from qsync_planner.indicators.interface import Omega


def unreached(observations: Observations | None, dag: PrecisionDag, collectors: Sequence[str]) -> list[OpId]:
    """Operators of which these collectors wrote nothing, though of others; zeros are something."""
    if observations is None:
        return []
    written = {series.op_id for series in observations.series if series.collector in collectors}
    return [operator.op_id for operator in dag.adjustable if operator.op_id not in written] if written - {None} else []


def lowered_last(omega: Omega, operators: Sequence[OpId]) -> Omega:
    """Ω with these operators as sensitive as the most sensitive of the others."""
    known = [by_variant for op_id, by_variant in omega.items() if op_id not in operators]
    if not known:
        return omega
    return {
        op_id: {v: max(by[v] for by in known) for v in by_variant} if op_id in operators else by_variant
        for op_id, by_variant in omega.items()
    }


def unreached_note(operators: Sequence[OpId]) -> tuple[str, ...]:
    """What a reader must know of them."""
    if not operators:
        return ()
    names = ", ".join(map(str, operators))
    return (f"no gradient came back to {names}: what rounding there does is not known, and Ω is set to the largest of the model",)
