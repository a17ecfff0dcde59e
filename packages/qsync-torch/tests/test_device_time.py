"""Device time of phases against a simulated GPU whose launch queue is bounded."""

from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hypothesis_profiles import tries
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_torch.profiling.whole_step import _measure_cuda, fill_period
from qsync_torch.timing import CudaStopwatch, Effort

CUDA = torch.device("cuda", 0)
FLOAT32 = Variant.plain(Precision.FLOAT32)
TWICE = Effort(min_repeats=2, max_repeats=2, budget_s=0.0, warmup=0)


_WORK = []


_LIBRARY = torch.library.Library("aten", "FRAGMENT")
_LIBRARY.define("simulated_call(Tensor x) -> Tensor")


def _call(x):
    _WORK.pop()()
    return x.clone()


_LIBRARY.impl("simulated_call", _call, "CPU")


@torch.library.custom_op("device_time::foreign_call", mutates_args=())
def _foreign_call(x: torch.Tensor) -> torch.Tensor:
    return _call(x)


class Moment:
    """An event: when the device reaches it."""

    def __init__(self, device, at_ns):
        self._device, self.at_ns = device, at_ns

    def query(self):
        return self._device.now_ns >= self.at_ns

    def elapsed_time(self, end):
        return (end.at_ns - self.at_ns) / 1e6


class SimulatedDevice:
    """A GPU, its launch queue and the CPU that feeds it, as a reference for what a stopwatch should find.

    One stream in order; a launch returns at once unless ``capacity`` launches are waiting, then when the oldest has begun.
    """

    def __init__(self, capacity=1024):
        self.capacity, self.now_ns, self.free_ns = capacity, 0, 0
        self._begins = deque()
        self._x = torch.ones(1)

    def launch(self, kernel_ns, issue_ns):
        """A call of PyTorch that takes the CPU and the device so long."""
        self.call(lambda: self.enqueue(kernel_ns, issue_ns))

    def call(self, work):
        """A call of PyTorch that does this work."""
        _WORK.append(work)
        torch.ops.aten.simulated_call(self._x)

    def foreign_call(self, work):
        """A call of another library that does this work."""
        _WORK.append(work)
        torch.ops.device_time.foreign_call(self._x)

    def enqueue(self, kernel_ns, issue_ns):
        """A launch that PyTorch does not see."""
        self.now_ns += issue_ns
        while self._begins and self._begins[0] <= self.now_ns:
            self._begins.popleft()
        if len(self._begins) >= self.capacity:
            self.now_ns = self._begins.popleft()
        begin = max(self.now_ns, self.free_ns)
        self._begins.append(begin)
        self.free_ns = begin + kernel_ns

    def clock(self):
        return self.now_ns

    def current(self):
        return nullcontext()

    def synchronize(self):
        self.now_ns = max(self.now_ns, self.free_ns)

    def spin(self, ns):
        self.enqueue(ns, 0)

    def record(self):
        return Moment(self, max(self.now_ns, self.free_ns))


def watch(device):
    return CudaStopwatch(CUDA, device, device.clock)


def device_ns(stopwatch, phase):
    return stopwatch.time_phase(phase)[1]


def launches(device, count, kernel_ns, issue_ns):
    def phase():
        for _ in range(count):
            device.launch(kernel_ns, issue_ns)

    return phase


def test_behind_one_spin_a_long_phase_of_short_kernels_takes_the_cpus_time():
    device = SimulatedDevice()
    stopwatch = watch(device)
    _, found_ns = stopwatch.time_series([launches(device, 3000, 3_000, 8_000)])
    # 1,024 launches wait behind the spin; when it ends the rest is issued while the device soon waits.
    assert found_ns > 1.5 * 3000 * 3_000
    assert stopwatch.given_up == 1


def test_cut_into_pieces_it_takes_the_devices_time():
    device = SimulatedDevice()
    stopwatch = watch(device)
    assert device_ns(stopwatch, launches(device, 3000, 3_000, 8_000)) == 3000 * 3_000
    assert stopwatch.given_up == 0


def test_a_phase_that_the_device_limits_takes_the_same():
    device = SimulatedDevice()
    assert device_ns(watch(device), launches(device, 3000, 50_000, 8_000)) == 3000 * 50_000


@tries(15)
@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.integers(0, 60_000), st.integers(1_000, 60_000)),
        min_size=1,
        max_size=60,
    )
)
def test_any_phase_takes_what_its_kernels_take(runs):
    device = SimulatedDevice()

    def phase():
        for count, kernel_ns, issue_ns in runs:
            for _ in range(count):
                device.launch(kernel_ns, issue_ns)

    whole = sum(count * kernel_ns for count, kernel_ns, _ in runs)
    stopwatch = watch(device)
    assert device_ns(stopwatch, phase) == pytest.approx(whole, rel=0.01, abs=1_000)
    assert stopwatch.given_up == 0


def test_backward_passes_are_cut_too():
    device = SimulatedDevice()

    class Many(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            for _ in range(20):
                device.launch(3_000, 8_000)
            return grad

    y = torch.ones(1, requires_grad=True)
    for _ in range(100):
        y = Many.apply(y)
    assert device_ns(watch(device), lambda: y.backward(retain_graph=True)) == 2000 * 3_000


def test_calls_may_launch_many_kernels_and_the_queue_may_be_short():
    device = SimulatedDevice(capacity=256)

    def phase():
        for _ in range(300):
            device.call(lambda: [device.enqueue(2_000, 8_000) for _ in range(20)])

    stopwatch = watch(device)
    assert device_ns(stopwatch, phase) == 300 * 20 * 2_000
    assert stopwatch.given_up == 0


def test_a_call_that_waits_for_the_device_costs_nothing_else():
    device = SimulatedDevice()

    def phase():
        for _ in range(17):
            device.launch(10_000, 8_000)
        device.call(device.synchronize)  # as .item() does
        for _ in range(2000):
            device.launch(3_000, 8_000)

    stopwatch = watch(device)
    assert device_ns(stopwatch, phase) == 17 * 10_000 + 2000 * 3_000
    assert stopwatch.given_up == 0
    # Behind one spin, what follows is bound by the CPU.
    assert stopwatch.time_series([phase])[1] == pytest.approx(17 * 10_000 + 2000 * 8_000, rel=0.001)


def test_it_says_when_launches_that_pytorch_does_not_see_outlast_the_queue():
    device = SimulatedDevice(capacity=64)
    stopwatch = watch(device)
    assert device_ns(stopwatch, lambda: [device.enqueue(1_000, 8_000) for _ in range(500)]) > 2 * 500 * 1_000
    assert stopwatch.given_up == 1
    device_ns(stopwatch, launches(device, 50, 1_000, 8_000))
    assert stopwatch.given_up == 1


def test_a_long_call_of_another_library_is_right_within_a_spin_and_doubted_beyond():
    device = SimulatedDevice(capacity=4096)
    stopwatch = watch(device)

    def phase(count):
        launches(device, 100, 3_000, 8_000)()
        device.foreign_call(lambda: [device.enqueue(2_000, 10_000) for _ in range(count)])
        launches(device, 100, 3_000, 8_000)()

    assert device_ns(stopwatch, lambda: phase(1_000)) == 200 * 3_000 + 1_000 * 2_000
    assert stopwatch.given_up == 0
    assert device_ns(stopwatch, lambda: phase(4_000)) > 1.5 * (200 * 3_000 + 4_000 * 2_000)
    assert stopwatch.given_up == 1


def test_an_error_in_a_phase_is_raised_as_it_is():
    device = SimulatedDevice()

    def phase():
        device.launch(1_000, 8_000)
        raise ValueError("the model's own")

    stopwatch = watch(device)
    with pytest.raises(ValueError, match="the model's own"):
        stopwatch.time_phase(phase)
    assert device_ns(stopwatch, launches(device, 10, 1_000, 8_000)) == 10_000


def simulated_runner(device, forward, backward, update):
    """A model whose phases are (launches, kernel, issue) each."""

    def step(_):
        launches(device, *forward)()
        launches(device, *backward)()
        launches(device, *update)()

    def run_forward(_):
        launches(device, *forward)()
        return SimpleNamespace(backward=launches(device, *backward))

    eager = {"synchronises": False, "compiled": None}
    return SimpleNamespace(forward=run_forward, update=launches(device, *update), train_step=step, **eager)


def test_a_step_that_dispatch_binds_keeps_its_device_time():
    device = SimulatedDevice()
    runner = simulated_runner(device, (1600, 3_000, 8_000), (2400, 4_000, 9_000), (60, 40_000, 50_000))
    found = _measure_cuda(runner, FLOAT32, watch(device), TWICE, 5)
    assert (found.forward_compute_ns, found.backward_compute_ns, found.optimizer_compute_ns) == (4_800_000, 9_600_000, 2_400_000)
    issued = found.forward_dispatch_ns + found.backward_dispatch_ns + found.optimizer_dispatch_ns
    assert issued == pytest.approx(found.iteration_ns, rel=0.001)
    assert found.iteration_ns == pytest.approx(1600 * 8_000 + 2400 * 9_000 + 60 * 50_000, rel=0.01)
    assert found.peak_bytes == 5


def test_a_step_that_the_device_binds_fills_its_period_with_compute():
    device = SimulatedDevice()
    runner = simulated_runner(device, (800, 40_000, 8_000), (900, 60_000, 9_000), (60, 40_000, 50_000))
    found = _measure_cuda(runner, FLOAT32, watch(device), TWICE, 5)
    computed = found.forward_compute_ns + found.backward_compute_ns + found.optimizer_compute_ns
    assert computed == pytest.approx(found.iteration_ns, rel=1e-6)
    assert found.backward_compute_ns == pytest.approx(900 * 60_000, rel=0.005)
    assert found.forward_dispatch_ns == 800 * 8_000


@pytest.mark.parametrize(("kernel_ns", "in_a_row"), [(10_000_000, 10), (150_000_000, 7), (900_000_000, 3)])
def test_steps_run_back_to_back_for_a_second(kernel_ns, in_a_row):
    device, trained = SimulatedDevice(), []
    runner = simulated_runner(device, (1, kernel_ns // 2, 8_000), (1, kernel_ns // 2, 9_000), (1, 40_000, 50_000))
    step, runner.train_step = runner.train_step, lambda index: (trained.append(index), step(index))
    found = _measure_cuda(runner, FLOAT32, watch(device), TWICE, 5)
    assert trained == 3 * list(range(in_a_row))
    assert found.iteration_ns == pytest.approx(kernel_ns, rel=0.02)


def test_which_resource_fills_the_period():
    # The device's work fills it: the rest is gaps between kernels.
    assert fill_period((10, 20, 10), (50, 40, 8), 100) == ((10, 20, 10), (51, 40, 8))
    # A CPU that is nearly as busy makes the rest of the period, and cannot be busier than that.
    assert fill_period((40, 40, 10), (50, 38, 8), 120) == ((53, 53, 13), (50, 38, 8))
    assert fill_period((60, 60, 30), (50, 40, 8), 100) == ((40, 40, 20), (51, 40, 8))
    # A CPU with little to do does not.
    assert fill_period((10, 10, 10), (40, 30, 10), 100) == ((10, 10, 10), (50, 37, 12))
    # Dispatch binds: compute stays as measured.
    assert fill_period((40, 40, 10), (20, 20, 8), 99) == ((44, 44, 11), (20, 20, 8))
    # Of a step that synchronises the optimizer is computed last.
    assert fill_period((40, 40, 10), (20, 20, 8), 98, synchronises=True) == ((40, 40, 10), (20, 20, 8))
    assert fill_period((0, 0, 0), (0, 0, 0), 100) == ((0, 0, 0), (0, 0, 0))


def test_what_fills_the_period_of_a_step_that_synchronises():
    # A forward that the CPU binds, then a backward that the device binds: 38 + 45 + 4 are too much, and 32 + 45 + 4 are the period.
    assert fill_period((38, 31, 8), (18, 45, 4), 81, synchronises=True) == ((31, 25, 6), (18, 45, 4))
    # The same, where the device is nearly as busy, and the CPU is far less.
    assert fill_period((24, 15, 6), (17, 36, 4), 62, synchronises=True) == ((21, 13, 5), (17, 36, 4))
    # The device binds: a forward's dispatch that would lengthen the step is cut to its compute.
    assert fill_period((20, 5, 5), (20, 70, 5), 100, synchronises=True) == ((20, 5, 5), (21, 73, 5))
    assert fill_period((30, 10, 10), (40, 55, 5), 96, synchronises=True) == ((30, 10, 10), (38, 52, 4))


_NS = st.integers(1, 10**9)


@given(dispatch=st.tuples(_NS, _NS, _NS), compute=st.tuples(_NS, _NS, _NS), period=_NS)
def test_the_longest_chain_of_a_step_that_synchronises_is_its_period(dispatch, compute, period):
    cpu, device = fill_period(dispatch, compute, period, synchronises=True)
    longest = max(sum(device), sum(cpu) + device[2], cpu[0] + device[1] + device[2])
    assert longest <= period
    assert longest >= min(period, 0.999 * period - 10)
    assert min(*cpu, *device) >= 0
