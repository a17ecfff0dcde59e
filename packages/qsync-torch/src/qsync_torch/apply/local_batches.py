"""The local batches of a plan: how many samples each rank takes in a step, and whether the script honours it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from qsync_core.errors import PlanError
from qsync_core.ir.plan import PrecisionPlan
from qsync_torch.distributed.weighted_gradients import weight_gradients
from qsync_torch.elastic.resizing import MicroBatch, StepBatches, micro_batches

FLAG = "local_batch"
"""In ``allow_flags``: the script weights its gradients by itself."""


class LocalBatches:
    """What a plan says of local batches, for one rank of a job.

    Attributes:
        own: samples of this rank in a step; None where no plan says so.
        by_rank: of every rank; empty where that is not known.
    """

    def __init__(
        self,
        plan: PrecisionPlan | None,
        group: str | None,
        groups: Mapping[int, str],
        *,
        by_script: bool,
        resized: StepBatches | None = None,
    ) -> None:
        self._by_group = {} if plan is None else dict(plan.local_batches)
        self._by_script = self._weighted = by_script
        self._resized = resized
        self._in_micro_batches = False
        self.own = None if group is None else self._by_group.get(group)
        known = bool(groups) and all(name in self._by_group for name in groups.values())
        self.by_rank = tuple(self._by_group[groups[rank]] for rank in sorted(groups)) if known else ()
        if resized is not None:
            self.by_rank = resized.by_rank
            self.own = self.by_rank[_rank()]

    @property
    def is_weighted(self) -> bool:
        """Whether the script weights gradients, by the hook or by itself."""
        return self._weighted

    @property
    def planned(self) -> int | None:
        """Samples of a step on all ranks, as planned for all groups; None where that is not known."""
        return None if self._resized is None else self._resized.planned

    @property
    def most_passes(self) -> int:
        """Forward passes of the rank that has most in a step."""
        return 1 if self._resized is None else self._resized.most_passes

    def micro_batches(self, ddp: nn.Module, samples: int | None) -> Iterator[MicroBatch]:
        """The parts of this rank's batch, all but the last under ``ddp.no_sync()``."""
        self._in_micro_batches = True
        count = self.own if samples is None else samples
        if count is None:
            raise PlanError("no plan says how large this rank's batch is: give micro_batches the number of its samples")
        passes = 1 if self._resized is None else self._resized.passes(_rank(), count)
        *first, last = micro_batches(count, passes, weighted=self._weighted and not self._by_script)
        for part in first:
            with ddp.no_sync() if isinstance(ddp, DistributedDataParallel) else nullcontext():
                yield part
        yield last

    @property
    def share(self) -> float | None:
        """This rank's part of the global batch; None where a batch is not known."""
        return self.own / sum(self.by_rank) if self.own and self.by_rank else None

    def weight_gradients(self, ddp: DistributedDataParallel, **options: Any) -> None:
        """As :func:`qsync_torch.distributed.weighted_gradients.weight_gradients`, for these batches."""
        weight_gradients(ddp, local_batch=self.own, **options)
        self._weighted, self._by_script = True, False

    def check_weighted(self) -> None:
        """Refuse batches of different sizes in a job that takes the mean over ranks as if they were equal.

        Raises:
            PlanError: with the batches, and what to call.
        """
        if self._resized is not None and self._resized.is_resized and not (self._in_micro_batches or self._by_script):
            sizes = " + ".join(map(str, self.by_rank))
            raise PlanError(
                f"resize is 'keep-global', and this script does not take its {sizes} samples a step in parts of the planned "
                "batches: write 'for part in applied.micro_batches(ddp):' around forward and backward (docs/coming-and-going.md)"
            )
        if self._weighted or len(set(self.by_rank or self._by_group.values())) < 2 or not _has_ranks():
            return
        if self._resized is not None and self._resized.is_resized:
            raise PlanError(
                f"with resize='keep-global' the ranks of this job take {' + '.join(map(str, self.by_rank))} samples a step, and "
                "this script would average gradients as if that were equally many: call applied.weight_gradients(ddp) once the "
                "model is in DistributedDataParallel"
            )
        batches = ", ".join(f"{size} samples a rank of {group!r}" for group, size in self._by_group.items())
        raise PlanError(
            f"the plan has local batches of different sizes ({batches}), and this script would average gradients as if they were "
            "equal: call applied.weight_gradients(ddp) once the model is in DistributedDataParallel, and take batches of "
            f"applied.local_batch samples; apply_(..., allow_flags=[{FLAG!r}]) says that the script weights its losses by itself"
        )


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _has_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
