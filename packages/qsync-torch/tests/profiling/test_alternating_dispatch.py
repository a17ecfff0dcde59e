"""The CPU's time for steps with every other operator lowered, on a clock that this test moves."""

import torch
from torch import nn

from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import StepMeasurement
from qsync_core.ir.variant import Variant
from qsync_torch.apply.planned_modules import is_planned
from qsync_torch.job import Batch, Job
from qsync_torch.profiling import whole_step
from qsync_torch.profiling.whole_step import StepRunner, may_bind, measure_alternating
from qsync_torch.timing import make_stopwatch
from qsync_torch.tracing.trace import trace

CPU = torch.device("cpu")
BFLOAT16 = Variant.of(Precision.BFLOAT16)


def _job():
    layers = [nn.Linear(8, 8) for _ in range(4)]
    return Job(
        "four-layers",
        nn.Sequential(*layers),
        lambda step, size: Batch((torch.randn(size, 8),)),
        lambda output, batch: output.square().mean(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        4,
    )


def test_what_is_more_than_the_mean_of_none_and_all(monkeypatch):
    """A lowered operator takes 100 ns more, one that stays under a plan 30; the CPU slows steadily, and for a while halves."""
    job = _job()
    dag, runner = trace(job), StepRunner.start(job, CPU)
    plans = []

    def issue(runner, step, stopwatch):
        formats = []
        hooks = [
            layer.register_forward_hook(lambda layer, x, y: formats.append(is_planned(layer) and is_lowered(layer)))
            for layer in runner.model.children()
        ]
        replaced = is_planned(runner.model[0])
        runner.forward(step)
        for hook in hooks:
            hook.remove()
        if not plans or plans[-1] != formats:
            plans.append(formats)
        own = sum(100 if lowered else 30 * replaced for lowered in formats)
        return (1_000 + 7 * len(plans) + own) * (2 if 6 <= len(plans) <= 8 else 1), 2_000, 500

    monkeypatch.setattr(whole_step, "_issue_times", issue)
    found = measure_alternating(runner, BFLOAT16, dag, make_stopwatch(CPU), {})
    turn = [[False, True] * 2, [True] * 4, [False, True] * 2, [False] * 4]
    assert plans == [[False] * 4, *3 * turn]
    assert (found.variant, found.forward_ns, found.backward_ns) == (BFLOAT16, 2 * 30, 0)
    assert not is_planned(runner.model[0])


def is_lowered(layer):
    return layer._qsync_plan["weight"].is_lowered


def test_only_a_cpu_that_may_be_the_whole_of_a_mixed_step_is_looked_at():
    def step(period, dispatch):
        return StepMeasurement(BFLOAT16, period, dispatch, 50, dispatch, 40, 5, 10, 0)

    assert may_bind(step(100, 15), step(100, 11))  # 62 of 200 issued
    assert not may_bind(step(100, 15), step(100, 10))
    assert not may_bind(step(300, 15), step(50, 22))  # the rung alone is bound, and nothing between
