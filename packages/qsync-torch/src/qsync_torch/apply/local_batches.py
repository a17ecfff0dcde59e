"""The local batches of a plan: how many samples each rank takes in a step, and whether the script honours it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from qsync_core.errors import PlanError
from qsync_core.ir.plan import PrecisionPlan
from qsync_torch.distributed.weighted_gradients import weight_gradients

FLAG = "local_batch"
"""In ``allow_flags``: the script weights its gradients by itself."""


class LocalBatches:
    """What a plan says of local batches, for one rank of a job.

    Attributes:
        own: samples of this rank in a step; None where no plan says so.
        by_rank: of every rank; empty where that is not known.
    """

    def __init__(self, plan: PrecisionPlan | None, group: str | None, groups: Mapping[int, str], *, by_script: bool) -> None:
        self._by_group = {} if plan is None else dict(plan.local_batches)
        self._weighted = by_script
        self.own = None if group is None else self._by_group.get(group)
        known = bool(groups) and all(name in self._by_group for name in groups.values())
        self.by_rank = tuple(self._by_group[groups[rank]] for rank in sorted(groups)) if known else ()

    @property
    def share(self) -> float | None:
        """This rank's part of the global batch; None where a batch is not known."""
        return self.own / sum(self.by_rank) if self.own and self.by_rank else None

    def weight_gradients(self, ddp: DistributedDataParallel, **options: Any) -> None:
        """As :func:`qsync_torch.distributed.weighted_gradients.weight_gradients`, for these batches."""
        weight_gradients(ddp, local_batch=self.own, **options)
        self._weighted = True

    def check_weighted(self) -> None:
        """Refuse batches of different sizes in a job that takes the mean over ranks as if they were equal.

        Raises:
            PlanError: with the batches, and what to call.
        """
        if self._weighted or len(set(self._by_group.values())) < 2 or not _has_ranks():
            return
        batches = ", ".join(f"{size} samples a rank of {group!r}" for group, size in self._by_group.items())
        raise PlanError(
            f"the plan has local batches of different sizes ({batches}), and this script would average gradients as if they were "
            "equal: call applied.weight_gradients(ddp) once the model is in DistributedDataParallel, and take batches of "
            f"applied.local_batch samples; apply_(..., allow_flags=[{FLAG!r}]) says that the script weights its losses by itself"
        )


def _has_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
