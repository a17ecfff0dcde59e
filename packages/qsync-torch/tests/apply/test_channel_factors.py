"""Factors of input channels: products and gradients of the operands as they are, and how factors follow from the last step."""

import copy
import gc
import json

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from qsync_core.errors import BackendError, PlanError
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_torch import apply_
from qsync_torch.elastic.checkpoints import Checkpoints
from qsync_torch.operators import conv2d, linear
from qsync_torch.operators.channel_factors import Factor, next_factors

from .operator_reference import check_operator
from .variants import ALL, INT8, ROWS

BY_ROW = ALL["int8 gradients by row"]
FACTORED = attrs.evolve(BY_ROW, channel_factors=True)
PLANTED = 3


def begun(width, device="cpu"):
    return Factor(torch.ones(width, device=device), torch.zeros(width, device=device), torch.zeros(width, device=device))


def advanced(factor):
    return Factor(next_factors(*factor), torch.zeros_like(factor.values), torch.zeros_like(factor.values))


@pytest.mark.parametrize("shape", [(33, 40), (3, 5, 40)])
@pytest.mark.parametrize(
    "name", ["int8", "int8 float16 backward", "int8 gradients", "int8 gradients by row", "int8 weight gradient"]
)
def test_it_computes_what_scaled_operands_do_and_gradients_of_those_given(device, name, shape):
    """Against the operator of x / c and w · c without factors, whose gradients autograd takes back through both."""
    variant = ALL[name]
    factor = begun(40, device)._replace(values=2.0 ** torch.arange(-5, 3, device=device).repeat(5).float())
    x, weight, grad = (torch.randn(s, device=device) for s in (shape, (24, 40), (*shape[:-1], 24)))
    found, expected = [], []
    for into, with_factors in ((found, True), (expected, False)):
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        if with_factors:
            y = linear(a, b, None, attrs.evolve(variant, channel_factors=True), factor=factor)
        else:
            y = linear(a / factor.values, b * factor.values, None, variant)
        y.backward(grad)
        into += [y.detach(), a.grad, b.grad]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("variant", [INT8, BY_ROW, ROWS], ids=["one scale", "by row", "16-bit gradients by row"])
def test_factors_of_one_change_no_bit(device, variant):
    variant = attrs.evolve(variant, rounding=Rounding.STOCHASTIC)
    x, weight, grad = (torch.randn(s, device=device) for s in ((16, 40), (24, 40), (16, 24)))
    results = []
    for factored in (False, True):
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = linear(
            a, b, None, attrs.evolve(variant, channel_factors=factored), seed=3, factor=begun(40, device) if factored else None
        )
        y.backward(grad)
        results.append([y.detach(), a.grad, b.grad])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_without_any_it_equals_float64_autograd(device):
    """The reference knows nothing of factors, which are 1 where none are given."""
    x, weight = torch.randn(8, 24, device=device), torch.randn(5, 24, device=device)
    check_operator(lambda *operands: linear(*operands, FACTORED), F.linear, x, weight, None, FACTORED)


@pytest.mark.parametrize("variant", [FACTORED, attrs.evolve(ROWS, channel_factors=True)], ids=["by column", "16-bit gradients"])
def test_magnitudes_are_noted_and_an_outlier_costs_no_other_channel_its_bits(device, variant):
    x, weight, grad = (torch.randn(s, device=device) for s in ((64, 40), (24, 40), (64, 24)))
    x[:, PLANTED] *= 100
    weight[:, PLANTED] /= 100
    x[:, 7] = 0.0
    exact = (F.linear(x, weight), grad @ weight, grad.t() @ x)
    factor, errors = begun(40, device), []
    for _ in range(2):
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = linear(a, b, None, variant, factor=factor)
        y.backward(grad)
        errors.append([((f - e).norm() / e.norm()).item() for f, e in zip((y.detach(), a.grad, b.grad), exact, strict=True)])
        assert torch.allclose(factor.x_largest, x.abs().amax(0), rtol=1e-5)
        assert torch.equal(factor.w_largest, weight.abs().amax(0))
        factor = advanced(factor)
    assert errors[0][0] > 0.15
    assert max(errors[1]) < 0.02
    assert factor.values[7] == 1


def test_the_next_factors():
    """Powers of two within √2 of the root of the ratio; what saw nothing, or no finite number, keeps its own."""
    x = torch.tensor([1.0, 100.0, 0.25, 3e-9, 1e30, 0.0, 5.0, torch.nan, torch.inf])
    w = torch.tensor([1.0, 0.01, 4.0, 3e9, 1e-7, 1.0, 0.0, 1.0, 1.0])
    found = next_factors(torch.full((9,), 8.0), x, w)
    expected = (x / w).sqrt()
    assert ((found / expected)[:3].log2().abs() <= 0.5).all()
    assert found[3:].tolist() == [2.0**-15, 2.0**15, 8.0, 8.0, 8.0, 8.0]
    assert (torch.frexp(found).mantissa == 0.5).all()


def test_a_convolution_has_none():
    variant = attrs.evolve(INT8, channel_factors=True)
    with pytest.raises(BackendError, match="factors of input channels belong to linear operators, not to convolutions"):
        conv2d(torch.randn(1, 4, 5, 5), torch.randn(3, 4, 3, 3), None, variant)


class Gated(nn.Module):
    """Two layers, the second of which reads one large channel."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 24, bias=False), nn.Linear(24, 8, bias=False)
        with torch.no_grad():
            self.up.weight[PLANTED] *= 100
            self.down.weight[:, PLANTED] /= 100

    def forward(self, x, again=False):
        h = torch.nn.functional.silu(self.up(x))
        return checkpoint(self.down, h, use_reentrant=False) if again else self.down(h)


STOCHASTIC = attrs.evolve(FACTORED, rounding=Rounding.STOCHASTIC)


def planned(seed=0):
    torch.manual_seed(seed)
    model = Gated()
    applied = apply_(model, {"up": STOCHASTIC, "down": STOCHASTIC}, seed=5)
    return model, applied, torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)


def batch(step):
    return torch.randn(12, 16, generator=torch.Generator().manual_seed(100 + step))


def train(model, optimizer, steps, **how):
    losses = []
    for step in steps:
        optimizer.zero_grad()
        for part in batch(step).chunk(2):
            loss = model(part, **how).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return losses


def factors_of(applied):
    return {
        name.partition("#")[0]: f.values.clone() for of in applied.in_model.key.factors._factors.values() for name, f in of.items()
    }


def test_a_plans_factors_follow_from_all_micro_batches_of_the_last_step():
    model, applied, optimizer = planned()
    assert all((values == 1).all() for values in factors_of(applied).values())
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    hidden = F.silu(batch(0) @ weights["up.weight"].t())  # the forward's own differs by the rounding of one product
    train(model, optimizer, [0])
    values = factors_of(applied)["down"]
    expected = (hidden.abs().amax(0) / weights["down.weight"].abs().amax(0)).sqrt()
    assert ((values / expected).log2().abs() <= 0.6).all()
    assert values[PLANTED] >= 16 * values[PLANTED + 1]
    before = factors_of(applied)
    with torch.no_grad():
        model(1e6 * batch(1))  # no step follows from what has no gradient
    applied.advance()
    assert all(torch.equal(before[name], now) for name, now in factors_of(applied).items())


def test_what_a_checkpoint_runs_again_sees_the_same_factors():
    model, _, optimizer = planned()
    plain = train(model, optimizer, range(4)), [p.detach().clone() for p in model.parameters()]
    model, _, optimizer = planned()
    again = train(model, optimizer, range(4), again=True), [p.detach().clone() for p in model.parameters()]
    assert plain[0] == again[0]
    assert all(torch.equal(one, other) for one, other in zip(plain[1], again[1], strict=True))


def test_a_job_that_resumes_with_its_state_trains_bit_for_bit():
    model, applied, optimizer = planned()
    train(model, optimizer, range(3))
    kept = [json.loads(json.dumps(applied.state_dict())), *copy.deepcopy((model.state_dict(), optimizer.state_dict()))]
    assert set(model.state_dict()) == {"up.weight", "down.weight"}
    expected = train(model, optimizer, range(3, 6))
    assert kept[0]["step"] == 3
    for state, same in ((kept[0], True), ({"step": 3, "seed": 5}, False)):
        model, applied, optimizer = planned(seed=1)
        model.load_state_dict(kept[1])
        optimizer.load_state_dict(kept[2])
        applied.load_state_dict(state)
        assert (train(model, optimizer, range(3, 6)) == expected) == same


@pytest.mark.parametrize("factors", [3, {"up#0": 3}, {"up#0": "zz" * 16}, {"up#0": "8"}, {"up#0": "00" * 16}, {"up#0": "ff" * 16}])
def test_what_is_no_state_of_factors_is_refused_and_changes_nothing(factors):
    """Also exponents that no factor has: with a factor of 0 operators would find infinite numbers."""
    model, applied, optimizer = planned()
    train(model, optimizer, range(2))
    before = applied.state_dict()
    with pytest.raises(PlanError, match="the factors of a plan in force are a text for each operator, got "):
        applied.load_state_dict({"step": 7, "seed": 5, "factors": factors})
    assert applied.state_dict() == before


@pytest.mark.parametrize("shape", [(0, 40), (3, 0, 40)])
@pytest.mark.parametrize("variant", [FACTORED, attrs.evolve(ROWS, channel_factors=True)], ids=["by column", "16-bit gradients"])
def test_a_batch_of_nothing_says_nothing_of_channels(device, variant, shape):
    """As a branch with no tokens for it has: gradients of 0, and factors stay."""
    x, weight = (torch.randn(s, device=device, requires_grad=True) for s in (shape, (24, 40)))
    factor = begun(40, device)
    linear(x, weight, None, variant, factor=factor).sum().backward()
    assert x.grad.shape == shape
    assert not weight.grad.any()
    assert not factor.x_largest.any()
    assert torch.equal(advanced(factor).values, factor.values)


def test_checkpoints_keep_each_ranks_factors(tmp_path):
    model, applied, optimizer = planned()
    train(model, optimizer, range(3))
    Checkpoints(tmp_path, applied).save(3, copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()}))
    expected = train(model, optimizer, range(3, 5))
    model, applied, optimizer = planned(seed=1)
    found = Checkpoints(tmp_path, applied).load()
    model.load_state_dict(found.state["model"])
    optimizer.load_state_dict(found.state["optimizer"])
    assert train(model, optimizer, range(3, 5)) == expected


def test_compiled_steps_take_the_factors_of_eager_ones():
    torch._dynamo.reset()
    model, applied, optimizer = planned()
    eager = train(model, optimizer, range(3)), factors_of(applied)
    model, applied, optimizer = planned()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    optimizer.step = torch.compile(optimizer.step, backend="aot_eager")
    found = train(compiled, optimizer, range(3)), factors_of(applied)
    assert applied.step == 3
    assert found[0] == pytest.approx(eager[0], rel=1e-5)
    assert all(torch.equal(found[1][name], values) for name, values in eager[1].items())
    assert any((values != 1).any() for values in found[1].values())


def test_a_plan_may_be_collected_while_an_optimizer_is_compiled():
    torch._dynamo.reset()
    others = [planned(seed) for seed in range(1, 9)]
    model, applied, optimizer = planned()

    def collecting(graph, inputs):
        del others[-2:]
        gc.collect()
        return graph.forward

    optimizer.step = torch.compile(optimizer.step, backend=collecting)
    train(model, optimizer, range(3))
    assert applied.step == 3
    assert len(others) < 8


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 16))

    def forward(self, x):
        return F.linear(x, self.weight)


def test_a_compiler_that_reads_a_functional_call_first_needs_no_break():
    """Its factors are there from the start, like those of modules."""
    torch._dynamo.reset()
    model = Functional()
    applied = apply_(model, {"weight": STOCHASTIC}, seed=5)
    torch.compile(model, backend="aot_eager", fullgraph=True)(batch(0)).sum().backward()
    applied.advance()
    assert (factors_of(applied)["weight"] != 1).any()


def test_formats_are_those_of_the_variant():
    assert FACTORED.grad_weight is FACTORED.grad_input is Precision.INT8
    assert FACTORED.x_granularity is Granularity.PER_ROW
