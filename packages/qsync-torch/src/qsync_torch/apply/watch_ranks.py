"""``watch``: one line in a script, with a plan or without, that names the rank which all others wait for."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from qsync_torch.apply.applied_plan import applied_to
from qsync_torch.watching.watch import RankWatch


def watch(*models: nn.Module, say: Callable[[str], object] | None = None) -> RankWatch:
    """Watch the ranks of a job: ``watch = qsync.watch(ddp)``, on every rank, once the model is in DistributedDataParallel.

    Rank 0 says within 50 steps which rank has become slow, in which phase and by how much, once for a rank and a phase.
    ``watch.slowest()`` says it at any time, on every rank, and ``watch.log_scalars(writer.add_scalar)`` logs phases
    (docs/slow-ranks.md).  Where a plan is in force on the first model, ranks are compared with what it expects of them, in the
    place of the watch that the plan has by itself.

    Args:
        models: what the loop calls, all models that it trains: wrappers, or what ``torch.compile`` makes of them.  A step ends
            with a backward pass of the first that exchanges gradients.
        say: is given the sentence, on rank 0; by default a line on standard error says it.

    Raises:
        JobError: where a model is in no DistributedDataParallel.
    """
    applied = applied_to(models[0])
    own = None if applied is None else applied.in_model.lag_watch
    if own is None or not own.expects_times:
        return RankWatch(*models, say=say)
    return own.watch_ranks(*models, say=say)
