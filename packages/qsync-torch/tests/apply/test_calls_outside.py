"""What a script computes with a model's weights outside of the model's forward is refused; gradients from elsewhere are not."""

import copy
import warnings

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from nightly import each_once
from qsync_core.errors import PlanError
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_torch import apply_
from qsync_torch.apply.calls_outside import CallsOutside

from .small_models import BFLOAT16, FLOAT32, INT8, Handwritten, named
from .test_apply import plan_of


class Steps(nn.Module):
    """A model whose loss is computed in a method."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(16, 16) / 4)
        self.filters = nn.Parameter(torch.randn(4, 1, 3, 3))
        self.fc = nn.Linear(16, 4)

    def forward(self, x):
        return self.fc(F.linear(x, self.w))

    def linear(self, x):
        return self.fc(F.linear(x, self.w))

    def product(self, x):
        return self.fc(x @ self.w)

    def transposed(self, x):
        return self.fc(x @ self.w[:, :].t())

    def convolution(self, x):
        return F.conv2d(x.view(4, 1, 4, 4), self.filters).flatten(1)

    def checkpointed(self, x):
        return checkpoint(self.linear, x.requires_grad_(), use_reentrant=True)

    def own_function(self, x):
        return self.fc(Handwritten.apply(x, self.w))

    def bypassed_module(self, x):
        return F.linear(x, self.fc.weight)


VARIANTS = named(w=INT8, filters=INT8, fc=BFLOAT16)
WAYS = ["linear", "product", "transposed", "convolution", "checkpointed", "own_function", "bypassed_module"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("whole", [True, False])
def test_a_method_that_computes_with_planned_weights_is_refused_in_its_first_step(x, way, whole):
    model = Steps()
    apply_(model, plan_of(VARIANTS) if whole else VARIANTS)
    name = {"convolution": "filters", "bypassed_module": "fc"}.get(way, "w")
    with pytest.raises(PlanError, match=rf"gradient of {name} comes from a product \(\w+\).*{name}#0 has not run.*model's forward"):
        getattr(model, way)(x).square().sum().backward()


def test_autocast_around_the_method_does_not_hide_it(x):
    model = Steps()
    apply_(model, plan_of(VARIANTS))
    y = F.linear(x, model.w)
    with torch.autocast("cpu", torch.bfloat16):
        y = y + F.linear(x, model.w)
    with pytest.raises(PlanError, match="gradient of w comes from a product"):
        y.sum().backward()


def test_full_precision_by_names_is_no_reason_to_refuse(x):
    model = Steps()
    apply_(model, named(w=FLOAT32, fc=INT8))
    model.linear(x).sum().backward()


def backward(loss, model):
    loss.backward()


def gradients(loss, model):
    torch.autograd.grad(loss, [model.w], allow_unused=True)


@pytest.mark.parametrize("differentiate", [backward, gradients])
def test_calls_that_begin_later_are_refused_too(x, differentiate):
    model = Steps()
    apply_(model, plan_of(VARIANTS))
    for _ in range(5):  # a branch without the product; a penalty on all weights; an embedding of the same weight
        penalty = sum(parameter.square().sum() for parameter in model.parameters())
        (model.fc(x).sum() + penalty + F.embedding(torch.tensor([1, 2]), model.w).sum()).backward()
    for _ in range(2):  # and again, where a script goes on
        with pytest.raises(PlanError, match="gradient of w comes from a product"):
            differentiate(model.linear(x).sum(), model)


def test_a_call_of_another_operator_after_the_models_own_forward_is_refused(x):
    model = Steps()
    apply_(model, plan_of(VARIANTS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the filters do not run
        model(x).sum().backward()
    with pytest.raises(PlanError, match="gradient of filters comes from a product"):
        (model(x).sum() + model.convolution(x).sum()).backward()


def assigned(model):
    apply_(model, plan_of(VARIANTS))
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)


def materialized(model):
    model.to("meta")
    apply_(model, plan_of(VARIANTS))
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter)


def thawed(model):
    model.requires_grad_(False)
    apply_(model, plan_of(VARIANTS))
    model.requires_grad_()


def frozen(model):
    apply_(model, plan_of(VARIANTS))
    model.w.requires_grad_(False)


def evaluated(model):
    apply_(model, plan_of(VARIANTS))
    model.eval()
    model(torch.ones(4, 16)).sum().backward()
    model.train()


@pytest.mark.parametrize("prepare", [assigned, materialized, thawed, frozen, evaluated])
@pytest.mark.parametrize("differentiate", [backward, gradients])
def test_weights_are_found_whatever_happened_to_them_since(x, prepare, differentiate):
    model = Steps()
    prepare(model)
    with pytest.raises(PlanError, match="gradient of w comes from a product"):
        differentiate(model.linear(x.requires_grad_()).sum() + model.w.sum(), model)


def test_what_ran_in_eval_mode_is_told_from_what_the_script_computes(x):
    model = Steps()
    apply_(model, plan_of(VARIANTS))
    model.eval()
    y = model(x).sum()
    model.train()
    y.backward(retain_graph=True)
    with pytest.raises(PlanError, match="gradient of w comes from a product"):
        (y + model.linear(x).sum()).backward()


@each_once({"way": ["linear", "product", "convolution", "bypassed_module"], "compiler": ["eager", "aot_eager"]})
def test_a_compiled_function_that_computes_with_planned_weights_is_refused(x, compiler, way):
    model = Steps()
    apply_(model, plan_of(VARIANTS))
    torch._dynamo.reset()
    loss = torch.compile(lambda x: getattr(model, way)(x).square().sum(), backend=compiler)(x)
    with pytest.raises(PlanError, match=r"comes from a product .*has not run at all.*model's forward"):
        loss.backward()


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_checkpoint_in_a_compiled_function_does_not_hide_it(x, compiler):
    model = Steps()
    apply_(model, plan_of(VARIANTS))
    torch._dynamo.reset()
    run = lambda x: F.linear(x, model.w)  # noqa: E731
    loss = torch.compile(lambda x: checkpoint(run, x, use_reentrant=False).sum(), backend=compiler)(x.requires_grad_())
    with pytest.raises(PlanError, match="gradient of w comes from a product"):
        loss.backward()


def test_compiled_evaluations_are_not_refused(x):
    model = Steps()
    apply_(model, plan_of(VARIANTS))
    model.w.requires_grad_(False)
    torch._dynamo.reset()
    features = torch.compile(lambda x: F.linear(x, model.w), backend="aot_eager")
    with torch.no_grad():
        features(x)
    torch.compile(lambda b: b.square().sum(), backend="aot_eager")(model.fc.bias).backward()


def test_a_compiled_penalty_is_not_refused(x):
    model = Steps()
    apply_(model, plan_of(VARIANTS))
    torch._dynamo.reset()
    penalty = torch.compile(lambda w: (w @ w.t() - torch.eye(16)).square().sum() + w.norm(), backend="aot_eager")
    for _ in range(2):
        penalty(model.w).backward()


def orthogonality(model, x):
    return (model.w @ model.w.T - torch.eye(16)).square().sum() + (model.w.t() @ model.w.detach()).sum()


def convolved(model, x):
    return F.conv2d(model.filters, model.filters, padding=1).square().sum()


def spectral(model, x):
    with torch.no_grad():
        u = F.normalize(torch.mv(model.w.t(), torch.randn(16)), dim=0)
    return torch.dot(u, torch.mv(model.w, u))


def cosines(model, x):
    unit = F.normalize(model.w)
    return (unit @ unit.t()).sum()


def decay(model, x):
    return sum(parameter.norm() + parameter.abs().sum() for parameter in model.parameters())


def embedded(model, x):
    return F.embedding(torch.tensor([1, 2]), model.w).sum()


def own_penalty(model, x):
    class Penalty(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight):
            ctx.save_for_backward(weight)
            return weight.square().sum()

        @staticmethod
        def backward(ctx, grad):
            return grad * 2 * ctx.saved_tensors[0]

    return Penalty.apply(model.w)


@pytest.mark.parametrize("penalty", [orthogonality, convolved, spectral, cosines, decay, embedded, own_penalty])
@pytest.mark.parametrize("first", [True, False])
def test_penalties_on_weights_are_none_of_its_business(x, penalty, first):
    model = Steps()
    apply_(model, plan_of(named(w=INT8, fc=BFLOAT16)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if first:
            penalty(model, x).backward()
        for _ in range(3):
            (model(x).sum() + penalty(model, x)).backward()


@pytest.mark.parametrize("variant", [BFLOAT16, FLOAT32])
def test_gradients_of_gradients_are_the_models_own(x, variant):
    model = Steps()
    apply_(model, plan_of(named(w=variant, fc=FLOAT32)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            (slope,) = torch.autograd.grad(model(x.requires_grad_()).sum(), x, create_graph=True)
            (slope.norm() + model(x).sum()).backward()


def looks_at(model, monkeypatch):
    found, products = [], CallsOutside.products

    def counted(self, outputs):
        if self._model is model:
            found.append(outputs)
        return products(self, outputs)

    monkeypatch.setattr(CallsOutside, "products", counted)
    return found


def test_ordinary_steps_are_looked_at_now_and_then(x, monkeypatch):
    model = Steps()
    apply_(model, plan_of(named(w=INT8, fc=BFLOAT16)))
    looks = looks_at(model, monkeypatch)
    for step in range(20):
        if step % 5 == 4:  # an evaluation
            with torch.no_grad():
                model.eval()(x)
            model.train()
        (model(x).square().sum() + decay(model, x)).backward()
        for parameter in model.parameters():
            parameter.grad = None
    assert len(looks) == 5  # in the steps 1, 2, 4, 8, 16
    assert not any(parameter._post_accumulate_grad_hooks or parameter._backward_hooks for parameter in model.parameters())


def test_a_new_number_of_nodes_is_looked_at_within_a_budget(x, monkeypatch):
    model = Steps()
    apply_(model, plan_of(named(w=INT8, fc=BFLOAT16)))
    looks = looks_at(model, monkeypatch)
    for step in range(100):  # another number of terms in each
        sum((model.fc.bias * 2 for _ in range(step + 1)), torch.zeros(())).sum().backward()
    assert len(looks) < 45


@pytest.mark.parametrize("variant", [INT8, BFLOAT16, FLOAT32])
@pytest.mark.parametrize("way", ["linear", "product", "transposed", "checkpointed", None])
def test_a_call_outside_beside_the_models_own_is_named(x, way, variant):
    model = Steps()
    apply_(model, plan_of(named(w=variant, fc=BFLOAT16)))
    y = model(x).sum()
    if way is not None:
        y = y + getattr(model, way)(x).sum()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        y.backward()
    found = [str(one.message) for one in said]
    assert len(found) == (way is not None and variant is not FLOAT32)
    assert all(text.startswith("the gradient of w comes from a product in full precision too (") for text in found)


def test_functions_of_the_users_inside_the_forward_are_not_named(x):
    model = Steps()
    model.forward = model.own_function
    apply_(model, plan_of(named(w=INT8, fc=BFLOAT16)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x).sum().backward()


def test_without_a_plan_nothing_is_watched(x):
    model = Steps()
    apply_(model, plan_of(VARIANTS)).remove()
    model.linear(x).sum().backward()


@pytest.mark.parametrize("trains", [True, False])
def test_calls_outside_are_not_refused_in_eval_mode(x, trains):
    model = Steps().eval()
    apply_(model, plan_of(VARIANTS))
    y = model(x)
    if trains:
        model.train()
    y.sum().backward()
    model.eval()
    model.linear(x).sum().backward()


def said_of(run):
    """What a script is told of training in eval mode."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run()
    return [str(one.message) for one in said if "in eval mode" in str(one.message)]


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("part", ["model", "fc"])
def test_a_model_that_trains_in_eval_mode_is_named_at_once(x, steps, part):
    model = Steps()
    apply_(model, plan_of(VARIANTS))
    for _ in range(steps):
        model(x).square().sum().backward()
    model.eval()  # for an evaluation, after which model.train() is forgotten
    with torch.no_grad():
        model(x)
    run = model if part == "model" else model.fc
    (said,) = said_of(lambda: run(x).square().sum().backward())
    assert "fc#0 gets its gradient from a forward in eval mode" in said
    assert "call apply_(..., lower_eval=True), and else model.train()" in said


@pytest.mark.parametrize("lower_eval", [True, False])
def test_gradients_in_eval_mode_that_train_nothing_are_not_named(x, lower_eval):
    model, variants = Steps(), VARIANTS if lower_eval else named(w=FLOAT32, filters=FLOAT32, fc=FLOAT32)
    apply_(model, plan_of(variants), lower_eval=lower_eval)
    model.eval()
    assert not said_of(lambda: model(x).square().sum().backward())


def test_an_attack_in_eval_mode_is_not_named(x):
    model = Steps()
    apply_(model, plan_of(VARIANTS))
    model.eval()
    x.requires_grad_()
    assert not said_of(lambda: torch.autograd.grad(model(x).sum(), x))
    assert not said_of(lambda: model(x).sum().backward(inputs=[x]))
    model.requires_grad_(False)
    assert not said_of(lambda: model(x).sum().backward())


def test_parts_that_run_as_planned_are_not_refused(x):
    model = Steps()
    apply_(model, plan_of(VARIANTS))
    model.fc(x).sum().backward()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models_are_not_refused(x, backend):
    for variants in (VARIANTS, named(w=FLOAT32, filters=FLOAT32, fc=FLOAT32)):
        model = Steps()
        apply_(model, plan_of(variants))
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=backend)
        for _ in range(2):
            compiled(x).sum().backward()


@pytest.mark.parametrize("runs", ["region", "region of a module", "checkpoint", "nothing"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_calls_that_a_compiler_does_not_see_are_named(x, backend, runs):
    class Regions(Steps):
        @torch.compiler.nested_compile_region
        def region(self, x):
            return self.fc(x) if runs == "region of a module" else self.linear(x)

        def forward(self, x):
            if runs == "checkpoint":
                return checkpoint(self.linear, x, use_reentrant=False)
            return self.linear(x) if runs == "nothing" else self.region(x)

    model = Regions()
    apply_(model, named(fc=BFLOAT16) if runs == "region of a module" else named(w=INT8, fc=BFLOAT16))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            compiled(x).sum().backward()
    found = [str(one.message) for one in said if "the compiled model does not run" in str(one.message)]
    assert len(found) == (runs == "region")
    assert all("the plan lowers w#0, which" in text and "call modules, not F.linear" in text for text in found)


READINGS = {
    "transposed": lambda x, w: x @ w.t(),
    "transposed, after a graph break": lambda x, w: interrupted(x) @ w.t(),
    "addmm": lambda x, w: torch.addmm(x[0], x, w.mT),
    "left": lambda x, w: (w @ x.t()).t(),
    "convolution": lambda x, w: F.conv2d(x[:, :, None, None], w[:, :, None, None]).flatten(1),
    "einsum": lambda x, w: torch.einsum("bi,oi->bo", x, w),
    "tensordot": lambda x, w: torch.tensordot(x, w, 1),
}


@torch.compiler.disable
def interrupted(x):
    return x + 1


@each_once({"reading": READINGS, "backend": ["aot_eager", "eager"]})
def test_what_a_compiled_model_reads_otherwise_keeps_its_precision_as_in_eager_mode(x, reading, backend):
    class Reading(Steps):
        def forward(self, x):
            return READINGS[reading](x, self.w)

    def step(compiled):
        model = Reading()
        if compiled is not None:
            apply_(model, named(w=INT8))
        torch._dynamo.reset()
        run = torch.compile(model, backend=backend) if compiled else model
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            y = run(x)
            y.square().sum().backward()
        return y, model.w.grad, [str(one.message) for one in said if "the plan lowers w#0, which" in str(one.message)]

    plain, eager, compiled = step(None), step(False), step(True)
    assert torch.equal(compiled[0], plain[0])
    assert torch.equal(compiled[1], plain[1])
    assert torch.equal(eager[1], plain[1])
    for _, _, said in (eager, compiled):
        assert len(said) == 1
        assert "they keep their precision" in said[0]
        assert "trace this model, called as it is in training, and plan again" in said[0]


def test_a_compiled_part_that_reads_a_weight_otherwise_is_refused_by_both_that_it_may_be(x):
    class Part(Steps):
        def forward(self, x):
            return x @ self.w.t()

    model = nn.Sequential(Part(), nn.ReLU())
    apply_(model, {OpId("0.w"): INT8})
    torch._dynamo.reset()
    y = torch.compile(lambda x: model[0](x), backend="aot_eager")(x)
    with pytest.raises(PlanError, match=r"do that in the model's forward.*; a part of it.* F.linear.* and not transposed"):
        y.sum().backward()


AMP = named(w=Variant.plain(Precision.BFLOAT16), filters=Variant.plain(Precision.BFLOAT16), fc=Variant.plain(Precision.BFLOAT16))


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("whole", [True, False])
def test_parts_outside_of_autocast_are_refused_where_all_operators_are_bfloat16(x, whole):
    def model():
        found, plan = Steps(), plan_of(AMP)
        groups = tuple(attrs.evolve(group, base=Precision.BFLOAT16) for group in plan.groups)
        plan = attrs.evolve(plan, base=Precision.BFLOAT16, groups=groups)
        apply_(found, plan if whole else AMP, base=Precision.BFLOAT16)
        return found

    with pytest.raises(PlanError, match=r"runs without torch\.autocast, but its plan is for a job under autocast to bfloat16"):
        model().fc(x)
    with pytest.raises(PlanError, match="gradient of w comes from a product"):
        F.linear(x, model().w).sum().backward()
    under = model()
    with autocast():
        y = under.fc(x)
        z = F.linear(x, under.w)
    assert y.dtype is torch.bfloat16
    (y.float().sum() + z.float().sum()).backward()
    under.eval().fc(x)


def test_parts_under_autocast_run_again_as_they_did(x):
    model, plain = Steps(), Steps()
    applied = apply_(model, AMP, base=Precision.BFLOAT16)
    found = []
    for one in (model, plain):
        with autocast():
            y = checkpoint(one.fc, x.requires_grad_(), use_reentrant=False)
        y.float().square().sum().backward()
        found.append(one.fc.weight.grad)
    assert torch.equal(*found)
    assert applied.step == 1


class Parts(nn.Module):
    """A model of which a script calls parts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.trunk, self.head = nn.Embedding(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, ids):
        return self.head(self.trunk(self.emb(ids)))


def test_parts_without_operators_may_run_outside_autocast_where_all_operators_are_its_format():
    model, plain = Parts(), Parts()
    applied = apply_(model, named(trunk=BFLOAT16, head=BFLOAT16), base=Precision.BFLOAT16)
    ids, labels = torch.arange(8), torch.arange(8) % 4
    for each in (model, plain):
        hidden = each.emb(ids)
        with torch.autocast("cpu", torch.bfloat16):
            logits = each.head(each.trunk(hidden))
        each.criterion(logits.float(), labels).backward()
    for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own.grad, expected.grad)
    with pytest.raises(PlanError, match="autocast"):
        model.trunk(model.emb(ids))
    applied.remove()


def test_compiled_autograd_has_no_backward_pass_to_look_at():
    from torch._dynamo import compiled_autograd

    model = Steps()
    apply_(model, named(fc=INT8))
    with compiled_autograd._enable(torch.compile(backend="eager")):
        model(torch.randn(4, 16)).sum().backward()
    assert model.fc.weight.grad.shape == (4, 16)


def test_a_function_that_is_compiled_and_calls_parts_is_no_call_outside():
    model = Steps()
    apply_(model, named(fc=BFLOAT16))
    step = torch.compile(lambda x: model.fc(x).sum(), backend="eager")
    step(torch.randn(4, 16)).backward()
    assert model.fc.weight.grad.shape == (4, 16)


def copied_attributes(module, clone=lambda parameter: parameter.clone()):
    """A copy as learn2learn's ``clone_module`` makes it: gradients flow through it to the original."""
    other = type(module).__new__(type(module))
    other.__dict__ = module.__dict__.copy()
    other._parameters = {name: clone(parameter) for name, parameter in module._parameters.items() if parameter is not None}
    other._modules = {name: copied_attributes(part, clone) for name, part in module._modules.items()}
    return other


@pytest.mark.parametrize("part", ["", "fc"])
@pytest.mark.parametrize("variants", [VARIANTS, AMP])
@pytest.mark.parametrize("evaluates", [True, False])
def test_shallow_copies_with_other_parameters_are_refused(x, part, variants, evaluates):
    model = Steps()
    apply_(model, variants, base=Precision.BFLOAT16 if variants is AMP else Precision.FLOAT32)
    model.train(not evaluates)
    clone = copied_attributes(model.get_submodule(part))
    for _ in range(2):
        with pytest.raises(PlanError, match=r"a shallow copy of a .* is called .*: copy it with copy.deepcopy"):
            clone(x)


@pytest.mark.parametrize("layer", [True, False])
def test_shallow_copies_of_parts_inside_the_forward_are_refused(x, layer):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(16, 16)

        def forward(self, x):
            return self.fc(x)

    class Outer(nn.Module):
        def __init__(self, clones):
            super().__init__()
            self.inner, self.clones = Inner(), clones

        def forward(self, x):
            part = self.inner.fc if layer else self.inner
            return self.inner(x) + (copied_attributes(part) if self.clones else copy.deepcopy(part))(x)

    for clones in (True, False):
        model = Outer(clones)
        apply_(model, {"inner.fc#0": "int8"})
        if not clones:
            model(x).sum().backward()
            continue
        with pytest.raises(PlanError, match=r"a shallow copy of a (Linear|Inner) under a plan is called"):
            model(x)


def test_a_shallow_copy_of_all_that_the_original_has_is_the_original(x):
    model = Steps()
    applied = apply_(model, VARIANTS)
    copied = copy.copy(model)
    y = copied(x)
    applied.step = 0
    assert torch.equal(model(x), y)
    copied.fc = nn.Linear(16, 2)  # which both have: copies share their parts
    assert copied(x).shape == model(x).shape == (4, 2)
    copied.scale = 2.0
    with pytest.raises(PlanError, match="a shallow copy of a Steps"):
        copied(x)


def test_wrappers_that_take_the_forward_of_a_model_are_no_copies(x):
    class Wrapper(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model, self.forward = model, model.forward

    model = Steps()
    applied = apply_(model, VARIANTS)
    y = Wrapper(model)(x)
    applied.step = 0
    assert torch.equal(model(x), y)


def test_other_parameters_by_functional_call_are_those_that_compute(x):
    model = Steps()
    apply_(model, VARIANTS)
    fast = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    torch.func.functional_call(model, fast, (x,)).sum().backward()
    assert fast["w"].grad is not None
    assert model.w.grad is None


def test_another_view_of_a_planned_weight_inside_the_forward_is_no_fault():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.e, self.m = nn.Linear(32, 16, bias=False), nn.Linear(16, 16)

        def forward(self, x):
            return torch.nn.functional.linear(self.m(self.e(x).tanh()).tanh(), self.e.weight.t())

    model = Tied()
    apply_(model, plan_of(named(e=BFLOAT16, m=INT8)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            model(torch.randn(4, 32)).sum().backward()
    assert model.e.weight.grad.norm() > 0
