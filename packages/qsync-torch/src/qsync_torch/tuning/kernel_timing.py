"""Timing kernels for the search: on operands as ``apply_`` would give them, against the most that the device can do."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from qsync_core.errors import BackendError
from qsync_core.ir.precision import Granularity, Precision
from qsync_core.kernels.backend import Kernel, KernelRequest, Op
from qsync_core.kernels.requests import OperatorRequest
from qsync_core.kernels.roofline import Peaks
from qsync_core.tuning.search import DeviceLostError
from qsync_torch.devices import compute_capability
from qsync_torch.dtypes import TORCH_DTYPE
from qsync_torch.timing import Thunk, make_stopwatch, rotation_count

Arguments = tuple[Any, ...]

_MOST_SETS = 16
_FEWEST = 3
_BUDGET_S = 0.25
_BYTES = 1 << 28
_PASSES = 5
_HEADROOM = 1.15
"""Reading alone is somewhat faster than the copy that is timed, and the bound must hold."""


class KernelTimer:
    """A :class:`qsync_core.tuning.search.Measure` on fixed sets of operands, which all candidates of a request share.

    A sample is one pass over all sets by the device's stopwatch.
    """

    def __init__(self, sets: Sequence[Arguments], device: torch.device) -> None:
        self._sets, self._device = sets, device
        self._stopwatch = make_stopwatch(device)

    def __call__(self, kernel: Kernel, request: KernelRequest, samples: int) -> int:
        """Median latency in nanoseconds; the first call, which may compile, is not counted.

        Raises:
            BackendError: when the kernel does not run.
            DeviceLostError: when the device does not answer after it.
        """
        try:
            kernel(*self._sets[0])
            self._stopwatch.synchronize()
            calls = [functools.partial(kernel, *arguments) for arguments in self._sets]
            return max(1, round(statistics.median(self._samples(calls, samples))))
        except BackendError:
            raise
        except (
            Exception,
            SystemExit,
        ) as error:  # a kernel may fail in whatever way; the next candidate decides whether the device lives
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
            if not self._device_lives():
                raise DeviceLostError(
                    f"a kernel of {request.op} on {list(request.shapes)} made the device unusable ({said}); "
                    "start the command again: it continues after that kernel"
                ) from error
            raise BackendError(f"its kernel failed with {said}") from error

    def _samples(self, calls: Sequence[Thunk], count: int) -> list[int]:
        """At most ``count`` samples: a slow kernel's are few, because they scatter little and the search must end."""
        found: list[int] = []
        start = time.monotonic()
        while len(found) < count and (len(found) < _FEWEST or time.monotonic() - start < _BUDGET_S):
            found.append(self._stopwatch.time_series(calls)[1])
        return found

    def _device_lives(self) -> bool:
        try:
            self._stopwatch.synchronize()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
                torch.zeros(1, device=self._device).item()
        except torch.OutOfMemoryError:
            return True  # it answers, and another process fills it
        except RuntimeError:
            return False
        return True


def rotating_sets(asked: OperatorRequest, device: torch.device) -> list[Arguments]:
    """Sets of arguments that are used in turn, so that no operand is found in a cache."""
    first = make_operands(asked, device)
    nbytes = sum(argument.nbytes for argument in first if isinstance(argument, torch.Tensor))
    count = rotation_count(nbytes, device, most=_MOST_SETS)
    return [first, *(make_operands(asked, device) for _ in range(count - 1))]


def make_operands(asked: OperatorRequest, device: torch.device) -> Arguments:
    """The arguments of one call of a request's kernel (``docs/writing-a-backend.md``)."""
    request, variant = asked.request, asked.request.variant
    if request.op == Op.QUANTIZE:
        return _quantize(asked, device)
    first_shape, second_shape = request.shapes
    result = asked.result_shape

    def scales(shape: tuple[int, ...], granularity: Granularity, symmetric: bool = True) -> torch.Tensor:
        count = granularity.scale_count(shape)
        if not variant.compute.needs_scale:
            return torch.empty(0, device=device)
        found = torch.rand(count, device=device) * 0.01 + 0.001
        return found if symmetric else torch.cat([found, torch.full_like(found, -128.0)])

    if request.op in (Op.LINEAR_OUTPUT, Op.CONV2D_OUTPUT):
        x, w = (_random(shape, variant.compute, device) for shape in (first_shape, second_shape))
        bias = torch.randn(result[1], device=device) if request.op == Op.LINEAR_OUTPUT else None
        x_scale, w_scale = (
            scales(first_shape, variant.x_granularity, variant.symmetric),
            scales(second_shape, variant.w_granularity),
        )
        return x, x_scale, w, w_scale, bias, _empty(result, variant.output, device)
    if request.op in (Op.LINEAR_GRAD_INPUT, Op.CONV2D_GRAD_INPUT):
        grad, w = _random(first_shape, asked.source, device), _random(second_shape, variant.compute, device)
        eight_bit = variant.grad_input.needs_scale
        scale = torch.rand(1, device=device) if eight_bit else scales(second_shape, variant.w_granularity)
        return grad, w, scale, _empty(result, variant.output if eight_bit else variant.grad_input, device)
    out = _empty(result, Precision.FLOAT32, device)
    if variant.grad_weight.needs_scale and request.op == Op.LINEAR_GRAD_WEIGHT:
        # The sum runs over rows, and both copies come transposed from their quantization.
        grad, x = (_random(shape[::-1], variant.grad_weight, device).t() for shape in (first_shape, second_shape))
        per_channel = variant.w_granularity is Granularity.PER_CHANNEL
        return grad, x, torch.rand(result[0] if per_channel else 1, device=device), out
    grad, x = _random(first_shape, asked.source, device), _random(second_shape, variant.compute, device)
    return grad, x, scales(second_shape, variant.x_granularity, variant.symmetric), out


def _quantize(asked: OperatorRequest, device: torch.device) -> Arguments:
    request, variant = asked.request, asked.request.variant
    shape = request.shapes[0]
    x = _random(shape, asked.source, device)
    q = torch.empty_like(x, dtype=TORCH_DTYPE[variant.compute])
    count = variant.x_granularity.scale_count(shape) * (1 if variant.symmetric else 2)
    scale = torch.empty(count, dtype=torch.float32, device=device)
    channels = shape[1] if len(shape) == 4 else shape[-1]
    arguments: Arguments = (x, q, scale, 1, 0)
    if request.multiplied or request.transposed:
        arguments = (*arguments, torch.rand(channels, device=device) + 0.5 if request.multiplied else None)
    if request.transposed:
        arguments = (*arguments, torch.empty(shape[::-1], dtype=TORCH_DTYPE[variant.compute], device=device))
    return arguments


def _random(shape: tuple[int, ...], precision: Precision, device: torch.device) -> torch.Tensor:
    """Values spread as in training: integers over the whole range, floats normally distributed; images channels-last."""
    if precision is Precision.INT8:
        x = torch.randint(-127, 128, shape, dtype=torch.int8, device=device)
    else:
        x = torch.randn(shape, device=device).to(TORCH_DTYPE[precision])
    return x.to(memory_format=torch.channels_last) if len(shape) == 4 else x


def _empty(shape: tuple[int, ...], precision: Precision, device: torch.device) -> torch.Tensor:
    layout = torch.channels_last if len(shape) == 4 else torch.contiguous_format
    return torch.empty(shape, dtype=TORCH_DTYPE[precision], device=device, memory_format=layout)


@functools.lru_cache(maxsize=8)
def device_peaks(device: torch.device) -> Peaks:
    """Peak rates of a CUDA device, its memory's measured, its products' by its clock; a CPU's caches hide its own."""
    if device.type != "cuda":
        return Peaks(0.0)
    source = torch.empty(_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best_ns = float("inf")
    for _ in range(_PASSES):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        best_ns = min(best_ns, begin.elapsed_time(end) * 1e6)
    properties = torch.cuda.get_device_properties(device)
    clock_ghz = getattr(properties, "clock_rate", 0) / 1e6
    capability = compute_capability(device) if clock_ghz else ""
    return Peaks.of_cuda(2 * _BYTES / best_ns * _HEADROOM, capability, properties.multi_processor_count, clock_ghz)
