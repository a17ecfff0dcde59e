"""The memory model: peak memory of one rank's training step, following what autograd really keeps (DESIGN 6.4).

A step has 2V moments: operator i runs forward at moment i and backward at moment 2V-1-i.  Every piece of memory is an interval of
moments:

* an operator's output lives until its last consumer has run, or, where somebody saved it for backward, until the last of those
  has run backward; two consumers of one tensor share it;
* a cast copy likewise, shared by the consumers that share the cast; the original is kept only where somebody saved the original;
* what an operator alone keeps (int8 copies, masks, statistics) lives from its forward to its backward: three int8 copies are three;
* a tensor's gradient lives from its last consumer's backward to its producer's; a parameter's from its last user's backward to the
  optimizer, in float32;
* workspace and the gradient's copies in the gradient formats live for one moment.

Memory is then integer additions at moments, and the peak is the highest running sum: the same from scratch or after any number of
updates.  A measured peak of whole steps calibrates it (:mod:`qsync_planner.calibration`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs
import numpy as np

from qsync_core.dag import PrecisionDag
from qsync_core.op_id import OpId
from qsync_core.precision import Precision
from qsync_core.profile import Profile
from qsync_core.semantics import CastSite
from qsync_core.variant import Variant
from qsync_planner.cost_mapper import CostMapper
from qsync_planner.cost_model import CostModel

GRADIENT_NBYTES = Precision.FLOAT32.nbytes
_DTYPE_NBYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2}


@attrs.frozen
class MemoryEstimate:
    """Predicted memory of one rank, in bytes.

    Attributes:
        static_bytes: there during the whole step: weights, optimizer state, the batch, DDP's bucket copies of all gradients.
        saved_bytes: kept for backward when the forward pass ends.
        transient_bytes: what the peak moment has beyond both: gradients made until then, living activations, workspace, and the
            calibration's correction (which may make it negative).
        peak_bytes: the sum of the three.
    """

    static_bytes: int
    saved_bytes: int
    transient_bytes: int
    peak_bytes: int


class MemoryLedger:
    """Memory of one device group's rank, kept up to date with its cost mapper."""

    def __init__(self, mapper: CostMapper, *, distributed: bool = True) -> None:
        self._mapper = mapper
        dag, profile = mapper.dag, mapper.model.profile
        count = len(dag.operators)
        self._backward_of = [2 * count - 1 - i for i in range(count)]
        self._bucket_bytes = sum(bucket.nbytes for bucket in dag.buckets) if distributed else 0
        self.static_bytes = (
            sum(p.numel * _DTYPE_NBYTES.get(p.dtype, GRADIENT_NBYTES) for p in dag.parameters)
            + profile.optimizer_state_bytes
            + profile.input_bytes
            + self._bucket_bytes
        )
        self._delta = np.zeros(2 * count + 1, dtype=np.int64)
        self._moment = np.zeros(2 * count + 1, dtype=np.int64)
        self._correction = 0
        self._count_parameter_gradients(dag)
        self._gradient_start = [self._first_gradient(i) for i in range(count)]
        self._tensors: list[list[tuple[int, int, int]]] = [self._tensor_intervals(i) for i in range(count)]
        for intervals in self._tensors:
            self._add(intervals, 1)
        self._own: list[tuple[int, int, int, int]] = [self._own_of(i) for i in range(count)]
        for position, own in enumerate(self._own):
            self._add_own(position, own, 1)

    def _count_parameter_gradients(self, dag: PrecisionDag) -> None:
        numel = {p.fqn: p.numel for p in dag.parameters if p.requires_grad}
        last_user: dict[str, int] = {}
        for position, operator in enumerate(dag.operators):
            last_user.update(dict.fromkeys(operator.parameters, position))
        for name, size in numel.items():
            if name in last_user:
                self._delta[self._backward_of[last_user[name]]] += size * GRADIENT_NBYTES

    def _tensor_intervals(self, position: int) -> list[tuple[int, int, int]]:
        """(first moment, moment after the last, bytes) of an operator's output, of its cast copies, and of its gradient."""
        mapper = self._mapper
        operator = mapper.dag.operators[position]
        settled = mapper.settled[position]
        readers = mapper.readers[position]
        intervals: list[tuple[int, int, int]] = []
        kept_until = self._backward_of[position] if settled.saves_output else -1
        copies: dict[int, tuple[int, int, int]] = {}
        for reader in readers:
            reading = mapper.settled[reader]
            inputs = mapper.inputs[reader]
            for priced in reading.casts:
                if priced.cast.site is CastSite.INPUT and inputs[priced.cast.input_index] == position:
                    start, end, _ = copies.get(priced.share, (reader, 0, 0))
                    nbytes = priced.cast.numel * priced.cast.key.target.nbytes
                    copies[priced.share] = (start, max(end, reader), nbytes)
            for saved in reading.saved_inputs:
                if inputs[saved.input_index] != position:
                    continue
                if saved.share < 0:
                    kept_until = max(kept_until, self._backward_of[reader])
                else:
                    start, end, nbytes = copies[saved.share]
                    copies[saved.share] = (start, max(end, self._backward_of[reader]), nbytes)
        if operator.kind != "input":
            intervals.append((position, max(readers[-1] if readers else position, kept_until) + 1, settled.output_bytes))
            gradient_start = self._gradient_start[position]
            if gradient_start is not None:
                intervals.append((gradient_start, self._backward_of[position] + 1, settled.output_bytes))
        intervals.extend((start, end + 1, nbytes) for start, end, nbytes in copies.values())
        return intervals

    def _first_gradient(self, producer: int) -> int | None:
        """The moment at which the output's gradient is first made: the backward of its last reader that makes one.

        The last operator (the loss) starts from its own; None where no reader makes any.
        """
        readers = self._mapper.readers[producer]
        for reader in reversed(readers):
            skipped = self._mapper.dag.operators[reader].no_grad_inputs
            if any(source == producer and i not in skipped for i, source in enumerate(self._mapper.inputs[reader])):
                return self._backward_of[reader]
        return None if readers else self._backward_of[producer]

    def _own_of(self, position: int) -> tuple[int, int, int, int]:
        """Own saved bytes, workspace, gradient copy, calibration."""
        settled = self._mapper.settled[position]
        return settled.saved_own_bytes, settled.workspace_bytes, settled.gradient_copy_bytes, settled.memory_correction_bytes

    def _add(self, intervals: Iterable[tuple[int, int, int]], sign: int) -> None:
        for start, end, nbytes in intervals:
            self._delta[start] += sign * nbytes
            self._delta[end] -= sign * nbytes

    def _add_own(self, position: int, own: tuple[int, int, int, int], sign: int) -> None:
        saved, workspace, gradient_copy, correction = own
        backward = self._backward_of[position]
        self._delta[position] += sign * saved
        self._delta[backward + 1] -= sign * saved
        self._moment[position] += sign * workspace
        self._moment[backward] += sign * (workspace + gradient_copy)
        self._correction += sign * correction

    def refresh(self, settled: Iterable[int], producers: Iterable[int]) -> MemoryBefore:
        """Account for changed operators and changed readings of producers; returns what was there, for :meth:`restore`."""
        before = MemoryBefore([(p, self._tensors[p]) for p in producers], [(p, self._own[p]) for p in settled])
        for position, tensors in before.tensors:
            self._replace_tensors(position, tensors, self._tensor_intervals(position))
        for position, own in before.own:
            self._replace_own(position, own, self._own_of(position))
        return before

    def restore(self, before: MemoryBefore) -> None:
        """Undo a refresh."""
        for position, tensors in before.tensors:
            self._replace_tensors(position, self._tensors[position], tensors)
        for position, own in before.own:
            self._replace_own(position, self._own[position], own)

    def _replace_tensors(self, position: int, old: list[tuple[int, int, int]], new: list[tuple[int, int, int]]) -> None:
        if old != new:
            self._add(old, -1)
            self._add(new, 1)
        self._tensors[position] = new

    def _replace_own(self, position: int, old: tuple[int, int, int, int], new: tuple[int, int, int, int]) -> None:
        if old != new:
            self._add_own(position, old, -1)
            self._add_own(position, new, 1)
        self._own[position] = new

    def peak_bytes(self) -> int:
        """Predicted peak of one rank."""
        running = np.cumsum(self._delta)
        highest = int((running + self._moment).max()) if running.size else 0
        calibration = self._mapper.model.calibration
        modelled = self.static_bytes + highest + self._correction + calibration.memory_bytes
        return max(modelled, calibration.memory_floor_bytes + self._bucket_bytes)

    def saved_bytes(self) -> int:
        """Bytes kept for backward when the forward pass ends."""
        boundary = len(self._backward_of)
        saved = sum(own[0] for own in self._own)
        for intervals in self._tensors:
            saved += sum(nbytes for start, end, nbytes in intervals if start < boundary < end)
        return saved

    def estimate(self) -> MemoryEstimate:
        """The whole estimate."""
        saved, peak = self.saved_bytes(), self.peak_bytes()
        return MemoryEstimate(self.static_bytes, saved, peak - self.static_bytes - saved, peak)


@attrs.frozen
class MemoryBefore:
    """What a refresh replaced."""

    tensors: list[tuple[int, list[tuple[int, int, int]]]]
    own: list[tuple[int, tuple[int, int, int, int]]]


def estimate_memory(
    dag: PrecisionDag,
    profile: Profile,
    variants: Mapping[OpId, Variant],
    *,
    model: CostModel | None = None,
    distributed: bool = True,
) -> MemoryEstimate:
    """Predicted peak memory of one rank under an assignment of variants.

    Args:
        dag: the model.
        profile: its measurements on the device.
        variants: the variant of every adjustable operator.
        model: a calibrated cost model of the same graph and profile; None for the plain sum of parts.
        distributed: whether DDP keeps its bucket copies of the gradients.

    Raises:
        PlanError: when the variants do not fit the model or were not profiled.
    """
    mapper = CostMapper(dag, model or CostModel(dag, profile), variants)
    return MemoryLedger(mapper, distributed=distributed).estimate()
