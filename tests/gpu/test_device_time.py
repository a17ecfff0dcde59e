"""Device time of a phase on a GPU: what its kernels take, however many there are and whether or not the CPU waits in between."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture
def stopwatch():
    from qsync_torch.timing import make_stopwatch

    return make_stopwatch(torch.device("cuda", 0))


def test_thousands_of_short_kernels_take_what_a_few_of_them_take_each(stopwatch):
    x = torch.randn(1 << 20, device="cuda", requires_grad=True)

    def forward(count):
        y = x
        for _ in range(count):
            y = y * 1.0001
        return y.sum()

    def both(count):
        loss, forward_ns = stopwatch.time_phase(lambda: forward(count))
        return forward_ns, stopwatch.time_phase(loss.backward)[1]

    for _ in range(3):  # the first ones load kernels and start autograd's thread
        both(200)
    few = both(200)  # as many as the queue takes at once
    stopwatch.given_up = 0
    many = both(4000)
    assert [many_ns / few_ns for many_ns, few_ns in zip(many, few, strict=True)] == pytest.approx([20, 20], rel=0.1)
    assert stopwatch.given_up == 0


def test_a_wait_for_the_device_costs_no_more_than_itself(stopwatch):
    x = torch.randn(1 << 20, device="cuda")

    def work(wait):
        y = x
        for number in range(1000):
            y = y * 1.0001
            if wait and number == 5:
                y[0].item()
        return y

    for wait in (False, True):  # the first ones load kernels, and the memory that a number is read through
        stopwatch.time_phase(lambda wait=wait: work(wait))
    stopwatch.given_up = 0
    _, without_ns = stopwatch.time_phase(lambda: work(False))
    _, with_ns = stopwatch.time_phase(lambda: work(True))
    assert with_ns == pytest.approx(without_ns, rel=0.05)
    assert stopwatch.given_up == 0


@pytest.mark.parametrize(
    ("name", "waits"), [("resnet18:image=32,small_stem=true,classes=10", False), ("bert-base:layers=1,seq=16", True)]
)
def test_models_that_wait_for_the_device_are_found(name, waits):
    from qsync_torch.load_job import load_job
    from qsync_torch.profiling.whole_step import StepRunner

    if name.startswith("bert"):
        pytest.importorskip("transformers")
    runner = StepRunner.start(load_job(name, 4), torch.device("cuda", 0))
    assert runner.watch_synchronising(torch.device("cuda", 0)) is waits
