"""Operators that a person keeps at the base precision: by the name of a module or parameter, or by a pattern."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator

from qsync_core.errors import PlanError
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.op_id import OpId

PATTERN = "re:"
"""What stands before a regular expression, as in ``re:.*norm.*``, which is to match a whole name."""
_MOST_NEAR = 3


def kept_operators(dag: PrecisionDag, names: Collection[str]) -> frozenset[OpId]:
    """Find the adjustable operators that some names mean.

    Args:
        dag: the model.
        names: each a name as the model has it (``lm_head``), which means all in it too (``encoder.layer.0``), or ``re:`` and a
            regular expression.

    Raises:
        PlanError: when a name means no adjustable operator, or is no regular expression.
    """
    return frozenset(op_id for name in names for op_id in _meant(dag, name))


def _meant(dag: PrecisionDag, name: str) -> Iterator[OpId]:
    known = [operator.op_id for operator in dag.adjustable]
    if name.startswith(PATTERN):
        try:
            pattern = re.compile(name.removeprefix(PATTERN))
        except re.error as error:
            raise PlanError(f"--keep {name!r} is no regular expression ({error})") from None
        found = [op_id for op_id in known if pattern.fullmatch(op_id.fqn)]
    else:
        found = [op_id for op_id in known if op_id.fqn == name or op_id.fqn.startswith(f"{name}.")]
    if not found:
        fqns = list(dict.fromkeys(op_id.fqn for op_id in known))
        near = difflib.get_close_matches(name.removeprefix(PATTERN), fqns, _MOST_NEAR, 0.0) or ["nothing"]
        raise PlanError(
            f"--keep {name!r} means no operator of {dag.model} whose precision a plan chooses; it has {len(fqns)}, among them "
            f"{', '.join(near)} ('qsync show' lists them){_hint(dag, name, fqns)}"
        )
    yield from found


def _hint(dag: PrecisionDag, name: str, fqns: Collection[str]) -> str:
    """What else bears this name: operators that no plan lowers, or a part of longer names."""
    word = name.removeprefix(PATTERN).strip(".*")
    others = {operator.op_id.fqn for operator in dag.operators} - set(fqns)
    if word and (count := sum(word in fqn for fqn in others)):
        return f"; {count} that have {word!r} in their names keep their precision in every plan"
    if word and not name.startswith(PATTERN) and any(word in fqn for fqn in fqns):
        return f"; all that have {word!r} in their names are '{PATTERN}.*{re.escape(word)}.*'"
    return ""
