"""Flips and the masks behind an operator, by the collector, against Jacobians of ReLUs with a window written out in float64."""

import copy
from collections import Counter

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_core.ir import observations as terms
from qsync_core.ir.precision import Granularity, Precision
from qsync_core.ir.variant import Variant
from qsync_torch.job import Batch, Job
from qsync_torch.observing import hutchinson, mask_flips
from qsync_torch.observing.collector import ObservedStep
from qsync_torch.observing.hutchinson import HutchinsonCollector
from qsync_torch.observing.mask_flips import FLIP_FACTOR
from qsync_torch.tracing.trace import trace

INT8 = attrs.evolve(Variant.of(Precision.INT8), w_granularity=Granularity.PER_TENSOR)
BFLOAT16 = Variant.of(Precision.BFLOAT16)
WINDOW = 0.5


class Step(torch.autograd.Function):
    """1 above 0, with the derivative 1/(2t) for one element."""

    @staticmethod
    def forward(ctx, a, t, element):
        ctx.t, ctx.element = t, element
        return (a > 0).to(a.dtype)

    @staticmethod
    def backward(ctx, grad):
        one = torch.zeros_like(grad)
        one.view(-1)[ctx.element] = 1 / (2 * ctx.t)
        return grad * one, None, None


class WindowedReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, t, element):
        ctx.save_for_backward(a)
        ctx.t, ctx.element = t, element
        return a.relu()

    @staticmethod
    def backward(ctx, grad):
        return grad * Step.apply(ctx.saved_tensors[0], ctx.t, ctx.element), None, None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x):
        return self.c(F.relu(self.b(F.relu(self.a(x)))))


@pytest.fixture(scope="module")
def step():
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    job = Job(
        "net",
        Net(),
        lambda step, size: Batch((x[:size],), target=torch.linspace(-1, 1, size)),
        lambda output, batch: (output - batch.target[:, None]).square().mean(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=8,
    )
    return ObservedStep(job, copy.deepcopy(job.model).train(), trace(job), job.batch(0, 8), 0, seed=3)


def _forward(step, window):
    """(parameters, noise by operator and operand and at masks, tensors there, loss); ``window`` is a mask and an element of it."""
    p = {name: value.detach().double().requires_grad_() for name, value in step.model.named_parameters()}
    noise, values = {}, {}

    def noisy(key, tensor):
        noise[key] = torch.zeros_like(tensor).requires_grad_()
        values[key] = tensor.detach()
        return tensor + noise[key]

    def call(name, x):
        return F.linear(noisy((name, "x"), x), noisy((name, "w"), p[f"{name}.weight"]), p[f"{name}.bias"])

    def relu(name, a):
        a = noisy((name, "mask"), a)
        return WindowedReLU.apply(a, _half_width(a), window[1]) if window and window[0] == name else F.relu(a)

    y = call("c", relu("b", call("b", relu("a", call("a", step.batch.args[0].double())))))
    return p, noise, values, step.job.loss(y, step.batch)


def _half_width(a):
    return WINDOW * float(a.detach().std(correction=0))


def _variance(x):
    s = float(x.abs().max()) / 127
    residual = x / s - torch.floor(x / s)
    return s**2 * residual * (1 - residual)


def _jacobian(step, window=None):
    p, noise, values, loss = _forward(step, window)
    gradients = torch.autograd.grad(loss, list(p.values()), create_graph=True)
    rows = [
        torch.autograd.grad(element, list(noise.values()), retain_graph=True, allow_unused=True, materialize_grads=True)
        for element in torch.cat([g.flatten() for g in gradients])
    ]
    return values, dict(zip(noise, map(torch.stack, zip(*rows, strict=True)), strict=True))


def _expected(step):
    """By operator: the smooth part, what elements of masks add each by itself, and the weight of the masks behind."""
    values, without = _jacobian(step)
    smooth, flips, weights = Counter(), Counter(), Counter()
    for name in "abc":
        for place in "xw":
            smooth[name] += float((_variance(values[name, place]) * without[name, place].square().sum(0)).sum())
    for mask in "ab":
        a = values[mask, "mask"]
        for element in (a.abs() < _half_width(a)).flatten().nonzero().flatten().tolist():
            _, found = _jacobian(step, (mask, element))
            for name in "ab"[: "ab".index(mask) + 1]:
                for place in "xw":
                    added = (found[name, place] - without[name, place]).square().sum(0)
                    flips[name] += float((_variance(values[name, place]) * added).sum())
                added = (found[mask, "mask"] - without[mask, "mask"]).flatten(1)[:, element]
                weights[name] += float(added.square().sum() * a.var(correction=0))
    return smooth, flips, weights


@pytest.mark.slow
def test_flips_are_what_elements_of_masks_add_one_by_one(step, monkeypatch):
    """The direction averaged out over all coordinates, signs at masks by drawing them."""
    monkeypatch.setattr(mask_flips, "WINDOW", WINDOW)
    sizes = [parameter.numel() for parameter in step.model.parameters()]
    totals, weights, draws = Counter(), Counter(), 6
    for index in range(draws * sum(sizes)):

        def signs(tensors, seed, index=index):
            flat = torch.zeros(sum(sizes))
            flat[index % sum(sizes)] = 1
            return [part.view_as(t).clone() for part, t in zip(flat.split(sizes), tensors, strict=True)]

        monkeypatch.setattr(hutchinson, "random_signs", signs)
        found = HutchinsonCollector().collect_step(attrs.evolve(step, seed=index), [INT8])
        totals.update(found)
        for operator in step.dag.adjustable:
            noise = found[operator.op_id, INT8, terms.OPERANDS_NOISE]
            weights[operator.op_id] += found[operator.op_id, INT8, terms.OPERANDS_FLIPS] / noise if noise else 0.0
    smooth, flips, behind = _expected(step)
    for operator in step.dag.adjustable:
        name = str(operator.op_id).removesuffix("#0")
        assert totals[operator.op_id, INT8, terms.OPERANDS] / draws == pytest.approx(smooth[name], rel=1e-3)
        assert totals[operator.op_id, INT8, terms.OPERANDS_FLIPS] / draws == pytest.approx(FLIP_FACTOR * flips[name], rel=0.1)
        assert weights[operator.op_id] / draws == pytest.approx(FLIP_FACTOR * behind[name], rel=0.02)
    assert behind["a"] > behind["b"] > behind["c"] == 0


def test_the_weight_of_masks_is_that_of_every_variant(step, monkeypatch):
    monkeypatch.setattr(mask_flips, "WINDOW", WINDOW)
    found = HutchinsonCollector().collect_step(step, [INT8, BFLOAT16])
    for operator in step.dag.adjustable[:2]:
        flips = [
            found[operator.op_id, variant, term]
            for variant, term in ((INT8, terms.OPERANDS_FLIPS), (BFLOAT16, terms.OPERANDS_FLIPS), (BFLOAT16, terms.OUTPUT_FLIPS))
        ]
        noise = [
            found[operator.op_id, variant, term]
            for variant, term in ((INT8, terms.OPERANDS_NOISE), (BFLOAT16, terms.OPERANDS_NOISE), (BFLOAT16, terms.OUTPUT_NOISE))
        ]
        weights = [flip / part for flip, part in zip(flips, noise, strict=True)]
        assert weights == pytest.approx([weights[0]] * 3)


def test_flips_in_parts(step, monkeypatch):
    """Smaller parts have scales and standard deviations of their own: about the same."""
    monkeypatch.setattr(mask_flips, "WINDOW", WINDOW)
    rounds = 100
    means = []
    for parts in (1, 2):
        mean = Counter()
        for seed in range(rounds):
            mean.update(HutchinsonCollector(parts).collect_step(attrs.evolve(step, seed=seed), [BFLOAT16]))
        means.append(mean)
    for operator in step.dag.adjustable[:2]:
        for term in (terms.OPERANDS_FLIPS, terms.OPERANDS_NOISE, terms.OUTPUT_FLIPS, terms.OUTPUT_NOISE):
            whole, split = (mean[operator.op_id, BFLOAT16, term] for mean in means)
            assert 0.5 * whole < split < 2 * whole, term
