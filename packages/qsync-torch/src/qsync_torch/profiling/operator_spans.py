"""Which operator of the graph an event of a recorded step belongs to, and in which phase it ran."""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterable, Sequence

import attrs

from qsync_core.ir.dag import Operator, PrecisionDag
from qsync_core.ir.dfg import Phase, Resource
from qsync_core.ir.op_id import OpId
from qsync_torch.profiling.recorded_step import RANGE, STEP, Event
from qsync_torch.tracing.aten_call import CALL_ATTRIBUTE
from qsync_torch.tracing.classify import op_name

_BACKWARD = "autograd::engine::evaluate_function: "
_OPTIMIZER = ("Optimizer.step#", "Optimizer.zero_grad#")
_LOWERED = {"_QuantizedLinear": "linear", "_QuantizedConv2d": "conv2d"}
"""Autograd functions that stand where a lowered functional call was."""
_ALL_REDUCE = ("gloo:all_reduce", "ncclDevKernel_AllReduce", "ncclKernel_AllReduce")


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
    On a device, kernels belong to whoever launched them, and the CPU's spans are dispatch.

    Args:
        events: from :func:`~qsync_torch.profiling.recorded_step.record_step`.
        dag: the model's graph.
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
        Span("all-reduce", None, Phase.COMMUNICATION, Resource.COMMUNICATION, event.start_ns, event.end_ns)
        for event in events
        if event.name.startswith(_ALL_REDUCE)
    ]
    on_cpu = [*forward, *backward, *optimizer]
    return sorted([*on_cpu, *_kernel_spans(events, on_cpu), *communication], key=lambda span: (span.resource, span.start_ns))


def _forward_spans(events: Sequence[Event], dag: PrecisionDag, marked: set[str], resource: Resource) -> list[Span]:
    spans: list[Span] = []
    position, covered_until = 0, 0
    for event in events:
        if event.start_ns < covered_until:
            continue
        if event.name.startswith(RANGE):
            op_id = OpId.parse(event.name.removeprefix(RANGE))
            position = dag.index.get(op_id, position - 1) + 1
        elif "::" in event.name or event.name in _LOWERED:
            found = _find(dag, position, marked, _plain_name(event.name))
            op_id = None if found is None else dag.operators[found].op_id
            position = position if found is None else found + 1
        else:
            continue  # a range of somebody else's around what interests us
        covered_until = event.end_ns
        name = str(op_id) if op_id else event.name
        spans.append(Span(name, op_id, Phase.FORWARD, resource, event.start_ns, event.end_ns))
    return spans


def _find(dag: PrecisionDag, position: int, marked: set[str], name: str) -> int | None:
    """Position of the next operator of that name before the next marked one."""
    for index in range(position, len(dag.operators)):
        operator = dag.operators[index]
        if operator.op_id.fqn in marked:
            return None
        if _aten_name(operator) == name:
            return index
    return None


def _aten_name(operator: Operator) -> str:
    call = operator.attributes.get(CALL_ATTRIBUTE)
    return op_name(json.loads(call)["op"].removeprefix("aten.")) if call else operator.kind


def _plain_name(event_name: str) -> str:
    return _LOWERED.get(event_name) or op_name(event_name.rpartition("::")[2])


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


def _kernel_spans(events: Sequence[Event], on_cpu: Sequence[Span]) -> list[Span]:
    launched = {event.correlation: event.start_ns for event in events if not event.on_device}
    locate = _Locator(on_cpu)
    spans = []
    for event in events:
        if event.on_device and not event.name.startswith(_ALL_REDUCE):
            span = locate.at(launched[event.linked]) if event.linked in launched else None
            op_id, phase = (span.op_id, span.phase) if span else (None, Phase.FORWARD)
            spans.append(Span(str(op_id or event.name), op_id, phase, Resource.COMPUTE, event.start_ns, event.end_ns))
    return spans


class _Locator:
    """Finds the span that contains a moment, among spans that do not overlap much."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self._spans = sorted(spans, key=lambda span: span.start_ns)
        self._starts = [span.start_ns for span in self._spans]

    def at(self, moment_ns: int) -> Span | None:
        """The latest span that began before and had not ended."""
        index = bisect.bisect_right(self._starts, moment_ns) - 1
        if index >= 0 and self._spans[index].end_ns > moment_ns:
            return self._spans[index]
        return None
