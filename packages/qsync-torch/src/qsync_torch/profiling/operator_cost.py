"""Measuring one operator in one variant: time forward and backward, what autograd keeps, temporary memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from qsync_core.ir.dag import Operator
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import OpCost
from qsync_core.ir.variant import Variant
from qsync_core.kernels.choice import KernelChoice
from qsync_torch.job import autocast
from qsync_torch.profiling.benchmark_case import BenchmarkCase, differentiable_outputs, make_case
from qsync_torch.profiling.memory import memory_rise, watch_saved
from qsync_torch.timing import Effort, Stopwatch, repeat, rotation_count
from qsync_torch.torch_internals import TorchDispatchMode

_MOST_SETS_CUDA, _MOST_SETS_CPU = 8, 4


def measure_operator(
    operator: Operator,
    variant: Variant,
    layouts: Mapping[str, torch.Tensor],
    choice: KernelChoice,
    stopwatch: Stopwatch,
    effort: Effort,
    base: Precision = Precision.FLOAT32,
) -> OpCost:
    """Measure one operator as :func:`measure_case` does.

    Args:
        operator, variant, layouts, choice: what runs, as in :func:`~qsync_torch.profiling.benchmark_case.make_case`.
        base: of the graph; under AMP, operators that no plan lowers run as autocast runs them.
    """
    device = stopwatch.device
    forwarding = autocast(Precision.FLOAT32 if operator.is_adjustable else base, device)
    make = partial(make_case, operator, variant, layouts, device, choice, base)
    return measure_case(make, choice, stopwatch, effort, forwarding)


def measure_case(
    make: Callable[[], BenchmarkCase],
    choice: KernelChoice,
    stopwatch: Stopwatch,
    effort: Effort,
    forwarding: AbstractContextManager[Any] | None = None,
) -> OpCost:
    """Measure a call forward and backward.

    Several sets of operands are made and used in turn: all forward calls run before all backward calls, the latter in reverse
    order, so that a backward finds its saved tensors as cold in the caches as it does in training.

    Args:
        make: makes a set of operands.
        choice: whose kernels run it, for the record.
        forwarding: what forward calls run in, again and again.
    """
    device, forwarding = stopwatch.device, nullcontext() if forwarding is None else forwarding
    first = make()
    whole = first.with_casts or first
    call = whole.make_ready()
    with forwarding:
        saved = watch_saved(call.run, whole.activations, whole.parameters)
    gradients = [_gradient(output, whole) for output in differentiable_outputs(saved.result)]
    workspaces = _workspaces(whole, gradients, device, forwarding)

    nbytes = sum(t.nbytes for t in (*first.activations, *first.parameters))
    sets = rotation_count(nbytes, device, most=_MOST_SETS_CUDA if device.type == "cuda" else _MOST_SETS_CPU)
    cases = [first, *(make() for _ in range(sets - 1))]

    def sample() -> tuple[int, int, int, int]:
        while True:
            calls = [case.make_ready() for case in cases]
            with forwarding:
                results, forward_dispatch, forward_compute = stopwatch.time_each([call.run for call in calls])
            if stopwatch.must_repeat:
                continue
            pairs = zip(reversed(results), reversed(calls), strict=True)
            backward = [thunk for result, call in pairs if (thunk := call.backward_thunk(result, gradients)) is not None]
            if not backward:
                return forward_dispatch, forward_compute, 0, 0
            _, backward_dispatch, backward_compute = stopwatch.time_each(backward)
            if not stopwatch.must_repeat:
                return forward_dispatch, forward_compute, backward_dispatch, backward_compute

    timing = repeat(sample, effort)
    forward_dispatch, forward_compute, backward_dispatch, backward_compute = timing.median_ns
    if device.type == "cpu":
        forward_calls, backward_calls = _count_calls(first, gradients, forwarding)
        forward_dispatch = min(forward_compute, forward_calls * stopwatch.overhead_ns)
        backward_dispatch = min(backward_compute, backward_calls * stopwatch.overhead_ns)
        forward_compute -= forward_dispatch
        backward_compute -= backward_dispatch
    return OpCost(
        forward_dispatch_ns=forward_dispatch,
        forward_compute_ns=forward_compute,
        backward_dispatch_ns=backward_dispatch,
        backward_compute_ns=backward_compute,
        saves_inputs=saved.inputs,
        saves_output=saved.output,
        saved_own_bytes=saved.own_bytes,
        workspace_bytes=workspaces[0],
        backend=choice.backend,
        config=choice.config,
        spread=timing.spread,
        backward_workspace_bytes=workspaces[1],
    )


def run_once(make: Callable[[], BenchmarkCase]) -> None:
    """Make one of the calls that :func:`measure_case` measures, forward and backward."""
    case = make()
    call = case.make_ready()
    result = call.run()
    backward = call.backward_thunk(result, [_gradient(output, case) for output in differentiable_outputs(result)])
    if backward is not None:
        backward()


def _gradient(output: torch.Tensor, case: BenchmarkCase) -> torch.Tensor:
    dtype = case.gradient_dtype or output.dtype
    gradient = torch.empty_like(output, dtype=dtype, requires_grad=False, memory_format=case.gradient_layout)
    return gradient.normal_()


def _workspaces(
    case: BenchmarkCase, gradients: list[torch.Tensor], device: torch.device, forwarding: AbstractContextManager[Any]
) -> tuple[int, int]:
    """Bytes allocated above what remains, forward and backward."""
    kept: list[Any] = []
    call = case.make_ready()
    with forwarding:
        peak, left = memory_rise(lambda: kept.append(call.run()), device)
    forward_bytes, backward_bytes = peak - left, 0
    backward = call.backward_thunk(kept, gradients)
    if backward is not None:
        peak, left = memory_rise(lambda: kept.append(backward()), device)
        backward_bytes = peak - left
    return max(0, forward_bytes), max(0, backward_bytes)


class _CallCounter(TorchDispatchMode):
    """Counts the operators that are dispatched under it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch annotates nothing there
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def _count_calls(case: BenchmarkCase, gradients: list[torch.Tensor], forwarding: AbstractContextManager[Any]) -> tuple[int, int]:
    """Operators dispatched in one forward and in one backward."""
    call = case.make_ready()
    with _CallCounter() as counter:
        with forwarding:
            result = call.run()
        forward = counter.calls
        backward = call.backward_thunk(result, gradients)
        if backward is not None:
            backward()
        return forward, counter.calls - forward
