"""The costs of one group as functions of its local batch: t(b) = fixed + slope·b.

A profile is made at one batch size.  With that alone, the compute time of every kernel is taken as proportional to the batch, while
dispatch and the optimizer, measured apart, do not change.  A second profile at another batch size shows for every operator what
really does not scale.
"""

from __future__ import annotations

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

    def at(self, more: int) -> int:
        """Nanoseconds with so many more samples than traced."""
        return max(0, self.traced_ns + round(self.slope * more))


class BatchScaling:
    """The costs of one group as functions of its local batch.

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

    def busy_ns(self, traced_ns: int, batch: int) -> int:
        """Busy time of a rank at a local batch, never falling with it; ``traced_ns`` is that at the traced batch size."""
        return traced_ns * self._model_ns(batch) // max(1, self._model_ns(self.batch_size))

    @cached_property
    def _measured_ns(self) -> tuple[Integers, Integers]:
        return measured_ns(self.profile)

    def kernels_at(self, batch: int) -> tuple[Integers, Integers]:
        """Dispatch and compute times of all costs of the profile at a local batch, as :meth:`profile_at` has them."""
        dispatch, compute = self._measured_ns
        more = np.rint(self._slopes * (batch - self.batch_size)).astype(np.int64)
        return dispatch, np.maximum(0, compute + more)

    def profile_at(self, batch: int) -> Profile:
        """The group's profile with its kernels, and the whole steps it is calibrated with, scaled to a local batch."""
        if batch == self.batch_size:
            return self.profile
        more = batch - self.batch_size
        with attrs.validators.disabled():  # of thousands of costs no attribute but two is new
            computing = self.kernels_at(batch)[1].tolist()
            costs = tuple(cost.computing(*ns) for cost, ns in zip(self.profile.costs, computing, strict=True))
        steps = tuple(self._scaled_step(step, more) for step in self.profile.steps)
        mixed = tuple(attrs.evolve(one, step=self._scaled_step(one.step, more)) for one in self.profile.mixed)
        return attrs.evolve(self.profile, costs=costs, steps=steps, mixed=mixed)

    def _model_ns(self, batch: int) -> int:
        """The sum of parts at a batch size: kernels of all micro-batches at the base precision, and the optimizer."""
        more = batch - self.batch_size
        dispatch = self._accumulate * self._dispatch_ns + self.profile.optimizer_dispatch_ns
        compute = self._accumulate * (self._forward.at(more) + self._backward.at(more)) + self.profile.optimizer_compute_ns
        return dispatch + compute if self.profile.device.is_synchronous else max(dispatch, compute)

    def _scaled_step(self, step: StepMeasurement, more: int) -> StepMeasurement:
        """A whole measured step: forward and backward by the ratio of their kernels, the rest as it was."""
        forward_ns, backward_ns = (
            measured * line.at(more) // max(1, line.traced_ns)
            for measured, line in ((step.forward_compute_ns, self._forward), (step.backward_compute_ns, self._backward))
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
