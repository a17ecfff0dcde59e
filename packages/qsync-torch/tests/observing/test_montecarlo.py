import copy

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_core.errors import ObservationError
from qsync_core.ir import observations as terms
from qsync_core.ir.formats import OutputFormats
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment
from qsync_core.ir.precision import Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_torch.apply.apply import apply_
from qsync_torch.job import Batch, Job
from qsync_torch.observing.collector import ObservedStep, StepCollector
from qsync_torch.observing.measure_truth import TruthBudget, fit_passes, fit_seconds
from qsync_torch.observing.montecarlo import MonteCarloCollector, is_random, passes, subjects
from qsync_torch.tracing.trace import trace

INT8 = Variant.of(Precision.INT8, output=Precision.FLOAT32)
NEAREST = attrs.evolve(INT8, rounding=Rounding.NEAREST)
BFLOAT16 = Variant.of(Precision.BFLOAT16)
FLOAT32 = Variant.of(Precision.FLOAT32)


class Net(nn.Module):
    """Batch norm, dropout, a module called twice and a functional linear."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.3)
        self.twice = nn.Linear(16, 16)
        self.weight = nn.Parameter(torch.randn(5, 16) / 4)

    def forward(self, x):
        y = self.drop(F.relu(self.norm(self.conv(x)))).mean(1).flatten(1)
        return F.linear(self.twice(torch.tanh(self.twice(y))), self.weight)


def _job(model=None, batch=None, loss=None):
    torch.manual_seed(0)
    return Job(
        "net",
        model or Net(),
        batch or (lambda step, size: Batch((torch.randn(size, 2, 4, 4, generator=torch.Generator().manual_seed(step)),))),
        loss or (lambda output, batch: output.square().mean()),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=6,
    )


def _step(job, update=0, seed=3):
    model = copy.deepcopy(job.model).train()
    return ObservedStep(job, model, trace(job), job.batch(update, job.batch_size), update, seed)


def _linear_job(x, c):
    """y = x·Wᵀ and L = Σ c·y, so that ∂L/∂W = cᵀ·x and only the saved copy of x disturbs it."""
    model = nn.Linear(x.shape[1], c.shape[1], bias=False)
    return _job(model, lambda step, size: Batch((x,), target=c), lambda output, batch: (output * batch.target).sum())


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_linear_layer_against_the_closed_form(symmetric):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 40, generator=generator)
    x = x if symmetric else x.relu()
    c = torch.randn(6, 5, generator=generator)
    job = _linear_job(x, c)
    exact_backward = attrs.evolve(INT8, grad_input=Precision.FLOAT32, grad_weight=Precision.FLOAT32, symmetric=symmetric)
    found = MonteCarloCollector(draws=400).collect_step(_step(job), [exact_backward])
    # E‖cᵀ(x̂ - x)‖² = Σ_nk σ²_nk · Σ_m c²_nm, with σ² = s²·f·(1-f) of stochastic rounding, all in float64.
    scale = x.double().abs().max() / (127 if symmetric else 255)
    residual = torch.frac(x.double() / scale)
    residual = torch.where(residual < 0, residual + 1, residual)
    expected = float(((scale**2 * residual * (1 - residual)).sum(1) * c.double().square().sum(1)).sum())
    op_id = trace(job).adjustable[0].op_id
    halves = [found[op_id, exact_backward, term] for term in (terms.FIRST_HALF, terms.SECOND_HALF)]
    assert halves[0] != halves[1]
    assert sum(halves) / 2 == pytest.approx(expected, rel=0.02)
    assert halves[0] == pytest.approx(expected, rel=0.04)
    assert found[None, None, terms.GRADIENT_SQ_NORM] == pytest.approx(float((c.double().t() @ x.double()).square().sum()))


def test_every_operator_against_gradients_taken_by_hand():
    job = _job()
    step = _step(job)
    found = MonteCarloCollector().collect_step(step, [BFLOAT16, FLOAT32])

    def gradients(entries):
        model = copy.deepcopy(job.model).train()
        whole = {operator.op_id: FLOAT32 for operator in step.dag.adjustable} | {
            OpId.parse(str(op_id)): variant for op_id, variant in entries.items()
        }
        decided = OutputFormats.of(step.dag).decided(whole)
        applied = apply_(model, {op_id: Assignment(variant, "", "", "") for op_id, variant in decided.items()}) if entries else None
        torch.manual_seed(step.seed)
        taken = torch.autograd.grad(job.compute_loss(step.batch, model), list(model.parameters()))
        if applied:
            applied.remove()
        return torch.cat([g.double().flatten() for g in taken])

    base = gradients({})
    assert found[None, None, terms.GRADIENT_SQ_NORM] == pytest.approx(float(base.square().sum()))
    everything = {operator.op_id: BFLOAT16 for operator in step.dag.adjustable}
    for key, names in ((OpId("conv"), ["conv#0"]), (OpId("weight"), ["weight#0"]), (None, everything)):
        expected = float((gradients(dict.fromkeys(names, BFLOAT16)) - base).square().sum())
        assert expected > 0
        assert found[key, BFLOAT16, terms.FIRST_HALF] == pytest.approx(expected, rel=1e-5)
        assert found[key, BFLOAT16, terms.SECOND_HALF] == found[key, BFLOAT16, terms.FIRST_HALF]
    both = float((gradients({"twice#0": BFLOAT16, "twice#1": BFLOAT16}) - base).square().sum())
    assert sum(found[OpId("twice", call), BFLOAT16, terms.FIRST_HALF] for call in (0, 1)) == pytest.approx(both, rel=1e-5)
    assert {variant for _, variant, _ in found} == {None, BFLOAT16}


def test_dropout_masks_are_paired():
    """Small integers are exact in bfloat16, so whatever changes would be a mask."""
    x = torch.randint(-3, 4, (6, 16), generator=torch.Generator().manual_seed(2)).float()
    model = nn.Sequential(nn.Linear(16, 8, bias=False), nn.Dropout(0.5), nn.Linear(8, 4, bias=False))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 1.0)
    job = _job(model, lambda step, size: Batch((x,)), lambda output, batch: output.sum())
    found = MonteCarloCollector().collect_step(_step(job), [BFLOAT16])
    assert found[None, None, terms.GRADIENT_SQ_NORM] > 0
    assert [value for (_, variant, _), value in found.items() if variant is BFLOAT16] == [0.0] * 6


def test_every_draw_and_every_update_rounds_differently_and_the_same_step_alike():
    job = _job()
    conv = OpId("conv")
    collector = MonteCarloCollector(draws=2, operators=[conv], together=False)
    first = collector.collect_step(_step(job), [INT8, NEAREST])
    again = collector.collect_step(_step(job), [INT8, NEAREST])
    batch = _step(job).batch
    later = collector.collect_step(attrs.evolve(_step(job), update=1, batch=batch), [INT8, NEAREST])
    assert first == again
    assert first[conv, INT8, terms.FIRST_HALF] != first[conv, INT8, terms.SECOND_HALF]
    assert first[conv, INT8, terms.FIRST_HALF] != later[conv, INT8, terms.FIRST_HALF]
    assert first[conv, NEAREST, terms.FIRST_HALF] == first[conv, NEAREST, terms.SECOND_HALF]
    assert first[conv, NEAREST, terms.FIRST_HALF] == later[conv, NEAREST, terms.FIRST_HALF]
    assert {key[0] for key in first} == {None, conv}


def test_the_step_is_left_as_it_was():
    step = _step(_job())
    before = copy.deepcopy(step.model.state_dict())
    state = torch.get_rng_state()
    collector = MonteCarloCollector(draws=2)
    assert isinstance(collector, StepCollector)
    collector.collect_step(step, [INT8])
    assert all(torch.equal(value, before[name]) for name, value in step.model.state_dict().items())
    assert all(parameter.grad is None for parameter in step.model.parameters())
    assert all("forward" not in module.__dict__ for module in step.model.modules())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("together", [True, False])
def test_the_cost_is_known_before(together):
    seen, job = [], _job()
    counts = []
    step = _step(job)
    step.model.register_forward_pre_hook(lambda *_: counts.append(1))
    collector = MonteCarloCollector(draws=4, together=together, progress=lambda *args: seen.append(args))
    collector.collect_step(step, [INT8, NEAREST, BFLOAT16, FLOAT32])
    # conv, both calls of twice at once, and linear: 4 + 1 + 1 passes for each.
    assert len(subjects(step.dag)) == 3
    expected = passes(3, [INT8, NEAREST, BFLOAT16, FLOAT32], 4, together=together)
    assert expected == 1 + (3 + together) * 6 == len(counts)
    assert seen[0] == (0, expected, "full precision")
    assert seen[1] == (1, expected, "conv#0 in int8>float32")
    assert seen[-1] == (expected, expected, "")
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)


def test_what_draws_at_random():
    gradients_only = attrs.evolve(BFLOAT16, grad_input=Precision.INT8, rounding=Rounding.STOCHASTIC)
    assert [is_random(v) for v in (INT8, NEAREST, BFLOAT16, FLOAT32, gradients_only)] == [True, False, False, False, True]


def test_not_finite_in_full_precision():
    x = torch.full((6, 4), 1e30)
    job = _linear_job(x, torch.full((6, 3), 1e30))
    with pytest.raises(ObservationError, match="the gradients of net in full precision are not finite at update 0"):
        MonteCarloCollector().collect_step(_step(job), [BFLOAT16])


def test_not_finite_in_a_variant_names_operator_and_variant():
    # 65,536 is the first power of two that float16 does not hold.
    job = _linear_job(torch.full((6, 4), 65536.0), torch.ones(6, 3))
    name = trace(job).adjustable[0].op_id
    expected = f"with {name} in float16 a gradient of net is not finite at update 0; its range is too small"
    with pytest.raises(ObservationError, match=expected):
        MonteCarloCollector().collect_step(_step(job), [Variant.of(Precision.FLOAT16)])


def test_a_quantizer_that_sees_infinity_names_operator_and_variant():
    class Blown(Net):
        def forward(self, x):
            blown = self.conv(x * float("inf")).detach().nan_to_num(0, 0, 0)
            return super().forward(x) + 0 * blown.sum()

    with pytest.raises(
        ObservationError, match=r"conv#0 of net in int8>float32 at update 0: operator conv#0: a tensor of shape .* infinite"
    ):
        MonteCarloCollector(operators=[OpId("conv")]).collect_step(_step(_job(Blown())), [INT8])


def test_other_bad_input():
    for draws in (0, 1, 3):
        with pytest.raises(ValueError, match="draws is an even number of at least 2"):
            MonteCarloCollector(draws)
    job = _job()
    with pytest.raises(ObservationError, match="net has no linear or convolution norm#0 whose precision a plan may change"):
        MonteCarloCollector(operators=[OpId("norm")]).collect_step(_step(job), [INT8])
    step = attrs.evolve(_step(job), job=_job(loss=lambda output, batch: output.detach().sum()))
    with pytest.raises(ObservationError, match="the loss of net depends on no trainable parameter"):
        MonteCarloCollector().collect_step(step, [INT8])


@pytest.mark.parametrize(
    ("allowed", "most", "expected"),
    [
        # 9 operators and all together: 2 draws and bfloat16 cost 1 + 10·3 = 31 passes, 4 cost 51, 8 cost 91, 22 cost 231.
        (31, 20, TruthBudget(1, 2, 31)),
        (123, 20, TruthBudget(3, 2, 93)),
        (204, 20, TruthBudget(4, 4, 204)),
        (500, 20, TruthBudget(5, 8, 455)),
        (500, 2, TruthBudget(2, 22, 462)),
        (9999, 2, TruthBudget(2, 32, 662)),
    ],
)
def test_a_budget_in_passes(allowed, most, expected):
    assert fit_passes(allowed, 9, [INT8, BFLOAT16, FLOAT32], most) == expected


def test_without_randomness_draws_buy_nothing():
    assert fit_passes(1000, 9, [BFLOAT16], 20) == TruthBudget(20, 2, 20 * 11)


def test_a_budget_in_seconds():
    assert fit_seconds(31 * 0.25, 0.25, 9, [INT8, BFLOAT16], 20) == TruthBudget(1, 2, 31)
    expected = "a budget of 5 s is too small: measuring 9 operators once on one batch takes 31 passes of 0.25 s; give at least 10 s"
    with pytest.raises(ObservationError, match=expected):
        fit_seconds(5, 0.25, 9, [INT8, BFLOAT16], 20)
    assert fit_seconds(41 * 0.25, 0.25, 9, [INT8, BFLOAT16], 20, other_passes=10) == TruthBudget(1, 2, 31)
    with pytest.raises(ObservationError, match=r"0\.25 s after 10 updates of warm-up; give at least 13 s"):
        fit_seconds(40 * 0.25, 0.25, 9, [INT8, BFLOAT16], 20, other_passes=10)
    with pytest.raises(ObservationError, match="30 passes are too few to measure 9 operators even once; 31 would be enough"):
        fit_passes(30, 9, [INT8, BFLOAT16], 20)
