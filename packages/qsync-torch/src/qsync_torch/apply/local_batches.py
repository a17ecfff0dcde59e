"""The local batches of a plan: how many samples each rank takes in a step, and whether the script honours it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import attrs
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from qsync_core.errors import PlanError
from qsync_core.ir.plan import PrecisionPlan
from qsync_core.units import format_bytes
from qsync_torch.batch_axes import BatchAxis, axes_of_calls
from qsync_torch.caller import BY_HAND, Caller
from qsync_torch.distributed.process_group import own_rank, rank_count
from qsync_torch.distributed.weighted_gradients import weight_gradients
from qsync_torch.elastic.resizing import MicroBatch, StepBatches, micro_batches

FLAG = "local_batch"
"""A flag of ``allow_flags``: the script weights its gradients by itself."""
SIZE_FLAG = "batch_size"
"""A flag of ``allow_flags``: a forward pass may take another batch than the plan was made for."""
_GROW_WITH_BATCH = ("batch", "activations", "workspace")
"""Parts of a process's memory that grow with its batch."""


@attrs.frozen(slots=False)
class PlannedPass:
    """What one forward pass of a rank was planned with; the first one of training is held against it.

    Attributes:
        group: the rank's.
        size: samples of a pass.
        axes: where a call of the model says how many it has.
        fixed_bytes, growing_bytes: what a process takes of its device, without its batch and with it.
        budget_bytes: what it may take; 0 for no limit.
        any_size: the script allows every batch; its rank takes part in what the others compare all the same.
        advice, exception: what to do instead, and what to write to train all the same.
    """

    group: str
    size: int
    axes: tuple[BatchAxis, ...]
    fixed_bytes: int
    growing_bytes: int
    budget_bytes: int
    any_size: bool
    advice: str
    exception: str

    @classmethod
    def of(cls, plan: PrecisionPlan, group: str, model: nn.Module, caller: Caller, *, any_size: bool) -> PlannedPass | None:
        """None, on all ranks, where the plan does not say how large batches are, or by what they are to be known."""
        axes = axes_of_calls(model, plan.batch_axes)
        if not axes or not all(plan.local_batches.get(entry.group) for entry in plan.groups):
            return None
        size = plan.local_batches[group]
        parts = plan.memory.get(group, {})
        growing = sum(parts.get(name, 0) for name in _GROW_WITH_BATCH)
        advice = f"take batches of {size}, or {caller.trace_again}, with this batch size"
        budget = plan.group(group).memory_budget_bytes
        exception = caller.with_option(f"allow_flags=[{SIZE_FLAG!r}]")
        made = cls(group, size, axes, sum(parts.values()) - growing, growing, budget, any_size, advice, exception)
        assert all(made.while_compiling)  # made now, and not by the compiler
        return made

    def samples(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
        """How many samples the model is called with; None where none of its arguments is as it was when it was traced."""
        return next((found for axis in self.axes if (found := axis.samples(args, kwargs)) is not None), None)

    @cached_property
    def most(self) -> int | None:
        """The largest batch that fits the budget; None where there is no limit."""
        if not self.budget_bytes or not self.growing_bytes or self.any_size:
            return None
        return max(self.size, (self.budget_bytes - self.fixed_bytes) * self.size // self.growing_bytes)

    def refusal(self, samples: int) -> str:
        """Why a batch cannot be trained with the group's memory; empty where it can."""
        if self.most is None or samples <= self.most:
            return ""
        needed = self.fixed_bytes + self.growing_bytes * samples // self.size
        return (
            f"the first batch has {samples} samples{self._planned}, with which a process would take {format_bytes(needed)} of "
            f"the {format_bytes(self.budget_bytes)} that the group has: {self.advice}; {self.exception} trains all the same"
        )

    def warning(self, samples: int) -> str:
        """What another batch means; empty for the planned one."""
        if samples == self.size or self.any_size:
            return ""
        what = "times do not hold" if samples < self.size else "times and memory do not hold"
        return f"the first batch has {samples} samples{self._planned}: predicted {what}; {self.advice}"

    @cached_property
    def while_compiling(self) -> tuple[str, str]:
        """Refusal and warning for some larger batch: a compiler's numbers are symbols, which it cannot put into a text."""
        above, planned = "the first batch has more than", self._planned
        return (
            f"{above} {self.most} samples{planned}, for which the group's {format_bytes(self.budget_bytes)} have no room: "
            f"{self.advice}; {self.exception} trains all the same",
            f"{above} {self.size} samples{planned}: predicted times and memory do not hold; {self.advice}",
        )

    @property
    def _planned(self) -> str:
        return f", and the plan was made for {self.size} on each rank of group {self.group!r}"


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
        caller: Caller = BY_HAND,
    ) -> None:
        self._by_group = {} if plan is None else dict(plan.local_batches)
        self._by_script = self._weighted = by_script
        self._resized, self._caller = resized, caller
        self._in_micro_batches = False
        self.own = None if group is None else self._by_group.get(group)
        known = bool(groups) and all(name in self._by_group for name in groups.values())
        self.by_rank = tuple(self._by_group[groups[rank]] for rank in sorted(groups)) if known else ()
        if resized is not None:
            self.by_rank = resized.by_rank
            self.own = self.by_rank[own_rank()]

    @property
    def takes_parts(self) -> bool:
        """Whether the script takes its batch in parts, of which each is a forward pass."""
        return self._in_micro_batches

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
        passes = 1 if self._resized is None else self._resized.passes(own_rank(), count)
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
        """Weight gradients by these batches (:func:`qsync_torch.distributed.weighted_gradients.weight_gradients`)."""
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
        if self._weighted or len(set(self.by_rank or self._by_group.values())) < 2 or rank_count() < 2:
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
            f"applied.local_batch samples; {self._caller.with_option(f'allow_flags=[{FLAG!r}]')} says that the script weights its "
            "losses by itself"
        )
