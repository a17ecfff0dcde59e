"""A whole step among ranks is measured inside DistributedDataParallel, which leaves no trace afterwards."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn

from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import Compiled
from qsync_core.ir.variant import Variant
from qsync_torch.job import Batch, Job
from qsync_torch.profiling import whole_step
from qsync_torch.profiling.whole_step import StepRunner, measure_step
from qsync_torch.timing import Effort, make_stopwatch
from qsync_torch.tracing.trace import trace

QUICK = Effort(min_repeats=2, max_repeats=2, budget_s=0.0, warmup=0)


class TwoHeads(nn.Module):
    """The second head is never used: its parameters have no gradients."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x):
        return self.used(x)


def job_of(model):
    return Job(
        "two-heads",
        model,
        lambda step, size: Batch((torch.randn(size, 8, generator=torch.Generator().manual_seed(step)),)),
        lambda output, batch: output.square().mean(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        4,
    )


@pytest.fixture
def one_of_two(monkeypatch):
    """A process group in which this process believes to be one of two ranks."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(whole_step.dist, "get_world_size", lambda group=None: 2 if group is None else 1)
    try:
        yield
    finally:
        gc.collect()
        dist.destroy_process_group()


@pytest.mark.parametrize("precision", [Precision.FLOAT32, Precision.BFLOAT16])
def test_steps_run_in_ddp_and_the_model_is_itself_again(one_of_two, monkeypatch, precision):
    wrapped = []
    original = whole_step.DistributedDataParallel

    class Watched(original):
        def forward(self, *args, **kwargs):
            wrapped.append(self.find_unused_parameters)
            return super().forward(*args, **kwargs)

    monkeypatch.setattr(whole_step, "DistributedDataParallel", Watched)
    job = job_of(TwoHeads())
    runner = StepRunner.start(job, torch.device("cpu"))
    measured = measure_step(runner, Variant.of(precision), trace(job), make_stopwatch(torch.device("cpu")), QUICK)
    assert wrapped == [True] * 2
    assert measured.iteration_ns == measured.forward_compute_ns + measured.backward_compute_ns + measured.optimizer_compute_ns

    assert type(runner.model) is TwoHeads
    before = {name: value.clone() for name, value in runner.model.named_parameters()}
    runner.train_step(0)
    moved = {name for name, value in runner.model.named_parameters() if not torch.equal(value, before[name])}
    assert moved == {"used.weight", "used.bias"}


def test_alone_there_is_no_ddp(monkeypatch):
    monkeypatch.setattr(whole_step, "DistributedDataParallel", None)
    job = job_of(TwoHeads())
    runner = StepRunner.start(job, torch.device("cpu"))
    measure_step(runner, Variant.of(Precision.FLOAT32), trace(job), make_stopwatch(torch.device("cpu")), QUICK)


@pytest.mark.parametrize("around_ddp", [False, True], ids=["the model inside the wrapper", "the wrapper"])
def test_what_is_compiled_is_what_the_script_compiles(one_of_two, monkeypatch, around_ddp):
    """The compiler is a stand-in that counts: memory is always that of the model by itself."""
    compiled, ran = [], []

    class Wrapped(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, x):
            ran.append(type(self.model))
            return self.model(x)

    def stand_in(model, how, applied):
        compiled.append(type(model))
        return Wrapped(model)

    monkeypatch.setattr(whole_step, "compiled_model", stand_in)
    job = job_of(TwoHeads())
    runner = StepRunner.start(job, torch.device("cpu"), compiled=Compiled(around_ddp=around_ddp))
    assert runner.alone is None  # no compiler is to read the mode that answers for other ranks
    measured = measure_step(runner, Variant.of(Precision.FLOAT32), trace(job), make_stopwatch(torch.device("cpu")), QUICK)
    wrapper = whole_step.DistributedDataParallel
    assert compiled == ([TwoHeads, wrapper] if around_ddp else [TwoHeads])
    assert ran[-2:] == [compiled[-1]] * 2
    assert measured.saved_bytes > 0
    assert type(runner.model) is TwoHeads


def test_a_model_that_asks_other_ranks_is_not_compiled(one_of_two):
    class Asking(TwoHeads):
        def forward(self, x):
            dist.all_reduce(x)
            return super().forward(x)

    runner = StepRunner.start(job_of(Asking()), torch.device("cpu"), compiled=Compiled())
    assert runner.communicates
    assert runner.compiled is None
