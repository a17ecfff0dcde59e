"""The timer: medians of passes through all operands, few samples of slow kernels, failures as what they are."""

import pytest
import torch

from qsync_core.errors import BackendError
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import KernelRequest, Op
from qsync_core.tuning.search import DeviceLostError, is_temporary
from qsync_torch import timing
from qsync_torch.timing import Stopwatch
from qsync_torch.tuning.kernel_timing import KernelTimer

REQUEST = KernelRequest(Op.QUANTIZE, Variant.parse("int8"), ((4, 4),))
CPU = torch.device("cpu")


class Clock:
    """Time that passes only when a kernel says so."""

    def __init__(self, monkeypatch):
        self.now_ns = 0
        monkeypatch.setattr(timing.time, "perf_counter_ns", lambda: self.now_ns)
        monkeypatch.setattr(timing.time, "monotonic", lambda: self.now_ns / 1e9)


def test_the_median_of_passes_over_all_operands(monkeypatch):
    clock, calls = Clock(monkeypatch), []
    durations = iter([1_000_000, *[10, 20], *[100, 300], *[30, 30]])  # the first call is not counted

    def kernel(operand):
        calls.append(operand)
        clock.now_ns += next(durations)

    assert KernelTimer([("x",), ("y",)], CPU)(kernel, REQUEST, 3) == 30
    assert calls == ["x", *["x", "y"] * 3]


def test_slow_kernels_get_few_samples(monkeypatch):
    clock, calls = Clock(monkeypatch), []

    def kernel(operand):
        calls.append(operand)
        clock.now_ns += 1_000_000_000

    assert KernelTimer([("x",)], CPU)(kernel, REQUEST, 25) == 1_000_000_000
    assert len(calls) == 1 + 3


def test_a_kernel_that_fails_is_named():
    def kernel(operand):
        raise ValueError("wrong\nshape")

    with pytest.raises(BackendError, match="its kernel failed with ValueError: wrong shape") as caught:
        KernelTimer([("x",)], CPU)(kernel, REQUEST, 3)
    assert not isinstance(caught.value, DeviceLostError)


def test_a_refusal_of_the_backend_is_passed_on():
    def kernel(operand):
        raise BackendError("K must be a multiple of 16")

    with pytest.raises(BackendError, match=r"^K must be a multiple of 16$"):
        KernelTimer([("x",)], CPU)(kernel, REQUEST, 3)


def test_a_device_that_does_not_answer_ends_the_run(monkeypatch):
    monkeypatch.setattr(KernelTimer, "_device_lives", lambda self: False)

    def kernel(operand):
        raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(
        DeviceLostError, match=r"a kernel of quantize on \[\(4, 4\)\] made the device unusable .*illegal memory access"
    ):
        KernelTimer([("x",)], CPU)(kernel, REQUEST, 3)


def test_a_device_without_memory_is_not_lost(monkeypatch):
    """Another process fills it: it answers, and the kernel's configuration is not to blame."""

    def full(self):
        raise torch.OutOfMemoryError("tried to allocate 2 MiB")

    def kernel(operand):
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr(Stopwatch, "synchronize", full)
    with pytest.raises(BackendError, match="its kernel failed with OutOfMemoryError") as caught:
        KernelTimer([("x",)], CPU)(kernel, REQUEST, 3)
    assert not isinstance(caught.value, DeviceLostError)
    assert is_temporary(caught.value)
