"""What this process is to its job: its group and place in it, the batch it takes, and whose buffers count."""

from __future__ import annotations

import os
from collections.abc import Mapping

import attrs
import torch.distributed as dist
from torch import nn

from qsync_core.ir.plan import PrecisionPlan
from qsync_torch.apply.local_batches import FLAG, LocalBatches
from qsync_torch.apply.plan_fit import Planned
from qsync_torch.aten.random_bits import stream_key
from qsync_torch.distributed.buffers import buffers_of
from qsync_torch.distributed.process_group import in_process_group
from qsync_torch.elastic.job_ranks import JobRanks
from qsync_torch.elastic.resizing import Resize, step_batches


@attrs.frozen
class PlaceInJob:
    """A process's place.

    Attributes:
        name: such as ``infer/0``: its group, and how many ranks of it come before.  Random numbers and samples follow it, not the
            rank, which torchrun gives anew at each start.
        stream: key of its random numbers.
        job: the ranks; None where no plan was applied, or the rank alone was asked.
        batches: what each rank takes in a step.
        training: where rank 0 does not train: the ranks that do, whose buffers count.
        resize: what stays where the job has other ranks than planned.
    """

    name: str
    stream: int
    batches: LocalBatches
    job: JobRanks | None = None
    training: tuple[int, ...] = ()
    resize: Resize | None = None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        planned: Planned,
        seed: int,
        groups: Mapping[int, str] = {},
        whole: PrecisionPlan | None = None,
        resize: Resize | None = None,
    ) -> PlaceInJob:
        """Find it, once all ranks have told each other their groups.

        Args:
            groups: the device group of every rank of the job, by rank; empty where the rank alone was asked.
            whole: the plan for all groups of the cluster, whose global batch is the planned one; by default this plan.
            resize: what stays where the job has other ranks than planned.

        Raises:
            PlanError: as :func:`qsync_torch.elastic.resizing.step_batches`.
        """
        plan, caller, own = planned.plan, planned.caller, _rank_in_job()
        by_script = FLAG in planned.allow_flags
        if plan is None or planned.group is None or not groups:
            batches = LocalBatches(plan, planned.group, groups, by_script=by_script, resized=None, caller=caller)
            return cls(f"rank/{own}", stream_key(seed, own), batches, resize=resize)
        job = JobRanks.of(plan, groups)
        group, index = job.place(own) if in_process_group() else (planned.group, own)
        training = job.training_ranks
        resized = step_batches(plan, whole or plan, job, resize, caller) if in_process_group() or resize is not None else None
        return cls(
            f"{group}/{index}",
            stream_key(seed, *group.encode(), index),
            LocalBatches(
                plan,
                planned.group,
                groups,
                by_script=by_script,
                resized=resized,
                caller=caller,
            ),
            job,
            training if training and min(groups) not in training and buffers_of(model) else (),
            resize,
        )


def _rank_in_job() -> int:
    """Return the rank of this process, as ``torch.distributed`` or torchrun has it; 0 where neither says."""
    return dist.get_rank() if in_process_group() else int(os.environ.get("RANK", "0"))
