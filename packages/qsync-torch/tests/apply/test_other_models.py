"""A plan meets another model than it was made for, or one that was changed since: refused by name, or found again."""

import gc
import warnings

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.exc import InternalTorchDynamoError

from qsync_core.errors import PlanError
from qsync_core.ir.op_id import OpId
from qsync_torch import apply_

from .small_models import BFLOAT16, FLOAT32, INT8, ConvNet, images, named
from .test_apply import plan_of
from .two_layers import BOTH, TwoLayers, equal, gradients_of, step_of


def test_calls_that_the_plan_does_not_name_are_refused_and_unused_weights_are_not(x):
    class Head(TwoLayers):
        def __init__(self):
            super().__init__()
            self.extra = nn.Parameter(torch.randn(16, 16))
            self.uses = False

        def forward(self, x):
            y = self.body(x)
            return F.linear(y, self.extra) if self.uses else y

    model = Head()
    apply_(model, plan_of(BOTH))
    model(x)
    model.uses = True
    with pytest.raises(PlanError, match=r"extra runs but the plan does not name it.*trace this model"):
        model(x)
    assert model.eval()(x).shape == (4, 16)


def test_a_rank_in_full_precision_checks_what_it_runs_too(x):
    plan = plan_of(named(a=FLOAT32, b=FLOAT32))

    class Inside(TwoLayers):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.body(x)

    inside, cast, longer = Inside(), TwoLayers(), TwoLayers()
    longer.c = nn.Linear(16, 16)
    for model in (inside, cast, longer):
        apply_(model, plan)
    with pytest.raises(PlanError, match="operator a#0 runs under"):
        inside(x)
    with pytest.raises(PlanError, match="weight of a is bfloat16"):
        cast.bfloat16()(x.bfloat16())
    longer.body = lambda t: longer.c(longer.a(t))
    with pytest.raises(PlanError, match="c runs but the plan does not name it"):
        longer(x)


@pytest.mark.parametrize("variant", [INT8, BFLOAT16, FLOAT32])
def test_a_bias_in_16_bits_is_refused(variant):
    model = TwoLayers()
    model.b.bias = nn.Parameter(model.b.bias.detach().bfloat16())
    with pytest.raises(PlanError, match=r"the bias of b is bfloat16, and plans are for float32 parameters"):
        apply_(model, named(a=INT8, b=variant))


def test_a_plan_for_other_widths_is_refused():
    plan = attrs.evolve(plan_of(BOTH), weight_shapes={"a": (16, 16), "b": (32, 16)})
    with pytest.raises(PlanError, match=r"the weight of b has shape \[16, 16\] in this TwoLayers and \[32, 16\] in the plan"):
        apply_(TwoLayers(), plan)


def test_parameters_of_sixteen_bits_are_refused(x):
    with pytest.raises(PlanError, match=r"weight of a is bfloat16.*call model.float\(\).*amp='bfloat16'"):
        apply_(TwoLayers().bfloat16(), BOTH)
    model = TwoLayers()
    apply_(model, BOTH)
    model.bfloat16()
    with pytest.raises(PlanError, match="weight of a is bfloat16"):
        model(x.bfloat16())


def test_a_plan_of_the_inner_or_outer_model_names_where_it_fits():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = TwoLayers()

    with pytest.raises(PlanError, match=r"it fits the module 'net' inside this one: call apply_ on model\.net"):
        apply_(Wrapper(), plan_of(BOTH))
    outer = plan_of(named(**{"net.a": INT8, "net.b": INT8}))
    with pytest.raises(PlanError, match=r"a module that holds this one as 'net': call apply_ on that one"):
        apply_(TwoLayers(), outer)


def test_a_model_on_the_meta_device_takes_its_plan_and_is_checked_when_it_runs(x):
    with torch.device("meta"):
        model = TwoLayers()
    apply_(model, BOTH, seed=5)
    model.to_empty(device="cpu")
    model.load_state_dict(TwoLayers().state_dict())
    assert equal(gradients_of(model, model(x).square().sum()), step_of(TwoLayers(), x))


def test_data_parallel_is_refused():
    model = ConvNet()
    apply_(model, named(fc=INT8))
    with pytest.raises(PlanError, match="before it is wrapped"):
        apply_(nn.DataParallel(ConvNet()), named(fc=INT8))
    assert model(images()).shape == (4, 4)


def test_data_parallel_around_a_planned_model_is_refused_where_it_copies_it():
    model = ConvNet()
    applied = apply_(model, named(fc=INT8))
    with pytest.raises(PlanError, match=r"start a process for each GPU with torchrun and use Distributed.*or call remove"):
        model.fc._replicate_for_data_parallel()  # what torch.nn.parallel.replicate calls for each module
    applied.remove()
    model.fc._replicate_for_data_parallel()


def test_an_operator_of_the_plan_that_the_first_step_does_not_run_is_named(x):
    class Off(TwoLayers):
        def body(self, x):
            return torch.einsum("bi,oi->bo", x, self.b.weight) + self.a(x)

    model = Off()
    apply_(model, plan_of(BOTH))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x).sum().backward()
    with pytest.warns(UserWarning, match="the plan lowers b#0, which the first step did not run"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x).sum().backward()
        optimizer.step()


def test_another_model_s_step_before_the_planned_one_runs_names_nothing(x):
    gc.collect()  # models of other tests, whose plans are in force
    model, other = TwoLayers(), nn.Linear(16, 1)
    apply_(model, plan_of(BOTH))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other(x).sum().backward()
        torch.optim.SGD(other.parameters(), 0.1).step()
        model(x).sum().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()


def test_an_unknown_weight_is_no_operator():
    with pytest.raises(PlanError, match="has no linear or convolution emb"):
        apply_(nn.ModuleDict({"emb": nn.Embedding(4, 4)}), {OpId("emb"): INT8})


@pytest.mark.parametrize("padding", [1, (2, 0), "same"])
def test_padding_that_is_circular_since_the_plan_was_applied(padding):
    model, x = nn.Sequential(nn.Conv2d(2, 3, 3, padding=padding)), torch.randn(1, 2, 5, 5)
    applied = apply_(model, {OpId("0"): INT8})
    model[0].padding_mode = "circular"
    y = model(x)
    applied.remove()
    assert 0 < (y - model(x)).norm() < 0.03 * y.norm()


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def another_class(model, monkeypatch):
    model.fc.__class__ = Doubled


def another_forward(model, monkeypatch):
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: 2 * F.linear(x, self.weight, self.bias))


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x):
        return self.fc(x)


@pytest.mark.parametrize("changed", [another_class, another_forward])
@pytest.mark.parametrize("called", ["model", "compiled"])
def test_a_class_that_is_patched_after_apply_is_refused(changed, called, monkeypatch):
    model, x = nn.Sequential(Body()), torch.randn(4, 16)
    apply_(model, named(**{"0.fc": FLOAT32}))
    if called != "compiled":
        model(x)
    changed(model[0], monkeypatch)
    torch._dynamo.reset()
    run = model if called == "model" else torch.compile(model, backend="eager")
    cls = "Doubled" if changed is another_class else "Linear"
    error = InternalTorchDynamoError if called == "compiled" else PlanError
    with pytest.raises(error, match=f"the class of '0.fc', {cls}, has another forward than when the plan was applied"):
        run(x)


@pytest.mark.parametrize("name", ["linear", "conv2d"])
@pytest.mark.parametrize("called", ["model", "compiled"])
def test_a_function_of_pytorchs_that_the_script_replaces_is_refused(name, called, monkeypatch):
    model, x, own = nn.Sequential(Body()), torch.randn(4, 16), getattr(F, name)

    def doubled(*args):
        return 2 * own(*args)

    apply_(model, named(**{"0.fc": INT8}))
    torch._dynamo.reset()
    monkeypatch.setattr(F, name, doubled)
    error, run = (PlanError, model) if called == "model" else (InternalTorchDynamoError, torch.compile(model, backend="eager"))
    with pytest.raises(error, match=rf"torch\.nn\.functional\.{name} is .*doubled of the script"):
        run(x)


def of_the_class(layer, monkeypatch):
    own = nn.Conv2d._conv_forward
    monkeypatch.setattr(nn.Conv2d, "_conv_forward", lambda self, *args: 2 * own(self, *args))


def of_the_instance(layer, monkeypatch):
    """As diffusion models are made to tile."""
    layer._conv_forward = lambda x, weight, bias: F.conv2d(F.pad(x, (1, 1, 1, 1), "circular"), weight, bias)


@pytest.mark.parametrize("patch", [of_the_class, of_the_instance])
def test_a_convolution_that_is_patched_after_apply_is_refused(patch, monkeypatch):
    model, x = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1)), torch.randn(1, 2, 5, 5)
    apply_(model, named(**{"0": INT8}))
    model(x)
    patch(model[0], monkeypatch)
    with pytest.raises(PlanError, match=r"has another (forward|_conv_forward) than when the plan was applied"):
        model(x)


@pytest.mark.parametrize("stays", [True, False])
def test_a_module_that_leaves_the_model_after_the_first_step_is_named(x, stays):
    model = TwoLayers()
    apply_(model, plan_of(BOTH))
    model(x)
    model.a = nn.Sequential(model.a if stays else nn.Linear(16, 16))  # adapters stand around the layer
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model(x)
    assert [str(one.message).partition(",")[0] for one in said] == ([] if stays else ["the plan lowers a#0"])


def test_a_class_of_the_script_that_is_derived_from_pytorchs_runs_as_planned():
    class Tagged(nn.Linear):
        pass

    torch.manual_seed(0)
    model, x = nn.Sequential(Tagged(16, 16)), torch.randn(4, 16)
    exact = model(x)
    apply_(model, named(**{"0": INT8}))
    assert 0 < (model(x) - exact).norm() < 0.03 * exact.norm()
    assert type(model[0]).__name__ == "Tagged"
    assert isinstance(model[0], Tagged)
