"""The memory model: peak memory of one rank's training step, following what autograd really keeps (docs/design/memory.md#moments).

A step has 2V moments: operator i runs forward at moment i and backward at moment 2V-1-i.  Every piece of memory is an interval of
moments:

* a frozen weight is there at every moment in the format in which it is stored, once however often its module is called; its
  dequantized copy is workspace of forward, and again of backward;
* an operator's output lives until its last consumer has run, or, where operators save it for backward, until the last of those
  has run backward; two consumers of one tensor share it, also where an operator between hands it on as it is;
* a cast copy likewise, shared by the consumers that share the cast; the original is kept only where an operator saves it uncast;
* what an operator alone keeps (int8 copies, masks, statistics) lives from its forward to its backward: three int8 copies are three;
* a tensor's gradient lives from its last consumer's backward to its producer's; a parameter's from its last user's backward to the
  optimizer, in float32; where it is a view of DDP's bucket, until it has been copied there, after its first user's backward;
* where gradients are accumulated, the sums are there at every moment, from the second micro-batch on, and a micro-batch's own
  gradient of a parameter until it has been added, after its first user's backward;
* workspace and the gradient's copies in the gradient formats live for one moment.

Memory is then integer additions at moments, and the peak is the highest running sum: the same from scratch or after any number of
updates, each of which costs O(log V) for every operator whose memory changes.  A measured peak of whole steps calibrates it
(:mod:`qsync_planner.replayer.calibration`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, zip_longest
from math import ceil
from operator import itemgetter
from typing import Any, NamedTuple

import attrs
import numpy as np

from qsync_core.chains.finding import chains_of
from qsync_core.ir.dag import OpClass, PrecisionDag
from qsync_core.ir.plan import OUTSIDE
from qsync_core.ir.profile import Profile
from qsync_planner.replayer.cost_mapper import CostMapper
from qsync_planner.replayer.cost_model import GRADIENT_NBYTES, CostModel, Evaluation, Wiring
from qsync_planner.replayer.incremental import Node, SequenceTree
from qsync_planner.replayer.max_plus import NEVER
from qsync_planner.replayer.process_memory import ProcessMemory

_DTYPE_NBYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2}
Intervals = list[tuple[int, int, int]]
"""(first moment, moment after the last, bytes)."""
OwnBytes = tuple[int, int, int, int, int]
"""Own saved bytes, workspace forward, workspace and gradient copies backward, calibration, what storing the weight adds."""
Replaced = tuple[list[tuple[int, Intervals]], list[tuple[int, OwnBytes]], Intervals, list[tuple[int, int]]]
_EMPTY = (0, 0, 0)
_MOST_INT64 = 2**62
Moment = tuple[int, int, int]
"""Bytes at a moment: gradients of parameters outside buckets, workspace, and both with activations."""
_BESIDE = "measured beside these"


@attrs.frozen
class MemoryEstimate:
    """Predicted memory of one rank, in bytes.

    Attributes:
        static_bytes: there during the whole step: weights, optimizer state, the batch, DDP's buckets (as of the second step).
        saved_bytes: kept for backward when the forward pass ends.
        peak_bytes: both, and what the peak moment has beyond them: gradients made until then, living activations, workspace, and
            the calibration's correction (which may make that negative).
        parts: the peak by what is alive at its moment.
        process: what a process takes beside its tensors.
        moments: bytes of all that is not static, at every moment.
    """

    static_bytes: int
    saved_bytes: int
    peak_bytes: int
    parts: Mapping[str, int] = attrs.field(factory=dict, eq=False)
    process: ProcessMemory = attrs.field(factory=ProcessMemory)
    moments: Sequence[Moment] = attrs.field(default=(), eq=False, repr=False)
    batch_size: int = attrs.field(default=0, eq=False)

    def at_batch(self, batch_size: int) -> MemoryEstimate:
        """The same step with another number of samples.

        At every moment the batch, activations and workspace are proportional to them, and the peak may come at another moment.
        What was measured beside these is taken as what makes the peak larger: unchanged, or proportional too.
        """
        if batch_size == self.batch_size:
            return self
        share, beside = Fraction(batch_size, max(1, self.batch_size)), self.parts[_BESIDE]
        parts = {
            "parameters": self.parts["parameters"],
            "optimizer state": self.parts["optimizer state"],
            "batch": ceil(share * self.parts["batch"]),
            **self._alive(self._highest(share), share),
            _BESIDE: max(beside, ceil(share * beside)),
        }
        static, saved = self.static_bytes - self.parts["batch"] + parts["batch"], ceil(share * self.saved_bytes)
        return MemoryEstimate(static, saved, sum(parts.values()), parts, self.process, batch_size=batch_size)

    def _highest(self, share: Fraction) -> Moment:
        """The first moment at which most is alive, with this share of the samples."""
        gradients, activations, workspace = self._by_moment
        up, down = share.numerator, share.denominator
        if max(int(activations.max()), int(workspace.max())) * up >= _MOST_INT64:
            activations, workspace = activations.astype(object), workspace.astype(object)
        return self.moments[int(np.argmax(gradients - (-activations * up // down) - (-workspace * up // down)))]

    @cached_property
    def _by_moment(self) -> tuple[np.ndarray[Any, Any], ...]:
        """Bytes of gradients, activations and workspace."""
        gradients, workspace, whole = np.asarray(self.moments, dtype=np.int64).T
        return gradients, whole - gradients - workspace, workspace

    def _alive(self, moment: Moment, share: Fraction) -> dict[str, int]:
        gradients, workspace, whole = moment
        buckets = self.static_bytes - sum(self.parts[name] for name in ("parameters", "optimizer state", "batch"))
        return {
            "gradients": gradients + buckets,
            "activations": ceil(share * (whole - gradients - workspace)),
            "workspace": ceil(share * workspace),
        }

    @property
    def kept_bytes(self) -> int:
        """What of :attr:`saved_bytes` a measured peak leaves room for: less than all where a script checkpoints activations."""
        return max(0, self.saved_bytes + min(0, self.parts[_BESIDE]))

    @property
    def reserved_bytes(self) -> int:
        """What PyTorch's allocator reserves for the peak."""
        return self.process.reserved_bytes(self.peak_bytes)

    @property
    def process_bytes(self) -> int:
        """The smallest budget of a process, margin included."""
        return self.process.process_bytes(self.peak_bytes)

    @property
    def process_parts(self) -> dict[str, int]:
        """What adds up to :attr:`process_bytes`, by name; parts of 0 bytes are left out."""
        parts = {
            OUTSIDE: self.process.outside_bytes,
            **self.parts,
            "allocator's reserve": self.reserved_bytes - self.peak_bytes,
            "margin": self.process_bytes - self.process.outside_bytes - self.reserved_bytes,
        }
        return {name: nbytes for name, nbytes in parts.items() if nbytes}


@attrs.frozen
class MemoryLayout:
    """The fixed part of one rank's memory.

    Args:
        wiring: which of its operators reads which.
        distributed: whether DDP keeps buckets of all gradients.
        bucket_views: whether gradients live there alone (``gradient_as_bucket_view``); otherwise the buckets are copies.
        accumulates: whether a step has several micro-batches.  Their sums are in no bucket before the last backward pass.
    """

    dag: PrecisionDag
    wiring: Wiring
    profile: Profile
    distributed: bool
    bucket_views: bool = False
    accumulates: bool = False

    @property
    def count(self) -> int:
        """V, the number of operators."""
        return len(self.dag.operators)

    def backward_of(self, position: int) -> int:
        """The moment of an operator's backward."""
        return 2 * self.count - 1 - position

    @cached_property
    def bucket_bytes(self) -> int:
        """DDP's buckets of all gradients, and on a GPU its first ones, which NCCL holds beside them at the peak of the second step
        (docs/design/memory.md#buckets)."""
        copies = (1 if self.profile.device.is_synchronous else 2) if self.distributed else 0
        return copies * sum(bucket.nbytes for bucket in self.dag.buckets)

    @cached_property
    def static_bytes(self) -> int:
        """There during the whole step: weights, optimizer state, the batch, buckets."""
        weights = sum(p.numel * _DTYPE_NBYTES.get(p.dtype, GRADIENT_NBYTES) for p in self.dag.parameters)
        return weights + self.profile.optimizer_state_bytes + self.profile.input_bytes + self.bucket_bytes

    @cached_property
    def parameter_gradients(self) -> tuple[int, ...]:
        """The changes of the bytes of parameters' gradients outside buckets, at each moment and at the one after the last."""
        begin = (*self.wiring.parameter_gradients, 0)
        if not self.accumulates and not (self.distributed and self.bucket_views):
            return begin
        sums = sum(begin) if self.accumulates else 0
        first, *later = (new - copied for new, copied in zip(begin, self.wiring.gradients_copied, strict=True))
        return (sums + first, *later)

    @cached_property
    def parameter_gradients_until(self) -> tuple[int, ...]:
        """Bytes of parameters' gradients outside buckets at each moment."""
        return tuple(accumulate(self.parameter_gradients))

    @cached_property
    def handed_on(self) -> dict[int, int]:
        """The operator that made what another hands on as its output, by that other's position (docs/design/memory.md#moments)."""
        found: dict[int, int] = {}
        if not self.profile.handed_on:
            return found
        named = set(self.profile.handed_on).difference(*(chain.members for chain in chains_of(self.dag)))
        for position, operator in enumerate(self.dag.operators):
            alone = operator.op_class is OpClass.DEPENDENT and len(operator.inputs) == 1 and not operator.parameters
            if operator.op_id in named and alone:
                (producer,) = self.wiring.inputs[position]
                if operator.output_numel == self.dag.operators[producer].output_numel:
                    found[position] = found.get(producer, producer)
        return found

    @cached_property
    def handing_on(self) -> dict[int, tuple[int, ...]]:
        """The operators that hand on another's output, ascending, by that other's position."""
        found: dict[int, list[int]] = {}
        for position, producer in self.handed_on.items():
            found.setdefault(producer, []).append(position)
        return {producer: tuple(positions) for producer, positions in found.items()}

    @cached_property
    def indirect_reads(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """The reads of an output through operators that hand it on: reader and slot, as in :attr:`Wiring.reads`, by who made it."""
        return {
            producer: tuple(sorted(read for position in positions for read in self.wiring.reads[position]))
            for producer, positions in self.handing_on.items()
        }

    def gradient_makers(self, position: int) -> list[int]:
        """The operators whose backward makes the gradient of an operator's output; itself where nothing reads that.

        One that hands the output on makes none: the gradient of what it hands on is that of the output.
        """
        made: list[int] = []
        for reader in self.wiring.readers[position]:
            skipped = self.dag.operators[reader].no_grad_inputs
            if any(source == position and i not in skipped for i, source in enumerate(self.wiring.inputs[reader])):
                made += self.gradient_makers(reader) if reader in self.handed_on else [reader]
        return made if self.wiring.readers[position] else [position]

    @cached_property
    def first_gradient(self) -> tuple[int | None, ...]:
        """The moments of outputs' first gradients: :attr:`Wiring.first_gradient`, knowing of outputs that are handed on."""
        found = [*self.wiring.first_gradient]
        for position in self.handing_on:
            if found[position] is not None:
                found[position] = min(map(self.backward_of, self.gradient_makers(position)), default=None)
        return tuple(found)


class _KnownIntervals:
    """What the ledgers of one layout of a model share.

    Attributes:
        concerned: the operators on whose states an operator's tensors depend, beside its own, by the position of that operator.
        intervals: of an operator's tensors, by its position and these states.
    """

    def __init__(self, layout: MemoryLayout) -> None:
        count, wiring = layout.count, layout.wiring
        self.layout = layout
        self.backward_of = [layout.backward_of(position) for position in range(count)]
        self.operator_at = [*range(count), *reversed(range(count)), 0]
        self.concerned = [*wiring.readers]
        for position, others in layout.handing_on.items():
            indirect = [reader for reader, _ in layout.indirect_reads[position]]
            self.concerned[position] = tuple(dict.fromkeys((*self.concerned[position], *others, *indirect)))
        self.intervals: dict[tuple[object, ...], Intervals] = {}


def _known_layouts(_: CostModel) -> dict[tuple[bool, bool, bool], _KnownIntervals]:
    """What ledgers of a model share, by how its layouts differ."""
    return {}


class MemoryBefore(NamedTuple):
    """What a refresh replaced, and what it added: bytes from one moment to another, and at a moment."""

    root: Node
    tensors: list[tuple[int, Intervals]]
    owned: list[tuple[int, OwnBytes]]
    intervals: Intervals
    moments: list[tuple[int, int]]


class MemoryLedger:
    """Memory of one device group's rank, kept up to date with its cost mapper.

    The operators are the leaves of a :class:`~qsync_planner.replayer.incremental.SequenceTree`; a node holds what a run of them
    adds until its end and the highest sum on the way, forward and, in reverse, backward.
    """

    def __init__(
        self,
        mapper: CostMapper,
        *,
        distributed: bool = True,
        bucket_views: bool = False,
        accumulates: bool = False,
        stays: bool = False,
    ) -> None:
        self._mapper = mapper
        known, key = mapper.model.once(_known_layouts), (distributed, bucket_views, accumulates)
        if key not in known:
            known[key] = _KnownIntervals(MemoryLayout(mapper.dag, mapper.wiring, mapper.model.profile, *key))
        layout = self._layout = known[key].layout
        count = layout.count
        self._backward_of, self._operator_at = known[key].backward_of, known[key].operator_at
        self._delta = [*layout.parameter_gradients]
        self._moment = [0] * (2 * count + 1)
        self._correction = self._held = 0
        self._known, self._concerned = known[key].intervals, known[key].concerned
        self._tensors: list[Intervals] = [self._intervals_of(position) for position in range(count)]
        self._own: list[OwnBytes] = [_own_bytes(state.evaluation) for state in mapper.states]
        for position, (own, backward) in enumerate(zip(self._own, self._backward_of, strict=True)):
            for start, end, nbytes in (*self._tensors[position], (position, backward + 1, own[0])):
                self._delta[start] += nbytes
                self._delta[end] -= nbytes
            self._moment[position] += own[1]
            self._moment[backward] += own[2]
            self._correction += own[3]
            self._held += own[4]
        self._tree = SequenceTree(count, self._fold, _join, stays=stays)

    def _intervals_of(self, position: int) -> Intervals:
        """Return :meth:`_tensor_intervals`, computed once for the same states of the producer and of its readers."""
        states = self._mapper.states
        key = (position, states[position], *[states[reader] for reader in self._concerned[position]])
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._tensor_intervals(position)
        return found

    def _tensor_intervals(self, position: int) -> Intervals:
        """(first moment, moment after the last, bytes) of an operator's output, of its cast copies, and of its gradient."""
        mapper = self._mapper
        evaluation = mapper.states[position].evaluation
        if evaluation.delay:  # inside a fused chain: what it delivers is never a tensor
            return []
        intervals: Intervals = []
        read_until, kept_until = position, self._backward_of[position] if evaluation.saves_output else -1
        copies: dict[int, tuple[int, int, int]] = {}
        if evaluation.written >= 0:
            copies[evaluation.written] = (position, position, evaluation.written_bytes)
        delayed = False
        for reader, slot in mapper.wiring.reads[position]:
            state = mapper.states[reader]
            delay = state.evaluation.delay
            delayed |= delay > 0
            served = False
            if slot in state.kept:
                kept_until = max(kept_until, self._backward_of[reader + delay])
            for share, nbytes, keeps in state.copies.get(slot, ()):
                end = self._backward_of[reader + delay] if keeps else reader + delay
                served = share == evaluation.written and mapper.serves(position, reader)
                first, last, _ = copies.get(share, (reader, 0, 0))
                copies[share] = (first, max(last, end), nbytes)
            if not served:
                read_until = max(read_until, reader + delay)
        for reader, slot in self._layout.indirect_reads.get(position, ()):
            state = mapper.states[reader]
            delay = state.evaluation.delay
            delayed |= delay > 0
            read_until = max(read_until, reader + delay)
            if slot in state.kept:
                kept_until = max(kept_until, self._backward_of[reader + delay])
        for other in self._layout.handing_on.get(position, ()):
            if mapper.states[other].evaluation.saves_output:
                kept_until = max(kept_until, self._backward_of[other])
        if mapper.dag.operators[position].kind != "input" and position not in self._layout.handed_on:
            intervals.append((position, max(read_until, kept_until) + 1, evaluation.output_bytes))
            gradient_start = self._first_gradient(position) if delayed else self._layout.first_gradient[position]
            if gradient_start is not None:
                intervals.append((gradient_start, self._backward_of[position] + 1, evaluation.gradient_bytes))
        intervals.extend([(start, end + 1, nbytes) for start, end, nbytes in copies.values()])
        return intervals

    def _first_gradient(self, position: int) -> int | None:
        """Find :attr:`MemoryLayout.first_gradient` of an operator, some of whose readers run later than they stand in the graph."""
        states = self._mapper.states
        makers = self._layout.gradient_makers(position)
        return min((self._backward_of[maker + states[maker].evaluation.delay] for maker in makers), default=None)

    def _fold(self, first: int, last: int) -> Node:
        """A few operators: what their moments add, and the highest sum during them, forward and backward.

        Nothing begins at the last moment of all, the one after the backward pass, so that the peak is never there.
        """
        moments = 2 * len(self._backward_of)
        added = back_added = 0
        peak = back_peak = NEVER
        for delta, more in zip(self._delta[first:last], self._moment[first:last], strict=True):
            added += delta
            if added + more > peak:
                peak = added + more
        backward, before = moments - last, moments - first
        for delta, more in zip(self._delta[backward:before], self._moment[backward:before], strict=True):
            back_added += delta
            if back_added + more > back_peak:
                back_peak = back_added + more
        return (None, None, added, peak, back_added, back_peak)

    def refresh(self, evaluated: Iterable[int], producers: Iterable[int]) -> MemoryBefore:
        """Account for changed operators, and for producers whose output may be kept in another way.

        Returns what was there, for :meth:`restore`.
        """
        if handed_on := self._layout.handed_on:
            producers = set(producers)
            producers |= {handed_on[position] for position in producers & handed_on.keys()}
        before = MemoryBefore(self._tree.root, *self._replace(evaluated, producers))
        touched = {moment for start, end, _ in before.intervals for moment in (start, end)}
        touched.update(moment for moment, _ in before.moments)
        self._tree.refresh([self._operator_at[moment] for moment in touched], self._fold)
        return before

    def _replace(self, evaluated: Iterable[int], producers: Iterable[int]) -> Replaced:
        """Set what changed operators own and how producers' outputs are kept; returns the fields of :class:`MemoryBefore`."""
        tensors: list[tuple[int, Intervals]] = []
        owned: list[tuple[int, OwnBytes]] = []
        intervals: Intervals = []
        moments: list[tuple[int, int]] = []
        for position in producers:
            old, new = self._tensors[position], self._intervals_of(position)
            if old != new:
                tensors.append((position, old))
                self._tensors[position] = new
                for (start, end, nbytes), added in zip_longest(old, new, fillvalue=_EMPTY):
                    if start == added[0] and end == added[1]:
                        nbytes -= added[2]
                    elif added[2]:
                        intervals.append(added)
                    if nbytes:
                        intervals.append((start, end, -nbytes))
        for position in evaluated:
            was, now = self._own[position], _own_bytes(self._mapper.states[position].evaluation)
            if was != now:
                owned.append((position, was))
                self._own[position] = now
                backward = self._backward_of[position]
                intervals.append((position, backward + 1, now[0] - was[0]))
                moments.append((position, now[1] - was[1]))
                moments.append((backward, now[2] - was[2]))
                self._correction += now[3] - was[3]
                self._held += now[4] - was[4]
        for start, end, nbytes in intervals:
            self._delta[start] += nbytes
            self._delta[end] -= nbytes
        for moment, nbytes in moments:
            self._moment[moment] += nbytes
        return tensors, owned, intervals, moments

    def restore(self, before: MemoryBefore) -> None:
        """Undo a refresh."""
        self._tree.root, tensors, owned, intervals, moments = before
        for position, old in tensors:
            self._tensors[position] = old
        for position, was in owned:
            self._correction += was[3] - self._own[position][3]
            self._held += was[4] - self._own[position][4]
            self._own[position] = was
        for start, end, nbytes in intervals:
            self._delta[start] -= nbytes
            self._delta[end] += nbytes
        for moment, nbytes in moments:
            self._moment[moment] -= nbytes

    def peak_bytes(self) -> int:
        """Predicted peak of one rank."""
        _, _, added, forward_peak, _, backward_peak = self._tree.root
        calibration = self._mapper.model.calibration
        highest: int = max(forward_peak, added + backward_peak)
        return max(highest + self.constant_bytes, calibration.memory_floor_bytes + self._layout.bucket_bytes)

    def moments_bytes(self) -> list[int]:
        """Memory at each of the 2V moments, without what is static and without calibration."""
        return [running + more for running, more in zip(accumulate(self._delta), self._moment, strict=True)][:-1]

    @property
    def static_bytes(self) -> int:
        """There during the whole step: weights as they are stored, optimizer state, the batch, buckets."""
        return self._layout.static_bytes + self._held

    @property
    def constant_bytes(self) -> int:
        """What is there at every moment beside :meth:`moments_bytes`: all that is static, and what calibration adds."""
        return self.static_bytes + self._correction + self._mapper.model.calibration.memory_bytes

    @property
    def _beside_saved(self) -> int:
        """What calibration adds to the bytes kept for backward: compiled graphs keep other tensors than their operators would."""
        calibration, states = self._mapper.model.calibration, self._mapper.states
        if not calibration.corrections:
            return calibration.saved_bytes
        runs = enumerate(state.evaluation.run for state in states)
        added = (calibration.corrections[key].saved_bytes for key in runs if key in calibration.corrections)
        return calibration.saved_bytes + sum(added)

    def saved_bytes(self) -> int:
        """Bytes kept for backward when the forward pass ends."""
        boundary = len(self._backward_of)
        tensors = [nbytes for intervals in self._tensors for start, end, nbytes in intervals if start < boundary < end]
        return sum([own[0] for own in self._own]) + sum(tensors) + self._beside_saved

    def estimate(self) -> MemoryEstimate:
        """The whole estimate."""
        layout, until = self._layout, self._layout.parameter_gradients_until
        beside, pieces = self._beside_saved, zip(until, self._moment, self.moments_bytes(), strict=False)  # the first two go on
        moments = [(own, work, own + work if own + work > whole + beside else whole + beside) for own, work, whole in pieces]
        saved, peak, process = self.saved_bytes(), self.peak_bytes(), ProcessMemory.of(layout.profile)
        parts = self._parts(peak, max(moments, key=itemgetter(2)))
        return MemoryEstimate(self.static_bytes, saved, peak, parts, process, moments, layout.dag.batch_size)

    def _parts(self, peak_bytes: int, highest: Moment) -> dict[str, int]:
        """The peak by what is alive at its moment, each at least 0 but for the last, which is what calibration adds."""
        layout, profile = self._layout, self._layout.profile
        gradients, workspace, whole = highest
        state, batch = profile.optimizer_state_bytes, profile.input_bytes
        return {
            "parameters": self.static_bytes - state - batch - layout.bucket_bytes,
            "optimizer state": state,
            "batch": batch,
            "gradients": gradients + layout.bucket_bytes,
            "activations": whole - gradients - workspace,
            "workspace": workspace,
            _BESIDE: peak_bytes - self.static_bytes - whole,
        }


def _own_bytes(entry: Evaluation) -> OwnBytes:
    backward = entry.backward_workspace_bytes + entry.gradient_copy_bytes
    return entry.saved_own_bytes, entry.workspace_bytes, backward, entry.memory_correction_bytes, entry.held_bytes


def _join(left: Node, right: Node) -> Node:
    """Two neighbouring runs of operators: ``right`` follows ``left`` in the forward pass and precedes it in the backward pass."""
    _, _, added, peak, back_added, back_peak = left
    _, _, added2, peak2, back_added2, back_peak2 = right
    peak2 += added
    back_peak += back_added2
    return (
        left,
        right,
        added + added2,
        peak if peak > peak2 else peak2,
        back_added + back_added2,
        back_peak if back_peak > back_peak2 else back_peak2,
    )
