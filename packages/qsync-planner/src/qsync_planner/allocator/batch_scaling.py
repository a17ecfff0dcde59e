"""How a device group's costs change with its local batch: t(b) = fixed + slope·b.

A profile is made at one batch size.  With that alone, the compute time of every kernel is taken as proportional to the batch, while
what was measured apart from it does not change: dispatch and the optimizer.  A second profile at another batch size tells for
every operator what really does not scale.
"""

from __future__ import annotations

import attrs

from qsync_core.cluster import DeviceGroup
from qsync_core.errors import PlanError
from qsync_core.profile import OpCost, Profile, StepMeasurement
from qsync_core.variant import Variant
from qsync_planner.allocator.problem import Problem


@attrs.frozen
class BatchProfile:
    """A further profile of the same job on the same device at another batch size."""

    batch_size: int
    profile: Profile


@attrs.frozen
class _Ratio:
    """A factor for integer times, exact until rounded down."""

    numerator: int
    denominator: int

    def __call__(self, value: int) -> int:
        return value * self.numerator // self.denominator


class BatchScaling:
    """The costs of one group as functions of its local batch.

    Args:
        problem, group: what is scaled.
        busy_ns: predicted busy time of a rank at the traced batch size; the scaling is relative to it.
        further: the profile at a second batch size.

    Raises:
        PlanError: when the second profile is of the same batch size or of other operators.
    """

    def __init__(self, problem: Problem, group: DeviceGroup, busy_ns: int, further: BatchProfile | None) -> None:
        self.profile = problem.profiles[group.name]
        self.batch_size = max(1, problem.dag.batch_size)
        self.measured_busy_ns = busy_ns
        self._forward, self._backward = self._fit(group.name, further)
        base = Variant.plain(group.base)
        chosen = [
            by_variant.get(base, next(iter(sorted(by_variant.values()))))
            for operator in problem.dag.operators
            if (by_variant := self.profile.cost_index.get(operator.op_id))
        ]
        costs = self.profile.costs
        self._dispatch_ns = sum(costs[i].forward_dispatch_ns + costs[i].backward_dispatch_ns for i in chosen)
        self._forward_ns = sum(costs[i].forward_compute_ns for i in chosen)
        self._backward_ns = sum(costs[i].backward_compute_ns for i in chosen)
        self._forward_slope = sum(self._forward[i] for i in chosen)
        self._backward_slope = sum(self._backward[i] for i in chosen)

    def busy_ns(self, batch: int) -> int:
        """Busy time of a rank at a local batch: exact at the traced batch size, and never falling with the batch."""
        return _Ratio(self._model_ns(batch), max(1, self._model_ns(self.batch_size)))(self.measured_busy_ns)

    def profile_at(self, batch: int) -> Profile:
        """The group's profile with its kernels, and the whole steps it is calibrated with, scaled to a local batch."""
        if batch == self.batch_size:
            return self.profile
        costs = tuple(self._scaled(index, cost, batch) for index, cost in enumerate(self.profile.costs))
        forward = _Ratio(self._forward_at(batch), max(1, self._forward_ns))
        backward = _Ratio(self._backward_at(batch), max(1, self._backward_ns))
        steps = tuple(_scale_step(step, forward, backward) for step in self.profile.steps)
        return attrs.evolve(self.profile, costs=costs, steps=steps)

    def _forward_at(self, batch: int) -> int:
        return max(0, self._forward_ns + round(self._forward_slope * (batch - self.batch_size)))

    def _backward_at(self, batch: int) -> int:
        return max(0, self._backward_ns + round(self._backward_slope * (batch - self.batch_size)))

    def _model_ns(self, batch: int) -> int:
        """The sum of parts at a batch size: kernels at the base precision and the optimizer."""
        dispatch = self._dispatch_ns + self.profile.optimizer_dispatch_ns
        compute = self._forward_at(batch) + self._backward_at(batch) + self.profile.optimizer_compute_ns
        return dispatch + compute if self.profile.device.is_synchronous else max(dispatch, compute)

    def _scaled(self, index: int, cost: OpCost, batch: int) -> OpCost:
        difference = batch - self.batch_size
        return attrs.evolve(
            cost,
            forward_compute_ns=max(0, cost.forward_compute_ns + round(self._forward[index] * difference)),
            backward_compute_ns=max(0, cost.backward_compute_ns + round(self._backward[index] * difference)),
        )

    def _fit(self, group: str, further: BatchProfile | None) -> tuple[list[float], list[float]]:
        """Forward and backward slopes in ns per sample, one per cost, not negative."""
        size = self.batch_size
        forward = [cost.forward_compute_ns / size for cost in self.profile.costs]
        backward = [cost.backward_compute_ns / size for cost in self.profile.costs]
        if further is None:
            return forward, backward
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
                    here, there = self.profile.costs[index], other.cost(op_id, variant)
                    forward[index] = max(0.0, (there.forward_compute_ns - here.forward_compute_ns) / difference)
                    backward[index] = max(0.0, (there.backward_compute_ns - here.backward_compute_ns) / difference)
        return forward, backward


def _scale_step(step: StepMeasurement, forward: _Ratio, backward: _Ratio) -> StepMeasurement:
    """A whole measured step at another batch size: forward and backward by the ratio of their kernels, the rest as it was."""
    forward_ns, backward_ns = forward(step.forward_compute_ns), backward(step.backward_compute_ns)
    added = forward_ns - step.forward_compute_ns + backward_ns - step.backward_compute_ns
    dispatch = step.forward_dispatch_ns + step.backward_dispatch_ns + step.optimizer_dispatch_ns
    return attrs.evolve(
        step,
        iteration_ns=max(dispatch, step.iteration_ns + added),
        forward_compute_ns=forward_ns,
        backward_compute_ns=backward_ns,
    )
