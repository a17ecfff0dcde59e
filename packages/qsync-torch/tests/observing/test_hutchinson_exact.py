"""The collector against Jacobians taken row by row in float64, the random direction averaged out exactly."""

import copy
import functools
import math
from collections import Counter

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_core.ir import observations as terms
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_torch.job import Batch, Job
from qsync_torch.observing import hutchinson
from qsync_torch.observing.collector import ObservedStep
from qsync_torch.observing.hutchinson import HutchinsonCollector, random_signs
from qsync_torch.observing.montecarlo import MonteCarloCollector, squared_norm
from qsync_torch.tracing.trace import trace

FLOAT32, BF16, INT8_FORMAT = Precision.FLOAT32, Precision.BFLOAT16, Precision.INT8
BFLOAT16 = Variant.of(BF16)
INT8 = Variant.of(INT8_FORMAT, output=Precision.FLOAT32)
FORWARD = attrs.evolve(INT8, grad_input=FLOAT32, grad_weight=FLOAT32)
PER_TENSOR = attrs.evolve(FORWARD, w_granularity=Granularity.PER_TENSOR)
NEAREST = attrs.evolve(FORWARD, rounding=Rounding.NEAREST)
FLOOR = attrs.evolve(FORWARD, rounding=Rounding.FLOOR)
WEIGHT_GRADIENT = attrs.evolve(INT8, grad_input=FLOAT32, grad_weight=INT8_FORMAT)
INPUT_GRADIENT = attrs.evolve(INT8, grad_input=INT8_FORMAT, grad_weight=FLOAT32)
BOTH_GRADIENTS = attrs.evolve(INT8, grad_input=INT8_FORMAT, grad_weight=INT8_FORMAT)
BOTH_PER_TENSOR = attrs.evolve(BOTH_GRADIENTS, w_granularity=Granularity.PER_TENSOR)
AFFINE, AFFINE_FLOOR = attrs.evolve(FORWARD, symmetric=False), attrs.evolve(FLOOR, symmetric=False)
LADDER = (
    BFLOAT16, INT8, FORWARD, PER_TENSOR, NEAREST, FLOOR, WEIGHT_GRADIENT, INPUT_GRADIENT, BOTH_GRADIENTS, BOTH_PER_TENSOR, AFFINE,
    AFFINE_FLOOR,
)  # fmt: skip


class Linears(nn.Module):
    """Nothing but products: with a squared error, the loss is a polynomial."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 2, stride=2, padding=1, groups=2)
        self.fc = nn.Linear(16, 2)

    def forward(self, x):
        return self.fc(self.conv(x).flatten(1))

    @staticmethod
    def written_out(call, p, x):
        product = lambda x, w, b: F.conv2d(x, w, b, 2, 1, 1, 2)  # noqa: E731
        y = call("conv", x, p["conv.weight"], p["conv.bias"], product).flatten(1)
        return call("fc", y, p["fc.weight"], p["fc.bias"])


class Mixed(nn.Module):
    """A frozen first layer, a module called twice, layer norm, softmax and a functional linear without bias."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 4).requires_grad_(False)
        self.twice = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x):
        y = self.twice(F.gelu(self.first(x)))
        y = self.norm(y + self.twice(torch.softmax(y, -1)))
        return F.linear(y, self.weight)

    @staticmethod
    def written_out(call, p, x):
        y = call("twice", F.gelu(call("first", x, p["first.weight"], p["first.bias"])), p["twice.weight"], p["twice.bias"])
        y = y + call("twice#1", torch.softmax(y, -1), p["twice.weight"], p["twice.bias"])
        return call("weight", F.layer_norm(y, (4,), p["norm.weight"], p["norm.bias"]), p["weight"], None)


class Products(nn.Module):
    """Weights that are stored as inputs by outputs, one of them read by two calls."""

    def __init__(self):
        super().__init__()
        self.first, self.twice = nn.Parameter(torch.randn(5, 4) / 2), nn.Parameter(torch.randn(4, 4) / 2)
        self.bias, self.out = nn.Parameter(torch.randn(4)), nn.Linear(4, 2)

    def forward(self, x):
        y = torch.addmm(self.bias, F.gelu(x @ self.first), self.twice)
        return self.out(y + torch.addmm(self.bias, torch.softmax(y, -1), self.twice))

    @staticmethod
    def written_out(call, p, x):
        y = call("twice", F.gelu(call("first", x, p["first"].t(), None)), p["twice"].t(), p["bias"])
        y = y + call("twice#1", torch.softmax(y, -1), p["twice"].t(), p["bias"])
        return call("out", y, p["out.weight"], p["out.bias"])


class Attention(nn.Module):
    """Fused attention with dropout, behind dropout."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(4, 12)
        self.out = nn.Linear(4, 2)

    def forward(self, x):
        q, k, v = (part.unsqueeze(1) for part in self.qkv(F.dropout(x, 0.5)).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, dropout_p=0.3).squeeze(1))

    @staticmethod
    def written_out(call, p, x):
        x = x * torch.empty(x.shape).bernoulli_(0.5) * 2
        q, k, v = call("qkv", x, p["qkv.weight"], p["qkv.bias"]).chunk(3, -1)
        weights = torch.softmax(q @ k.transpose(1, 2) / 2, -1)
        weights = weights * torch.empty(weights.shape).bernoulli_(0.7) / 0.7
        return call("out", weights @ v, p["out.weight"], p["out.bias"])


SHAPES = {Linears: (2, 2, 3), Mixed: (5,), Products: (5,), Attention: (3, 4)}


def _step(kind):
    torch.manual_seed(5)

    def batch(step, size):
        x = torch.randn(size, *SHAPES.get(kind, (4,)), generator=torch.Generator().manual_seed(step))
        return Batch((x,), target=torch.linspace(-1, 1, size))

    def loss(output, batch):
        return (output.flatten(1) - batch.target[:, None]).square().mean()

    job = Job("net", kind(), batch, loss, lambda parameters: torch.optim.SGD(parameters, lr=0.1), batch_size=4)
    return ObservedStep(job, copy.deepcopy(job.model).train(), trace(job), job.batch(0, 4), 0, seed=3)


class Reference:
    """By operator and place: the tensor there, and the Jacobian of all trainable gradients by noise added to it."""

    def __init__(self, step):
        self._noise, self.values, self._terms = {}, {}, []
        p = {name: value.detach().double().requires_grad_() for name, value in step.model.named_parameters()}
        trained = [p[name] for name, value in step.model.named_parameters() if value.requires_grad]
        batch = step.batch
        torch.manual_seed(step.seed)
        output = type(step.model).written_out(self._call, p, batch.args[0].double())
        loss = step.job.loss(output, Batch(target=batch.target.double()))
        for (name, place), noise in list(self._noise.items()):
            if place in ("y", "x", "w", "b"):
                # What enters backward from the output, and what this operator alone hands to its input, its weight and its bias.
                self.values[name, {"y": "g", "x": "gi", "w": "gw", "b": "gb"}[place]] = torch.autograd.grad(
                    loss, noise, retain_graph=True
                )[0]
        gradients = torch.autograd.grad(loss + sum(self._terms), trained, create_graph=True)
        rows: dict = {key: [] for key in self._noise}
        for element in torch.cat([g.flatten() for g in gradients]):
            found = torch.autograd.grad(element, self._noise.values(), retain_graph=True, allow_unused=True, materialize_grads=True)
            for key, row in zip(self._noise, found, strict=True):
                rows[key].append(row)
        self.jacobians = {key: torch.stack(of) for key, of in rows.items()}
        self.parameters = len(next(iter(rows.values())))
        if ("twice", "w") in rows:
            # Both calls read one rounded weight and one bias; each counts half of what they do.
            for place in "wb":
                both = (self.jacobians["twice", place] + self.jacobians["twice#1", place]) / math.sqrt(2)
                self.jacobians["twice", place] = self.jacobians["twice#1", place] = both

    def _call(self, name, x, weight, bias, product=F.linear):
        def noisy(place, tensor):
            self._noise[name, place] = torch.zeros_like(tensor).requires_grad_()
            self.values[name, place] = tensor.detach()
            return tensor + self._noise[name, place]

        own = noisy("x", x)
        y = noisy("y", product(own, noisy("w", weight), bias if bias is None else noisy("b", bias)))
        # ⟨e, y⟩ in the loss adds e to the gradient of y; with one operand cut off, to the copy that one product reads.
        for place, tensor in (
            ("g", y),
            ("gi", x),
            ("g for w", product(x.detach(), weight, None)),
            ("g for x", product(x, weight.detach(), None)),
            ("g for both", product(x, weight, None)),
        ):
            self._noise[name, place] = torch.zeros_like(tensor).requires_grad_()
            self._terms.append((self._noise[name, place] * tensor).sum())
        return y

    def squares(self, name, place, variance):
        """Σ σ²·‖∂g/∂e‖²."""
        return float((variance * self.jacobians[name, place].square().sum(0)).sum())


def _spacing(x, per_channel):
    largest = x.abs().amax(dim=tuple(range(1, x.dim())), keepdim=True) if per_channel else x.abs().max()
    return (largest / 127).expand_as(x)


def _affine_spacing(x):
    """The range, of which 0 is a part, over 255 where it begins or ends there, else over 254."""
    low, high = min(0.0, float(x.min())), max(0.0, float(x.max()))
    return torch.full_like(x, (high - low) / (255 if low == 0 or high == 0 else 254))


def _stochastic(x, per_channel=False, affine=False):
    s = _affine_spacing(x) if affine else _spacing(x, per_channel)
    residual = x / s - torch.floor(x / s)
    return s**2 * residual * (1 - residual)


def _bfloat16(x):
    return (x - x.float().bfloat16().double()).square()


def _bfloat16_by_magnitude(x):
    return torch.tensor([4.0 ** (math.frexp(v)[1] - 1 - 7) / 12 if v else 0.0 for v in x.flatten().tolist()]).view(x.shape)


@functools.cache
def _observed(kind):
    """(step, sums over all coordinate directions of the terms of every operator and variant, reference)."""
    step = _step(kind)
    reference = Reference(step)
    totals = Counter()
    with pytest.MonkeyPatch.context() as patch:
        for index in range(reference.parameters):
            patch.setattr(hutchinson, "random_signs", lambda tensors, seed, index=index: _coordinate(tensors, index))
            totals.update(HutchinsonCollector().collect_step(step, LADDER))
    return step, totals, reference


@pytest.fixture(params=[Linears, Mixed, Products, Attention], ids=lambda kind: kind.__name__)
def observed(request):
    return _observed(request.param)


def _coordinate(tensors, index):
    flat = torch.zeros(sum(tensor.numel() for tensor in tensors))
    flat[index] = 1
    return [part.view_as(tensor).clone() for part, tensor in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True)]


def _names(step):
    """Operators, and what they are called where the model is written out."""
    for operator in step.dag.adjustable:
        yield operator.op_id, str(operator.op_id).removesuffix("#0")


def _check(totals, key, expected):
    assert totals[key] == pytest.approx(expected, rel=1e-3, abs=1e-14)


@pytest.mark.parametrize(("variant", "per_channel"), [(FORWARD, True), (PER_TENSOR, False)], ids=["per-channel", "per-tensor"])
def test_stochastic_operands(observed, variant, per_channel):
    step, totals, reference = observed
    for op_id, name in _names(step):
        expected = reference.squares(name, "x", _stochastic(reference.values[name, "x"]))
        expected += reference.squares(name, "w", _stochastic(reference.values[name, "w"], per_channel))
        assert expected > 0
        _check(totals, (op_id, variant, terms.OPERANDS), expected)


def test_affine_activations(observed):
    """The weight is rounded as without zero points."""
    step, totals, reference = observed
    for op_id, name in _names(step):
        weight = reference.squares(name, "w", _stochastic(reference.values[name, "w"], True))
        activation = reference.squares(name, "x", _stochastic(reference.values[name, "x"], affine=True))
        _check(totals, (op_id, AFFINE, terms.OPERANDS), activation + weight)


@pytest.mark.parametrize("affine", [False, True], ids=["symmetric", "affine"])
def test_nearest_and_floored_operands(observed, affine):
    """Floor: what all elements' mean errors, -s/2 each, do together, squared; an exact zero has none.  Calls of one module are
    shifted alike, and each counts half of what both do."""
    step, totals, reference = observed

    def spacing(value, place):
        return _affine_spacing(value) if affine and place == "x" else _spacing(value, place == "w")

    shifts = {}
    for _, name in _names(step):
        shifts[name] = 0.0
        for place in ("x", "w"):
            value = reference.values[name, place]
            mean = torch.where(value == 0, 0, -spacing(value, place) / 2)
            # Of the weight that two calls read, 1/√2 is in the Jacobian.
            share = math.sqrt(0.5) if place == "w" and name.startswith("twice") else 1.0
            shifts[name] = shifts[name] + share * (reference.jacobians[name, place] * mean).flatten(1).sum(1)
    if "twice" in shifts:
        shifts["twice"] = shifts["twice#1"] = (shifts["twice"] + shifts["twice#1"]) / math.sqrt(2)
    for op_id, name in _names(step):
        squares, variance = 0.0, 0.0
        for place in ("x", "w"):
            value = reference.values[name, place]
            s = spacing(value, place)
            squares += reference.squares(name, place, (value - s * torch.round(value / s)).square())
            variance += reference.squares(name, place, torch.where(value == 0, 0, s**2 / 12))
        if not affine:
            _check(totals, (op_id, NEAREST, terms.OPERANDS), squares)
        _check(totals, (op_id, AFFINE_FLOOR if affine else FLOOR, terms.OPERANDS), variance + float(shifts[name].square().sum()))


def test_bfloat16_operands_and_output(observed):
    step, totals, reference = observed
    for op_id, name in _names(step):
        cast = [place for place in "xwb" if (name, place) in reference.values]
        operands = sum(reference.squares(name, place, _bfloat16(reference.values[name, place])) for place in cast)
        _check(totals, (op_id, BFLOAT16, terms.OPERANDS), operands)
        output = reference.squares(name, "y", _bfloat16(reference.values[name, "y"]))
        assert output > 0
        _check(totals, (op_id, BFLOAT16, terms.OUTPUT), output)
        assert (op_id, INT8, terms.OUTPUT) not in totals


def test_bfloat16_gradients(observed):
    """One copy of the incoming gradient for both products, and all results in bfloat16, the weight's and the bias's only of
    bfloat16 products."""
    step, totals, reference = observed
    first = next(iter(_names(step)))[1]
    trained = {name for name, value in step.model.named_parameters() if value.requires_grad}
    for op_id, name in _names(step):
        expected = reference.squares(name, "g", _bfloat16(reference.values[name, "g"]))
        if name != first:
            expected += reference.squares(name, "gi", _bfloat16_by_magnitude(reference.values[name, "gi"]))
        _check(totals, (op_id, INT8, terms.GRADIENT), expected)
        if {f"{name.removesuffix('#1')}.weight", name.removesuffix("#1")} & trained:
            # Whatever the direction, and they are as many as there are parameters.
            written = [reference.values[name, place] for place in ("gw", "gb") if (name, place) in reference.values]
            expected += reference.parameters * sum(float(_bfloat16(gradient).sum()) for gradient in written)
        _check(totals, (op_id, BFLOAT16, terms.GRADIENT), expected)
        assert (op_id, FORWARD, terms.GRADIENT) not in totals


def test_gradients_of_which_products_read_a_lower_format(observed):
    """The copy that the input's gradient reads is of the gradient times the weight's scales; the bias's reads none of 8 bits."""
    step, totals, reference = observed
    frozen = {name.removesuffix(".weight") for name, value in step.model.named_parameters() if not value.requires_grad}
    without_input_gradient = {operator.op_id for operator in step.dag.adjustable if 0 in operator.no_grad_inputs}
    for op_id, name in _names(step):
        grad = reference.values[name, "g"]
        scale = 1.0 if op_id in without_input_gradient else _spacing(reference.values[name, "w"], True)[:, 0]
        plain, multiplied = _stochastic(grad), _stochastic(grad * scale) / scale**2
        if name not in frozen:
            _check(totals, (op_id, WEIGHT_GRADIENT, terms.GRADIENT), reference.squares(name, "g for w", plain))
        _check(totals, (op_id, INPUT_GRADIENT, terms.GRADIENT), reference.squares(name, "g for x", multiplied))
        _check(totals, (op_id, BOTH_GRADIENTS, terms.GRADIENT), reference.squares(name, "g for both", multiplied))
        _check(totals, (op_id, BOTH_PER_TENSOR, terms.GRADIENT), reference.squares(name, "g for both", plain))


def test_random_signs_are_independent():
    """Terms are squares of what is linear in the direction: with uncorrelated signs their mean is the sum over coordinates."""
    tensors = [torch.empty(3), torch.empty(2, 2)]
    drawn = torch.stack([torch.cat([t.flatten() for t in random_signs(tensors, seed)]) for seed in range(4000)])
    assert drawn.unique().tolist() == [-1, 1]
    assert torch.equal(drawn[7], torch.cat([t.flatten() for t in random_signs(tensors, 7)]))
    assert drawn.mean(0).abs().max() < 5 / math.sqrt(4000)
    assert (drawn.T @ drawn / 4000 - torch.eye(7)).abs().max() < 5 / math.sqrt(4000)


class Turned(nn.Module):
    """A trained vector of complex numbers, as itself or as pairs."""

    def __init__(self, pairs=False):
        super().__init__()
        self.first, self.out, self.pairs = nn.Linear(4, 4), nn.Linear(4, 2), pairs
        numbers = torch.randn(4, 2)
        self.phase = nn.Parameter(numbers if pairs else torch.view_as_complex(numbers))

    def forward(self, x):
        return self.out((self.first(x) * (torch.view_as_complex(self.phase) if self.pairs else self.phase)).abs())


class TurnedPairs(Turned):
    def __init__(self):
        super().__init__(pairs=True)


def test_a_complex_parameter_is_its_two_parts():
    found = [HutchinsonCollector().collect_step(_step(kind), LADDER) for kind in (Turned, TurnedPairs)]
    assert found[0].keys() == found[1].keys()
    for key, value in found[0].items():
        assert math.isclose(value, found[1][key], rel_tol=1e-4), key
    assert any(key.fqn == "first" for key, *_ in found[0])
    assert squared_norm([torch.tensor([3 + 4j]), None], [torch.tensor([2 + 4j]), torch.tensor([2.0])]) == 5.0


def test_purely_linear_against_the_real_quantizer():
    step, totals, _ = _observed(Linears)
    found = MonteCarloCollector(draws=150).collect_step(step, [FORWARD])
    for op_id in (OpId("conv"), OpId("fc")):
        true = sum(found[op_id, FORWARD, half] for half in (terms.FIRST_HALF, terms.SECOND_HALF)) / 2
        assert totals[op_id, FORWARD, terms.OPERANDS] == pytest.approx(true, rel=0.1)
