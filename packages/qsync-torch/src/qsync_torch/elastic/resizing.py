"""The global batch of a job that has other ranks than its plan: what stays is the script's choice, and never changes unsaid."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Literal, get_args

import attrs

from qsync_core.errors import PlanError
from qsync_core.ir.plan import PrecisionPlan
from qsync_torch.caller import BY_HAND, Caller
from qsync_torch.distributed.process_group import own_rank
from qsync_torch.distributed.uneven_batches import split_samples
from qsync_torch.elastic.job_ranks import JobRanks

Resize = Literal["keep-local", "keep-global"]
"""``keep-global``: a step has as many samples as planned, by accumulation; ``keep-local``: each rank takes its planned batch."""
CHOICES: tuple[str, ...] = get_args(Resize)


@attrs.frozen
class StepBatches:
    """How many samples ranks take in a step.

    Attributes:
        planned: all ranks together, as planned for all groups, or for those that the plan recommends where the job is theirs.
        at_once: by rank, the local batch that its group was planned with: what one forward pass takes.
        by_rank: what a rank takes in a step.
    """

    planned: int
    at_once: tuple[int, ...]
    by_rank: tuple[int, ...]

    @property
    def is_resized(self) -> bool:
        """Whether a rank takes another number than it was planned with."""
        return self.at_once != self.by_rank

    def passes(self, rank: int, samples: int | None = None) -> int:
        """Count the forward passes in which a rank takes so many samples; those of a step by default."""
        return max(1, -(-(self.by_rank[rank] if samples is None else samples) // self.at_once[rank]))

    @property
    def most_passes(self) -> int:
        """The most forward passes that any rank takes in a step."""
        return max(map(self.passes, range(len(self.by_rank))))


@attrs.frozen
class MicroBatch:
    """A part of this rank's batch that one forward pass takes.

    Attributes:
        rows: which samples of the batch.
        weight: what to multiply the mean loss over them with.
    """

    rows: slice
    weight: float


def step_batches(
    plan: PrecisionPlan, whole: PrecisionPlan, job: JobRanks, choice: Resize | None, caller: Caller = BY_HAND
) -> StepBatches | None:
    """What each rank of a job takes in a step; None where the plan does not say what it takes.

    Args:
        plan: of the groups that are there.
        whole: of all groups of the cluster: its global batch is the planned one.  A job of just the groups that it recommends needs
            no choice: it has their batch, and a warning says so.
        choice: what the script keeps.

    Raises:
        PlanError: when the job has another global batch than planned and nothing was chosen, or the choice cannot be carried out;
            in a job that torchrun starts again when ranks are lost, also where the plan recommends just the groups that are left.
    """
    if choice is not None and choice not in CHOICES:
        raise PlanError(f"resize is {' or '.join(map(repr, CHOICES))}, got {choice!r}")
    groups = job.groups
    if set(groups.values()) - set(plan.local_batches) or {entry.group for entry in whole.groups} - set(whole.local_batches):
        if choice is not None:
            raise PlanError(
                f"the plan does not say what batches it is for, so {choice!r} cannot be carried out: {caller.plan_again}"
            )
        return None
    at_once = tuple(plan.local_batches[groups[rank]] for rank in sorted(groups))
    planned = sum(entry.count * whole.local_batches[entry.group] for entry in whole.groups)
    if choice is None and sum(at_once) != planned:
        if not _is_recommended(whole, groups) or _may_lose_ranks():
            raise PlanError(_unchosen(whole, groups, sum(at_once), planned, caller))
        _tell(_recommended(whole, groups, sum(at_once), planned, caller))
        return StepBatches(sum(at_once), at_once, at_once)
    if choice != "keep-global":
        return StepBatches(planned, at_once, at_once)
    parts = split_samples(planned, [plan.local_batches[groups[rank]] for rank in job.in_order])
    if 0 in parts:
        raise PlanError(f"resize is 'keep-global', and the planned {planned} samples a step are too few for {len(parts)} ranks")
    by_rank = dict(zip(job.in_order, parts, strict=True))
    return StepBatches(planned, at_once, tuple(by_rank[rank] for rank in sorted(groups)))


def _is_recommended(whole: PrecisionPlan, groups: Mapping[int, str]) -> bool:
    """Whether a job has all ranks of the groups that the plan of all groups says to train with, as it is or best, and no others."""
    best = whole.recommended_way.groups if whole.recommended_way else ()
    said = ({name: whole.group(name).count for name in names} for names in (whole.recommended_groups, best))
    return Counter(groups.values()) in said


def _may_lose_ranks() -> bool:
    """Whether torchrun starts this job again when a rank is lost, so that the ranks may have been others a moment ago."""
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def _tell(text: str) -> None:
    if own_rank() == 0:
        warnings.warn(text, stacklevel=6)


def _recommended(whole: PrecisionPlan, groups: Mapping[int, str], now: int, planned: int, caller: Caller) -> str:
    left_out = " and ".join(repr(entry.group) for entry in whole.groups if entry.group not in groups.values())
    now, planned = now * whole.accumulate, planned * whole.accumulate
    return (
        f"this job trains without {left_out}, as the plan recommends: a step has {now} samples, and not the {planned} of all "
        f"groups; where the learning rate is for {planned}, {caller.keep_samples}"
    )


def _unchosen(whole: PrecisionPlan, groups: Mapping[int, str], now: int, planned: int, caller: Caller) -> str:
    here = Counter(groups.values())
    now, planned = now * whole.accumulate, planned * whole.accumulate
    ranks = ", ".join(f"{here[entry.group]} of {entry.count} in {entry.group!r}" for entry in whole.groups)
    keep_global, keep_local = (caller.with_option(f"resize={choice!r}") for choice in ("keep-global", "keep-local"))
    looped = f"{keep_global} and the loop over applied.micro_batches(ddp), or with " if caller.own_loop else ""
    return (
        f"this job has other ranks than planned ({ranks}), so that a step would have {now} samples instead of {planned}: say what "
        f"is to stay, with {looped}{keep_local} and a learning rate of your choice for {now / planned:.3g} of the batch "
        "(docs/coming-and-going.md)"
    )


def micro_batches(samples: int, passes: int, *, weighted: bool) -> list[MicroBatch]:
    """Cut a rank's batch into nearly equal parts.

    Args:
        samples: of the batch.
        passes: how many parts.
        weighted: gradients are weighted by the samples of every pass in a communication hook, which takes 1 / passes for the loss.
    """
    found, start = [], 0
    for part in range(passes):
        size = samples // passes + (part < samples % passes)
        found.append(MicroBatch(slice(start, start + size), 1 / passes if weighted else size / max(1, samples)))
        start += size
    return found
