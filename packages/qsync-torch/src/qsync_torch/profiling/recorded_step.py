"""One training step as torch's profiler saw it: events in nanoseconds, with the ranges of a model's operators marked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import torch

from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.op_id import OpId

RANGE = "qsync.operator "
"""Prefix of the ranges that mark a module's operator; its OpId follows."""
STEP = "qsync.step"


@attrs.frozen
class Event:
    """One event of the profiler.

    Attributes:
        name: of the operator, autograd node, range or kernel.
        start_ns, end_ns: system-wide monotonic nanoseconds.
        thread: that it ran on (0 on a device).
        sequence: number that a forward operator and its autograd node share; -1 for none.
        on_device: a kernel on an accelerator; ``linked`` is then the correlation number of the CPU event that launched it.
        correlation: number of this event.
    """

    name: str
    start_ns: int
    end_ns: int
    thread: int
    sequence: int
    on_device: bool
    correlation: int
    linked: int


def record_step(model: torch.nn.Module, dag: PrecisionDag, train_step: Callable[[], Any], device: torch.device) -> list[Event]:
    """Run one step under the profiler and return its events in order of their start."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with _marked(model, dag), torch.profiler.profile(activities=activities) as recorded, torch.profiler.record_function(STEP):
        train_step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    session = recorded.profiler
    assert session is not None
    events = [
        Event(
            name=raw.name(),
            start_ns=raw.start_ns(),
            end_ns=raw.start_ns() + raw.duration_ns(),
            thread=raw.start_thread_id(),
            sequence=raw.sequence_nr(),
            on_device=raw.device_type() == torch.autograd.DeviceType.CUDA,
            correlation=raw.correlation_id(),
            linked=raw.linked_correlation_id(),
        )
        for raw in session.kineto_results.events()
    ]
    return sorted(events, key=lambda event: (event.start_ns, -event.end_ns))


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
