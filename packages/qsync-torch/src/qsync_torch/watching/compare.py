"""Which rank the others wait for, in which phase and by how much: from what all ranks have told of the same steps.

In a collective every rank waits for the slowest, so waiting is nobody's fault.  What a rank does itself is compared with what the
others do in the same phase; where a plan expects ranks to differ in forward and backward, by that much less or more.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from qsync_core.units import format_ns
from qsync_torch.watching.phases import Phase, StepPhases

OWN = (Phase.INPUT, Phase.FORWARD, Phase.BACKWARD, Phase.COMMUNICATION, Phase.OPTIMIZER)
"""What a rank does itself."""
_PLANNED = (Phase.FORWARD, Phase.BACKWARD)
"""What plans expect to differ between groups."""
LEAST_SHARE = 0.1
"""The least share of a step that others wait for a rank before it is called slow."""
LEAST_NS = 500_000
_ERRORS = 4
"""Standard errors by which it must be above nothing."""
_TRIMMED = 0.1
"""Steps that are left out of a mean at each end: a checkpoint, an evaluation; a stall of every fourth step stays in."""
_NAMED = 0.25
"""A phase is named beside the worst where it has this share of what a rank is slow by."""
_ADVICE = {
    Phase.INPUT: "it waits for data, or for what the loop does between steps: look at its loader's workers, its disk and its cores",
    Phase.FORWARD: "'torchrun … -m qsync doctor' compares the devices of all ranks",
    Phase.BACKWARD: "'torchrun … -m qsync doctor' compares the devices of all ranks",
    Phase.COMMUNICATION: "look at its communication hook and its cores; 'torchrun … -m qsync doctor' times all-reduces",
    Phase.OPTIMIZER: "look at what it does between the gradients' arrival and the end of the optimizer's step",
}


@attrs.frozen
class Told:
    """One rank's steps in a window that all ranks have.

    Attributes:
        window: its number.
        step_ns: mean of a step.
        phases_ns: mean of each phase, by its name.
        errors_ns: standard errors of these.
        received_ns: when the last steps' gradients were there, in order; empty on a GPU.
        machine: which processes share a clock.
        group: the device group under a plan; else empty.
        weight: what a plan expects its compute to take, in any unit; 1 without.
    """

    window: int
    step_ns: float
    phases_ns: Mapping[str, float]
    errors_ns: Mapping[str, float]
    received_ns: Sequence[int]
    machine: str
    group: str = ""
    weight: float = 1.0

    @classmethod
    def of(cls, window: int, steps: Sequence[StepPhases], machine: str, group: str, weight: float) -> Told:
        """Sum up the steps of a window."""
        found = {phase: _mean([float(step.phases_ns.get(phase, 0)) for step in steps]) for phase in Phase}
        return cls(
            window,
            statistics.fmean(sum(step.phases_ns.values()) for step in steps),
            {phase: mean for phase, (mean, _) in found.items()},
            {phase: error for phase, (_, error) in found.items()},
            [step.received_ns for step in steps if step.received_ns],
            machine,
            group,
            weight,
        )


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """A trimmed mean and its standard error."""
    ordered = sorted(values)
    cut = int(len(ordered) * _TRIMMED)
    kept = ordered[cut : len(ordered) - cut]
    mean = statistics.fmean(kept)
    if len(kept) < 2:
        return mean, 0.0
    variance = sum((value - mean) ** 2 for value in kept) / (len(kept) - 1)  # statistics.stdev is slow: fractions
    return mean, (variance / len(kept)) ** 0.5


@attrs.frozen
class Slowest:
    """The rank that the others wait for.

    Attributes:
        rank: its number.
        group: its device group under a plan; else empty.
        phase: in which it is slow the most.
        phase_ns: what this phase takes it in a step.
        excess_ns: by how much that is more than expected.
        more: what other phases take more, those that matter.
        step_ns: a step, of all ranks.
        delay_ns: what the others wait for it in a step.
        window: of the steps that tell it.
    """

    rank: int
    group: str
    phase: Phase
    phase_ns: float
    excess_ns: float
    more: Mapping[Phase, float]
    step_ns: float
    delay_ns: float
    window: int

    def names_the_same(self, other: Slowest | None) -> bool:
        """Whether another window names the same rank and phase."""
        return other is not None and (self.rank, self.phase) == (other.rank, other.phase)

    @property
    def sentence(self) -> str:
        """What a person reads."""
        who = f"rank {self.rank}" + (f" (group {self.group!r})" if self.group else "")
        expected = "its plan expects beside the other ranks" if self.group else "the other ranks take"
        more = "".join(f", and its {phase} {format_ns(ns)} more" for phase, ns in self.more.items())
        return (
            f"{who} is slow in its {self.phase}: it takes {format_ns(self.phase_ns)} of a step of {format_ns(self.step_ns)}, "
            f"{format_ns(self.excess_ns)} more than {expected}{more}; the others wait {format_ns(self.delay_ns)} "
            f"({self.delay_ns / self.step_ns:.0%}) for it in every step. {_ADVICE[self.phase][0].upper()}{_ADVICE[self.phase][1:]}"
        )


def slowest(told: Mapping[int, Told]) -> Slowest | None:
    """The rank that the others wait for; None where no rank is slow.

    Args:
        told: of the same window, by rank.
    """
    if len(told) < 2:
        return None
    found = _late_in_exchange(told)
    excess: dict[int, dict[Phase, float]] = defaultdict(dict)
    takes: dict[int, dict[Phase, float]] = defaultdict(dict)
    is_planned = all(one.group for one in told.values())  # of a group whose costs were estimated none is expected
    for phase in OWN:
        weights = {rank: one.weight if is_planned and phase in _PLANNED else 1.0 for rank, one in told.items()}
        for rank, one in told.items():
            takes[rank][phase] = one.phases_ns[phase] + (found[rank] if phase is Phase.COMMUNICATION else 0.0)
        usual = {rank: takes[rank][phase] / weights[rank] for rank in told}
        middle = statistics.median(usual.values())
        for rank in told:
            other = middle if len(told) > 2 else next(usual[one] for one in told if one != rank)
            excess[rank][phase] = takes[rank][phase] - other * weights[rank]
    waits = {rank: one.phases_ns[Phase.WAIT] for rank, one in told.items()}
    delays = {rank: sum(excess[rank].values()) - (waits[rank] - min(waits.values())) for rank in told}
    rank = max(delays, key=lambda rank: delays[rank])
    one, delay = told[rank], delays[rank]
    phase = max(OWN, key=lambda phase: excess[rank][phase])
    error = max(sum(other.errors_ns[phase] ** 2 for phase in OWN) ** 0.5 for other in told.values())
    if delay < max(LEAST_SHARE * one.step_ns, LEAST_NS, _ERRORS * error):
        return None
    more = {other: ns for other, ns in excess[rank].items() if other is not phase and ns > _NAMED * delay}
    return Slowest(
        rank, one.group, phase, takes[rank][phase], excess[rank][phase], more, one.step_ns, min(delay, one.step_ns), one.window
    )


def _late_in_exchange(told: Mapping[int, Told]) -> dict[int, float]:
    """The time by which each rank has its gradients later than the first of its machine: all have waited for the same exchange."""
    earliest: dict[str, list[int]] = {}
    for one in told.values():
        seen = earliest.get(one.machine)
        received = one.received_ns
        earliest[one.machine] = list(received) if seen is None else [min(pair) for pair in zip(seen, received, strict=False)]
    late = {}
    for rank, one in told.items():
        differences = [mine - first for mine, first in zip(one.received_ns, earliest[one.machine], strict=False)]
        late[rank] = statistics.median(differences) if differences else 0.0
    return late


def as_message(told: Told) -> dict[str, Any]:
    """What goes to other ranks, as JSON."""
    return attrs.asdict(told)
