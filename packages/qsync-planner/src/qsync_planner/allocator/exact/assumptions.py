"""Where the deadline form does not hold, the exact solver says so, and trials by replay take its place.

The proof (``docs/allocator-exact.md``) takes collectives for what the buckets of gradients are: started in the backward pass, of a
duration that no plan changes.  The replayer itself models optimizers and collectives of fixed duration, and steps that synchronise.
"""

from __future__ import annotations

from qsync_core.dag import PrecisionDag
from qsync_core.errors import PlanError

_COLLECTIVES = ("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "broadcast", "sync_batch_norm")


class NoDeadlineForm(PlanError):
    """The job's period is not a matter of deadlines of each group alone."""


def check_deadline_form(dag: PrecisionDag) -> None:
    """Refuse a model with a collective inside its forward pass.

    Raises:
        NoDeadlineForm: naming the operator.
    """
    for operator in dag.operators:
        if any(name in operator.kind for name in _COLLECTIVES):
            raise NoDeadlineForm(
                f"operator {operator.op_id} ({operator.kind}) waits for other ranks in the middle of the forward pass, so that no "
                "group's deadlines are its own"
            )
