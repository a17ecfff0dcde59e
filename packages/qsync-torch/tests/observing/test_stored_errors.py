"""What storing a frozen weight does to the gradients of what is trained: the collector against Jacobians taken in float64."""

import copy
import math

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_core.errors import ObservationError
from qsync_core.ir import observations as terms
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision, Storage
from qsync_core.ir.variant import Variant
from qsync_planner.allocator.verdict import plan_error
from qsync_planner.indicate import indicate
from qsync_torch.aten.stored_weights import dequantize_weight, quantize_weight
from qsync_torch.job import Batch, Job
from qsync_torch.observing.closed_form import LossVarCollector
from qsync_torch.observing.collector import ObservedStep
from qsync_torch.observing.hutchinson import _DIRECTION_SEED, _NEXT_DIRECTION, HutchinsonCollector, _Pass, random_signs
from qsync_torch.observing.joint_errors import MOST, mixtures
from qsync_torch.observing.observe import ObserveRequest, observe
from qsync_torch.tracing.trace import trace

STORED = [Variant.named(name) for name in ("float32@nf4", "float32@int8-row", "bfloat16@nf4", "int8@int8-row")]
SEED = 7


class Adapted(nn.Module):
    """A frozen layer called twice and another, with something trained before, between and after them."""

    def __init__(self, activation=torch.tanh):
        super().__init__()
        self.before = nn.Linear(6, 5)
        self.twice = nn.Linear(5, 5).requires_grad_(False)
        self.frozen = nn.Linear(5, 4, bias=False).requires_grad_(False)
        self.after = nn.Linear(4, 2)
        self.activation = activation

    def forward(self, x):
        y = self.activation(self.twice(self.activation(self.before(x))))
        y = self.activation(self.twice(y))
        return self.after(self.activation(self.frozen(y)))


def job_of(activation=torch.tanh, samples=4):
    torch.manual_seed(0)
    x, target = torch.randn(samples, 6), torch.randn(samples, 2)
    return Job(
        "adapted",
        Adapted(activation),
        lambda step, size: Batch((x[:size],), target=target[:size]),
        lambda output, batch: F.mse_loss(output, batch.target),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=samples,
    )


def collected(job, parts=1, variants=STORED):
    model = job.copy_model().train()
    step = ObservedStep(job, model, trace(job), job.batch(0, job.batch_size), 0, SEED)
    return model, HutchinsonCollector(parts).collect_step(step, variants)


def error_of(weight, variant):
    """What the product reads less what it would read of the weight itself."""
    dtype = torch.float32 if variant.compute in (Precision.INT8, Precision.FLOAT32) else torch.bfloat16
    read = dequantize_weight(quantize_weight(weight, variant.storage), variant.storage, weight.shape, dtype)
    return read.double() - weight.to(dtype).double()


def moved(job, model, name, error):
    """The directional derivative of each trained parameter's gradient along the error of one weight."""
    model = copy.deepcopy(model).double()
    batch = job.batch(0, 4)
    weight = model.get_parameter(name).requires_grad_(True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter is not weight]
    loss = F.mse_loss(model(batch.args[0].double()), batch.target.double())
    gradients = torch.autograd.grad(loss, trained, create_graph=True)

    def along(entry):
        (row,) = torch.autograd.grad(entry, weight, retain_graph=True, allow_unused=True)
        return 0.0 if row is None else float((row * error).sum())

    return [torch.tensor([along(entry) for entry in gradient.flatten()]).view(gradient.shape) for gradient in gradients]


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("name", ["twice", "frozen"])
def test_shifts_are_the_derivative_along_the_error_seen_from_each_direction(name, parts):
    """Along what the errors do together, and random signs without that; weighted so that the mean of the squares is the square."""
    job = job_of()
    model, found = collected(job, parts)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    known = together(job, model, STORED[:3])  # the fourth is read as the second
    count = len(terms.SHIFTS)
    for variant in STORED:
        derivative = flat(moved(job, model, f"{name}.weight", error_of(model.get_parameter(f"{name}.weight").detach(), variant)))
        along = {1 + number: math.sqrt(count) * float(one @ derivative) for number, one in enumerate(known)}
        for number in {*range(count)} - {*along}:
            u = flat(random_signs(trained, SEED + _DIRECTION_SEED + number * _NEXT_DIRECTION))
            u = u - sum(float(one @ u) * one for one in known)
            along[number] = math.sqrt(count / (count - len(known))) * float(u @ derivative)
        noise = 1e-4 * max(map(abs, along.values()))  # of float32, by the CPU
        for number, term in enumerate(terms.SHIFTS):
            assert found[OpId(name), variant, term] == pytest.approx(along[number], rel=1e-3, abs=noise)
            if name == "twice":
                assert found[OpId("twice", 1), variant, term] == 0.0


class Own(nn.Module):
    """A layer that calls a function with its own weight, as those do that have adapters beside it."""

    def __init__(self, linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


def test_a_weight_that_its_own_layer_reads_by_a_function_is_seen_as_a_modules():
    """Its errors are those of a linear layer, alone and together with others'."""
    found = []
    for is_own in (False, True):
        job = job_of()
        if is_own:
            for name in ("twice", "frozen"):
                setattr(job.model, name, Own(getattr(job.model, name)))
        step = ObservedStep(job, job.copy_model().train(), trace(job), job.batch(0, job.batch_size), 0, SEED)
        terms_of = HutchinsonCollector().collect_step(step, STORED)
        found.append({(op_id.fqn.removesuffix(".weight"), op_id.call, *rest): one for (op_id, *rest), one in terms_of.items()})
    module, own = found
    assert own == pytest.approx(module, rel=1e-5, abs=1e-9)
    assert any(value for (name, *_), value in module.items() if name == "frozen")


def flat(parts):
    return torch.cat([part.detach().double().flatten() for part in parts])


def together(job, model, variants):
    """By how much the gradients change where all frozen weights are stored, at right angles and of length 1."""

    def gradients(errors):
        copied = copy.deepcopy(model).double()
        for name, error in errors.items():
            copied.get_parameter(name).data += error
        batch = job.batch(0, 4)
        loss = F.mse_loss(copied(batch.args[0].double()), batch.target.double())
        return flat(torch.autograd.grad(loss, [parameter for parameter in copied.parameters() if parameter.requires_grad]))

    found = []
    alike = [dict.fromkeys(("twice.weight", "frozen.weight"), variant) for variant in variants]
    for stored in [*alike, *mixtures(alike, MOST - len(alike), SEED)]:
        errors = {name: error_of(model.get_parameter(name).detach(), variant) for name, variant in stored.items()}
        change = gradients(errors) - gradients({})
        length = change.norm()
        for one in found:
            change = change - (one @ change) * one
        if length > 0 and change.norm() > 1e-2 * length:
            found.append(change / change.norm())
    return found


def test_a_whole_plan_in_one_storage_needs_no_luck():
    """Of one update, where sixteen random directions have a standard error of 35%."""
    job = job_of()
    variants = [Variant.named(name) for name in ("bfloat16@nf4", "bfloat16@int8-row")]
    sensitivity = indicate(observed(job, [HutchinsonCollector()], variants, steps=1), trace(job), variants)
    model = job.copy_model()
    for variant in variants:
        names = ("twice.weight", "frozen.weight")
        derivatives = [flat(moved(job, model, name, error_of(model.get_parameter(name).detach(), variant))) for name in names]
        truth = float(sum(derivatives).square().sum())
        noise = sum(
            by_variant[variant] - sum(value**2 for value in sensitivity.shifts[op_id][variant])
            for op_id, by_variant in sensitivity.omega.items()
            if variant in by_variant and op_id in sensitivity.shifts
        )
        rated = plan_error(sensitivity, {OpId("twice"): variant, OpId("frozen"): variant})
        assert rated - noise == pytest.approx(truth, rel=0.05)


def test_weights_are_as_they_were_after_an_update_is_observed():
    job = job_of()
    model, _ = collected(job)
    mine, theirs = model.state_dict(), job.model.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_only_variants_that_store_a_weight_and_weights_that_can_be_have_shifts():
    _, found = collected(job_of(), variants=[*STORED, Variant.of(Precision.BFLOAT16)])
    having = {(op_id.fqn, variant) for op_id, variant, term in found if term in terms.SHIFTS}
    assert having == {(name, variant) for name in ("twice", "frozen") for variant in STORED}
    assert {variant for op_id, variant, _ in found if op_id.fqn == "after"} == {Variant.of(Precision.BFLOAT16)}
    _, plain = collected(job_of(), variants=[Variant.of(Precision.BFLOAT16)])
    kept = {key: value for key, value in found.items() if key[1] == Variant.of(Precision.BFLOAT16)}
    assert kept == pytest.approx(plain)


def test_flips_behind_a_relu_count_the_error_as_noise():
    _, found = collected(job_of(torch.relu, samples=512))
    for variant in STORED:
        assert found[OpId("frozen"), variant, terms.STORED_FLIPS] >= 0
        assert math.isfinite(found[OpId("frozen"), variant, terms.STORED_NOISE])
    assert any(found[OpId("twice"), variant, terms.STORED_FLIPS] > 0 for variant in STORED)


def observed(job, collectors, variants=STORED, steps=40):
    asked = ObserveRequest(variants, warmup=0, steps=steps, batch_size=4, collectors=collectors, settled=None)
    return observe(job, trace(job), asked)


def test_omega_is_the_squared_change_and_errors_add_up_before_they_are_squared():
    """At weights that do not move, along 320 directions: a standard error of 8%."""
    job = attrs.evolve(job_of(), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    variant = STORED[0]
    sensitivity = indicate(observed(job, [HutchinsonCollector()]), trace(job), [variant])
    model = job.copy_model()
    apart = [
        moved(job, model, f"{name}.weight", error_of(model.get_parameter(f"{name}.weight").detach(), variant))
        for name in ("twice", "frozen")
    ]
    for name, derivative in zip(("twice", "frozen"), apart, strict=True):
        truth = sum(float(part.square().sum()) for part in derivative)
        rated = sum(by_variant.get(variant, 0.0) for op_id, by_variant in sensitivity.omega.items() if op_id.fqn == name)
        assert rated == pytest.approx(truth, rel=0.3)
        shifts = sensitivity.shifts[OpId(name)][variant]
        assert sum(shift**2 for shift in shifts) == pytest.approx(sensitivity.omega[OpId(name)][variant])
    together = sum(float((a + b).square().sum()) for a, b in zip(*apart, strict=True))
    plan = dict.fromkeys(sensitivity.omega, variant)
    assert plan_error(sensitivity, plan) == pytest.approx(together, rel=0.3)


def test_the_loss_is_moved_by_the_same_errors():
    job = job_of()
    observations = observed(job, [LossVarCollector()], steps=1)
    model, batch = job.copy_model().double(), job.batch(0, 4)
    weight = model.frozen.weight.requires_grad_(True)
    (gradient,) = torch.autograd.grad(F.mse_loss(model(batch.args[0].double()), batch.target.double()), weight)
    for variant in STORED:
        expected = float((error_of(weight.detach().float(), variant) * gradient).square().sum())
        (found,) = observations.values("lossvar", terms.STORED_GRAD, OpId("frozen"), variant)
        assert found == pytest.approx(expected, rel=1e-4)
    rated = indicate(observations, trace(job), STORED, "lossvar").omega[OpId("frozen")]
    (weight_noise,) = observations.values("lossvar", terms.W_VAR_GRAD, OpId("frozen"), STORED[3])
    assert weight_noise == 0.0
    assert rated[STORED[0]] > rated[STORED[1]]


def test_an_indicator_that_knows_nothing_of_storage_rates_none():
    class Other:
        name, collectors, summary = "other", ("hutchinson",), "rates anything alike"

        def omega(self, dag, variants, observations):
            return {operator.op_id: dict.fromkeys(variants, 1.0) for operator in dag.adjustable}

        def notes(self, dag, observations):
            return ()

    job = job_of()
    observations = observed(job, [HutchinsonCollector()], steps=1)
    with pytest.raises(
        ObservationError, match=r"'other' does not rate weights that are stored .* float32@nf4 are asked for; choose"
    ):
        indicate(observations, trace(job), STORED[:1], Other())
    assert STORED[0].storage is Storage.NF4


class Saturated(nn.Module):
    """Attention whose scores are large: what is stored tips it, and its derivative says little of that."""

    def __init__(self, sharpness):
        super().__init__()
        self.sharpness = sharpness
        self.before = nn.Linear(6, 16)
        self.query = nn.Linear(16, 16, bias=False).requires_grad_(False)
        self.key = nn.Linear(16, 16, bias=False).requires_grad_(False)
        self.after = nn.Linear(16, 2)

    def forward(self, x):
        h = self.before(x)
        return self.after(torch.softmax(self.sharpness * self.query(h) @ self.key(h).transpose(1, 2), -1) @ h)


@pytest.mark.parametrize("sharpness, seed", [(7, 12), (10, 12), (10, 4), (20, 3)])  # the first two need one point, the others three
def test_derivatives_on_the_way_tell_what_one_at_its_begin_does_not(monkeypatch, sharpness, seed):
    torch.manual_seed(seed)
    x, target = torch.randn(8, 12, 6), torch.randn(8, 12, 2)
    model, samples = Saturated(sharpness), 8
    job = Job(
        "saturated",
        model,
        lambda step, size: Batch((x[:size],), target=target[:size]),
        lambda output, batch: F.mse_loss(output, batch.target),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=samples,
    )
    variant = Variant.named("float32@nf4")

    def gradient(names):
        copied = copy.deepcopy(model).double()
        for name in names:
            copied.get_parameter(f"{name}.weight").data += error_of(model.get_parameter(f"{name}.weight").detach(), variant)
        loss = F.mse_loss(copied(x.double()), target.double())
        return flat(torch.autograd.grad(loss, [parameter for parameter in copied.parameters() if parameter.requires_grad]))

    truth = float((gradient(("query", "key")) - gradient(())).square().sum())

    def rated():
        asked = ObserveRequest([variant], warmup=0, steps=1, batch_size=samples, collectors=[HutchinsonCollector()], settled=None)
        sensitivity = indicate(observe(job, trace(job), asked), trace(job), [variant])
        return plan_error(sensitivity, {OpId("query"): variant, OpId("key"): variant}) / truth

    assert rated() == pytest.approx(1, abs=0.1)
    monkeypatch.setattr(_Pass, "_follow", lambda *_: None)
    assert rated() > 1.2
