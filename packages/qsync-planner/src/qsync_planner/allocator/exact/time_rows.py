"""The time limit as deadlines: what a group must keep so that the job's period is at most T.

See docs/design/exact-allocator.md#deadlines.

The period is at most T exactly when, for every group i and bucket n, ``ready[i, n] ≤ T − optimizer[i] − Σ_{m ≥ n} duration[m]`` and
the group alone takes at most T.  No deadline depends on another group's plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from qsync_core.ir.semantics import CastSite
from qsync_planner.allocator.exact.choices import Choices
from qsync_planner.allocator.exact.program import ALWAYS, CONSTANT, Expression, Indicator, Program, add, combined
from qsync_planner.replayer.cost_mapper import ALL_ELSEWHERE
from qsync_planner.replayer.cost_model import PricedCast
from qsync_planner.replayer.max_plus import NOTHING, Work, device_only
from qsync_planner.replayer.step_timing import StepShape

_UNIT_NS = 1000
_MOST_UNITS = 10**6


class ChargedCast(NamedTuple):
    """A shared cast at one operator, and the indicator that it is charged there."""

    position: int
    cast: PricedCast
    charged: Indicator


def charged_casts(choices: Choices, program: Program) -> Iterator[ChargedCast]:
    """Every shared cast at every operator that may be the first to need it, which pays for it as in the cost mapper; a copy that a
    fused chain writes is needed by none of those that it serves."""
    for producer, reads in enumerate(choices.wiring.reads):
        users: dict[int, list[tuple[int, PricedCast, Indicator]]] = {}
        for reader, slot in reads:
            for share, (cast, used) in choices.uses(reader, slot).items():
                users.setdefault(share, []).append((reader, cast, choices.needs(producer, reader, share, used)))
        for entries in users.values():
            yield from _first_of(entries, program)


def _first_of(entries: list[tuple[int, PricedCast, Indicator]], program: Program) -> Iterator[ChargedCast]:
    earlier: list[Indicator] = []
    charges: list[Indicator] = []
    for position, cast, used in entries:
        if not charges:
            charged = used
        elif any(other in (ALWAYS, used) for other in earlier):
            continue
        else:
            # 1 where it is used and no earlier consumer was charged: charges so far add up to whether any of these uses it.
            charged = program.largest_of([combined((used, 1), *((other, -1) for other in charges))])
            program.row(combined((charged, 1), (used, -1)), upper=0)
        earlier.append(used)
        charges.append(charged)
        yield ChargedCast(position, cast, charged)


def unit_ns(slowest_ns: int) -> int:
    """Rows of time are in microseconds, those of steps longer than a second in a power of ten of them.

    A solver's tolerance is far below a nanosecond then, and not below what its numbers can tell apart.
    """
    unit = _UNIT_NS
    while slowest_ns > _MOST_UNITS * unit:
        unit *= 10
    return unit


def time_after(shape: StepShape) -> dict[int, int]:
    """Return the ns after each backward that makes a bucket ready, by operator: the collectives from there on, and the optimizer.

    The deadline of that backward is T less this time.
    """
    found: dict[int, int] = {}
    for position, left in zip(shape.ready_after, shape.left_ns, strict=True):
        found[position] = max(found.get(position, 0), shape.optimizer.compute_ns + left)
    return found


class Step:
    """One operator's forward or backward: dispatch, compute and chain as expressions of the choices; compute's extremes."""

    def __init__(self, works: Sequence[Work]) -> None:
        """``works``: what the step may amount to."""
        self.pieces: list[tuple[Indicator, Work]] = []
        self._works = works

    @property
    def least_ns(self) -> int:
        """The least that the device does."""
        return min(work.compute_ns for work in self._works)

    @property
    def most_ns(self) -> int:
        """The most that the device does."""
        return max(work.compute_ns for work in self._works)

    def add(self, chosen: Indicator, work: Work) -> None:
        """A piece of work that is done where ``chosen`` is 1; before any of the expressions is asked for."""
        self.pieces.append((chosen, work))

    def add_to(self, compute: Expression, dispatch: Expression, times: int = 1) -> None:
        """Add up what the device and the CPU do."""
        computed, dispatched = compute.get, dispatch.get
        for chosen, (dispatch_ns, compute_ns, _) in self.pieces:
            for column, coefficient in chosen.items():
                coefficient *= times
                compute[column] = computed(column, 0) + coefficient * compute_ns
                dispatch[column] = dispatched(column, 0) + coefficient * dispatch_ns

    @cached_property
    def dispatch(self) -> Expression:
        """What the CPU does."""
        return self._sum(lambda work: work.dispatch_ns)

    @cached_property
    def compute(self) -> Expression:
        """What the device does."""
        return self._sum(lambda work: work.compute_ns)

    @cached_property
    def chain(self) -> Expression:
        """The longest way from the first dispatch through one kernel's to the last computation."""
        return self._sum(lambda work: 0 if work == NOTHING else work.chain_ns)

    def _sum(self, part: Callable[[Work], int]) -> Expression:
        found: Expression = {}
        for chosen, work in self.pieces:
            add(found, chosen, part(work))
        return found

    @property
    def is_fixed(self) -> bool:
        """Whether no choice changes it."""
        return all(column == CONSTANT for entry in (self.dispatch, self.compute, self.chain) for column in entry)


class StepExpressions:
    """Forward and backward of every operator, in the order in which they run: per operator one or more steps; and ``all``."""

    def __init__(self, choices: Choices, charges: Sequence[ChargedCast]) -> None:
        before: list[list[Step]] = [[] for _ in choices.of]
        after: list[list[Step]] = [[] for _ in choices.of]
        for position, cast, charged in charges:
            step = Step((NOTHING, cast.work))
            step.add(charged, cast.work)
            (before if cast.cast.site is CastSite.INPUT else after)[position].append(step)
        self.forward: list[list[Step]] = []
        self.backward: list[list[Step]] = []
        for position, options in enumerate(choices.of):
            charges_of = [(state.charge(ALL_ELSEWHERE), chosen) for state, chosen, _ in options]
            forward = Step([own.forward for own, _ in charges_of])
            backward = Step([own.backward for own, _ in charges_of])
            for own, chosen in charges_of:
                forward.add(chosen, own.forward)
                backward.add(chosen, own.backward)
            self.forward.append([*before[position], forward])
            self.backward.append([backward, *after[position]])
        self.all = [step for steps in (*self.forward, *reversed(self.backward)) for step in steps]


class MomentRows:
    """Rows between moments of a step and T, all of them columns of the program.

    Attributes:
        deadlines: where they are sums, in the order in which they pass: the work since the one before, and what follows it, in
            nanoseconds; all work until then and that are T at most.
        dispatch: the CPU's time of the whole step then, without bounds a deadline of its own.

    Args:
        limit: T's column.
        unit: of T's column and of all others for moments, in nanoseconds; see :func:`unit_ns`.
    """

    def __init__(self, program: Program, limit: int, unit: int) -> None:
        self._program, self._limit, self._unit = program, limit, unit
        self.deadlines: list[tuple[Expression, int]] = []
        self.dispatch: Expression = {}

    def then(self, before: int | None, work: Expression, column: int | None = None) -> int:
        """A column (or the given one) that is at least the time ``before`` (None: the start) plus the work."""
        if column is None:
            column = self._program.column(upper=math.inf)
        row = dict(work)
        if before is not None:
            row[before] = row.get(before, 0) + self._unit
        row[column] = row.get(column, 0) - self._unit
        self._program.row(row, upper=0, unit=self._unit)
        return column

    def within(self, moments: Expression, after_ns: int) -> None:
        """``moments + after_ns ≤ T``."""
        row: Expression = {CONSTANT: after_ns, self._limit: -self._unit}
        for moment, factor in moments.items():
            row[moment] = factor * self._unit
        self._program.row(row, upper=0, unit=self._unit)


class TimeRows(MomentRows):
    """Rows that keep a step within T, by deadlines of the group alone."""

    def __init__(self, program: Program, limit: int, shape: StepShape, unit: int) -> None:
        super().__init__(program, limit, unit)
        self._shape, self._after = shape, time_after(shape)
        self._micro_batch: int | None = None

    def add_free_running(self, steps: StepExpressions) -> None:
        """Rows of a group whose CPU runs ahead, or runs the kernels itself: sums alone bind."""
        dispatch: Expression = {}
        segment: Expression = {}
        for step in steps.all if self._shape.micro_batches > 1 else ():
            step.add_to(segment, dispatch, self._shape.micro_batches - 1)
        for forward in steps.forward:
            for step in forward:
                step.add_to(segment, dispatch)
        reached: int | None = None
        for position in reversed(range(len(steps.backward))):
            for step in steps.backward[position]:
                step.add_to(segment, dispatch)
            if position in self._after:
                self.deadlines.append((segment, self._after[position]))
                reached = self.then(reached, segment)
                self._within_limit(reached, self._after[position])
                segment = {CONSTANT: self._shape.host_work_after(position)}
        self.deadlines.append((segment, self._shape.optimizer.compute_ns))
        self._within_limit(self.then(reached, segment), self._shape.optimizer.compute_ns)
        self.dispatch = {**dispatch, CONSTANT: dispatch.get(CONSTANT, 0) + self._shape.optimizer.dispatch_ns}
        self._within_limit(self.then(None, dispatch), self._shape.optimizer.dispatch_ns)

    def add_synchronising(self, steps: StepExpressions) -> None:
        """Rows of a group that synchronises every step: device time G and CPU time C kernel by kernel.

        ``G' ≥ G + compute``, ``G' ≥ C + chain``, ``C' ≥ C + dispatch``, from 0 at the start of the step, or of its last
        micro-batch: each one before that takes as long as one alone.
        """
        if self._shape.micro_batches > 1:
            self._micro_batch = self.then(None, {})
            alone = Clock(self)
            alone.run(steps.all)
            for moment in (alone.device(), alone.host()):
                self.then(moment, {}, self._micro_batch)
        clock = Clock(self)
        for forward in steps.forward:
            clock.run(forward)
        for position in reversed(range(len(steps.backward))):
            clock.run(steps.backward[position])
            if position in self._after:
                self._within_limit(clock.device(), self._after[position])
                clock.delay_device(self._shape.host_work_after(position))
        optimizer = self._shape.optimizer
        self._within_limit(clock.device(), optimizer.compute_ns)
        self._within_limit(clock.host(), optimizer.dispatch_ns + optimizer.compute_ns)

    def _within_limit(self, reached: int | None, after_ns: int) -> None:
        moments = {} if reached is None else {reached: 1}
        if self._micro_batch is not None:
            moments[self._micro_batch] = self._shape.micro_batches - 1
        self.within(moments, after_ns)


class Clock:
    """Device and CPU time after the steps so far: a column each; steps that no plan changes are put together first."""

    def __init__(self, rows: MomentRows) -> None:
        self._then = rows.then
        self._device: int | None = None
        self._host: int | None = None
        self._pending = NOTHING

    def run(self, steps: Sequence[Step]) -> None:
        """The steps, one after the other."""
        for step in steps:
            if not step.is_fixed:
                self._flush()
                self._advance(step.dispatch, step.compute, step.chain)
            elif step.dispatch or step.compute:
                fixed = (entry.get(CONSTANT, 0) for entry in (step.dispatch, step.compute, step.chain))
                self._pending = self._pending.then(Work(*fixed))

    def delay_device(self, compute_ns: int) -> None:
        """Device work without a dispatch."""
        self._pending = self._pending.then(device_only(compute_ns)) if compute_ns else self._pending

    def device(self) -> int | None:
        """The device's time now; None for the start."""
        self._flush()
        return self._device

    def host(self) -> int | None:
        """The CPU's time now; None for the start."""
        self._flush()
        return self._host

    def _flush(self) -> None:
        if self._pending is not NOTHING:
            dispatch, compute, chain = self._pending
            self._pending = NOTHING
            self._advance({CONSTANT: dispatch}, {CONSTANT: compute}, {CONSTANT: max(chain, 0)})

    def _advance(self, dispatch: Expression, compute: Expression, chain: Expression) -> None:
        device = self._then(self._device, compute)
        self._then(self._host, chain, device)
        if dispatch:
            self._host = self._then(self._host, dispatch)
        self._device = device
