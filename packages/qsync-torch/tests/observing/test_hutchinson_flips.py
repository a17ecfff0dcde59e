"""Flips and the noise that masks read, by the collector, against Jacobians of ReLUs with a window written out in float64."""

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
WINDOW = 0.5


class Step(torch.autograd.Function):
    """1 above 0, with the derivative 1[|a| < t]/(2t)."""

    @staticmethod
    def forward(ctx, a, t):
        ctx.save_for_backward(a)
        ctx.t = t
        return (a > 0).to(a.dtype)

    @staticmethod
    def backward(ctx, grad):
        (a,) = ctx.saved_tensors
        return grad * (a.abs() < ctx.t) / (2 * ctx.t), None


class WindowedReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, t):
        ctx.save_for_backward(a)
        ctx.t = t
        return a.relu()

    @staticmethod
    def backward(ctx, grad):
        return grad * Step.apply(ctx.saved_tensors[0], ctx.t), None


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


def _forward(step):
    """(parameters, noise by operator and operand, tensors there, inputs of masks, loss with or without windows)."""
    p = {name: value.detach().double().requires_grad_() for name, value in step.model.named_parameters()}
    noise, values, read = {}, {}, []

    def call(name, x):
        operands = []
        for place, tensor in (("x", x), ("w", p[f"{name}.weight"])):
            noise[name, place] = torch.zeros_like(tensor).requires_grad_()
            values[name, place] = tensor.detach()
            operands.append(tensor + noise[name, place])
        return F.linear(*operands, p[f"{name}.bias"])

    def relu(a, windowed):
        read.append(a)
        return WindowedReLU.apply(a, WINDOW * float(a.detach().std(correction=0))) if windowed else F.relu(a)

    def loss(windowed):
        read.clear()
        y = call("c", relu(call("b", relu(call("a", step.batch.args[0].double()), windowed)), windowed))
        return step.job.loss(y, step.batch)

    return p, noise, values, read, loss


def _variance(x):
    s = float(x.abs().max()) / 127
    residual = x / s - torch.floor(x / s)
    return s**2 * residual * (1 - residual)


def _jacobian(step, windowed):
    p, noise, values, _, loss = _forward(step)
    gradients = torch.autograd.grad(loss(windowed), list(p.values()), create_graph=True)
    rows = [
        torch.autograd.grad(element, list(noise.values()), retain_graph=True, allow_unused=True, materialize_grads=True)
        for element in torch.cat([g.flatten() for g in gradients])
    ]
    return values, dict(zip(noise, map(torch.stack, zip(*rows, strict=True)), strict=True))


def test_flips_are_what_windows_add(step, monkeypatch):
    """Squares of the response with windows less that without, the direction averaged out over all coordinates."""
    monkeypatch.setattr(mask_flips, "WINDOW", WINDOW)
    plain_signs = hutchinson.random_signs
    sizes = [parameter.numel() for parameter in step.model.parameters()]
    totals = Counter()
    for index in range(sum(sizes)):

        def signs(tensors, seed, index=index):
            tensors = list(tensors)
            if [tensor.numel() for tensor in tensors] != sizes:  # at the masks
                return plain_signs(tensors, seed)
            flat = torch.zeros(sum(sizes))
            flat[index] = 1
            return [part.view_as(t).clone() for part, t in zip(flat.split(sizes), tensors, strict=True)]

        monkeypatch.setattr(hutchinson, "random_signs", signs)
        totals.update(HutchinsonCollector().collect_step(step, [INT8]))
    values, with_windows = _jacobian(step, True)
    _, without = _jacobian(step, False)
    for operator in step.dag.adjustable:
        smooth = by_flips = 0.0
        for place in "xw":
            key = str(operator.op_id).removesuffix("#0"), place
            variance = _variance(values[key])
            smooth += float((variance * without[key].square().sum(0)).sum())
            by_flips += float((variance * (with_windows[key] - without[key]).square().sum(0)).sum())
        assert totals[operator.op_id, INT8, terms.OPERANDS] == pytest.approx(smooth, rel=1e-3)
        assert totals[operator.op_id, INT8, terms.OPERANDS_FLIPS] == pytest.approx(FLIP_FACTOR * by_flips, rel=0.02)
        assert (by_flips > 0) == (key[0] != "c")


def test_noise_that_masks_read(step):
    """Σ σ²·‖∂a/∂e‖² over the elements of a and their variance, mean over the masks behind; signs average out."""
    rounds = 300
    mean = Counter()
    for seed in range(rounds):
        mean.update(HutchinsonCollector().collect_step(attrs.evolve(step, seed=seed), [INT8]))
    _, noise, values, read, loss = _forward(step)
    loss(False)
    for operator in step.dag.adjustable:
        name = str(operator.op_id).removesuffix("#0")
        shares = []
        for a in read:
            total = 0.0
            for element in a.flatten():
                keys = [(name, "x"), (name, "w")]
                found = torch.autograd.grad(
                    element, [noise[key] for key in keys], retain_graph=True, allow_unused=True, materialize_grads=True
                )
                total += sum(float((_variance(values[key]) * g.square()).sum()) for key, g in zip(keys, found, strict=True))
            shares.append(total / a.numel() / float(a.detach().var(correction=0)))
        behind = [share for share in shares if share > 0]
        expected = sum(behind) / len(behind) if behind else 0.0
        assert len(behind) == {"a": 2, "b": 1, "c": 0}[name]
        assert mean[operator.op_id, INT8, terms.OPERANDS_NOISE] / rounds == pytest.approx(expected, rel=0.1)


def test_noise_that_masks_read_in_parts(step):
    """Smaller parts have scales and standard deviations of their own: about the same."""
    rounds = 100
    means = []
    for parts in (1, 2):
        mean = Counter()
        for seed in range(rounds):
            mean.update(HutchinsonCollector(parts).collect_step(attrs.evolve(step, seed=seed), [Variant.of(Precision.BFLOAT16)]))
        means.append(mean)
    for (op_id, variant, term), value in means[0].items():
        if term in (terms.OPERANDS_NOISE, terms.OUTPUT_NOISE):
            assert means[1][op_id, variant, term] == pytest.approx(value, rel=0.5)
