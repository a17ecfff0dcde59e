"""Operators with int8 gradients are timed without the casts of their gradient, which have models of their own."""

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import CastKey
from qsync_core.ir.semantics import CastSite, casts
from qsync_core.ir.variant import Variant
from qsync_core.kernels.choice import ATEN
from qsync_torch.job import Batch, Job
from qsync_torch.profiling import benchmark_case
from qsync_torch.profiling.bench import Efforts
from qsync_torch.profiling.cast_cost import possible_casts
from qsync_torch.profiling.memory import watch_saved
from qsync_torch.profiling.profile import ProfileRequest, profile
from qsync_torch.timing import Effort
from qsync_torch.tracing.trace import trace

from .test_benchmark_case import _convolution

QUICK = Effort(min_repeats=1, max_repeats=1, budget_s=0.0, warmup=0)
INPUT = attrs.evolve(Variant.of(Precision.INT8, output=Precision.BFLOAT16), grad_input=Precision.INT8)
BOTH = attrs.evolve(INPUT, grad_weight=Precision.INT8)
FLOAT32 = Variant.of(Precision.FLOAT32)


def test_the_timed_backward_starts_from_copies_that_are_made_before(monkeypatch):
    made = []
    original = benchmark_case.cast_gradient
    monkeypatch.setattr(benchmark_case, "cast_gradient", lambda *arguments: made.append(1) or original(*arguments))
    layouts = {"conv.weight": torch.empty(6, 4, 3, 3).to(memory_format=torch.channels_last)}
    case = benchmark_case.adjustable_case(_convolution(), INPUT, layouts, torch.device("cpu"), ATEN)
    call = case.make_ready()
    # The copies, their scales, and the stream that the rounding of gradients follows from.
    saved = watch_saved(call.run, case.activations, case.parameters)
    assert (saved.inputs, saved.own_bytes) == ((0,), 6 * 4 * 9 + 4 + 6 * 4 + 8)
    assert made == [1]
    grad_x, grad_w, grad_b = call.backward_thunk(saved.result, [torch.ones_like(saved.result)])()
    assert made == [1]
    assert (grad_x.dtype, grad_w.dtype, grad_b.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert grad_x.shape == (2, 4, 5, 5)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


@pytest.mark.parametrize("variant", [INPUT, BOTH])
def test_a_profile_has_every_cast_that_such_a_rung_needs(variant):
    torch.manual_seed(0)
    job = Job(
        "layers",
        Layers(),
        lambda step, size: Batch((torch.randn(size, 6),), target=torch.arange(size) % 3),
        lambda output, batch: F.cross_entropy(output, batch.target),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=4,
    )
    dag = trace(job)
    found = profile(job, dag, ProfileRequest(ladder=(variant, FLOAT32), efforts=Efforts(QUICK, QUICK, QUICK)))
    measured = {model.key for model in found.casts}
    for operator in dag.adjustable:
        assert found.cost(operator.op_id, variant).backward_compute_ns >= 0
        needed = casts(operator, variant, [Precision.FLOAT32])
        assert {cast.key for cast in needed} <= measured
    quantized = CastKey(Precision.BFLOAT16, Precision.INT8, rounding=variant.rounding)
    assert CastSite.GRAD_OUTPUT in possible_casts((variant, FLOAT32))[quantized]
