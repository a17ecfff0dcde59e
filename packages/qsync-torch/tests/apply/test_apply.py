import copy

import attrs
import pytest
import torch
from torch import nn

from qsync_core.errors import BackendError, NumericsError, PlanError
from qsync_core.ir.chain import UNFUSED, ChainVariant
from qsync_core.ir.formats import OutputFormats
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment, ChainAssignment, GroupPlan, PrecisionPlan, Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import DeviceKind, DeviceType
from qsync_core.ir.variant import Variant
from qsync_torch import apply_
from qsync_torch.apply.applied_plan import AppliedPlan
from qsync_torch.apply.planned_modules import is_planned
from qsync_torch.operators.step_key import LARGEST_STEP

from .small_models import BFLOAT16, FLOAT32, INT8, Attention, ConvNet, Functional, images, named


def plan_of(variants, model="small", backend="aten", group="infer"):
    assignments = {op_id: Assignment(variant, backend, "", "") for op_id, variant in variants.items()}
    device = DeviceType("cpu", DeviceKind.CPU)
    groups = (GroupPlan(group, Role.INFER, 1, device, Precision.FLOAT32, assignments),)
    return PrecisionPlan(
        model=model,
        dag_digest="",
        operator_ids=tuple(variants),
        input_digests={},
        solver="greedy",
        indicator="lossvar",
        time_limit_ns=1,
        predicted_iteration_ns=1,
        objective=0.0,
        bound=None,
        groups=groups,
        rank0_group=group,
        output_formats=OutputFormats(decides=False),  # as they say
    )


EVERYTHING = {"conv1": INT8, "conv2": BFLOAT16, "fc": INT8}


def train_step(model, x):
    model.zero_grad()
    y = model(x)
    y.square().mean().backward()
    return y.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_a_model_runs_as_planned_and_close_to_float32():
    model, x = ConvNet(), images()
    exact, exact_grads = train_step(copy.deepcopy(model), x)
    applied = apply_(model, named(**EVERYTHING))
    y, grads = train_step(model, x)
    assert isinstance(applied, AppliedPlan)
    assert y.dtype is torch.float32
    assert 0 < (y - exact).norm() / exact.norm() < 0.05
    for name, grad in grads.items():
        assert grad.dtype is torch.float32
        if name != "conv1.bias":  # BatchNorm takes it out: its gradient is rounding noise
            assert (grad - exact_grads[name]).norm() / exact_grads[name].norm() < 0.4, name


def test_parameters_state_dict_and_identity_of_modules_do_not_change():
    model = ConvNet()
    before = {name: (id(value), value.dtype, type(value)) for name, value in model.named_parameters()}
    keys, modules = list(model.state_dict()), [id(module) for module in model.modules()]
    apply_(model, named(**EVERYTHING))
    train_step(model, images())
    assert {name: (id(value), value.dtype, type(value)) for name, value in model.named_parameters()} == before
    assert list(model.state_dict()) == keys
    assert [id(module) for module in model.modules()] == modules
    fresh = ConvNet()
    fresh.load_state_dict(model.state_dict())
    assert len(list(model.buffers())) == len(list(fresh.buffers()))


def test_remove_restores_everything():
    model, x = ConvNet().eval(), images()
    expected = model(x)
    attributes = {name: set(module.__dict__) for name, module in model.named_modules()}
    applied = apply_(model, named(**EVERYTHING), lower_eval=True)
    assert not torch.equal(model(x), expected)
    applied.remove()
    assert torch.equal(model(x), expected)
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == attributes
    apply_(model, named(fc=BFLOAT16)).remove()


def test_a_forward_that_an_instance_already_had_is_called_and_restored():
    model = ConvNet()
    own = model.fc.forward
    model.fc.forward = lambda input: own(input) + 100
    replaced = model.forward
    applied = apply_(model, named(conv1=BFLOAT16))
    assert (model(images()) > 50).all()
    applied.remove()
    assert model.fc.forward is not replaced
    assert (model(images()) > 50).all()


def test_remove_refuses_a_class_that_was_changed_since():
    model = ConvNet()
    applied = apply_(model, named(fc=INT8))
    nn.utils.parametrizations.weight_norm(model.fc)
    with pytest.raises(PlanError, match=r"the class of fc was changed after the plan was applied \(it is a Parametrized"):
        applied.remove()
    nn.utils.parametrize.remove_parametrizations(model.fc, "weight")
    applied.remove()
    assert type(model.fc) is nn.Linear


def test_random_numbers_follow_seed_and_step():
    x, state = images(), ConvNet().state_dict()

    def outputs(seed, first_step=0):
        model = ConvNet()
        model.load_state_dict(state)
        applied = apply_(model.eval(), named(conv1=INT8, fc=INT8), seed=seed, lower_eval=True)
        applied.step = first_step
        first = model(x)
        assert torch.equal(model(x), first)
        applied.advance()
        return first, model(x)

    first, second = outputs(1)
    assert not torch.equal(first, second)
    assert torch.equal(outputs(1)[0], first)
    assert torch.equal(outputs(1, first_step=1)[0], second)
    assert not torch.equal(outputs(2)[0], first)


@pytest.mark.parametrize("step", [-1, LARGEST_STEP + 1, 2**31, 2**63, 1.0, True, "7", None])
def test_a_step_that_is_no_number_of_steps_is_refused_and_the_count_stays(step):
    applied = apply_(ConvNet(), named(fc=INT8))
    applied.step = LARGEST_STEP
    with pytest.raises(PlanError, match=rf"number of optimizer steps so far, an integer in 0\.\.{LARGEST_STEP}, got {step!r}"):
        applied.step = step
    with pytest.raises(PlanError, match="got"):
        applied.load_state_dict({**applied.state_dict(), "step": step})
    assert applied.step == LARGEST_STEP


def test_ranks_draw_different_numbers_from_one_seed(monkeypatch):
    x, state = images(), ConvNet().state_dict()
    found = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        model = ConvNet()
        model.load_state_dict(state)
        apply_(model.eval(), named(fc=INT8), seed=3, lower_eval=True)
        found.append(model(x))
    assert not torch.equal(*found)


def test_inference_without_gradients():
    model, x = ConvNet().eval(), images()
    expected = model(x)
    apply_(model, named(**EVERYTHING))
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            y = model(x)
        assert not y.requires_grad
        assert (y - expected).norm() / expected.norm() < 0.1


def test_q_k_and_v_share_one_cast_of_the_activation(monkeypatch):
    from qsync_torch.kernels.binding import Bound

    model, x = Attention(), torch.randn(2, 5, 16)
    apply_(model, named(q=INT8, k=INT8, v=INT8, out=BFLOAT16))
    casts = []
    original = Bound.kernel

    def kernel(self, op, device, *shapes):
        casts.append((op, shapes))
        return original(self, op, device, *shapes)

    monkeypatch.setattr(Bound, "kernel", kernel)
    model(x).sum().backward()
    quantized = [shapes[0] for op, shapes in casts if op == "quantize"]
    assert sorted(quantized) == [(2, 5, 16), (16, 16), (16, 16), (16, 16)]


def test_saved_memory_is_that_of_int8_copies():
    model, x = Attention(), torch.randn(8, 32, 16, requires_grad=True)
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = (tensor.dtype, tensor.untyped_storage().nbytes(), tensor)
        return tensor

    apply_(model, named(q=INT8, k=INT8, v=INT8))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    int8 = [nbytes for dtype, nbytes, _ in kept.values() if dtype is torch.int8]
    # One copy of the activation, which three operators share, and three of weights.
    assert sorted(int8) == [256, 256, 256, 8 * 32 * 16]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_rounds_the_same_way_again(use_reentrant):
    """Checkpointed and plain training steps give the same gradients bit for bit, shared casts and functional calls included."""

    class Checkpointed(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block
            self.checkpoint = True

        def forward(self, x):
            if not self.checkpoint:
                return self.block(x)
            return torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=use_reentrant)

    names = ("0.q", "0.k", "0.v", "0.out", "1.child", "1.weight", "1.attention.in_proj_weight")
    both = {**named(**{f"block.{name}": INT8 for name in names}), OpId("block.1.attention.out_proj"): BFLOAT16}
    model = Checkpointed(nn.Sequential(Attention(8), Functional()))
    x = torch.randn(2, 5, 8, requires_grad=True)
    applied = apply_(model, both, seed=4)
    gradients = []
    for checkpoint in (False, True):
        model.checkpoint, applied.step = checkpoint, 0
        _, found = train_step(model, x)
        gradients.append(found)
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


@pytest.mark.parametrize("name", ["weight", "kernel", "attention.in_proj_weight", "attention.out_proj"])
def test_functional_calls_are_addressed_by_their_weight(name):
    model, x = Functional(), torch.randn(2, 5, 8)
    exact = model(x)
    applied = apply_(model, {OpId(name): INT8})
    assert 0 < (model(x) - exact).norm() / exact.norm() < 0.05
    applied.remove()
    assert torch.equal(model(x), exact)


def test_shared_modules_share_a_variant():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[2] = model[0]
    apply_(model, {OpId("0", 0): INT8, OpId("0", 1): INT8}).remove()
    with pytest.raises(
        PlanError, match="calls of 0 are to run as int8>float32 and as bfloat16>float32; calls that share a weight share a v"
    ):
        apply_(model, {OpId("0", 0): INT8, OpId("0", 1): BFLOAT16})


def test_a_root_that_is_an_operator_itself():
    """The root's FQN is empty, so that a plan cannot name it; naming anything else is an error."""
    with pytest.raises(PlanError, match="has no linear or convolution fc"):
        apply_(nn.Linear(4, 3), named(fc=INT8))


def test_a_plan_of_float32_only_changes_nothing():
    model, x = ConvNet().eval(), images()
    expected, plain = model(x), copy.deepcopy(model).train()
    apply_(model, plan_of(named(conv1=FLOAT32, conv2=FLOAT32, fc=FLOAT32)))
    assert torch.equal(model(x), expected)
    assert torch.equal(model.train()(x), plain(x))


def test_a_plan_from_a_file(tmp_path):
    from qsync_core.artifacts.files import save

    path = tmp_path / "plan.qsync"
    save(plan_of(named(**EVERYTHING)), path)
    applied = apply_(ConvNet(), str(path))
    assert applied.group == "infer"
    assert applied.variants == named(**EVERYTHING)


def test_a_plan_for_another_model_names_the_first_differing_operators():
    other = named(**{f"layer{i}.conv": INT8 for i in range(5)}, fc=INT8)
    with pytest.raises(PlanError) as error:
        apply_(ConvNet(), plan_of(other, model="resnet50"))
    assert str(error.value) == (
        "the plan was made for another model (resnet50): ConvNet has no linear or convolution layer0.conv, layer1.conv, "
        "layer2.conv (and 2 more), and the plan does not know conv1, conv2; trace this model, called as it is in training, and "
        "plan again"
    )


def test_a_module_that_the_plan_does_not_know_must_not_run():
    model = ConvNet()
    apply_(model, plan_of(named(conv1=INT8, fc=FLOAT32)))
    with pytest.raises(PlanError, match="conv2 runs but the plan does not name it, so the plan was made for another model"):
        model(images())


def test_a_module_that_can_not_be_changed_runs_as_it_is():
    torch.manual_seed(0)
    model = ConvNet()
    x = images()
    plan = plan_of(named(conv1=FLOAT32, fc=FLOAT32))
    expected = model(x)
    apply_(model, attrs.evolve(plan, unaddressed_ids=(OpId("conv2"),)))
    torch.testing.assert_close(model(x), expected)


def test_a_refused_plan_leaves_the_model_alone():
    model = ConvNet()
    with pytest.raises(PlanError, match="has no linear or convolution nothing"):
        apply_(model, named(fc=INT8, nothing=INT8))
    float8 = Variant.parse("float8_e4m3fn")
    with pytest.raises(
        BackendError,
        match=r"1 of 2 operators cannot run on cpu as .* planned: conv1#0: conv2d\.output as float8_e4m3fn>float32 \(aten: ",
    ):
        apply_(model, named(fc=INT8, conv1=float8))
    assert not any(map(is_planned, model.modules()))


def test_a_backend_that_is_not_installed_is_named():
    with pytest.raises(BackendError, match="kernel backend 'tensorrt' is not installed here"):
        apply_(ConvNet(), plan_of(named(**EVERYTHING), backend="tensorrt"))
    apply_(ConvNet(), plan_of(named(conv1=INT8, conv2=INT8, fc=INT8), backend="tensorrt"), backend="aten")


def test_operators_and_variants_may_be_texts():
    applied = apply_(ConvNet(), {"fc#0": "int8", "conv1": INT8})
    assert applied.variants == {OpId("fc"): Variant.parse("int8>float32"), OpId("conv1"): INT8.in_float32}


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({5: INT8}, r"not an operator and its variant: 5: Variant\(.*\); write {'0#0': 'int8'}"),
        ({"fc": 8}, "not an operator and its variant: 'fc': 8; write"),
        ({"fc": "int9"}, "not an operator and its variant: 'fc': 'int9' .*not a variant"),
        ({"fc#x": "int8"}, "not an operator and its variant: 'fc#x': 'int8' .*an operator is written 'fcn?q?n?#call'|fqn#call"),
        ([OpId("fc")], "apply_ takes a plan, the path of one, or variants by operator, got list"),
    ],
)
def test_what_is_no_plan_is_refused(plan, message):
    with pytest.raises(PlanError, match=message):
        apply_(ConvNet(), plan)


@pytest.mark.parametrize("base", ["int8", "half", torch.bfloat16, None])
def test_a_base_is_a_float_format_and_may_be_a_text(base):
    apply_(ConvNet(), {"fc": "int8"}, base="bfloat16")
    with pytest.raises(PlanError, match=rf"base is {base!r}, but a model trains in one of bfloat16, float16, float32: give one"):
        apply_(ConvNet(), {"fc": "int8"}, base=base)


def test_an_empty_name_of_a_backend_is_refused():
    with pytest.raises(BackendError, match="not a kernel backend: ''"):
        apply_(ConvNet(), named(fc=INT8), backend="")


def test_an_unknown_group_is_named_with_those_there_are():
    with pytest.raises(PlanError, match="the plan has no group 'gpu'; its groups are infer"):
        apply_(ConvNet(), plan_of(named(**EVERYTHING)), group="gpu")


def test_a_plan_that_fuses_chains_is_refused():
    plan = plan_of(named(**EVERYTHING))
    (group,) = plan.groups
    said = {
        OpId("norm1"): ChainAssignment(ChainVariant(), "aten", "", "why"),
        OpId("norm2"): ChainAssignment(UNFUSED, "", "", "why"),
    }
    with pytest.raises(PlanError, match=r"the plan runs 1 chains of group 'infer' as fused kernels \(norm1#0 and so on\)"):
        apply_(ConvNet(), attrs.evolve(plan, groups=(attrs.evolve(group, chains=said),)))
    unfused = {name: entry for name, entry in said.items() if not entry.variant.fused}
    apply_(ConvNet(), attrs.evolve(plan, groups=(attrs.evolve(group, chains=unfused),)))


def test_a_wrapped_model_is_refused():
    with pytest.raises(PlanError, match=r"call apply_ on the model itself, before it is wrapped \(OptimizedModule\)"):
        apply_(torch.compile(ConvNet()), named(fc=INT8))


@pytest.mark.parametrize(
    "layers, missing",
    [
        ((nn.Linear(3, 4), nn.LazyLinear(2)), "1.weight"),
        ((nn.LazyConv2d(2, 3),), "0.weight"),
        ((nn.Linear(3, 4), nn.LazyBatchNorm1d(affine=False)), "1.running_mean"),
    ],
    ids=["linear", "convolution", "statistics"],
)
def test_lazy_modules_must_have_seen_a_batch(layers, missing):
    with pytest.raises(PlanError, match=f"{missing} of this Sequential has no shape yet.* on one before apply_"):
        apply_(nn.Sequential(*layers), {"0": "int8"})


def test_lazy_modules_that_have_seen_a_batch_run_as_others():
    model, x = nn.Sequential(nn.LazyConv2d(2, 3), nn.Flatten(), nn.LazyLinear(4)), images()
    model(x)
    plain, expected = train_step(model, x)
    apply_(model, {"0": "bfloat16", "2": "int8"})
    found, gradients = train_step(model, x)
    assert 0 < (found - plain).norm() < 0.05 * plain.norm()
    assert all((gradients[name] - expected[name]).norm() < 0.1 * expected[name].norm() for name in gradients)


def test_two_plans_on_one_model_are_refused():
    model = ConvNet()
    apply_(model, named(fc=INT8))
    with pytest.raises(PlanError, match=r"this model has a plan already: .* remove"):
        apply_(model, named(fc=INT8))


def test_not_a_number_names_the_operator():
    model = ConvNet()
    apply_(model, named(fc=INT8))
    with pytest.raises(NumericsError, match=r"operator fc#0: a tensor of shape .* holds NaN or infinite values"):
        model(images() * float("nan"))


def test_an_input_of_another_format_is_refused_by_name():
    model = ConvNet()
    apply_(model, named(conv1=INT8))
    with pytest.raises(NumericsError, match=r"operator conv1#0: .* takes float32 or a 16-bit float, got torch\.float64"):
        model(images().double())
