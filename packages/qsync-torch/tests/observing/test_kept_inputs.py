"""Noise on what chains keep of their inputs: against gradients in float64, by a backward that is written out."""

import copy

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

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

INT8, BFLOAT16 = Variant.of(Precision.INT8), Variant.of(Precision.BFLOAT16)
KEPT = ChainVariant(saved=Precision.INT8).rated_as
PRODUCERS = (F.batch_norm, F.layer_norm, F.gelu, F.silu)


class Net(nn.Module):
    """Every producer: before the first norm nothing is trained, one has a residual, one nothing to train itself."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.BatchNorm2d(2), nn.BatchNorm2d(2)
        self.conv, self.point = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)
        self.fc, self.ln = nn.Linear(8, 4), nn.LayerNorm(4)
        self.in_place = self.once_more = False
        self.plain, self.out = nn.LayerNorm(4, elementwise_affine=False), nn.Linear(4, 2)

    def forward(self, x):
        x = self.first(x)
        y = F.relu(self.norm(self.conv(x)) + x, inplace=True)
        y = self.fc(self.point(F.silu(self.point(y), inplace=self.in_place)).flatten(1))
        if self.once_more:
            F.layer_norm(y, (4,))
        return self.out(self.plain(y + F.gelu(self.ln(y), approximate="tanh")))


NAMES = ["first#0", "norm#0", "silu#0", "ln#0", "gelu#0", "plain#0"]
"""Of the chains, in the order of their calls."""


def _step():
    torch.manual_seed(0)
    model = Net()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    model.ln.weight.requires_grad_(False)

    def batch(step, size):
        return Batch((torch.randn(size, 2, 2, 2, generator=torch.Generator().manual_seed(step)),))

    def loss(output, batch):
        return (output.square() + output.pow(3)).mean()

    job = Job("net", model, batch, loss, lambda parameters: torch.optim.SGD(parameters, lr=0.1), batch_size=4)
    return ObservedStep(job, model.train(), trace(job), job.batch(0, 4), 0, 3)


class WrittenOut(TorchFunctionMode):
    """Producers whose backward reads what was kept, with noise on it."""

    def __init__(self, noise=None):
        super().__init__()
        self.noise, self.kept = noise or {}, []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func not in PRODUCERS:
            return func(*args, **(kwargs or {}))
        number, noise = len(self.kept), self.noise
        x, rest = args[0], args[1:]
        if func not in (F.batch_norm, F.layer_norm):
            self.kept.append(x.detach())
            return _Activation.apply(x, noise.get(number, 0.0), lambda x: func(x, *rest, **(kwargs or {})))
        dims = (0, 2, 3) if func is F.batch_norm else (-1,)
        weight, bias = kwargs["weight"], kwargs["bias"]  # as the modules and PyTorch hand them on
        var, mean = torch.var_mean(x.detach(), dims, correction=0, keepdim=True)
        r = (var + 1e-5).rsqrt()
        self.kept.append((x.detach() - mean) * r)
        affine = [None if t is None else t.view(-1, 1, 1) if func is F.batch_norm else t for t in (weight, bias)]
        return _Norm.apply(x, *affine, self.kept[-1], noise.get(number, 0.0), r, dims)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, xhat, noise, r, dims):
        ctx.weight, ctx.xhat, ctx.r, ctx.dims = weight, xhat + noise, r, dims
        return xhat.clone() if weight is None else xhat * weight + bias

    @staticmethod
    def backward(ctx, g):
        w = g if ctx.weight is None else g * ctx.weight
        mean = lambda t: t.mean(ctx.dims, keepdim=True)  # noqa: E731
        grad = ctx.r * (w - mean(w) - ctx.xhat * mean(w * ctx.xhat))
        if ctx.weight is None:
            return grad, None, None, None, None, None, None
        return grad, (g * ctx.xhat).sum_to_size(ctx.weight.shape), g.sum_to_size(ctx.weight.shape), None, None, None, None


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, noise, function):
        ctx.function, ctx.read = function, x.detach() + noise
        return function(x.detach())

    @staticmethod
    def backward(ctx, g):
        with torch.enable_grad():
            read = ctx.read.requires_grad_()
            return torch.autograd.grad(ctx.function(read), read, g)[0], None, None


def _written_out(step, noise=None):
    """All gradients as one vector, in float64, and what each producer kept."""
    model = copy.deepcopy(step.model).double()
    parameters = [p for p in model.parameters() if p.requires_grad]
    with WrittenOut(noise) as producers:
        loss = step.job.loss(model(step.batch.args[0].double()), step.batch)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)]), producers.kept


def _variance(kept, name):
    """s²·f·(1 - f) with a scale per channel of a batch norm, else per row; a SiLU between two convolutions has rows of channels."""
    dims = {"first#0": (0, 2, 3), "norm#0": (0, 2, 3), "silu#0": (1,)}.get(name, (-1,))
    scale = kept.abs().amax(dims, keepdim=True) / 127
    position = kept / scale
    return scale**2 * (position - position.floor()) * (position.floor() + 1 - position)


def _expected(step):
    """Σ_j σ²_j·‖∂g/∂e_j‖² of every chain, by central differences: gradients are of second degree in a norm's noise."""
    _, kept = _written_out(step)
    found, delta = {}, 1e-3
    for number, name in enumerate(NAMES):
        total = 0.0
        for j, variance in enumerate(_variance(kept[number], name).flatten()):
            e = torch.zeros_like(kept[number])
            e.view(-1)[j] = delta
            ahead, behind = (_written_out(step, {number: sign * e})[0] for sign in (1, -1))
            total += float(variance) * float(((ahead - behind) / (2 * delta)).square().sum())
        found[name] = total
    return found


@pytest.fixture(scope="module")
def step():
    return _step()


@pytest.fixture(scope="module")
def expected(step):
    return _expected(step)


def test_the_written_out_model_is_the_model(step):
    plain = torch.cat([g.double().flatten() for g in step_gradients(step) if g is not None])
    torch.testing.assert_close(_written_out(step)[0], plain, rtol=1e-4, atol=1e-6)
    assert [str(chain.name) for chain in chains_of(step.dag) if chain.may_round_input] == NAMES


def test_every_kept_input_against_differences_of_gradients(step, expected, monkeypatch):
    """The random direction is averaged out: along each coordinate once, responses add up to the norm."""
    totals: dict[str, float] = {}
    for index in range(sum(p.numel() for p in step.model.parameters() if p.requires_grad)):

        def along(tensors, seed, index=index):
            listed = list(tensors)
            sizes = [t.numel() for t in listed]
            flat = (torch.arange(sum(sizes)) == index).float()
            return [part.view(t.shape) for part, t in zip(flat.split(sizes), listed, strict=True)]

        monkeypatch.setattr(hutchinson, "random_signs", along)
        for (op_id, variant, term), value in HutchinsonCollector().collect_step(step, [INT8, BFLOAT16]).items():
            if term == terms.KEPT_INPUT:
                assert variant == KEPT
                totals[str(op_id)] = totals.get(str(op_id), 0.0) + value
    assert totals == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("name", NAMES)
def test_training_with_a_kept_input_against_the_written_out_backward(step, name, monkeypatch):
    """The kernels' copy, as noise on what was kept, gives the same gradients; the loss stays what it was."""
    kept, original = [], kept_inputs._Keeping.kept

    def recorded(keeping, x):
        found = original(keeping, x)
        rows = found[0].transpose(0, 1).reshape(x.shape[1], -1) if x.dim() == 4 else found[0]
        kept.append(rows.double() * found[1].double()[:, None])
        return found

    monkeypatch.setattr(kept_inputs._Keeping, "kept", recorded)
    with RoundedInput(step.dag, OpId.parse(name), KEPT, seed=5):
        rounded = torch.cat([g.double().flatten() for g in step_gradients(step) if g is not None])
    [rows] = kept
    number = NAMES.index(name)
    plain, exact = _written_out(step)
    shape = exact[number].shape
    if name == "silu#0":
        copied = rows.view(shape[0], *shape[2:], shape[1]).permute(0, 3, 1, 2)
    elif len(shape) == 4:
        copied = rows.view(shape[1], shape[0], *shape[2:]).transpose(0, 1)
    else:
        copied = rows.view(shape)
    disturbed, _ = _written_out(step, {number: copied - exact[number]})
    change = float((disturbed - plain).norm())
    assert change > 1e-5 * float(plain.norm())
    torch.testing.assert_close(rounded, disturbed, rtol=1e-5, atol=1e-2 * change)


def test_the_real_quantizer_on_average(step, expected):
    found = MonteCarloCollector(draws=60, operators=[], together=False, chains=True).collect_step(step, [INT8])
    halves = [{str(op): value for (op, v, term), value in found.items() if v == KEPT and term == half} for half in _HALVES]
    assert set(halves[0]) == set(NAMES)
    for name in NAMES:
        assert halves[0][name] != halves[1][name]
        assert (halves[0][name] + halves[1][name]) / 2 == pytest.approx(expected[name], rel=0.35)


_HALVES = (terms.FIRST_HALF, terms.SECOND_HALF)


def test_what_is_not_known_is_not_written(step):
    """Without an 8-bit format on the ladder, and where a function is called in place or in another number than the graph says."""
    assert not _kept_terms(step, [BFLOAT16])
    assert _kept_terms(step, [INT8, BFLOAT16]) == set(NAMES)

    for name, without in (("in_place", {"silu#0"}), ("once_more", {"ln#0", "plain#0"})):
        other = copy.deepcopy(step.model)
        setattr(other, name, True)
        assert _kept_terms(attrs.evolve(step, model=other), [INT8]) == set(NAMES) - without


def _kept_terms(step, variants):
    return {str(op_id) for op_id, _, term in HutchinsonCollector().collect_step(step, variants) if term == terms.KEPT_INPUT}
