"""The steady state of a job by clocks: every rank issues its kernels one by one, collectives wait for the last rank.

Shares no code with the product, and works the other way round: there is no formula for the period.  One step is played through
with explicit clocks, and a pace is tried: if everybody is given ``pace`` ns more from step to step, does anything still fall
behind?  A step moves clocks by sums and maxima only, so lateness that is not caught up with after as many steps as there are clocks
comes back for ever (Bellman and Ford's argument), and the answer is exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from brute_force_calibration import WholeSteps, cast_times, one_clock
from brute_force_formats import BEFORE_FORWARD, INPUT_GRADIENT, OUTPUT_GRADIENT, RESULT
from brute_force_walk import Walked, Walker

from qsync_core.ir.dag import PrecisionDag


@attrs.frozen
class Program:
    """What one rank does in a step.

    Attributes:
        kernels: of forward and backward, in order: ``(dispatch ns, compute ns, dispatched?)``; collectives that run on the rank's
            own compute are not dispatched.
        ready_after: per bucket how many of these have run when its gradients are complete.
        optimizer: dispatch and compute time of the optimizer step.
        one_clock: the CPU runs the kernels.
        synchronises: the CPU waits for everything at the end of every step.
        waits_before: before which of the kernels the CPU waits for the device: those that begin a micro-batch.
    """

    kernels: tuple[tuple[int, int, bool], ...]
    ready_after: tuple[int, ...]
    optimizer: tuple[int, int]
    one_clock: bool
    synchronises: bool
    waits_before: tuple[int, ...] = ()


def bucket_places(dag: PrecisionDag) -> list[int]:
    """Per bucket the operator whose backward completes it: of all users of its parameters the one that runs backward last."""
    places = []
    for bucket in dag.buckets:
        first = len(dag.operators)
        for name in bucket.parameters:
            users = [place for place, operator in enumerate(dag.operators) if name in operator.parameters]
            first = min([first, *users]) if users else 0
        places.append(first)
    return places


def write_program(
    walker: Walker,
    walked: Sequence[Walked],
    whole: WholeSteps,
    collective_ns: Sequence[int],
    compute_share: float,
    *,
    synchronises: bool,
) -> Program:
    """The step of one rank: casts around each kernel, buckets in the backward pass.

    A collective takes its share of the rank's compute after the operator that completed its bucket; the last one delays nothing.
    Micro-batches before the last are the same kernels without collectives.
    """
    on_cpu = one_clock(walker)
    kernels: list[tuple[int, int, bool]] = []

    def issue(dispatch: int, compute: int) -> None:
        if dispatch or compute:
            kernels.append((dispatch, compute, not on_cpu))

    def cast(one: Walked, *places: str) -> None:
        for wanted in one.performed:
            if wanted.where in places:
                issue(*cast_times(walker, wanted))

    def forward() -> None:
        for place, one in enumerate(walked):
            cast(one, *BEFORE_FORWARD)
            issue(*whole.kernel(walker, place, one)[:2])
            cast(one, RESULT)

    def backward(place: int) -> None:
        one = walked[place]
        cast(one, OUTPUT_GRADIENT)
        issue(*whole.kernel(walker, place, one)[2:])
        cast(one, INPUT_GRADIENT)

    waits = []
    for _ in range(walker.dag.accumulate - 1):
        forward()
        for place in reversed(range(len(walked))):
            backward(place)
        waits.append(len(kernels))
    forward()
    places = bucket_places(walker.dag)
    ready = [0] * len(places)
    for place in reversed(range(len(walked))):
        backward(place)
        completed = [bucket for bucket, at in enumerate(places) if at == place]
        for bucket in completed:
            ready[bucket] = len(kernels)
        for bucket in completed:
            if bucket < len(places) - 1:
                kernels.append((0, round(compute_share * collective_ns[bucket]), False))
    return Program(tuple(kernels), tuple(ready), whole.optimizer, on_cpu, synchronises, tuple(waits) if synchronises else ())


def play_step(programs: Sequence[Program], collective_ns: Sequence[int], clocks: Sequence[int]) -> list[int]:
    """The clocks after one step: per rank that of its CPU and that of its device, and last that of the network."""
    after: list[int] = []
    complete: list[list[int]] = []
    for number, program in enumerate(programs):
        cpu, device = clocks[2 * number], clocks[2 * number + 1]
        moments = [device]
        for place, (dispatch, compute, dispatched) in enumerate(program.kernels):
            if place in program.waits_before:
                cpu = max(cpu, device)
            if dispatched:
                cpu += dispatch
                device = max(device, cpu)
            device += compute
            moments.append(device)
        complete.append([moments[count] for count in program.ready_after])
        after += [cpu, device]
    network = clocks[-1]
    for bucket, duration in enumerate(collective_ns):
        network = max([network, *[moments[bucket] for moments in complete]]) + duration
    for number, program in enumerate(programs):
        cpu, device = after[2 * number], after[2 * number + 1]
        dispatch, compute = program.optimizer
        if collective_ns:
            device = max(device, network)
        if dispatch:
            cpu += dispatch
        if not program.one_clock:
            device = max(device, cpu)
        device += compute
        if program.synchronises and not program.one_clock:
            cpu = max([cpu, device, network] if collective_ns else [cpu, device])
        after[2 * number], after[2 * number + 1] = cpu, device
    return [*after, network]


def keeps_pace(programs: Sequence[Program], collective_ns: Sequence[int], pace_ns: int) -> bool:
    """Whether a step every ``pace_ns`` can be kept up for ever."""
    late = [0] * (2 * len(programs) + 1)
    for _ in range(len(late) + 1):
        played = play_step(programs, collective_ns, late)
        then = [max(before, clock - pace_ns) for before, clock in zip(late, played, strict=True)]
        if then == late:
            return True
        late = then
    return False


def fastest_pace(programs: Sequence[Program], collective_ns: Sequence[int]) -> int:
    """The least whole number of nanoseconds from step to step that can be kept up."""
    one_by_one = sum(
        sum(program.optimizer) + sum(dispatch + compute for dispatch, compute, _ in program.kernels) for program in programs
    )
    low, high = -1, one_by_one + sum(collective_ns)
    while high - low > 1:
        middle = (low + high) // 2
        if keeps_pace(programs, collective_ns, middle):
            high = middle
        else:
            low = middle
    return high
