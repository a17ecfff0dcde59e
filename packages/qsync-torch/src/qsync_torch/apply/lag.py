"""Whether training keeps to its plan's prediction: a sample of steps now and then, and one warning where it does not.

Ranks tell each other their medians through the process group's store, so nothing pairs with a collective, nothing waits, and no GPU
is synchronised.  What a step costs outside of a sample is a comparison of two integers.
"""

from __future__ import annotations

import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from qsync_core.ir.plan import PrecisionPlan
from qsync_core.ir.profile import DeviceKind
from qsync_core.units import format_ns
from qsync_torch.apply.first_step import device_of
from qsync_torch.apply.step_times import StepTime, StepTimer
from qsync_torch.distributed.mailbox import Mailbox
from qsync_torch.distributed.process_group import rank_count
from qsync_torch.torch_internals import pytree, running_wrapper
from qsync_torch.watching.hooks import OwnHook
from qsync_torch.watching.moments import Moment, between_ns, has_passed, now
from qsync_torch.watching.watch import RankWatch

STATED_ERROR = {DeviceKind.CUDA: 0.05, DeviceKind.CPU: 0.10}
"""The stated error of a predicted step, as a part of it: rows H2-worst (docs/hybrid.md) and S4 hold predictions to it."""
LEAST_EXCESS_NS = 2_000_000
"""Smaller delays are not reported, however small the step."""
FIRST_SAMPLE, STEPS, EVERY = 20, 50, 1000
"""Forwards before the first sample, steps in one, and forwards from one to the next."""
_LATE = 10
"""Forwards after a sample until all ranks have told theirs: on a GPU times are known some steps late."""


@attrs.frozen
class Pace:
    """One rank's medians beside its prediction.

    Attributes:
        step_ns: of a whole step.
        own_ns: of it without waiting for gradients and buffers: its compute, the optimizer, and whatever else the script does.
        predicted_step_ns, predicted_own_ns: as the plan has them.
        error: what predictions on such a device may be off by.
    """

    group: str
    step_ns: float
    own_ns: float
    predicted_step_ns: int
    predicted_own_ns: int
    error: float

    @property
    def lags(self) -> bool:
        """The whole step takes longer than predicted."""
        return _exceeds(self.step_ns, self.predicted_step_ns, self.error)

    @property
    def own_lags(self) -> bool:
        """What this rank does itself takes longer than predicted."""
        return _exceeds(self.own_ns, self.predicted_own_ns, self.error)

    @property
    def own_text(self) -> str:
        """Measured and predicted."""
        return f"{format_ns(self.own_ns)} instead of {format_ns(self.predicted_own_ns)}"


def _exceeds(measured_ns: float, predicted_ns: int, error: float) -> bool:
    return measured_ns - predicted_ns > max(error * predicted_ns, LEAST_EXCESS_NS)


def lag_warning(rank: int, paces: Mapping[int, Pace]) -> str:
    """What this rank has to say of it; empty where it keeps its prediction, or a rank that lags says it, and this is not rank 0.

    Args:
        paces: of all ranks that have told theirs, this one among them.
    """
    mine = paces[rank]
    behind = {other: pace for other, pace in paces.items() if pace.own_lags}
    if not mine.lags or (rank != 0 and rank not in behind):
        return ""
    more = mine.step_ns / mine.predicted_step_ns - 1
    found = (
        f"training is slower than its plan: a step takes {format_ns(mine.step_ns)} on rank {rank} (group {mine.group!r}), "
        f"{more:.0%} more than the {format_ns(mine.predicted_step_ns)} that were predicted"
    )
    doctor = "'torchrun … -m qsync doctor'"
    if rank in behind:
        return (
            f"{found}. It is this rank: its own part, with the optimizer and loading data, takes {mine.own_text}. See {doctor} for "
            "what slows it; if the job or the machine is another one than was profiled, prepare it again"
        )
    own = f"{found}. Its own part takes {format_ns(mine.own_ns)}, as predicted, and it waits for the rest of the step"
    if behind:
        others = "; ".join(f"rank {other} (group {it.group!r}), whose own part takes {it.own_text}" for other, it in behind.items())
        return f"{own} for {others}. See {doctor} for what slows it, and prepare the job again if that stays"
    return (
        f"{own}, although the own part of all {len(paces)} ranks that told theirs is as predicted: it is the way between them. "
        f"{doctor} times all-reduces; if that is what they take, prepare the job again"
    )


class _BeforeForward:
    """The moment at which a wrapper's forward began, before it hands buffers round."""

    def __init__(self, wrapper: DistributedDataParallel, model: nn.Module) -> None:
        self.moment: Moment | None = None
        self._model = model
        self.handle = wrapper.register_forward_pre_hook(OwnHook(self._begin))

    def _begin(self, module: nn.Module, args: Any) -> None:
        self.moment = now(device_of(self._model))


class LagWatch:
    """Samples the steps of a model under a plan.

    Args:
        plan: whole; one without predicted times is not watched.
        ranks: the device group of every rank; where they are not those that the plan was made for, nothing is watched, because
            rank 0 has been told that predicted times do not hold.
        excused: asked before a warning: whether this process differs from what the plan was made for, as was said already.

    Attributes:
        ranks: what compares the phases of all ranks, from the first forward in a wrapper on.
    """

    ranks: RankWatch | None = None

    def __init__(
        self, model: nn.Module, plan: PrecisionPlan, group: str, ranks: Mapping[int, str], excused: Callable[[], bool]
    ) -> None:
        self._model, self._plan, self._group, self._excused = model, plan, group, excused
        self._is_on = True
        self._forwards, self._next, self._samples = 0, FIRST_SAMPLE, 0
        self._take: Callable[[], None] = self._open
        self._times: StepTimer | None = None
        self._steps: list[StepTime] = []
        self._before: _BeforeForward | None = None
        self._buffers: list[tuple[Moment, Moment]] = []
        self._other_batch = False
        counts = {entry.group: entry.count for entry in plan.groups}
        entry = next((entry for entry in plan.groups if entry.group == group), None)
        self._predicted_own_ns = 0 if entry is None else entry.predicted_busy_ns
        self._error = STATED_ERROR[DeviceKind.CPU if entry is None else entry.device.kind]
        if not self._predicted_own_ns or group in plan.estimated or Counter(ranks.values()) != Counter(counts):
            self.stop()

    def stop(self) -> None:
        """Stop for good."""
        self._stop_sampling()
        if self.ranks is not None:
            self.ranks.close()
            self.ranks = None
        self._is_on = False

    def _stop_sampling(self) -> None:
        self._close()
        self._next = -1

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, inputs: Any) -> None:
        """Called in every forward that is not compiled, with what the model is given.

        Where a check refuses what a compiler reads, the forward runs without it, and is to refuse the same in its own words.
        """
        self._forwards += 1
        if self.ranks is None and self._is_on:
            wrapper = running_wrapper()
            if wrapper is not None and rank_count(wrapper.process_group) > 1:
                self.watch_ranks(wrapper)
        if self._times is not None:
            self._look(inputs)
        if self._forwards == self._next:
            self._take()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def started(self) -> None:
        """Called in the same forward, once buffers have come from another rank: DistributedDataParallel waits for them before."""
        if self.ranks is not None:
            self.ranks.computes()
        if self._before is not None and self._before.moment is not None:
            self._buffers.append((self._before.moment, now(device_of(self._model))))

    @property
    def expects_times(self) -> bool:
        """Whether the plan's times hold for this job."""
        return self._is_on

    def watch_ranks(self, *models: nn.Module, say: Callable[[str], object] | None = None) -> RankWatch:
        """Compare the phases of all ranks from now on, in the place of an earlier comparison."""
        if self.ranks is not None:
            self.ranks.close()
        self.ranks = RankWatch(*models, group=self._group, weight=self._predicted_own_ns, say=say)
        return self.ranks

    def _then(self, take: Callable[[], None], forwards: int) -> None:
        self._take, self._next = take, self._forwards + forwards

    def _open(self) -> None:
        self._samples += 1
        self._steps.clear()
        self._other_batch = False
        self._times = StepTimer(self._model, lambda: int, self._plan.accumulate)
        self._times.listeners.append(self._steps.append)
        self._buffers.clear()
        if (wrapper := running_wrapper()) is not None:
            self._before = _BeforeForward(wrapper, self._model)
        self._then(self._tell, STEPS * self._plan.accumulate + _LATE)

    def _look(self, inputs: Any) -> None:
        """Another number of samples than was planned for makes another step."""
        planned = self._plan.local_batches.get(self._group)
        sizes = {leaf.shape[0] for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.dim()}
        if planned is not None and sizes and planned not in sizes:
            self._other_batch = True

    def _close(self) -> None:
        if self._times is not None:
            self._times.close(wait=False)
            self._times = None
        if self._before is not None:
            self._before.handle.remove()
            self._before = None

    def _tell(self) -> None:
        self._close()
        self._then(self._open, EVERY)
        if len(self._steps) < STEPS // 2 or self._other_batch:
            return
        buffers_ns = [between_ns(*pair) for pair in self._buffers if has_passed(pair[1])]
        self._pace = Pace(
            self._group,
            statistics.median(step.duration_ns for step in self._steps),
            statistics.median(step.duration_ns - step.wait_ns for step in self._steps) - statistics.median(buffers_ns or [0]),
            self._plan.predicted_iteration_ns,
            self._predicted_own_ns,
            self._error,
        )
        members = Mailbox.of_group(None)
        if members is not None:
            with suppress(dist.DistError):
                members.say(self._key, attrs.asdict(self._pace))
        self._then(self._judge, _LATE)

    def _judge(self) -> None:
        self._then(self._open, EVERY)
        if not self._pace.lags or self._excused():
            return
        members = Mailbox.of_group(None)
        rank = 0 if members is None else members.rank
        paces = {rank: self._pace}
        if members is not None:
            with suppress(dist.DistError):
                paces |= {other: Pace(**said) for other, said in members.heard(self._key).items()}
        self._stop_sampling()
        if sentence := lag_warning(rank, paces):
            warnings.warn(sentence, stacklevel=2)

    @property
    def _key(self) -> str:
        """Name this sample, which all ranks take after as many forwards."""
        return f"qsync/pace/{self._plan.dag_digest[:16]}/{self._samples}"
