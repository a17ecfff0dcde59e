"""Operators whose weight the model computes in every forward."""

import pytest
import torch
from torch import nn

from qsync_core.ir.variant import Variant
from qsync_core.kernels.choice import ATEN
from qsync_torch.job import Batch, Job
from qsync_torch.profiling.benchmark_case import make_case
from qsync_torch.tracing.trace import trace


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("variant", ["int8", "bfloat16"])
def test_a_computed_weight_has_the_operators_shape(variant, bias):
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 12, bias=bias)), nn.ReLU(), nn.Linear(12, 2))
    job = Job("normed", model, lambda step, size: Batch((torch.ones(size, 8),)), lambda y, _: y.sum(), torch.optim.SGD)
    operator = trace(job).adjustable[0]
    case = make_case(operator, Variant.parse(variant), dict(model.named_parameters()), torch.device("cpu"), ATEN)
    assert [tuple(tensor.shape) for tensor in case.parameters] == [(12, 8), (12,)][: 1 + bias]
    assert case.make_ready().run().shape == (8, 12)
