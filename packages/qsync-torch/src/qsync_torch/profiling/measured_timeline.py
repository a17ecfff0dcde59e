"""The measured Timeline: real training steps, alone or in a process group, as intervals per rank with the graph's operators.

A step is recorded by torch's profiler with the operators' modules marked (:func:`record_step`), and each of its events is matched
to an operator and a phase (:func:`spans_of`).
"""

from __future__ import annotations

import bisect
import gc
import heapq
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import attrs
import torch
import torch.distributed as dist

from qsync_core.artifacts.files import from_bytes, to_bytes
from qsync_core.ir.dag import Operator, PrecisionDag
from qsync_core.ir.dfg import Phase, Resource
from qsync_core.ir.op_id import OpId
from qsync_core.ir.timeline import Interval, Timeline
from qsync_torch.devices import active_autocast, job_software
from qsync_torch.distributed.process_group import own_rank, rank_count
from qsync_torch.operators.products import QuantizedProduct
from qsync_torch.tracing.aten_call import CALL_ATTRIBUTE
from qsync_torch.tracing.classify import op_name

RANGE = "qsync.operator "
"""Prefix of the ranges that mark a module's operator; its OpId follows."""
STEP = "qsync.step"
_RECORDED = 2
"""Steps run under the profiler; the last is kept, the first pays for what is set up, and shows whether the model is compiled."""
_COMPILED = "Torch-Compiled Region"
"""Begins the range around a compiled graph.  It tells no operators, and marks on modules would have it compiled anew."""
_BACKWARD = "autograd::engine::evaluate_function: "
_OPTIMIZER = ("Optimizer.step#", "Optimizer.zero_grad#")
_LOWERED = QuantizedProduct.__name__
"""The autograd function that stands where a lowered functional call was."""
_COLLECTIVE = re.compile(r"(?:gloo:|nccl(?:Dev)?Kernel_)([A-Za-z_]+)")
"""A collective's event on a CPU's or a device's communication; the first group begins with what it does."""
_COLLECTIVES = {"allreduce": "all-reduce", "broadcast": "broadcast", "allgather": "all-gather", "reducescatter": "reduce-scatter"}
_ON_A_STREAM = ("kernel", "gpu_memcpy", "gpu_memset")
"""Kinds of device events that occupy a stream; others (annotations, synchronisations) are marks that span them."""


def measured_timeline(
    model: torch.nn.Module,
    dag: PrecisionDag,
    train_step: Callable[[], Any],
    *,
    group: str,
    device: torch.device | str = "cpu",
    steps: int = 10,
    peak_bytes: int = 0,
) -> Timeline:
    """Run real steps and record one.  In an initialised process group all ranks must call this; each gets the whole timeline.

    Args:
        model: the model whose modules the graph names: not its DistributedDataParallel wrapper.  A plan may be applied to it.
        train_step: one whole step: forward, backward, optimizer.
        group: name of this rank's device group.
        steps: steps timed without the profiler, for ``iteration_ns``.
        peak_bytes: this rank's measured peak memory, 0 where it was not measured.
    """
    device = torch.device(device)
    period = _period_ns(train_step, steps, device)
    marks = False
    for _ in range(_RECORDED):
        _wait_for_all(device)
        events, software = record_step(model, dag, train_step, device, marks=marks)
        marks = not any(event.name.startswith(_COMPILED) for event in events)
    software["compiled"] = str(not marks)
    spans = spans_of(events, dag, marked_operators(model, dag) if marks else ())
    zero = min((span.start_ns for span in spans), default=0)
    rank = own_rank()
    intervals = tuple(
        Interval(span.name, span.op_id, span.phase, span.resource, rank, span.start_ns - zero, span.end_ns - span.start_ns)
        for span in spans
    )
    mine = Timeline(
        "measured", dag.model, period, {rank: group}, intervals, {group: peak_bytes} if peak_bytes else {}, {group: software}
    )
    return merge_timelines(_gather(mine, device)) if rank_count() > 1 else mine


def merge_timelines(timelines: list[Timeline]) -> Timeline:
    """One timeline of several ranks' own; the slowest rank's period is the job's.

    The ranks' clocks are not compared: each rank's times count from its own first event after a barrier.
    """
    peaks: dict[str, int] = {}
    for timeline in timelines:
        for group, peak in timeline.peak_bytes.items():
            peaks[group] = max(peak, peaks.get(group, 0))
    intervals = [interval for timeline in timelines for interval in timeline.intervals]
    return attrs.evolve(
        timelines[0],
        iteration_ns=max(timeline.iteration_ns for timeline in timelines),
        rank_group={rank: group for timeline in timelines for rank, group in timeline.rank_group.items()},
        intervals=tuple(sorted(intervals, key=lambda i: (i.rank, i.resource, i.start_ns))),
        peak_bytes=peaks,
        software={group: software for timeline in reversed(timelines) for group, software in timeline.software.items()},
    )


def _wait_for_all(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if rank_count() > 1:
        dist.barrier()


def _period_ns(train_step: Callable[[], Any], steps: int, device: torch.device) -> int:
    """Mean time of steps run back to back."""
    train_step()
    _wait_for_all(device)
    start = time.perf_counter_ns()
    for _ in range(steps):
        train_step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter_ns() - start) // steps


def _gather(mine: Timeline, device: torch.device) -> list[Timeline]:
    """Every rank's timeline, exchanged as artifact bytes."""
    place = device if dist.get_backend() == "nccl" else torch.device("cpu")
    data = torch.frombuffer(bytearray(to_bytes(mine)), dtype=torch.uint8).to(place)
    sizes = [torch.zeros(1, dtype=torch.int64, device=place) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([data.numel()], device=place))
    room = max(int(size) for size in sizes)
    padded = torch.zeros(room, dtype=torch.uint8, device=place)
    padded[: data.numel()] = data
    everyone = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(everyone, padded)
    pairs = zip(everyone, sizes, strict=True)
    return [from_bytes(bytes(tensor[: int(size)].cpu().numpy().tobytes()), Timeline) for tensor, size in pairs]


@attrs.frozen
class Event:
    """One event of the profiler.

    Attributes:
        name: of the operator, autograd node, range or kernel.
        start_ns, end_ns: system-wide monotonic nanoseconds.
        thread: that it ran on (0 on a device).
        sequence: number that a forward operator and its autograd node share; -1 for none.
        on_device: it occupies a stream of an accelerator: a kernel, a copy or a fill.
        correlation: number of this event, where it is an operator's.
        linked: correlation number of the operator that launched it: of events on a device, and of the driver's calls on the CPU
            (whose own numbers count something else); 0 for none.
        stream: that it ran on, on a device.
    """

    name: str
    start_ns: int
    end_ns: int
    thread: int
    sequence: int
    on_device: bool
    correlation: int
    linked: int
    stream: int = 0


def record_step(
    model: torch.nn.Module, dag: PrecisionDag, train_step: Callable[[], Any], device: torch.device, *, marks: bool = True
) -> tuple[list[Event], dict[str, str]]:
    """Run one step under the profiler, with the operators' modules marked or not.

    Returns:
        Its events in order of their start, and the versions and settings (:mod:`qsync_core.settings`) in force in its forward.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    software = job_software(model, device)
    autocast: list[str] = []
    look = model.register_forward_pre_hook(lambda *_: autocast.append(active_autocast(device))) if marks else None
    try:
        with (
            _marked(model, dag) if marks else nullcontext(),
            torch.profiler.profile(activities=activities) as recorded,
            torch.profiler.record_function(STEP),
        ):
            train_step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    finally:
        if look is not None:
            look.remove()
    session = recorded.profiler
    assert session is not None
    events = [
        Event(
            name=raw.name(),
            start_ns=raw.start_ns(),
            end_ns=raw.start_ns() + raw.duration_ns(),
            thread=raw.start_thread_id(),
            sequence=raw.sequence_nr(),
            on_device=raw.device_type().name == "CUDA",
            correlation=raw.correlation_id(),
            linked=raw.linked_correlation_id(),
            stream=raw.device_resource_id(),
        )
        for raw in session.kineto_results.events()
        if raw.device_type().name != "CUDA" or _occupies_a_stream(raw)
    ]
    in_forward = {"autocast": autocast[0]} if autocast else {}
    return sorted(events, key=lambda event: (event.start_ns, -event.end_ns)), software | in_forward


def _occupies_a_stream(raw: Any) -> bool:
    """Whether a device's event takes time there; before 2.12 PyTorch only tells annotations, and records no other marks."""
    if not hasattr(raw, "activity_type"):
        return not raw.is_user_annotation()
    return raw.activity_type() in _ON_A_STREAM


def marked_operators(model: torch.nn.Module, dag: PrecisionDag) -> set[str]:
    """FQNs of operators that are a module's whole forward, and so can be marked by hooks."""
    modules = dict(model.named_modules())
    return {operator.op_id.fqn for operator in dag.operators if operator.op_id.fqn in modules and operator.op_id.fqn}


@contextmanager
def _marked(model: torch.nn.Module, dag: PrecisionDag) -> Iterator[None]:
    """Put a named range around the forward of every module that is an operator."""
    counts: Counter[str] = Counter()
    with ExitStack() as stack:
        for fqn in sorted(marked_operators(model, dag)):
            module = model.get_submodule(fqn)
            opened: list[Any] = []

            def enter(_: Any, __: Any, fqn: str = fqn, opened: list[Any] = opened) -> None:
                span = torch.profiler.record_function(f"{RANGE}{OpId(fqn, counts[fqn])}")
                counts[fqn] += 1
                span.__enter__()
                opened.append(span)

            def leave(_: Any, __: Any, ___: Any, opened: list[Any] = opened) -> None:
                opened.pop().__exit__(None, None, None)

            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield


@attrs.frozen
class Span:
    """A piece of a step: what ran, for which operator, in which phase, on what."""

    name: str
    op_id: OpId | None
    phase: Phase
    resource: Resource
    start_ns: int
    end_ns: int


def spans_of(events: Sequence[Event], dag: PrecisionDag, marked: Iterable[str]) -> list[Span]:
    """The spans of a recorded step.

    Forward: a module's operator is the range its hooks marked; any other operator is found by its ATen name between the marked ones
    before and after it in the graph.  Backward: an autograd node carries the sequence number of the forward operator that made it.
    On a device, a kernel belongs to the operator that launched it, and the CPU's spans are dispatch; what no operator launched is
    of the phase in which it was launched.  Of a compiled model nothing belongs to an operator.  Collectives are communication.  No
    moment is counted twice on one resource: where spans overlap, because one contains the other or streams run side by side, the
    one that began last has it.

    Args:
        events: from :func:`record_step`.
        marked: FQNs of operators whose modules were marked.
    """
    step = next(event for event in events if event.name == STEP)
    cpu = [event for event in events if not event.on_device and event is not step]
    resource = Resource.DISPATCH if any(event.on_device for event in events) else Resource.COMPUTE
    first_backward = min((event.start_ns for event in cpu if event.name.startswith(_BACKWARD)), default=step.end_ns)
    forward_events = [event for event in cpu if event.thread == step.thread and event.start_ns < first_backward]
    forward = _forward_spans(forward_events, dag, set(marked), resource)
    backward = _backward_spans([event for event in cpu if event.name.startswith(_BACKWARD)], forward_events, forward, resource)
    optimizer = [
        Span(event.name.partition("#")[0], None, Phase.OPTIMIZER, resource, event.start_ns, event.end_ns)
        for event in cpu
        if event.name.startswith(_OPTIMIZER)
    ]
    communication = [
        Span(collective, None, Phase.COMMUNICATION, Resource.COMMUNICATION, event.start_ns, event.end_ns)
        for event in events
        if (collective := _collective(event))
    ]
    on_cpu = without_overlap([*forward, *backward, *optimizer])
    phases = _PhaseStarts(
        first_backward,
        min((span.start_ns for span in optimizer if span.start_ns > first_backward), default=step.end_ns),
    )
    kernels = without_overlap(_kernel_spans(events, on_cpu, phases))
    return sorted([*on_cpu, *kernels, *without_overlap(communication)], key=lambda span: (span.resource, span.start_ns))


def _collective(event: Event) -> str:
    """What a collective's event does (``all-reduce``); empty for any other event."""
    found = _COLLECTIVE.match(event.name)
    if not found:
        return ""
    does = found[1].replace("_", "").lower()
    return next((name for start, name in _COLLECTIVES.items() if does.startswith(start)), found[1])


def without_overlap(spans: Sequence[Span]) -> list[Span]:
    """The same time cut into spans that do not overlap: each moment goes to the span that began last."""
    in_order = sorted(spans, key=lambda span: (span.start_ns, -span.end_ns))
    pieces: list[Span] = []
    active: list[tuple[int, int]] = []  # (minus the position in order, end), latest begun first
    moment = 0

    def run_until(limit_ns: int | None) -> None:
        nonlocal moment
        while active and (limit_ns is None or moment < limit_ns):
            position, end = active[0]
            if end <= moment:
                heapq.heappop(active)
                continue
            until = end if limit_ns is None else min(end, limit_ns)
            owner = in_order[-position]
            if pieces and pieces[-1].end_ns == moment and _same_work(pieces[-1], owner) and moment > owner.start_ns:
                pieces[-1] = attrs.evolve(pieces[-1], end_ns=until)
            else:
                pieces.append(attrs.evolve(owner, start_ns=moment, end_ns=until))
            moment = until

    for position, span in enumerate(in_order):
        run_until(span.start_ns)
        moment = max(moment, span.start_ns)
        heapq.heappush(active, (-position, span.end_ns))
    run_until(None)
    return pieces


def _same_work(one: Span, other: Span) -> bool:
    return (one.name, one.op_id, one.phase) == (other.name, other.op_id, other.phase)


def _forward_spans(events: Sequence[Event], dag: PrecisionDag, marked: set[str], resource: Resource) -> list[Span]:
    spans: list[Span] = []
    position, covered_until = 0, 0
    compiled = any(event.name.startswith(_COMPILED) for event in events)
    for event in events:
        if event.start_ns < covered_until:
            continue
        if event.name.startswith(RANGE):
            marked_id = OpId.parse(event.name.removeprefix(RANGE))
            op_id: OpId | None = marked_id
            position = dag.index.get(marked_id, position - 1) + 1
        elif compiled and ("::" in event.name or event.name.startswith(_COMPILED)):
            op_id = None
        elif "::" in event.name or event.name == _LOWERED:
            found = _find(dag, position, marked, event.name)
            op_id = None if found is None else dag.operators[found].op_id
            position = position if found is None else found + 1
        else:
            continue  # another tool's range around what interests us
        covered_until = event.end_ns
        name = str(op_id) if op_id else event.name
        spans.append(Span(name, op_id, Phase.FORWARD, resource, event.start_ns, event.end_ns))
    return spans


def _find(dag: PrecisionDag, position: int, marked: set[str], event_name: str) -> int | None:
    """Position of the next operator that an event may be of, before the next marked one."""
    name = op_name(event_name.rpartition("::")[2])
    for index in range(position, len(dag.operators)):
        operator = dag.operators[index]
        if operator.op_id.fqn in marked:
            return None
        if operator.is_adjustable if event_name == _LOWERED else _aten_name(operator) == name:
            return index
    return None


def _aten_name(operator: Operator) -> str:
    call = operator.attributes.get(CALL_ATTRIBUTE)
    return op_name(json.loads(call)["op"].removeprefix("aten.")) if call else operator.kind


def _backward_spans(
    nodes: Sequence[Event], forward_events: Sequence[Event], forward: Sequence[Span], resource: Resource
) -> list[Span]:
    # The last event to begin with a sequence number is the one that made the node; earlier ones contain it, or made none.
    maker = {event.sequence: event.start_ns for event in forward_events if event.sequence >= 0}
    locate = _Locator(forward)
    spans = []
    for node in nodes:
        span = locate.at(maker[node.sequence]) if node.sequence in maker else None
        op_id = span.op_id if span else None
        name = str(op_id) if op_id else node.name.removeprefix(_BACKWARD).rpartition("::")[2]
        spans.append(Span(name, op_id, Phase.BACKWARD, resource, node.start_ns, node.end_ns))
    return spans


@attrs.frozen
class _PhaseStarts:
    """When the CPU began the backward pass and the optimizer."""

    backward_ns: int
    optimizer_ns: int

    def at(self, moment_ns: int) -> Phase:
        """The phase of what was launched then."""
        if moment_ns < self.backward_ns:
            return Phase.FORWARD
        return Phase.BACKWARD if moment_ns < self.optimizer_ns else Phase.OPTIMIZER


def _kernel_spans(events: Sequence[Event], on_cpu: Sequence[Span], phases: _PhaseStarts) -> list[Span]:
    # Only operators' own numbers: those of the driver's calls, which are linked to an operator, count something else.
    launched = {event.correlation: event.start_ns for event in events if not event.on_device and not event.linked}
    computing = {event.stream for event in events if event.on_device and not _is_copy(event) and not _collective(event)}
    locate = _Locator(on_cpu)
    spans: list[Span] = []
    for event in events:
        if event.on_device and event.stream in computing and not _collective(event):
            moment = launched.get(event.linked)
            span = None if moment is None else locate.at(moment)
            if span:
                op_id, phase = span.op_id, span.phase
            elif moment is not None:
                op_id, phase = None, phases.at(moment)
            else:  # of an unknown launch: a stream is in order, so it goes with what ran before it
                op_id, phase = None, spans[-1].phase if spans else Phase.FORWARD
            spans.append(Span(str(op_id or event.name), op_id, phase, Resource.COMPUTE, event.start_ns, event.end_ns))
    return spans


def _is_copy(event: Event) -> bool:
    """Copies and fills count where they hold up kernels: on a stream that has some."""
    return event.name.startswith(("Memcpy", "Memset"))


class _Locator:
    """Finds the span that contains a moment, among spans that do not overlap."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self._spans = sorted(spans, key=lambda span: span.start_ns)
        self._starts = [span.start_ns for span in self._spans]

    def at(self, moment_ns: int) -> Span | None:
        """The latest span that began before and had not ended."""
        index = bisect.bisect_right(self._starts, moment_ns) - 1
        if index >= 0 and self._spans[index].end_ns > moment_ns:
            return self._spans[index]
        return None
