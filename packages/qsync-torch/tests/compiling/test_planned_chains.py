"""``compile`` with a plan that says which chains are fused: these and no others, by the names that a trace gives them."""

import re

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import qsync_torch as qsync
from nightly import each_once, nightly
from qsync_core.chains.finding import chains_of
from qsync_core.errors import BackendError, PlanError
from qsync_core.ir.chain import UNFUSED, Activation, ChainForm, ChainVariant
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_torch.compiling.planned import chain_names
from qsync_torch.job import Batch, Job
from qsync_torch.tracing.trace import trace

from .chained_models import INT8, Bert, ResNet, Vgg, compiled, distance, images, lowered, plan_of, step, tokens

NEAREST = attrs.evolve(INT8, rounding=Rounding.NEAREST, grad_input=Precision.FLOAT32, grad_weight=Precision.FLOAT32)
FLOAT32 = Variant.plain(Precision.FLOAT32)
FUSED, SAVED = ChainVariant(), ChainVariant(saved=Precision.INT8)


class Repeated(nn.Module):
    """Modules and functions that run more than once, in a part that is checkpointed too."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.act, self.norm = nn.Linear(16, 32), nn.Linear(32, 16), nn.GELU(), nn.LayerNorm(16)

    def block(self, x):
        return self.act(self.up(F.silu(self.down(self.act(self.up(x))))))

    def forward(self, x):
        x = self.norm(x)
        x = checkpoint(self.block, x, use_reentrant=False)
        return self.down(self.act(self.up(self.norm(F.silu(self.down(x))))))


def traced(model, batch):
    return trace(Job("m", model, lambda *_: Batch((batch,)), lambda y, _: y.square().sum(), torch.optim.SGD, batch_size=len(batch)))


@pytest.mark.parametrize("make, x", [(ResNet, images), (Bert, tokens), *nightly((Repeated, tokens))])
def test_names_are_those_of_a_trace(make, x):
    model, batch = make(), x()
    kinds = ("batch_norm", "layer_norm", "relu", "gelu", "silu")
    expected = [operator.op_id for operator in traced(model, batch).operators if operator.kind in kinds]
    found = []

    def backend(module, inputs):
        found.extend(chain_names(module, model).values())
        return module.forward

    applied = qsync.apply_(model, lowered(model))
    torch.compile(model, backend=backend)(batch)
    applied.remove()
    assert found == expected


def kept(run, x):
    """Numbers of elements of the float and of the 8-bit tensors that forward keeps."""
    found = {}

    def pack(tensor):
        if tensor.dtype in (torch.float32, torch.int8):
            found[tensor.data_ptr()] = (tensor.dtype, tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(x)
    return sorted(found.values(), key=str)


def test_the_chains_of_the_plan_and_no_others(fused):
    model, x = Vgg(), images()
    expected = step(model, model, x)
    plain = qsync.apply_(model, lowered(model, NEAREST))
    unfused = step(model, model, x)
    plain.remove()
    run = compiled(model, plan_of(model, NEAREST, {"layers.8#0": FUSED, "layers.1#0": UNFUSED}))
    found = step(run, model, x)
    assert [message.partition(" (")[0] for message in fused()] == ["fused: relu"]
    assert distance(found, unfused) < 1e-3
    assert distance(found, expected) > 1e-3, "the operators run in int8"


def test_inputs_are_kept_as_the_plan_says():
    """Of two equal chains one keeps x in 8 bit: its scale is one per channel, and rounding is unbiased (test_fused_steps)."""
    counts = []
    for how in (FUSED, SAVED):
        torch.manual_seed(0)
        model, x = Vgg(), images()
        run = compiled(model, plan_of(model, INT8, {"layers.1#0": how}))
        tensors = kept(run, x)
        counts.append([tensors.count((dtype, x.numel())) for dtype in (torch.float32, torch.int8)])
    assert counts[1] == [counts[0][0] - 1, counts[0][1] + 1]


@pytest.mark.parametrize("make, x, names", [(ResNet, images, ("bn#0", "blocks.2.bn2#0")), (Bert, tokens, ("norm1#0", "gelu#0"))])
def test_before_operators_in_float_formats_and_before_none(make, x, names, fused):
    """Nothing is rounded: the step is PyTorch's own."""
    model, batch = make(), x()
    expected = step(model, model, batch)
    found = step(compiled(model, plan_of(model, FLOAT32, dict.fromkeys(names, FUSED))), model, batch)
    assert len(fused()) == 2
    assert all(message.endswith("0 readers, float") for message in fused())
    assert distance(found, expected) < 1e-5


def test_an_input_in_8_bit_before_operators_in_float_formats():
    """Its rounding is the step's own: other numbers each time, and right on average."""
    model, x, runs = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16)), tokens(), 200
    step(model, model, x)
    exact = model[0].weight.grad.clone()
    run = compiled(model, plan_of(model, FLOAT32, {"1#0": SAVED}))
    draws = []
    for _ in range(runs):
        step(run, model, x)
        draws.append(model[0].weight.grad.clone())
    assert len({tuple(draw.flatten().tolist()) for draw in draws}) == runs
    grads = torch.stack(draws)
    bound = grads.std(0) / runs**0.5 + 1e-3 * exact.abs().max()
    assert float(((grads.mean(0) - exact).abs() / bound).max()) < 5


def test_a_plan_that_unfuses_all_fuses_none(fused):
    model, x = Vgg(), images()
    plan = plan_of(model, NEAREST, {"layers.1#0": UNFUSED})
    step(compiled(model, plan), model, x)
    assert fused() == []
    applied = qsync.applied_to(model)
    assert applied.in_model.planned.chains == {}
    applied.remove()
    assert qsync.applied_to(model) is None


class Broken(nn.Module):
    """A graph break stands between a batch norm and its ReLU."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn, self.conv2 = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)

    def forward(self, x):
        y = self.conv1(x)
        torch._dynamo.graph_break()
        return self.conv2(F.relu(self.bn(y)))


class ReadBetween(nn.Module):
    """Something reads what a batch norm writes before its ReLU runs."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)

    def forward(self, x):
        z = self.bn(self.conv(x))
        mean = self.bn.running_mean.sum()
        return F.relu(z) + mean


@pytest.mark.parametrize(
    "make, name, sentence",
    [
        (Broken, "conv3.bn#0", r"chain conv3.bn#0 as fused kernels, and the compiled model does not \(no graph has all"),
        (ReadBetween, "bn#0", r"chain bn#0 as .* does not \(what stands between its operators has to run between them\)"),
    ],
)
def test_a_chain_that_is_not_there_is_refused(make, name, sentence):
    model = make()
    run = compiled(model, plan_of(model, NEAREST, {name: FUSED}), fullgraph=False)
    model.eval()
    run(images())
    model.train()
    for _ in range(2):
        with pytest.raises(PlanError, match=sentence):
            run(images())


class Reversed(ResNet):
    """The shortcut comes first, and the sum is written over it."""

    def forward(self, x):
        block = self.blocks[0]
        y = block.relu(block.bn1(block.conv1(F.relu(self.bn(self.stem(x))))))
        shortcut = block.downsample(x)
        shortcut += block.bn2(block.conv2(y))
        return self.fc(self.blocks[1:](block.relu(shortcut)).mean((2, 3)))


@pytest.mark.parametrize(
    "make, x", [(Vgg, images), (Bert, tokens), *nightly((ResNet, images), (Reversed, images), (Repeated, tokens))]
)
@pytest.mark.slow
def test_chains_have_the_forms_of_a_trace(make, x, fused):
    """All of a model's chains, and every other one."""
    model, batch = make(), x()
    chains = chains_of(traced(model, batch))
    names = [str(chain.name) for chain in chains]
    forms = {str(chain.name): chain.form(True) for chain in chains}
    expected = step(model, model, batch)
    for some in (names, names[::2], names[1::2]):
        torch._dynamo.reset()
        before = len(fused())
        run = compiled(model, plan_of(model, FLOAT32, dict.fromkeys(some, FUSED), forms={name: forms[name] for name in some}))
        found = step(run, model, batch)
        qsync.applied_to(model).remove()
        assert len(fused()) - before == len(some)
        assert distance(found, expected) < 1e-4


def scaled_by_a_hook(model):
    model.layers[4].register_forward_hook(lambda module, given, result: result * 1.0)


def with_another_function(model):
    model.layers[5] = nn.LeakyReLU()


@each_once(
    {
        "form, planned": [
            (ChainForm(Activation.RELU), "batch_norm + relu"),
            (ChainForm(residual=True), "batch_norm + residual"),
        ],
        "change": [scaled_by_a_hook, with_another_function],
    }
)
def test_a_chain_of_another_form_is_refused(change, form, planned):
    model = Vgg()
    change(model)
    run = compiled(model, plan_of(model, NEAREST, dict.fromkeys(("layers.1#0", "layers.4#0"), FUSED), forms={"layers.4#0": form}))
    found = re.escape(f"does not (its graph has batch_norm in place of {planned}: train the model as it was traced, or")
    for _ in range(2):
        with pytest.raises(PlanError, match=rf"chain layers.4#0 as fused kernels, and .* {found}"):
            run(images())


@pytest.mark.parametrize("forms", [{}, {"layers.4#0": ChainForm(float_result=False)}], ids=str)
def test_what_a_plan_does_not_say_of_a_form_is_not_compared(forms, fused):
    """Plans from before there were forms say nothing; readers may stand in other graphs."""
    model = Vgg()
    scaled_by_a_hook(model)
    step(compiled(model, plan_of(model, NEAREST, {"layers.4#0": FUSED}, forms=forms)), model, images())
    assert fused() == ["fused: batch_norm (batch_norm_1), 0 readers, float"]


@pytest.mark.parametrize("momentum", [0, *nightly(1)])
def test_a_momentum_that_is_an_integer(momentum, fused):
    models = [Vgg() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        model.layers[1].momentum = momentum
    x = images()
    expected = step(models[0], models[0], x)
    found = step(compiled(models[1], plan_of(models[1], FLOAT32, {"layers.1#0": FUSED})), models[1], x)
    assert len(fused()) == 1
    assert distance(found, expected) < 1e-5
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(models[1].layers[1], name), getattr(models[0].layers[1], name))


def test_kernels_that_are_not_there_are_refused(monkeypatch):
    model = Vgg()
    with pytest.raises(BackendError, match="kernel backend 'nowhere' is not installed here"):
        compiled(model, plan_of(model, NEAREST, {"layers.1#0": FUSED}, "nowhere"))
    assert qsync.applied_to(model) is None
    monkeypatch.setattr("qsync_torch.compiling.rewriting.ProducerBinding.reasons_against", lambda *_: ["aten: not today"])
    run = compiled(model, plan_of(model, NEAREST, {"layers.1#0": FUSED, "layers.8#0": FUSED}))
    with pytest.raises(PlanError, match=r"chain layers.1#0 and 1 others as fused .* does not \(aten: not today\)"):
        run(images())


def test_a_chain_behind_a_graph_break(fused):
    model = Broken()
    compiled(model, plan_of(model, NEAREST, {"bn#0": FUSED}), fullgraph=False)(images())
    assert fused() == ["fused: batch_norm + relu (relu), 1 readers"]


@pytest.mark.nightly
def test_calls_in_several_graphs_cannot_be_told_apart():
    class Twice(Broken):
        def forward(self, x):
            y = F.relu(self.bn(self.conv1(x)))
            torch._dynamo.graph_break()
            return self.conv2(F.relu(self.bn(self.conv2(y))))

    model = Twice()
    run = compiled(model, plan_of(model, NEAREST, {"bn#0": FUSED}), fullgraph=False)
    with pytest.raises(PlanError, match="bn is called in several graphs, in which calls cannot be told apart"):
        run(images())


def test_arguments():
    model = Vgg()
    plan = plan_of(model, INT8, {"layers.1#0": FUSED})
    with pytest.raises(PlanError, match="says of each chain how it keeps its input for backward: leave saved out"):
        compiled(model, plan, saved="int8")
    assert qsync.applied_to(model) is None
    with pytest.raises(PlanError, match="the plan has no group 'other'"):
        compiled(model, plan, group="other")
    with pytest.raises(PlanError, match="group is for a plan that is put into force, and no plan was given"):
        qsync.compile(model, group="infer")
    with pytest.raises(PlanError, match=r"call qsync.compile\(model, plan\) in its place"):
        qsync.apply_(model, plan)
    assert qsync.applied_to(compiled(model, plan)).in_model.planned.chains.keys() == {OpId("layers.1")}
