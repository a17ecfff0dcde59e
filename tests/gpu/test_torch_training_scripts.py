"""Models as training scripts have them, on a GPU: moved after ``apply_``, checkpointed in backward's own thread, under autocast."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from qsync_core.errors import BackendError, PlanError
from qsync_torch import apply_


class Block(nn.Module):
    """A module's own linear and a functional one, in a method that may be checkpointed."""

    def __init__(self, use_reentrant=None):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.weight = nn.Linear(64, 64), nn.Parameter(torch.randn(64, 64) / 8)
        self.use_reentrant = use_reentrant

    def body(self, x):
        return F.linear(torch.relu(self.fc(x)), self.weight)

    def forward(self, x):
        return self.body(x) if self.use_reentrant is None else checkpoint(self.body, x, use_reentrant=self.use_reentrant)


BOTH = {"fc": "int8", "weight": "int8"}


def gradients_of(model, xs):
    model.zero_grad()
    outputs = [model(x) for x in xs]
    sum(y.square().sum() for y in outputs).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("backend", ["triton", "cutlass+triton"])
def test_a_plan_is_applied_before_the_model_is_on_its_gpu(backend):
    later, now = Block(), Block().cuda()
    x = torch.randn(128, 64, device="cuda")
    apply_(later, BOTH, backend=backend, seed=1)
    later.cuda()
    apply_(now, BOTH, backend=backend, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(gradients_of(later, [x]), gradients_of(now, [x]), strict=True))


def test_kernels_of_a_gpu_are_refused_in_the_first_forward_of_a_model_that_stays_on_the_cpu():
    model = Block()
    apply_(model, BOTH, backend="cutlass")
    with pytest.raises(BackendError, match="cannot run on cpu as they are planned"):
        model(torch.randn(8, 64))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_methods_run_again_as_they_did_with_two_forwards_before_backward(use_reentrant):
    x = torch.randn(128, 64, device="cuda", requires_grad=True)
    found = []
    for way in (None, use_reentrant):
        model = Block(way).cuda()
        apply_(model, BOTH, seed=1)
        found.append(gradients_of(model, [x, 2 * x]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_an_autocast_that_is_not_the_plans_is_refused():
    model, x = Block().cuda(), torch.randn(128, 64, device="cuda")
    apply_(model, BOTH)
    with torch.autocast("cuda", torch.bfloat16), pytest.raises(PlanError, match=r"under torch\.autocast to bfloat16"):
        model(x)
    model(x)


def test_eval_is_plain():
    model, x = Block().cuda(), torch.randn(128, 64, device="cuda")
    exact = model.eval()(x)
    apply_(model, BOTH)
    assert torch.equal(model(x), exact)
    assert not torch.equal(model.train()(x), exact)
