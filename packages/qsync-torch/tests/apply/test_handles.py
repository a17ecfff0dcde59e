"""What a script does with a planned parameter that it has read from its module, other than multiply with it."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from qsync_core.errors import PlanError
from qsync_torch import apply_

from .small_models import INT8, Functional, named
from .two_layers import BOTH, TwoLayers, equal, gradients_of


class Tied(nn.Module):
    """An embedding and a head, which a script may tie."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layer, self.head = nn.Embedding(20, 16), nn.Linear(16, 16), nn.Linear(16, 20, bias=False)

    def forward(self, tokens):
        return self.head(torch.tanh(self.layer(self.embed(tokens))))


TIED = named(layer=INT8, head=INT8)


def test_a_planned_parameter_is_one_to_whoever_asks():
    model = TwoLayers()
    model.a.weight.no_decay = True
    apply_(model, BOTH)
    assert isinstance(model.a.weight, nn.Parameter)
    assert torch.equal(model.get_parameter("a.weight"), dict(model.named_parameters())["a.weight"])
    assert not isinstance(model.a.weight.detach(), nn.Parameter)
    assert not isinstance(model.a.weight.t(), nn.Parameter)
    assert model.a.weight.no_decay
    model.b.weight.no_decay = False
    assert dict(model.named_parameters())["b.weight"].no_decay is False
    with pytest.raises(AttributeError, match="decay_rate"):
        _ = model.a.weight.decay_rate


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
def test_a_forward_that_asks_takes_the_same_branch(backend, x):
    class Asks(TwoLayers):
        def forward(self, x):
            return self.body(x) * (1 if isinstance(self.a.weight, nn.Parameter) else 2)

    model = Asks("functional")
    expected = TwoLayers("functional")
    apply_(expected, BOTH)
    apply_(model, BOTH)
    assert torch.equal((torch.compile(model, backend=backend, fullgraph=True) if backend else model)(x), expected(x))


@pytest.mark.parametrize("way", ["head to embedding", "embedding to head"])
def test_weights_are_tied_after_the_plan_was_applied(way):
    def tie(model):
        if way == "head to embedding":
            model.embed.weight = model.head.weight
        else:
            model.head.weight = model.embed.weight
        return model

    model, before = Tied(), tie(Tied())
    apply_(model, TIED)
    apply_(before, TIED)
    tie(model)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in before.named_parameters()]
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    tokens = torch.arange(12).view(3, 4)
    first, second = (gradients_of(one, F.cross_entropy(one(tokens).flatten(0, 1), tokens.flatten())) for one in (model, before))
    assert equal(first, second)


def test_a_parameter_made_of_a_planned_one_is_no_operator_of_the_plan(x):
    model, twin = TwoLayers(), TwoLayers()
    apply_(model, BOTH)
    for make in (lambda w: nn.Parameter(w.detach()), nn.Parameter, lambda w: nn.Parameter(w.detach().clone())):
        made = make(model.a.weight)
        assert isinstance(made, nn.Parameter)
        assert torch.equal(F.linear(x, made), F.linear(x, twin.a.weight))
        other = nn.Linear(16, 16, bias=False)
        other.weight = made
        assert type(other.weight) is nn.Parameter
        assert other.weight is not dict(model.named_parameters())["a.weight"]
        assert torch.equal(other(x), F.linear(x, twin.a.weight))
        other(x).sum().backward()
        assert torch.equal(other.weight.grad, x.sum(0).expand(16, 16))


def test_a_buffer_of_a_planned_parameter_is_a_plain_tensor():
    model, keeper = TwoLayers(), nn.Module()
    apply_(model, BOTH)
    keeper.register_buffer("initial", model.a.weight.detach())
    assert type(keeper.initial) is torch.Tensor


def test_a_copied_or_saved_handle_is_the_parameter():
    model, buffer = TwoLayers(), io.BytesIO()
    apply_(model, BOTH)
    torch.save(model.a.weight, buffer)
    buffer.seek(0)
    for kept in (copy.deepcopy(model.a.weight), torch.load(buffer)):
        assert type(kept) is nn.Parameter
        assert torch.equal(kept, model.a.weight)


def trained(make_optimizer, x, variants=BOTH):
    model = TwoLayers()
    applied = apply_(model, variants, seed=3)
    optimizer = make_optimizer(model)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    return applied, optimizer, [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("foreach", [False, True])
def test_an_optimizer_made_of_what_modules_have_steps_the_parameters(foreach, x):
    def read(model):
        biases = {"params": [model.a.bias, model.b.bias], "weight_decay": 0.0}
        return torch.optim.AdamW([{"params": [model.a.weight, model.b.weight]}, biases], lr=0.01, foreach=foreach)

    def listed(model):
        named = dict(model.named_parameters())
        biases = {"params": [named["a.bias"], named["b.bias"]], "weight_decay": 0.0}
        return torch.optim.AdamW([{"params": [named["a.weight"], named["b.weight"]]}, biases], lr=0.01, foreach=foreach)

    applied, optimizer, found = trained(read, x)
    assert applied.step == 3
    assert equal(found, trained(listed, x)[2])
    assert {type(parameter) for group in optimizer.param_groups for parameter in group["params"]} == {nn.Parameter}


def test_an_optimizer_that_has_a_parameter_twice_is_refused(x):
    def twice(model):
        others = [parameter for parameter in model.parameters() if parameter is not model.b.weight]
        return torch.optim.SGD([{"params": [model.b.weight], "lr": 0.1}, {"params": others}], lr=0.01)

    with pytest.raises(PlanError, match="the optimizer has 'weight' of Linear twice, and would step it twice"):
        trained(twice, x)


@pytest.mark.parametrize("how", ["modules", "functional"])
def test_a_parameter_that_is_given_other_data_has_gradients_of_its_new_shape(how):
    class OneLayer(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(16, 16, bias=False)

        def forward(self, x):
            return self.a(x) if how == "modules" else F.linear(x, self.a.weight)

    model = OneLayer()
    apply_(model, named(a=INT8))
    model(torch.randn(4, 16)).sum().backward()
    model.zero_grad()
    model.a.weight.data = torch.randn(24, 16)  # as an embedding that is resized
    x = torch.randn(4, 16)
    model(x).sum().backward()
    assert torch.allclose(model.a.weight.grad, x.sum(0).expand(24, 16), rtol=0.05, atol=0.1)


@pytest.mark.parametrize(
    "put", [parametrizations.weight_norm, parametrizations.orthogonal, prune.identity], ids=lambda put: put.__name__
)
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_a_weight_that_is_parametrized_after_the_plan_was_applied_is_trained(put, is_compiled, x):
    arguments = () if put is not prune.identity else ("weight",)
    late, early = TwoLayers(), TwoLayers()
    apply_(late, BOTH, seed=5)
    put(late.a, *arguments)
    put(early.a, *arguments)
    early.load_state_dict(late.state_dict())
    apply_(early, BOTH, seed=5)
    run = torch.compile(late, backend="aot_eager") if is_compiled else late
    found = dict(zip(dict(late.named_parameters()), gradients_of(late, run(x).square().sum()), strict=True))
    assert None not in found.values()
    expected = dict(zip(dict(early.named_parameters()), gradients_of(early, early(x).square().sum()), strict=True))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_a_parametrization_that_was_taken_back_leaves_the_plan(x):
    model, twin = TwoLayers(), TwoLayers()
    applied = apply_(model, BOTH, seed=5)
    parametrizations.orthogonal(model.a)
    with pytest.raises(PlanError, match="the class of a was changed after the plan was applied"):
        applied.remove()
    parametrize.remove_parametrizations(model.a, "weight", leave_parametrized=True)
    twin.load_state_dict(model.state_dict())
    applied.remove()
    assert torch.equal(model(x), twin(x))


def test_a_shallow_copy_runs_under_the_plan_as_long_as_its_model_does():
    torch.manual_seed(0)
    model = Functional()
    twin, x = copy.deepcopy(model), torch.randn(2, 4, 8)
    applied = apply_(model, named(weight=INT8), seed=5)
    shallow = copy.copy(model)
    assert torch.equal(shallow(x), model(x))
    assert not torch.equal(shallow(x), twin(x))
    applied.remove()
    assert torch.equal(shallow(x), twin(x))
