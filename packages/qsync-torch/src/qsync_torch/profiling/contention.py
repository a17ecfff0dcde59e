"""What collectives take from compute: one that is open from that of a rank that waits in it, and one that transfers.

See docs/design/simulator.md#communication.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection

import attrs
import torch
import torch.distributed as dist

from qsync_torch.distributed.ranks import together
from qsync_torch.profiling.collective import maximum_over_ranks
from qsync_torch.profiling.whole_step import StepRunner
from qsync_torch.torch_internals import occupy_stream

MOST_SLOWDOWN = 0.95
_SAMPLES = 3
_LONG_NS = 150_000_000
_SAMPLES_OF_LONG = 2
_BESIDE = 0.5
"""Share of the shortest backward pass that collectives beside it take, one after another."""
_MOST_BESIDE = 200
_COLLECTIVE_ISSUE_NS = 100_000
"""What the CPU takes at most to issue one."""
_TRIES = 3
_HOLD = 2.0
"""How long the others hold a collective open, in times of the compute that it is to cover; doubled where that was too short."""
_HOLD_MORE_NS = 10_000_000
_UNTIL_OPEN_S = 0.003
"""How long after the launch of a collective its kernel has surely begun."""
_SPIN_PER_ISSUE = 1.25
_SPIN_MORE_NS = 1_000_000
_LONGEST_SPIN_NS = 200_000_000
_CALIBRATION_CYCLES = 20_000_000


class Backward:
    """A job's backward pass at its base precision on a CUDA device, and a spin of a given length.

    The pass is issued behind a spin, so that the device never waits for the CPU and what is measured is compute alone.  Where a
    batch does not fit into memory in the base precision, half of it is taken, and so on.
    """

    def __init__(self, runner: StepRunner, device: torch.device) -> None:
        self._runner, self._device = runner, device
        self._loss = torch.zeros((), dtype=torch.float32)
        self._cycles_per_ns = _CALIBRATION_CYCLES / _device_ns(lambda: occupy_stream(_CALIBRATION_CYCLES))
        size = runner.batches[0].size
        while not (issue_ns := self._issue_ns(must_fit=size <= 1)):
            size //= 2
            self._runner = attrs.evolve(runner, batches=[runner.job.batch(0, size).to(device)])
        self.spin_ns = min(_LONGEST_SPIN_NS, round(_SPIN_PER_ISSUE * issue_ns) + _SPIN_MORE_NS)

    def _issue_ns(self, *, must_fit: bool) -> int:
        """How long the CPU takes to issue a pass to an idle device, the second time; 0 where the batch does not fit.

        Raises:
            torch.OutOfMemoryError: where it must.
        """
        issue_ns = 0
        for _ in range(2):
            try:
                self.prepare()
                start = time.perf_counter_ns()
                self._loss.backward()
                issue_ns = time.perf_counter_ns() - start
                self.wait()
            except torch.OutOfMemoryError:
                if must_fit:
                    raise
                issue_ns = 0
                break
        if not issue_ns:
            self._loss = torch.zeros((), dtype=torch.float32)
            torch.cuda.empty_cache()
        return issue_ns

    def prepare(self) -> None:
        """Run the forward that the next pass belongs to."""
        self._runner.optimizer.zero_grad(set_to_none=True)
        self._loss = self._runner.forward(0)
        self.wait()

    def run(self) -> int:
        """The time of a prepared pass on the device, in nanoseconds, once it is over."""
        self.spin(self.spin_ns)
        return _device_ns(self._loss.backward)

    def alone_ns(self) -> int:
        """The time of a pass beside which nothing runs."""
        found = []
        for _ in range(_SAMPLES):
            self.prepare()
            found.append(self.run())
        return round(statistics.median(found))

    def issue(self) -> None:
        """Issue a prepared pass."""
        self._loss.backward()

    def spin(self, duration_ns: float) -> None:
        """Keep the current stream busy, on one thread of the device."""
        occupy_stream(round(duration_ns * self._cycles_per_ns))

    def wait(self) -> None:
        """Wait for all work of the device."""
        torch.cuda.synchronize(self._device)


def _device_ns(work: Callable[[], object]) -> int:
    """Time between two events around some work on the current stream."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    elapsed_ms: float = begin.elapsed_time(end)
    return round(elapsed_ms * 1e6)


@attrs.frozen
class Beside:
    """What :func:`measure_beside_compute` found.

    Attributes:
        factor: how many times longer an all-reduce takes while all ranks compute, at least 1, the slowest rank's.
        lost: by which share of the all-reduce's duration this rank's compute takes longer.
    """

    factor: float
    lost: float


def measure_beside_compute(
    backward: Backward, group: dist.ProcessGroup, tensor: torch.Tensor, alone_ns: int, compute_ns: int, what: str
) -> Beside:
    """All-reduces that transfer while all ranks compute, against all-reduces and compute alone.

    A collective of few CTAs shares its multiprocessors with the kernels beside it, and memory and links are shared by all.  Every
    rank runs its backward pass, and, from its beginning on, a small all-reduce that brings the ranks level, then those that count,
    on another stream: as many as take half of the shortest pass, because a pass is timed to a few tenths of a percent.

    Args:
        backward: of this rank; prepared here.
        group: a process group of all ranks, initialised and connected for ``tensor``'s size.
        tensor: what is reduced.
        alone_ns: its duration when no rank computes.
        compute_ns: of this rank's pass when nothing runs beside it.
        what: the call, for errors.
    """
    device, factors, lost = tensor.device, [], []
    flag, side = torch.zeros(1, dtype=torch.float32, device=device), torch.cuda.Stream(device)
    shortest_ns = -maximum_over_ranks(float(-compute_ns), device, group)
    repeats = max(1, min(_MOST_BESIDE, int(_BESIDE * shortest_ns / max(1, alone_ns))))
    for _ in range(_SAMPLES_OF_LONG + 1):
        with together(what, slow=True, group=group):  # a rank that has no memory for it must not leave the others in a collective
            backward.prepare()
        with together(what, slow=True, group=group):
            backward.spin(backward.spin_ns + repeats * _COLLECTIVE_ISSUE_NS)
            computing, computed, begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(4))
            computing.record()
            with torch.cuda.stream(side):
                side.wait_event(computing)
                dist.all_reduce(flag, group=group)
                begin.record()
                for _ in range(repeats):
                    dist.all_reduce(tensor, group=group)
                end.record()
            backward.issue()
            computed.record()
            backward.wait()
        taken_ns = begin.elapsed_time(end) * 1e6
        factors.append(taken_ns / repeats / max(1, alone_ns))
        lost.append((computing.elapsed_time(computed) * 1e6 - compute_ns) / taken_ns)
    factor = maximum_over_ranks(statistics.median(factors[1:]), device, group)
    return Beside(max(1.0, factor), min(1.0, max(0.0, statistics.median(lost[1:]))))


@attrs.frozen
class Slowdown:
    """What :func:`measure_slowdown` found.

    Attributes:
        share: c: work that takes t alone takes t / (1 - c) while a collective is open.
        is_bound: the collective had ended before the compute had, so that c is a lower bound.
    """

    share: float
    is_bound: bool


def measure_slowdown(
    backward: Backward, group: dist.ProcessGroup, tensor: torch.Tensor, measuring: Collection[int], what: str
) -> Slowdown:
    """Backward on some ranks while an all-reduce of theirs is open, against backward alone; every rank gets the slowest rank's.

    The collective is open because the other ranks join it late: each issues its all-reduce at once, but behind a spin on its own
    stream.  So nothing that one process does waits for another process: the open state ends with the spin, whatever happens, and
    while it lasts every rank issues that one all-reduce and nothing else.  Ranks speak through the store before and after it, so
    that one that fails takes the others with it (:func:`~qsync_torch.distributed.ranks.together`).

    Args:
        backward: of this rank; prepared here.
        group: a process group of all ranks, whose communicator is initialised and connected for ``tensor``'s size.
        tensor: what is reduced.
        measuring: the ranks that compute; not all.
        what: the call, for errors.
    """
    computes, device = dist.get_rank() in measuring, tensor.device
    kept: list[float] = []
    hold, samples, is_bound = _HOLD, _SAMPLES, False
    while len(kept) < samples and not is_bound:  # which would only be found out again
        for attempt in range(_TRIES):
            alone_ns = opened_ns = 0
            is_open = True
            with together(what, slow=True, group=group):
                if computes:
                    backward.prepare()
                    alone_ns = backward.run()
                    backward.prepare()
            longest_ns = maximum_over_ranks(float(alone_ns + backward.spin_ns), device, group)  # after which the ranks are level
            with together(what, slow=True, group=group):
                if computes:
                    work = dist.all_reduce(tensor, group=group, async_op=True)
                    time.sleep(_UNTIL_OPEN_S)
                    opened_ns = backward.run()
                    is_open = not work.is_completed()
                else:
                    backward.spin(hold * longest_ns + _HOLD_MORE_NS)
                    work = dist.all_reduce(tensor, group=group, async_op=True)
                work.wait()
                backward.wait()
            if not maximum_over_ranks(float(not is_open), device, group):
                break
            if attempt + 1 < _TRIES:
                hold *= 2
            else:
                is_bound = True
        samples = _SAMPLES_OF_LONG if longest_ns > _LONG_NS else _SAMPLES
        kept.append(1 - alone_ns / opened_ns if computes else 0.0)
    share = maximum_over_ranks(statistics.median(kept), device, group)
    return Slowdown(min(MOST_SLOWDOWN, max(0.0, share)), is_bound)
