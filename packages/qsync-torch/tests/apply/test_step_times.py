"""Step times in training: what belongs to a step, what of it is waiting, and what is written of it."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from qsync_torch import apply_
from qsync_torch.apply.step_times import ScalarLog, StepTime
from qsync_torch.watching import moments

from .communicating_plans import plan_with, small_model

MS = 1_000_000


class Clock:
    """A CPU's clock that moves only when told, and says when it is read."""

    def __init__(self) -> None:
        self.ns = 0
        self.was_read = threading.Event()

    def perf_counter_ns(self) -> int:
        self.was_read.set()
        return self.ns

    def advance(self, ms: float) -> None:
        self.ns += round(ms * MS)


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(moments, "time", made)
    return made


@pytest.fixture
def one_rank():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def timed(model):
    applied = apply_(model, dict.fromkeys(("0", "3", "6"), "float32"))
    told = []
    applied.each_step(told.append)
    return applied, told


def images():
    return torch.randn(2, 3, 8, 8)


def test_a_step_goes_from_the_end_of_a_backward_to_the_end_of_the_next(clock):
    model = small_model()
    applied, told = timed(model)
    for ms in (1, 20, 3):
        clock.advance(ms)
        model(images()).sum().backward()
        applied.advance()
    assert told == [StepTime(1, 20 * MS, 0)]  # the first has no beginning, the third is over when the next begins
    applied.remove()
    assert told == [StepTime(1, 20 * MS, 0), StepTime(2, 3 * MS, 0)]
    model(images()).sum().backward()
    model(images()).sum().backward()
    assert len(told) == 2


def slow_all_reduce(clock, ms):
    """A hook for DistributedDataParallel whose collective ends so long after this rank's own backward."""

    def hook(_, bucket):
        future = torch.futures.Future()
        clock.was_read.clear()

        def arrive():
            assert clock.was_read.wait(30)
            clock.advance(ms)
            future.set_result(bucket.buffer())

        threading.Thread(target=arrive).start()
        return future

    return hook


def test_waiting_is_what_comes_between_the_own_backward_and_the_last_gradient(one_rank, clock):
    model = small_model()
    applied, told = timed(model)
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, slow_all_reduce(clock, 7))
    for _ in range(3):
        clock.advance(20)
        wrapped(images()).sum().backward()
        applied.advance()
    applied.remove()
    assert told == [StepTime(1, 27 * MS, 7 * MS), StepTime(2, 27 * MS, 7 * MS)]


def test_a_backward_that_raised_does_not_end_the_measurement(clock):
    model = small_model()
    applied, told = timed(model)

    def fail(_):
        raise RuntimeError("out of memory")

    for step, ms in enumerate((1, 2, 4, 8)):
        clock.advance(ms)
        x = images().requires_grad_()
        if step == 1:
            x.register_hook(fail)
            with pytest.raises(RuntimeError, match="out of memory"):
                model(x).sum().backward()
        else:
            model(x).sum().backward()
            applied.advance()
    applied.remove()
    assert [(t.step, t.duration_ns) for t in told] == [(1, 6 * MS), (2, 8 * MS)]


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_makes_no_steps_of_its_own(clock, reentrant):
    model = Checkpointed(reentrant=reentrant)
    applied = apply_(model, {"layers.1": "bfloat16"})
    told = []
    applied.each_step(told.append)
    for _ in range(3):
        clock.advance(5)
        model(torch.randn(2, 4, requires_grad=True)).sum().backward()
        applied.advance()
    applied.remove()
    assert told == [StepTime(1, 5 * MS, 0), StepTime(2, 5 * MS, 0)]


@pytest.mark.parametrize("is_timed", [False, True])
def test_a_compiled_model_is_timed_and_compiles_no_more_for_it(clock, is_timed):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    applied = apply_(model, {"0": "bfloat16"})
    told = []
    if is_timed:
        applied.each_step(told.append)
    compiled = torch.compile(model, backend="aot_eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for _ in range(3):
        clock.advance(5)
        compiled(torch.randn(2, 4)).sum().backward()
        applied.advance()
    applied.remove()
    assert [(t.step, t.duration_ns) for t in told] == ([(1, 5 * MS), (2, 5 * MS)] if is_timed else [])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_model_that_is_timed_is_saved_and_copied_as_any(clock, tmp_path):
    model = nn.Sequential(nn.Linear(4, 4))
    applied = apply_(model, {"0": "bfloat16"})
    applied.each_step(lambda _: None)
    torch.save(model.state_dict(), tmp_path / "checkpoint")
    assert set(torch.load(tmp_path / "checkpoint")) == {"0.weight", "0.bias"}


class FixedScale:
    def get_scale(self):
        return 1024.0


def test_scalars_are_medians_of_some_steps_beside_the_prediction():
    written = []
    log = ScalarLog(lambda *row: written.append(row), 3, 40 * MS, FixedScale())
    for step, (duration, wait) in enumerate([(50, 5), (500, 6), (52, 7), (60, 8)], 1):
        log(StepTime(step, duration * MS, wait * MS))
    assert written == [
        ("qsync/step_ms", 52.0, 3),
        ("qsync/wait_ms", 6.0, 3),
        ("qsync/predicted_step_ms", 40.0, 3),
        ("qsync/loss_scale", 1024.0, 3),
    ]


def test_tensorboard_takes_the_scalars(clock, tmp_path):
    board = pytest.importorskip("torch.utils.tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = small_model()
    applied = apply_(model, plan_with(None), group="infer")
    with board.SummaryWriter(str(tmp_path)) as writer:
        applied.log_scalars(writer.add_scalar, every=2)
        for _ in range(6):
            clock.advance(8)
            model(images()).sum().backward()
            applied.advance()
        applied.remove()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert sorted(events.Tags()["scalars"]) == ["qsync/predicted_step_ms", "qsync/step_ms", "qsync/wait_ms"]
    assert [(e.step, e.value) for e in events.Scalars("qsync/step_ms")] == [(2, 8.0), (4, 8.0)]


def test_nothing_is_looked_at_unless_it_is_asked_for():
    model = small_model()
    applied = apply_(model, plan_with(None), group="infer")
    model(images()).sum().backward()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    with pytest.raises(ValueError, match="every is a number of steps, got 0"):
        applied.log_scalars(print, every=0)


@pytest.mark.gpu
def test_on_a_gpu_the_streams_time_counts_and_nothing_waits_for_it():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = nn.Sequential(nn.Linear(64, 64, device="cuda"))
    applied = apply_(model, {"0": "bfloat16"})
    told = []
    applied.each_step(told.append)
    for _ in range(4):
        torch.cuda._sleep(200_000_000)
        model(torch.randn(8, 64, device="cuda")).sum().backward()
        assert not told or told[-1].duration_ns > 0
    assert len(told) < 3  # the device is behind the CPU, which has not waited
    applied.remove()
    assert len(told) == 3
    assert all(step.wait_ns <= step.duration_ns for step in told)
    assert all(step.duration_ns > 50_000_000 for step in told)  # 200 million cycles, of at most 4 GHz
