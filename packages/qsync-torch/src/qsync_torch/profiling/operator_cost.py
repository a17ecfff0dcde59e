"""Measuring one operator in one variant: time forward and backward, what autograd keeps, temporary memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qsync_core.ir.profile import OpCost
from qsync_torch.profiling.memory import memory_rise, watch_saved
from qsync_torch.profiling.replay_call import Prepared, differentiable_outputs
from qsync_torch.timing import Effort, Stopwatch, repeat

_CPU_ROTATE_BYTES = 32 << 20
_MAX_ROTATION = 4


def measure_operator(
    prepare: Callable[[], Prepared], stopwatch: Stopwatch, effort: Effort, *, backend: str = "aten", config: str = ""
) -> OpCost:
    """Measure one operator.

    Several sets of operands are made and used in turn: all forward calls run before all backward calls, the latter in reverse
    order, so that a backward finds its saved tensors as cold in the caches as it does in training.

    Args:
        prepare: makes fresh random operands, already in the formats in which the operator receives them.
        stopwatch: of the device.
        effort: how long to repeat.
        backend, config: stored in the result.
    """
    first = prepare()
    armed = first.arm()
    saved = watch_saved(armed.run, first.activations, first.parameters)
    outputs = differentiable_outputs(saved.result)
    gradients = [_gradient(output, first.gradient_dtype) for output in outputs]
    workspace = _workspace(first, gradients, stopwatch.device)

    operands = [first, *(prepare() for _ in range(_rotation(first, stopwatch.device) - 1))]

    def sample() -> tuple[int, int, int, int]:
        while True:
            calls = [prepared.arm() for prepared in operands]
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
    if stopwatch.device.type == "cpu":
        forward_calls, backward_calls = _count_calls(first, gradients)
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
        workspace_bytes=workspace,
        backend=backend,
        config=config,
        spread=timing.spread,
    )


def _gradient(output: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    gradient = torch.empty_like(output, dtype=dtype or output.dtype, requires_grad=False)
    return gradient.normal_()


def _rotation(prepared: Prepared, device: torch.device) -> int:
    """How many sets of operands: enough to exceed the last-level cache, within bounds."""
    nbytes = sum(t.nbytes for t in (*prepared.activations, *prepared.parameters)) or 1
    if device.type == "cuda":
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        return max(2, min(2 * _MAX_ROTATION, math.ceil(2 * cache / nbytes)))
    return max(2, min(_MAX_ROTATION, _CPU_ROTATE_BYTES // nbytes))


def _workspace(prepared: Prepared, gradients: list[torch.Tensor], device: torch.device) -> int:
    """Bytes allocated above what remains: the larger of forward's and backward's."""
    kept: list[Any] = []
    call = prepared.arm()
    peak, left = memory_rise(lambda: kept.append(call.run()), device)
    workspace = peak - left
    backward = call.backward_thunk(kept, gradients)
    if backward is not None:
        peak, left = memory_rise(lambda: kept.append(backward()), device)
        workspace = max(workspace, peak - left)
    return max(0, workspace)


@attrs.define(eq=False, slots=False)
class _CallCounter(TorchDispatchMode):
    """Counts the operators that are dispatched under it."""

    calls: int = 0

    def __attrs_pre_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def _count_calls(prepared: Prepared, gradients: list[torch.Tensor]) -> tuple[int, int]:
    """Operators dispatched in one forward and in one backward."""
    call = prepared.arm()
    with _CallCounter() as counter:
        result = call.run()
        forward = counter.calls
        backward = call.backward_thunk(result, gradients)
        if backward is not None:
            backward()
        return forward, counter.calls - forward
