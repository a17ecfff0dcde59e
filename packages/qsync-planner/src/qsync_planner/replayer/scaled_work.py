"""The work of a step whose kernels take another time than measured (a local batch of another size), by arrays.

Formats and casts stay as they are, so everything about a step but its kernels' times is known: what is left are sums, and for a
chain the highest of sums, over arrays of integers.  The result is that of a cost mapper over the scaled profile, to the nanosecond.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np

from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.profile import Profile
from qsync_core.ir.variant import Variant
from qsync_planner.replayer.cost_mapper import AFTER_BACKWARD, AFTER_FORWARD, BEFORE_BACKWARD, BEFORE_FORWARD, CostMapper
from qsync_planner.replayer.cost_model import Calibration, PhaseTimes, PricedCast, Scale, is_product
from qsync_planner.replayer.max_plus import NEVER, Work
from qsync_planner.replayer.step_timing import Condensed

Integers = np.ndarray[Any, np.dtype[np.int64]]


class ScaledWork:
    """The kernels of one assignment, in the order in which they run.

    Args:
        mapper: under the assignment; no chain may be fused.
        ready_after: where runs of operators end, as in :meth:`~qsync_planner.replayer.step_timing.Condensed.of`.
    """

    def __init__(self, mapper: CostMapper, ready_after: Iterable[int]) -> None:
        model, operators = mapper.model, mapper.dag.operators
        self._synchronous = mapper.is_synchronous
        self._begins = sorted({0, *ready_after})
        self._runs: list[Variant] = [state.evaluation.run for state in mapper.states]
        self._costs: Integers = np.asarray(
            [model.cost_number(operator, run) for operator, run in zip(operators, self._runs, strict=True)], dtype=np.int64
        )
        self._products = mapper.dag.once(_products)
        forward, charged = range(len(operators)), mapper.charged
        self._forward = _Kernels(charged, self._begins, [*forward], (BEFORE_FORWARD, AFTER_FORWARD))
        ends = [*self._begins, len(operators)]
        backward = [*chain.from_iterable(reversed(range(begin, end)) for begin, end in pairwise(ends))]
        self._backward = _Kernels(charged, self._begins, backward, (BEFORE_BACKWARD, AFTER_BACKWARD))

    def condensed(self, dispatch_ns: Integers, compute_ns: Integers, calibration: Calibration) -> Condensed:
        """The work with kernels of these times.

        Args:
            dispatch_ns, compute_ns: of every cost of a profile (:func:`measured_ns`), forward and backward.
            calibration: how they are brought to whole steps.
        """
        none = np.zeros((1, 2), dtype=np.int64)  # of an input, which no cost stands for
        dispatch, compute = (np.concatenate([entry, none])[self._costs] for entry in (dispatch_ns, compute_ns))
        if self._synchronous:
            dispatch, compute = np.zeros_like(dispatch), dispatch + compute
        times = np.stack([dispatch[:, 0], compute[:, 0], dispatch[:, 1], compute[:, 1]], axis=1)
        apart = calibration.product_scales or calibration.scales
        for column, (scale, of_products) in enumerate(zip(calibration.scales, apart, strict=True)):
            own = times[:, column]
            times[:, column] = np.where(self._products, _scaled(own, of_products), _scaled(own, scale))
        if calibration.everywhere:
            times += np.asarray(calibration.everywhere, dtype=np.int64)
        if calibration.corrections:
            nothing = PhaseTimes(0, 0, 0, 0)
            found = (calibration.corrections.get(key) for key in enumerate(self._runs))
            times += np.asarray([nothing if entry is None else entry.times for entry in found], dtype=np.int64)
        times = np.maximum(times, 0)
        run_of = {begin: number for number, begin in enumerate(self._begins)}
        return Condensed(
            self._forward.work(times[:, 0], times[:, 1]), self._backward.work(times[:, 2], times[:, 3]), self._synchronous, run_of
        )


def _products(dag: PrecisionDag) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Whether each operator is a product."""
    return np.asarray([is_product(operator) for operator in dag.operators])


def measured_ns(profile: Profile) -> tuple[Integers, Integers]:
    """Dispatch and compute times of all costs of a profile, forward and backward, of shape (costs, 2)."""
    dispatch = [(cost.forward_dispatch_ns, cost.backward_dispatch_ns) for cost in profile.costs]
    compute = [(cost.forward_compute_ns, cost.backward_compute_ns) for cost in profile.costs]
    return np.asarray(dispatch, dtype=np.int64).reshape(-1, 2), np.asarray(compute, dtype=np.int64).reshape(-1, 2)


class _Kernels:
    """A pass's kernels one after the other, casts among them."""

    def __init__(
        self,
        charged: Sequence[tuple[PricedCast, ...]],
        begins: Sequence[int],
        order: Sequence[int],
        sites: tuple[Sequence[object], Sequence[object]],
    ) -> None:
        alike: dict[int, list[int]] = {}  # equal operators share the object
        for position, casts in enumerate(charged):
            if casts:
                alike.setdefault(id(casts), []).append(position)
        before, after = ([[c for c in charged[own[0]] if c.cast.site in wanted] for own in alike.values()] for wanted in sites)
        ahead, sizes = np.zeros(len(charged), dtype=np.int64), np.ones(len(charged), dtype=np.int64)
        for positions, earlier, later in zip(alike.values(), before, after, strict=True):
            ahead[positions] = len(earlier)
            sizes[positions] += len(earlier) + len(later)
        ends = np.cumsum(sizes[order])
        first: Integers = ends - sizes[order]
        self._begins: Integers = first[begins]
        self._slots: Integers = np.empty(len(charged), dtype=np.int64)
        self._slots[order] = first + ahead[order]
        self._times: Integers = np.zeros((ends[-1] if len(ends) else 0, 2), dtype=np.int64)
        for positions, earlier, later in zip(alike.values(), before, after, strict=True):
            for places, made in ((np.arange(-len(earlier), 0), earlier), (np.arange(1, len(later) + 1), later)):
                own = np.asarray([(cast.dispatch_ns, cast.compute_ns) for cast in made], dtype=np.int64).reshape(-1, 2)
                self._times[self._slots[positions][:, None] + places] = own

    def work(self, dispatch_ns: Integers, compute_ns: Integers) -> list[Work]:
        """The work of each run of operators, given the times of the operators' own kernels."""
        dispatch, compute = self._times[:, 0].copy(), self._times[:, 1].copy()
        dispatch[self._slots], compute[self._slots] = dispatch_ns, compute_ns
        # A chain dispatches up to one kernel and computes from there on: the highest over all kernels of a run.
        before_end = np.cumsum(dispatch) - (np.cumsum(compute) - compute)
        chains = np.maximum.reduceat(before_end, self._begins)
        dispatched, computed = (np.add.reduceat(entry, self._begins) for entry in (dispatch, compute))
        ends = np.cumsum(computed)
        chains += ends - (np.cumsum(dispatched) - dispatched)
        chains[(dispatched == 0) & (computed == 0)] = NEVER
        return [*map(Work, dispatched.tolist(), computed.tolist(), chains.tolist())]


def _scaled(times: Integers, scale: Scale) -> Integers:
    if scale.numerator == scale.denominator:
        return times
    return np.asarray([*map(scale, times.tolist())], dtype=np.int64)
