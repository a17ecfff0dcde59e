"""Eigenvalues against dense Hessians in float64, rounding errors against Monte Carlo, and what cannot be differentiated twice."""

import copy

import attrs
import pytest
import torch
import torch.nn.functional as F
from qsync_indicators_example import terms
from qsync_indicators_example.observing_hessian import HessianCollector
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_torch.aten.quantize import dequantize
from qsync_torch.job import Batch, Job
from qsync_torch.observing.collector import CollectorUnavailable, ObservedStep, StepCollector
from qsync_torch.observing.observe import ObserveRequest, observe
from qsync_torch.quantize import quantize
from qsync_torch.tracing.trace import trace

INT8 = Variant.of(Precision.INT8)
PER_TENSOR = Variant.of(Precision.INT8, w_granularity=Granularity.PER_TENSOR)
BFLOAT16 = Variant.of(Precision.BFLOAT16)
FLOAT32 = Variant.of(Precision.FLOAT32)


class Net(nn.Module):
    """A convolution, a module called twice and a functional linear; smooth, so that second derivatives are everything."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.norm = nn.BatchNorm2d(2)
        self.drop = nn.Dropout(dropout)
        self.twice = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(3, 8))

    def forward(self, x):
        y = self.drop(torch.tanh(self.norm(self.conv(x)))).flatten(1)
        return F.linear(self.twice(F.gelu(self.twice(y))), self.weight)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x.flatten(1).reshape(-1, 2, 8)).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v).squeeze(1).mean(1)


class OnceSquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]


class Once(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 3)

    def forward(self, x):
        return OnceSquare.apply(self.fc(x.flatten(1)))


def _step(model, loss=None, update=0, double=True):
    def batch(step, size):
        generator = torch.Generator().manual_seed(step)
        return Batch((torch.randn(size, 1, 4, 4, generator=generator),), target=torch.arange(size) % 3)

    loss = loss or (lambda output, batch: F.cross_entropy(output, batch.target))
    job = Job("net", model, batch, loss, lambda parameters: torch.optim.SGD(parameters, lr=0.1), batch_size=6)
    observed = copy.deepcopy(model).train()
    made = job.batch(update, 6)
    dag = trace(job)
    if double:
        observed, made = observed.double(), Batch((made.args[0].double(),), target=made.target)
    return ObservedStep(job, observed, dag, made, update, seed=3)


def _dense(step, name):
    """The Hessian of the loss with respect to one parameter, column by column, by autograd."""
    parameter = dict(step.model.named_parameters())[name]

    def loss(value):
        output = torch.func.functional_call(step.model, {name: value.view_as(parameter)}, step.batch.args)
        return step.job.loss(output, step.batch)

    with step.undisturbed():
        return torch.autograd.functional.hessian(loss, parameter.detach().flatten())


def _top(matrix):
    values = torch.linalg.eigvalsh(matrix)
    return float(values[values.abs().argmax()])


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_eigenvalues_against_the_dense_hessian(dropout):
    torch.manual_seed(0)
    step = _step(Net(dropout))
    collector = HessianCollector(most_products=400, tolerance=1e-10)
    assert isinstance(collector, StepCollector)
    found = collector.collect_step(step, [INT8, FLOAT32])
    parameter_of = {operator.op_id: operator.parameters[0] for operator in step.dag.adjustable}
    assert sorted(parameter_of.values()) == ["conv.weight", "twice.weight", "twice.weight", "weight"]
    for op_id, name in parameter_of.items():
        assert found[op_id, None, terms.TOP_EIGENVALUE] == pytest.approx(_top(_dense(step, name)), rel=1e-4)
        assert found[op_id, None, terms.WEIGHT_NUMEL] == dict(step.model.named_parameters())[name].numel()


class Products(nn.Module):
    """A weight that is stored as inputs by outputs and read by two calls, between which the next one is made."""

    def __init__(self):
        super().__init__()
        self.twice, self.once = nn.Parameter(torch.randn(16, 16) / 4), nn.Parameter(torch.randn(16, 3) / 4)

    def forward(self, x):
        return F.gelu(F.gelu(x.flatten(1) @ self.twice) @ self.twice) @ self.once


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_that_are_stored_transposed(frozen):
    torch.manual_seed(0)
    model = Products()
    expected = HessianCollector(400, 1e-10).collect_step(_step(model), [INT8])
    model.twice.requires_grad_(not frozen)
    model.once.requires_grad_(False)
    model.extra = nn.Parameter(torch.zeros(()))
    model.register_forward_hook(lambda module, args, output: output + module.extra)
    step = _step(model)
    found = HessianCollector(400, 1e-10).collect_step(step, [INT8])
    for op_id, name in ((OpId("twice"), "twice"), (OpId("twice", 1), "twice"), (OpId("once"), "once")):
        assert found[op_id, None, terms.TOP_EIGENVALUE] == pytest.approx(_top(_dense(step, name)), rel=1e-4)
        # One scale for each output, which is a column of what is stored.
        weight = dict(step.model.named_parameters())[name].detach()
        spacing = weight.abs().amax(0) / 127
        residual = (weight / spacing) % 1
        error = float((spacing**2 * residual * (1 - residual)).sum())
        assert found[op_id, INT8, terms.WEIGHT_ERROR] == pytest.approx(error, rel=1e-4)
        assert found[op_id, INT8, terms.WEIGHT_ERROR] == pytest.approx(expected[op_id, INT8, terms.WEIGHT_ERROR])


def test_eight_products_come_near_and_negative_eigenvalues_keep_their_sign():
    torch.manual_seed(1)
    step = _step(Net(), loss=lambda output, batch: -F.cross_entropy(output, batch.target))
    found = HessianCollector().collect_step(step, [INT8])
    op_id = step.dag.adjustable[-1].op_id
    exact = _top(_dense(step, "weight"))
    assert exact < 0
    assert found[op_id, None, terms.TOP_EIGENVALUE] == pytest.approx(exact, rel=0.1)


def test_a_quadratic_loss_by_hand():
    # L = ½·Σ(x·wᵀ)²/6: the Hessian of each row of w is xᵀx/6.
    torch.manual_seed(2)
    step = _step(nn.Sequential(nn.Flatten(), nn.Linear(16, 3, bias=False)), lambda output, batch: output.square().sum() / 12)
    x = step.batch.args[0].flatten(1)
    found = HessianCollector(most_products=500, tolerance=1e-12).collect_step(step, [BFLOAT16])
    expected = float(torch.linalg.eigvalsh(x.T @ x / 6)[-1])
    assert found[OpId("1"), None, terms.TOP_EIGENVALUE] == pytest.approx(expected, rel=1e-4)


def test_a_loss_without_curvature_has_eigenvalue_zero():
    step = _step(nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), lambda output, batch: output.sum())
    assert HessianCollector().collect_step(step, [INT8])[OpId("1"), None, terms.TOP_EIGENVALUE] == 0


def test_frozen_weights_are_differentiated_for_too():
    torch.manual_seed(3)
    model = Net()
    found = HessianCollector().collect_step(_step(model), [INT8])
    model.twice.weight.requires_grad_(False)
    step = _step(model)
    frozen = HessianCollector().collect_step(step, [INT8])
    key = (OpId("twice"), None, terms.TOP_EIGENVALUE)
    assert frozen[key] == pytest.approx(found[key], rel=1e-2)
    assert step.model.twice.weight.grad is None
    assert not step.model.twice.weight.requires_grad


@pytest.mark.parametrize("variant", [INT8, PER_TENSOR], ids=["per-channel", "per-tensor"])
def test_weight_error_against_monte_carlo_rounding(variant):
    torch.manual_seed(4)
    step = _step(Net(), double=False)
    found = HessianCollector().collect_step(step, [variant, FLOAT32])
    weight = step.model.twice.weight.detach()
    squared = []
    for seed in range(300):
        q, scale = quantize(weight, Precision.INT8, variant.w_granularity, Rounding.STOCHASTIC, seed=seed, offset=0)
        squared.append(float((dequantize(q, scale, variant.w_granularity, torch.float32) - weight).double().square().sum()))
    expected = sum(squared) / len(squared)
    assert found[OpId("twice"), variant, terms.WEIGHT_ERROR] == pytest.approx(expected, rel=0.03)
    assert not any(key[1] == FLOAT32 for key in found)


def test_fused_attention_is_run_unfused():
    torch.manual_seed(5)
    model = Attention()
    step = _step(model, lambda output, batch: output.square().mean(), double=False)
    value = HessianCollector(400, 1e-7).collect_step(step, [INT8])[OpId("qkv"), None, terms.TOP_EIGENVALUE]
    exact = _step(model, lambda output, batch: output.square().mean())
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]):
        assert value == pytest.approx(_top(_dense(exact, "qkv.weight")), rel=1e-2)


def test_what_has_no_second_derivative_is_named():
    with pytest.raises(CollectorUnavailable, match=r"net has an operation without a second derivative.*once_differentiable"):
        HessianCollector().collect_step(_step(Once()), [INT8])


def test_later_updates_repeat_the_first():
    torch.manual_seed(6)
    first = _step(Net())
    collector = HessianCollector()
    found = collector.collect_step(first, [INT8])
    later = attrs.evolve(first, batch=Batch((torch.randn(6, 1, 4, 4).double(),), target=first.batch.target), update=1)
    assert collector.collect_step(later, [INT8]) == found
    # Another run starts anew.
    assert collector.collect_step(attrs.evolve(later, update=0), [INT8]) != found


def test_passes_are_the_backward_passes_that_it_makes_at_most(monkeypatch):
    step, made = _step(Net()), []
    for name in ("grad", "backward"):
        run = getattr(torch.autograd, name)
        monkeypatch.setattr(torch.autograd, name, lambda *a, run=run, name=name, **k: made.append(name) or run(*a, **k))
    HessianCollector(most_products=5, tolerance=0.0).collect_step(step, [INT8])
    # Three weights: one is called twice.
    assert len(made) == 1 + 1 + 5 * 3
    assert HessianCollector(most_products=5).passes(step.dag, [INT8]) == len(made)


def test_what_was_measured_before_an_interruption_comes_back():
    step = _step(Net())
    found = HessianCollector().collect_step(step, [INT8, FLOAT32])
    later = attrs.evolve(step, update=step.update + 2)
    continued = HessianCollector()
    continued.restore(step.model, step.update + 1, [INT8, FLOAT32], {key: -value for key, value in found.items()})
    assert continued.collect_step(later, [INT8, FLOAT32]) == {key: -value for key, value in found.items()}
    continued = HessianCollector()
    continued.restore(step.model, step.update + 1, [INT8], {})
    assert continued.collect_step(step, [INT8]) == HessianCollector().collect_step(step, [INT8])


def test_training_is_not_disturbed():
    torch.manual_seed(7)
    step = _step(Net(0.3), double=False)
    before = copy.deepcopy(step.model.state_dict())
    state = torch.random.get_rng_state()
    HessianCollector().collect_step(step, [INT8])
    after = step.model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(parameter.grad is None for parameter in step.model.parameters())
    assert torch.equal(torch.random.get_rng_state(), state)


class Checkpointed(nn.Module):
    def __init__(self, checkpoints=True):
        super().__init__()
        self.first, self.middle, self.head, self.checkpoints = nn.Linear(16, 8), nn.Linear(8, 8), nn.Linear(8, 3), checkpoints

    def forward(self, x):
        x = self.first(x.flatten(1))
        return self.head(checkpoint(self._middle, x, use_reentrant=False) if self.checkpoints else self._middle(x))

    def _middle(self, x):
        return torch.tanh(self.middle(x))


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_checkpointed_weight_has_the_eigenvalue_that_it_has_without(is_trained):
    """Where it is frozen, a forward that ran again would not differentiate for it."""
    found = []
    for checkpoints in (True, False):
        torch.manual_seed(0)
        job = _step(Checkpointed(checkpoints)).job
        job.model.middle.requires_grad_(is_trained)
        request = ObserveRequest([INT8, FLOAT32], warmup=0, steps=1, collectors=[HessianCollector()])
        found.append(observe(job, trace(job), request).values(terms.HESSIAN, terms.TOP_EIGENVALUE, OpId("middle")))
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert found[0][0] != 0
