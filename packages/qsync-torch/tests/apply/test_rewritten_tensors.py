"""Tensors that a script writes into without autograd's knowledge, as buffers of observations and states of recurrent models are."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from qsync_torch import apply_
from qsync_torch.operators import casts

from .small_models import BFLOAT16, INT8, named
from .two_layers import TwoLayers

BY_NUMPY = "the array behind it"
BY_DATA = "x.data"


def rewrite(x, how):
    values = torch.randn(x.shape)
    if how == BY_NUMPY:
        np.copyto(x.numpy(), values.numpy())
    else:
        x.data.copy_(values)


@pytest.mark.parametrize("how", [BY_NUMPY, BY_DATA])
@pytest.mark.parametrize("variant", [INT8, BFLOAT16], ids=["int8", "bfloat16"])
@pytest.mark.parametrize("grads", [True, False], ids=["with gradients", "without"])
@pytest.mark.parametrize("part", ["model", "layer"])
def test_an_input_that_is_written_into_between_forwards_is_cast_anew(how, variant, grads, part):
    model = TwoLayers()
    twin = copy.deepcopy(model)
    apply_(model, named(a=variant, b=variant))
    run, expected = (model, twin) if part == "model" else (model.a, twin.a)
    x = torch.randn(4, 16)
    for _ in range(3):
        with torch.set_grad_enabled(grads):
            assert (run(x) - expected(x)).norm() < 0.05 * expected(x).norm()
        rewrite(x, how)


def test_a_state_that_a_forward_writes_into_is_cast_anew():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.Linear(16, 16)
            self.register_buffer("state", torch.zeros(4, 16))

        def forward(self, inputs):
            for x in inputs:
                self.state.data.copy_(torch.tanh(self.cell(self.state) + x).detach())
            return self.cell(self.state)

    torch.manual_seed(0)
    model, inputs = Recurrent(), torch.randn(3, 4, 16)
    twin = copy.deepcopy(model)
    apply_(model, named(cell=INT8))
    assert (model(inputs) - twin(inputs)).norm() < 0.05 * twin(inputs).norm()


def test_readers_within_a_forward_share_a_cast_of_an_input(monkeypatch):
    class Readers(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

        def forward(self, x):
            return self.q(x) * self.k(x) + self.v(x)

    seen, original = [], casts.quantize
    monkeypatch.setattr(casts, "quantize", lambda x, *rest, **options: (seen.append(x), original(x, *rest, **options))[1])
    model, x = Readers(), torch.randn(4, 16)
    apply_(model, named(q=INT8, k=INT8, v=INT8))
    for forwards in (1, 2):
        model(x)
        assert sum(quantized is x for quantized in seen) == forwards
