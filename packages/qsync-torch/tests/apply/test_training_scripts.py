"""Models as training scripts have them: called in parts and in other ways, patched, evaluated.

The reference is the same model called in the plainest way, with the same seed and step: both must agree to the last bit.
"""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from qsync_core.ir.op_id import OpId
from qsync_torch import apply_
from qsync_torch.apply import planned_model

from .small_models import FLOAT32, INT8, images, named
from .test_apply import plan_of
from .two_layers import BOTH, TwoLayers, equal, step_of


@pytest.mark.parametrize("how", ["forward", "functional"])
@pytest.mark.parametrize("whole", [True, False])
def test_an_operator_is_its_weight_however_it_is_called(x, how, whole):
    variants = plan_of(BOTH) if whole else BOTH
    assert equal(step_of(TwoLayers(how), x, variants), step_of(TwoLayers(), x, variants))


@pytest.mark.parametrize("patch", ["lambda", "partial", "subclass"])
def test_a_forward_of_ones_own_keeps_its_effect_and_runs_as_planned(x, patch):
    class Doubled(nn.Linear):
        def forward(self, input):
            return 2 * F.linear(input, self.weight, self.bias)

    def model(how):
        found = TwoLayers()
        if how == "subclass":
            layer = Doubled(16, 16)
            layer.load_state_dict(found.b.state_dict())
            found.b = layer
        elif how == "lambda":
            own = found.b.forward
            found.b.forward = lambda input: 2 * own(input)
        elif how == "partial":
            found.b.forward = lambda input: 2 * F.linear(input, found.b.weight, found.b.bias)
        else:
            found.body = lambda x: 2 * found.b(torch.relu(found.a(x)))
        return found

    expected = step_of(model("outside"), x, plan_of(named(a=FLOAT32, b=INT8)))
    assert equal(step_of(model(patch), x, plan_of(named(a=FLOAT32, b=INT8))), expected)
    assert not equal(step_of(model(patch), x, plan_of(named(a=FLOAT32, b=FLOAT32))), expected)


def test_more_fewer_and_reordered_calls_keep_each_weight_in_its_format(x):
    class Shuffled(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.low, self.full = nn.Parameter(torch.randn(16, 16) / 4), nn.Parameter(torch.randn(16, 16) / 4)
            self.order = ("low", "full")

        def forward(self, x):
            return [F.linear(x, getattr(self, name)) for name in self.order]

    model = Shuffled()
    apply_(model, plan_of(named(low=INT8, full=FLOAT32)), seed=2)
    for order in (("full",), ("full", "low"), ("low", "low", "full", "full"), ("low",)):
        model.order = order
        for name, y in zip(order, model(x), strict=True):
            exact = F.linear(x, dict(model.named_parameters())[name])
            assert torch.equal(y, exact) == (name == "full")


def test_parts_that_are_called_by_themselves_are_lowered_in_every_step_with_new_numbers(x):
    model = TwoLayers("functional")
    model.part = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
    exact = model.part(x)
    applied = apply_(model, named(**{"a": INT8, "b": INT8, "part.0": INT8}))
    outputs = []
    for run in (model.part, lambda x: F.relu(model.part[0](x)), lambda x: F.relu(F.linear(x, *parameters(model.part[0])))) * 2:
        outputs.append(run(x))
        applied.advance()
    assert applied.step == 6
    assert all(0 < (y - exact).norm() / exact.norm() < 0.05 for y in outputs)
    assert len({tuple(y.flatten().tolist()) for y in outputs}) == 6


def test_an_optimizers_steps_count_for_the_plan_in_force_alone(x):
    """One plan after another on a model, with one optimizer; a removed plan keeps the step that it came to."""
    model = TwoLayers()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

    first = apply_(model, BOTH)
    train(3)
    first.remove()
    train(1)
    second = apply_(model, BOTH)
    train(2)
    assert (first.step, second.step) == (3, 2)


def parameters(layer):
    return layer.weight, layer.bias


def test_a_model_that_calls_itself(x):
    class Recursive(TwoLayers):
        def forward(self, x, depth=2):
            return self.body(x) if depth == 0 else self.forward(self.body(x), depth - 1) + self(x, depth - 1)

    model = Recursive()
    expected = model(x)
    apply_(model, BOTH)
    y = model(x)
    y.sum().backward()
    assert 0 < (y - expected).norm() < 0.05 * expected.norm()


def test_a_patch_of_pytorchs_class_stays_in_force(x, monkeypatch):
    own = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, input: 2 * own(self, input))
    plain = TwoLayers()(x)
    model = TwoLayers()
    apply_(model, plan_of(BOTH))
    assert 0 < (model(x) - plain).norm() / plain.norm() < 0.05


def test_a_patched_padding_stays_in_force():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1)), images()

    def circular(self, input, weight, bias):
        return F.conv2d(F.pad(input, (1, 1, 1, 1), mode="circular"), weight, bias)

    model[0]._conv_forward = circular.__get__(model[0])
    plain = model(x)
    apply_(model, named(**{"0": INT8}))
    assert 0 < (model(x) - plain).norm() / plain.norm() < 0.05


def test_eval_runs_in_full_precision_and_moves_no_random_numbers(x):
    model = TwoLayers()
    exact, state = model(x), torch.get_rng_state()
    apply_(model, plan_of(BOTH), seed=3)
    first = model(x)
    model.eval()
    assert torch.equal(model(x), exact)
    assert torch.equal(model(x), exact)
    assert torch.equal(model.a(x), F.linear(x, model.a.weight, model.a.bias))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model.train()(x), first)


def test_eval_under_the_plan_where_that_is_asked_for(x):
    model = TwoLayers().eval()
    exact = model(x)
    apply_(model, BOTH, lower_eval=True)
    assert not torch.equal(model(x), exact)


@pytest.mark.parametrize("whole", [True, False])
def test_a_feature_extractor_of_the_layers_evaluates_in_full_precision(x, whole):
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    variants = {OpId("0"): INT8, OpId("2"): INT8}
    exact = model[0](x).relu()
    apply_(model, plan_of(variants) if whole else variants)
    features = nn.Sequential(*list(model.children())[:-1]).eval()
    with torch.no_grad():
        assert torch.equal(features(x), exact)
    assert not torch.equal(features(x), exact)  # it trains, in eval mode


class Counts(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_a_mode_of_the_script_around_the_model_is_named():
    planned_model._say_once.cache_clear()
    model, x = nn.Sequential(nn.Linear(16, 16)), torch.randn(4, 16)
    apply_(model, named(**{"0": FLOAT32}))
    with torch.device("cpu"), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)
    with Counts(), pytest.warns(UserWarning, match="Counts, a TorchFunctionMode, is active around a model under a plan"):
        model(x)


class Around(torch.optim.SGD):
    """An optimizer that steps another one, as ZeroRedundancyOptimizer does."""

    def __init__(self, inner):
        super().__init__(inner.param_groups[0]["params"], lr=0.1)
        self.inner = inner

    def step(self, closure=None):
        self.inner.step(closure)


def test_an_optimizer_and_the_one_around_it_count_one_step(x):
    model = TwoLayers()
    applied = apply_(model, BOTH)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = Around(inner)
    for _ in range(3):
        model(x).sum().backward()
        optimizer.step()
    assert applied.step == 3
    inner.step()
    assert applied.step == 4


def test_an_optimizer_that_gets_the_models_parameters_later_counts(x):
    model, other = TwoLayers(), nn.Linear(2, 2)
    applied = apply_(model, BOTH)
    of_part, later = torch.optim.SGD(model.a.parameters(), lr=0.01), torch.optim.SGD(other.parameters(), lr=0.01)
    of_part.step()
    later.step()
    assert applied.step == 1
    later.add_param_group({"params": model.b.parameters()})
    later.step()
    assert applied.step == 2
