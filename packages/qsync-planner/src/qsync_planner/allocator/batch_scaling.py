"""The costs of one group as functions of its local batch: t(b) = fixed + slope·b.

A profile is made at one batch size.  With that alone, the compute time of every kernel is taken as proportional to the batch, while
dispatch and the optimizer, measured apart, do not change.  Whole steps that were measured at other batch sizes say how much more
or less all kernels compute there (a matrix product on few SMs takes its time in steps), and what of it does not scale.  A second
profile at another batch size shows for every operator what really does not scale.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import attrs
import numpy as np

from qsync_core.errors import PlanError
from qsync_core.ir.profile import Profile, StepMeasurement
from qsync_core.ir.variant import Variant
from qsync_planner.matching import BatchProfile, Inputs
from qsync_planner.replayer.scaled_work import Integers, measured_ns

Numbers = np.ndarray[Any, np.dtype[np.float64]]


@attrs.frozen
class _Line:
    """Compute time as a function of the local batch.

    Attributes:
        traced_ns: at the traced batch size.
        slope: ns per sample, not negative.
    """

    traced_ns: int
    slope: float

    def at(self, more: float) -> int:
        """Nanoseconds with so many more samples than traced."""
        return max(0, self.traced_ns + round(self.slope * more))


Points = list[tuple[float, float]]
"""Batch sizes, and by how much the kernels of a phase take longer there than at the traced one; both rise."""


def _growth_of(traced: int, step: StepMeasurement | None, others: Mapping[int, StepMeasurement]) -> tuple[Points, ...]:
    """The points of forward and backward; none where no other batch size was measured."""
    if step is None or not others:
        return ()
    found = []
    for phase in ("forward_compute_ns", "backward_compute_ns"):
        ratios = {batch: getattr(other, phase) / max(1, getattr(step, phase)) for batch, other in others.items()}
        points: Points = [(float(traced), 1.0)]
        for batch in sorted((b for b in others if b < traced), reverse=True):
            points.insert(0, (float(batch), min(ratios[batch], points[0][1])))
        for batch in sorted(b for b in others if b > traced):
            points.append((float(batch), max(ratios[batch], points[-1][1])))
        found.append(points)
    return tuple(found)


def _between(points: Points, batch: int) -> float:
    """On straight lines between points; outside of them on that from the nearest point to the furthest, because some of a step does
    not shrink with its samples.

    It is never steeper than in proportion to the batch: between two points may be what kernels on few SMs take at once.
    """
    (first, at_first), (last, at_last) = points[0], points[-1]
    slope = (at_last - at_first) / (last - first)
    if batch < first:
        return at_first - min(slope, at_first / first) * (first - batch)
    if batch > last:
        return at_last + min(slope, at_last / last) * (batch - last)
    return float(np.interp(batch, [point[0] for point in points], [point[1] for point in points]))


class BatchScaling:
    """The costs of one group as functions of its local batch.

    Attributes:
        measured: whole steps at other batch sizes, by these and the rung; none where a second profile says more.

    Args:
        inputs: of a plan, with the profile at a second batch size where there is one.
        group: its name.

    Raises:
        PlanError: when the second profile is of the same batch size or of other operators.
    """

    def __init__(self, inputs: Inputs, group: str) -> None:
        self.profile = inputs.profiles[group]
        self.further = inputs.further.get(group)
        self.batch_size = max(1, inputs.dag.batch_size)
        self._accumulate = inputs.dag.accumulate
        self._compute_ns, self._slopes = self._fit(group, self.further)
        base = Variant.plain(inputs.cluster.group(group).base)
        self._base = base
        steps = () if self.further else self.profile.batches
        self.measured = {(one.batch_size, one.step.variant): one.step for one in steps}
        whole = next((step for step in self.profile.steps if step.variant == base), None)
        at_base = {size: step for (size, variant), step in self.measured.items() if variant == base and size != self.batch_size}
        self._growth = _growth_of(self.batch_size, whole, at_base)
        chosen = [
            by_variant[base] if base in by_variant else min(by_variant.values())
            for operator in inputs.dag.operators
            if (by_variant := self.profile.cost_index.get(operator.op_id))
        ]
        costs = self.profile.costs
        self._dispatch_ns = sum(costs[i].forward_dispatch_ns + costs[i].backward_dispatch_ns for i in chosen)
        self._forward, self._backward = (
            _Line(int(self._compute_ns[chosen, phase].sum()), sum(self._slopes[chosen, phase].tolist())) for phase in (0, 1)
        )

    def nearest_measured(self, batch: int) -> int | None:
        """The other local batch nearest to this one at which whole steps were measured; None where they were at none."""
        others = [size for size, variant in self.measured if variant == self._base]
        return min(others, key=lambda size: (abs(size - batch), size), default=None)

    def busy_ns(self, traced_ns: int, batch: int) -> int:
        """Busy time of a rank at a local batch, never falling with it; ``traced_ns`` is that at the traced batch size."""
        return traced_ns * self._model_ns(batch) // max(1, self._model_ns(self.batch_size))

    @cached_property
    def _measured_ns(self) -> tuple[Integers, Integers]:
        return measured_ns(self.profile)

    def kernels_at(self, batch: int) -> tuple[Integers, Integers]:
        """Dispatch and compute times of all costs of the profile at a local batch, as :meth:`profile_at` has them."""
        dispatch, compute = self._measured_ns
        more = np.rint(self._slopes * self._more(batch)).astype(np.int64)
        return dispatch, np.maximum(0, compute + more)

    def _more(self, batch: int) -> tuple[float, float]:
        """How many more samples than traced the kernels of forward and backward compute as if they had."""
        if not self._growth:
            return float(batch - self.batch_size), float(batch - self.batch_size)
        forward, backward = (_between(points, batch) for points in self._growth)
        return self.batch_size * (forward - 1.0), self.batch_size * (backward - 1.0)

    def profile_at(self, batch: int) -> Profile:
        """The group's profile with its kernels, and the whole steps it is calibrated with, scaled to a local batch."""
        if batch == self.batch_size:
            return self.profile
        with attrs.validators.disabled():  # of thousands of costs no attribute but two is new
            computing = self.kernels_at(batch)[1].tolist()
            costs = tuple(cost.computing(*ns) for cost, ns in zip(self.profile.costs, computing, strict=True))
        steps = tuple(self._scaled_step(step, batch) for step in self.profile.steps)
        mixed = tuple(attrs.evolve(one, step=self._scaled_step(one.step, batch, mixed=True)) for one in self.profile.mixed)
        return attrs.evolve(self.profile, costs=costs, steps=steps, mixed=mixed)

    def _model_ns(self, batch: int) -> int:
        """The sum of parts at a batch size: kernels of all micro-batches at the base precision, and the optimizer."""
        more_fw, more_bw = self._more(batch)
        dispatch = self._accumulate * self._dispatch_ns + self.profile.optimizer_dispatch_ns
        compute = self._accumulate * (self._forward.at(more_fw) + self._backward.at(more_bw)) + self.profile.optimizer_compute_ns
        return dispatch + compute if self.profile.device.is_synchronous else max(dispatch, compute)

    def _scaled_step(self, step: StepMeasurement, batch: int, *, mixed: bool = False) -> StepMeasurement:
        """A whole step as it was measured there; between batches at which it was, on the straight line between them; outside of
        them the nearest one with forward and backward by the ratio of their kernels, the rest as it was.

        ``mixed``: of some layers alone, which were measured at the traced batch only.
        """
        known = {self.batch_size: step}
        if not mixed:
            known |= {size: one for (size, rung), one in self.measured.items() if rung == step.variant}
        sizes = sorted(known)
        place = bisect_left(sizes, batch)
        if place in (0, len(sizes)) or sizes[place] == batch:
            nearest = sizes[min(place, len(sizes) - 1)]
            return self._proportional(known[nearest], nearest, batch)
        below, above = sizes[place - 1 : place + 1]
        part = (batch - below) / (above - below)
        low, high = known[below], known[above]
        names = ("iteration_ns", "forward_compute_ns", "backward_compute_ns")
        between = {name: round((1 - part) * getattr(low, name) + part * getattr(high, name)) for name in names}
        return attrs.evolve(low if part < 0.5 else high, **between)

    def _proportional(self, step: StepMeasurement, there: int, batch: int) -> StepMeasurement:
        if there == batch:
            return step
        taken, lines = (step.forward_compute_ns, step.backward_compute_ns), (self._forward, self._backward)
        forward_ns, backward_ns = (
            ns * line.at(more) // max(1, line.at(from_))
            for ns, line, more, from_ in zip(taken, lines, self._more(batch), self._more(there), strict=True)
        )
        added = forward_ns - step.forward_compute_ns + backward_ns - step.backward_compute_ns
        dispatch = step.forward_dispatch_ns + step.backward_dispatch_ns + step.optimizer_dispatch_ns
        return attrs.evolve(
            step,
            iteration_ns=max(dispatch, step.iteration_ns + added),
            forward_compute_ns=forward_ns,
            backward_compute_ns=backward_ns,
        )

    def _fit(self, group: str, further: BatchProfile | None) -> tuple[Integers, Numbers]:
        """Compute times at the traced batch and ns per sample of every cost, forward and backward, of shape (costs, 2); those that
        the second profile lacks are proportional to the batch."""
        compute = self._measured_ns[1]
        slopes: Numbers = compute / self.batch_size
        if further is None:
            return compute, slopes
        other, difference = further.profile, further.batch_size - self.batch_size
        if difference == 0:
            raise PlanError(
                f"the second profile of group {group!r} is at batch size {further.batch_size}, as the first; "
                "profile another batch size"
            )
        if set(other.cost_index) != set(self.profile.cost_index):
            raise PlanError(
                f"the second profile of group {group!r} (batch size {further.batch_size}) has other operators than the first; "
                "profile the same job with only its batch size changed"
            )
        for op_id, by_variant in self.profile.cost_index.items():
            for variant, index in by_variant.items():
                if variant in other.cost_index[op_id]:
                    there = other.cost(op_id, variant)
                    more = np.asarray([there.forward_compute_ns, there.backward_compute_ns]) - compute[index]
                    slopes[index] = np.maximum(0.0, more / difference)
        return compute, slopes
