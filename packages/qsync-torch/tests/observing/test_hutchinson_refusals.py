"""Models of which only a part can be differentiated, and one whose forward runs twice."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from qsync_core.ir import observations as terms
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_torch.job import Batch, Job
from qsync_torch.observing.closed_form import LossVarCollector
from qsync_torch.observing.hutchinson import HutchinsonCollector
from qsync_torch.observing.observe import ObserveRequest, observe
from qsync_torch.tracing.trace import trace

LADDER = (Variant.of(Precision.INT8), Variant.of(Precision.FLOAT32))


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.middle, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        with torch.no_grad():
            x = torch.relu(self.backbone(x))
        return self.head(torch.tanh(self.middle(x)))


class Tanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (1 - x.tanh() ** 2)


class Checkpointed(Frozen):
    def forward(self, x):
        x = checkpoint(lambda y: Tanh.apply(torch.sin(y)), self.middle(self.backbone(x)), use_reentrant=False)
        return self.head(x)


def _job(model):
    def batch(step, size):
        generator = torch.Generator().manual_seed(step)
        return Batch((torch.randn(size, 8, generator=generator),), target=torch.arange(size) % 3)

    def loss(output, batch):
        return F.cross_entropy(output, batch.target)

    return Job("part", model, batch, loss, lambda parameters: torch.optim.SGD(parameters, lr=0.1), batch_size=8)


def test_an_operator_that_runs_without_gradients_has_no_series():
    torch.manual_seed(0)
    job = _job(Frozen())
    found = observe(
        job, trace(job), ObserveRequest(LADDER, warmup=0, steps=2, collectors=[HutchinsonCollector(), LossVarCollector()])
    )
    assert {series.op_id for series in found.series} == {None, OpId("middle"), OpId("head")}
    assert min(found.values(terms.HUTCHINSON, terms.OPERANDS, OpId("middle"), LADDER[0])) > 0


class DetachedBehindReLU(nn.Module):
    """Random signs at the mask come back to ``cut``; the gradient of the loss does not."""

    def __init__(self):
        super().__init__()
        self.cut, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(F.relu(self.cut(x)).detach() + x)


def test_an_operator_before_a_detached_mask_has_no_series():
    torch.manual_seed(0)
    job = _job(DetachedBehindReLU())
    found = observe(job, trace(job), ObserveRequest(LADDER, warmup=0, steps=1, collectors=[HutchinsonCollector()]))
    assert {series.op_id for series in found.series} == {None, OpId("head")}


def left_to_the_fallback(job, dag):
    """The reason why hutchinson is left out, and what is said of that."""
    said = []
    request = ObserveRequest(LADDER, warmup=0, steps=2, collectors=[HutchinsonCollector(), LossVarCollector()])
    found = observe(job, dag, request, announce=said.append)
    assert {series.collector for series in found.series} == {terms.RUN, terms.LOSSVAR}
    (sentence,) = (text for text in said if "observing goes on with lossvar" in text)
    return found.settings["without hutchinson"], sentence


def test_checkpoints_that_run_again_all_the_same_are_refused_with_the_reason():
    torch.manual_seed(0)
    job, plain = _job(Checkpointed()), _job(Frozen())
    reason, _ = left_to_the_fallback(job, trace(plain))
    assert reason.startswith("an autograd function outside of all modules is checkpointed")
    with pytest.raises(Exception, match="cannot observe part: an autograd function outside of all modules is checkpointed"):
        observe(job, trace(plain), ObserveRequest(LADDER, warmup=0, steps=2, collectors=[HutchinsonCollector()]))


class Reentrant(nn.Module):
    def __init__(self, is_whole):
        super().__init__()
        self.stem, self.head, self.is_whole = nn.Linear(8, 8), nn.Linear(8, 3), is_whole

    def forward(self, x):
        if self.is_whole:
            return checkpoint(lambda y: self.head(torch.tanh(self.stem(y))), x.requires_grad_(), use_reentrant=True)
        return checkpoint(self.head, torch.tanh(self.stem(x)), use_reentrant=True)


@pytest.mark.parametrize("is_whole", [False, True])
def test_reentrant_checkpoints_are_left_to_the_fallback_with_the_reason(is_whole):
    torch.manual_seed(0)
    job = _job(Reentrant(is_whole))
    reason, said = left_to_the_fallback(job, trace(job))
    assert "reentrant activation checkpointing" in reason
    assert "use_reentrant=False" in said


class WritesBehindAFrozenLayer(nn.Module):
    def __init__(self, checkpointed):
        super().__init__()
        self.stem, self.frozen, self.head = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 3)
        self.checkpointed = checkpointed

    def inner(self, x):
        x = torch.sin(x) + 1
        x += self.frozen(x)
        return torch.sin(x)

    def forward(self, x):
        x = self.stem(x)
        return self.head(checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_frozen_layers_input_that_is_written_into_is_left_to_the_fallback(checkpointed):
    """A training step does not read it again; in a checkpoint, autograd did not notice."""
    torch.manual_seed(0)
    job = _job(WritesBehindAFrozenLayer(checkpointed))
    reason, said = left_to_the_fallback(job, trace(job))
    assert "changes a tensor in place which second derivatives read" in reason
    assert "modified by an inplace operation" in said
