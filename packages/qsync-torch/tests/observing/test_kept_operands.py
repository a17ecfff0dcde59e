"""Noise on what RMS norms and gated units keep: against gradients in float64, by a backward that is written out."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_core.chains.finding import chains_of
from qsync_core.ir import observations as terms
from qsync_core.ir.chain import ChainVariant
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_torch.job import Batch, Job
from qsync_torch.observing import hutchinson, kept_inputs
from qsync_torch.observing.collector import ObservedStep
from qsync_torch.observing.hutchinson import HutchinsonCollector
from qsync_torch.observing.kept_inputs import RoundedInput
from qsync_torch.observing.montecarlo import MonteCarloCollector, step_gradients
from qsync_torch.tracing.trace import trace

INT8 = Variant.of(Precision.INT8)
KEPT = ChainVariant(saved=Precision.INT8).rated_as
EPS = 1e-3


class Net(nn.Module):
    """A norm as transformers writes it, a gated unit, a norm without a weight, and one as a function behind an addition."""

    def __init__(self):
        super().__init__()
        self.fc, self.gate, self.up, self.down, self.out = (nn.Linear(4, 4, bias=False) for _ in range(5))
        self.weight, self.second = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
        self.norm, self.glu, self.bare = self.as_written, lambda x, factor: factor * F.silu(x), self.without_weight
        self.function = lambda x, weight: F.rms_norm(x, (4,), weight, EPS)

    @staticmethod
    def as_written(x, weight):
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
        return weight * wide.to(x.dtype)

    @staticmethod
    def without_weight(x):
        return torch.rsqrt((x * x).mean(-1, True).add(EPS)) * x

    def forward(self, x):
        x = self.fc(x)
        y = self.norm(x, self.weight)
        z = self.down(self.glu(self.gate(y), self.up(y)))
        return self.out(self.bare(self.function(x + z, self.second)))


NAMES = ["rsqrt#0", "silu#0", "rms_norm#0", "rsqrt#1"]
KEPT_OF = {"rsqrt#0": (0,), "silu#0": (1, 2), "rms_norm#0": (3,), "rsqrt#1": (4,)}
"""The tensors that each keeps, by their number."""


@pytest.fixture(scope="module")
def step():
    torch.manual_seed(0)
    model = Net()
    for parameter in model.parameters():
        nn.init.normal_(parameter)

    def batch(step, size):
        return Batch((torch.randn(size, 4, generator=torch.Generator().manual_seed(step)),))

    def loss(output, batch):
        return (output.square() + output.pow(3)).mean()

    job = Job("net", model, batch, loss, lambda parameters: torch.optim.SGD(parameters, lr=0.1), batch_size=3)
    return ObservedStep(job, model.train(), trace(job), job.batch(0, 3), 0, 3)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, noise, kept):
        r = (x.detach().square().mean(-1, keepdim=True) + EPS).rsqrt()
        kept.append(x.detach() * r)
        ctx.weight, ctx.xhat, ctx.r = weight, kept[-1] + noise, r
        return kept[-1].clone() if weight is None else kept[-1] * weight

    @staticmethod
    def backward(ctx, g):
        w = g if ctx.weight is None else g * ctx.weight
        grad = ctx.r * (w - ctx.xhat * (w * ctx.xhat).mean(-1, keepdim=True))
        return grad, None if ctx.weight is None else (g * ctx.xhat).sum(0), None, None


class _Glu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor, noise, other, kept):
        kept += [x.detach(), factor.detach()]
        ctx.x, ctx.factor = x.detach() + noise, factor.detach() + other
        return F.silu(x.detach()) * factor.detach()

    @staticmethod
    def backward(ctx, g):
        s = torch.sigmoid(ctx.x)
        return ctx.factor * g * s * (1 + ctx.x * (1 - s)), ctx.x * s * g, None, None, None


def written_out(step, noise=None):
    """All gradients as one vector, in float64, and what was kept."""
    model, kept, noise = copy.deepcopy(step.model).double(), [], noise or {}
    model.norm = model.function = lambda x, weight: _Norm.apply(x, weight, noise.get(len(kept), 0.0), kept)
    model.bare = lambda x: _Norm.apply(x, None, noise.get(len(kept), 0.0), kept)
    model.glu = lambda x, factor: _Glu.apply(x, factor, noise.get(len(kept), 0.0), noise.get(len(kept) + 1, 0.0), kept)
    loss = step.job.loss(model(step.batch.args[0].double()), step.batch)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]), kept


@pytest.fixture(scope="module")
def expected(step):
    """Σ_j σ²_j·‖∂g/∂e_j‖² of every chain, with a scale per row, by central differences."""
    _, kept = written_out(step)
    found, delta = {}, 1e-3
    for name, numbers in KEPT_OF.items():
        found[name] = 0.0
        for number in numbers:
            position = kept[number] / (scale := kept[number].abs().amax(-1, keepdim=True) / 127)
            variance = scale**2 * (position - position.floor()) * (position.floor() + 1 - position)
            for j, each in enumerate(variance.flatten()):
                e = torch.zeros_like(kept[number])
                e.view(-1)[j] = delta
                ahead, behind = (written_out(step, {number: sign * e})[0] for sign in (1, -1))
                found[name] += float(each) * float(((ahead - behind) / (2 * delta)).square().sum())
    return found


def test_the_written_out_model_is_the_model(step):
    plain = torch.cat([g.double().flatten() for g in step_gradients(step)])
    torch.testing.assert_close(written_out(step)[0], plain, rtol=1e-4, atol=1e-6)
    assert [str(chain.name) for chain in chains_of(step.dag) if chain.may_round_input] == NAMES


def test_every_kept_operand_against_differences_of_gradients(step, expected, monkeypatch):
    """The random direction is averaged out: along each coordinate once, responses add up to the norm."""
    totals = dict.fromkeys(NAMES, 0.0)
    for index in range(sum(p.numel() for p in step.model.parameters())):

        def along(tensors, seed, index=index):
            listed = list(tensors)
            sizes = [t.numel() for t in listed]
            flat = (torch.arange(sum(sizes)) == index).float()
            return [part.view(t.shape) for part, t in zip(flat.split(sizes), listed, strict=True)]

        monkeypatch.setattr(hutchinson, "random_signs", along)
        for (op_id, _, term), value in HutchinsonCollector().collect_step(step, [INT8]).items():
            if term == terms.KEPT_INPUT:
                totals[str(op_id)] += value
    assert totals == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("name", NAMES)
def test_training_with_kept_operands_against_the_written_out_backward(step, name, monkeypatch):
    """The kernels' copies, as noise on what was kept, give the same gradients."""
    kept, original = [], kept_inputs._Keeping.kept

    def recorded(keeping, *operands):
        found = original(keeping, *operands)
        pairs = [found[:2], found[2:4]] if len(operands) == 2 else [found[:2]]
        kept.extend(q.double() * scale.double()[:, None] for q, scale in pairs)
        return found

    monkeypatch.setattr(kept_inputs._Keeping, "kept", recorded)
    with RoundedInput(step.dag, OpId.parse(name), KEPT, seed=5):
        rounded = torch.cat([g.double().flatten() for g in step_gradients(step)])
    plain, exact = written_out(step)
    assert len(kept) == len(KEPT_OF[name])
    noise = {number: copied - exact[number] for number, copied in zip(KEPT_OF[name], kept, strict=True)}
    disturbed, _ = written_out(step, noise)
    change = float((disturbed - plain).norm())
    assert change > 1e-5 * float(plain.norm())
    torch.testing.assert_close(rounded, disturbed, rtol=1e-5, atol=1e-2 * change)


@pytest.mark.nightly
def test_the_real_quantizer_on_average(step, expected):
    found = MonteCarloCollector(draws=300, operators=[], together=False, chains=True).collect_step(step, [INT8])
    for name in NAMES:
        halves = [found[OpId.parse(name), KEPT, half] for half in (terms.FIRST_HALF, terms.SECOND_HALF)]
        assert halves[0] != halves[1]
        assert sum(halves) / 2 == pytest.approx(expected[name], rel=0.2)


def test_what_a_model_calls_otherwise_than_it_was_traced_is_not_rated(step):
    other = copy.deepcopy(step.model)
    other.bare, other.glu = (lambda x: x * torch.rsqrt(x.square().mean(-1, True) * 1.0 + EPS)), lambda x, factor: F.silu(x) + factor
    observed = ObservedStep(step.job, other, step.dag, step.batch, 0, 3)
    found = HutchinsonCollector().collect_step(observed, [INT8])
    assert {str(op_id) for op_id, _, term in found if term == terms.KEPT_INPUT} == {"rsqrt#0", "rms_norm#0"}
