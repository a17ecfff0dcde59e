"""Compiled steps with fused chains: their numbers, their randomness, what they keep, and what they leave to the compiler."""

import copy

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import qsync_torch as qsync
from nightly import nightly_but
from qsync_core.errors import PlanError
from qsync_core.ir.chain import Activation, ChainForm, Producer
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.kernels.choice import KernelChoice
from qsync_torch import apply_
from qsync_torch.apply.applied_plan import applied_to
from qsync_torch.compiling import rewriting
from qsync_torch.compiling.compile import _MODES
from qsync_torch.kernels.producers import producer_binding, producer_choice
from qsync_torch.operators.chains import CHAINS

from .chained_models import INT8, Bert, ResNet, Vgg, distance, images, lowered, step, tokens

NEAREST = attrs.evolve(INT8, rounding=Rounding.NEAREST, grad_input=Precision.FLOAT32, grad_weight=Precision.FLOAT32)
STOCHASTIC = attrs.evolve(NEAREST, rounding=Rounding.STOCHASTIC)
ROWS = attrs.evolve(NEAREST, x_granularity=Granularity.PER_ROW)


def compiled(model, **options):
    """Without inductor, which takes long."""
    return qsync.compile(model, **({"backend": "aot_eager", "fullgraph": True} | options))


def unfused_and_fused(model, x, variant, statistics=1e-5, **options):
    """A step of each from one state; running statistics may differ by that part of themselves."""
    applied, state = apply_(model, lowered(model, variant)), copy.deepcopy(model.state_dict())
    unfused, after = step(model, model, x), copy.deepcopy(model.state_dict())
    model.load_state_dict(state)
    applied.step = 0
    found = step(compiled(model, **options), model, x)
    assert list(after) == list(model.state_dict())
    for name, value in after.items():  # running statistics and the count of batches among them
        torch.testing.assert_close(model.state_dict()[name], value, rtol=statistics, atol=statistics)
    applied.remove()
    model.load_state_dict(state)
    return unfused, found


@pytest.mark.parametrize(
    "make, x, variant, chains",
    [
        (Vgg, images, NEAREST, 2),
        (Vgg, lambda: torch.randn(4, 8, 6, 6), NEAREST, 2),
        (Bert, tokens, NEAREST, 4),
        (Bert, tokens, ROWS, 4),
    ],
    ids=["vgg", "vgg-nchw", "bert", "bert-rows"],
)
def test_a_fused_step_rounded_to_nearest_is_the_unfused_one(make, x, variant, chains, fused):
    """The same scales, and the same integers, but for numbers that float32 puts on either side of the middle of two.

    One of those moves a row of a result by one step of 1 / 127 of the largest magnitude, in few of some thousand elements.
    """
    unfused, found = unfused_and_fused(make(), x(), variant)
    assert len([message for message in fused() if message.startswith("fused")]) == chains
    assert distance(found, unfused) < 1e-3


def test_behind_a_residual_the_error_is_at_most_doubled(fused):
    """Its scale is at most that of the sum of two magnitudes, which is up to twice that of the magnitude of the sum."""
    model, x = ResNet().double(), images().double()
    exact = {name: value.float() for name, value in step(model, model, x).items()}
    model, x = model.float(), x.float()
    unfused, found = unfused_and_fused(model, x, NEAREST, statistics=1e-2)
    assert len(fused()) == 6
    assert distance(found, exact) < 2 * distance(unfused, exact) + 1e-3


@pytest.mark.parametrize("make, x", [(ResNet, images), (Bert, tokens)])
def test_inputs_saved_in_8_bit(make, x, fused):
    """As far from the step in float32 as int8 is by itself, some more."""
    model, x = make(), x()
    exact = step(model, model, x)
    unfused, found = unfused_and_fused(model, x, STOCHASTIC, statistics=1e-2, saved="int8")
    assert len([message for message in fused() if message.startswith("fused")]) >= 4
    assert torch.equal(found["y"].sign(), exact["y"].sign())
    assert distance(found, exact) < 3 * distance(unfused, exact) + 1e-2


@pytest.fixture
def any_size_pays(monkeypatch):
    """As if the reference were a fast kernel, and inductor slow on images of any size."""
    monkeypatch.setattr(rewriting, "LEAST_ELEMENTS", 1)
    monkeypatch.setattr(rewriting, "FLOAT_BACKEND", "no backend")


def test_batch_norms_that_no_product_reads_are_fused_where_that_is_faster(fused, any_size_pays):
    """The first block's shortcut, and the last block's sum: the batch norm of the shortcut is the residual of its block's chain."""
    model, x = ResNet().double(), images().double()
    exact = {name: value.float() for name, value in step(model, model, x).items()}
    model, x = model.float(), x.float()
    unfused, found = unfused_and_fused(model, x, NEAREST, statistics=1e-2)
    said = [message.replace(f"({message.partition('(')[2].partition(')')[0]})", "()") for message in fused()]
    assert said.count("fused: batch_norm (), 0 readers, float") == 1
    assert said.count("fused: batch_norm + residual + relu (), 0 readers, float") == 1
    assert len(said) == 8
    assert distance(found, exact) < 2 * distance(unfused, exact) + 1e-3


def test_their_kept_inputs_are_rounded_without_bias(any_size_pays):
    """Two batch norms that no product reads keep x in 8 bit, with random numbers that are new in every step."""

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = nn.ModuleList(nn.Conv2d(8, 8, 1, bias=False) for _ in range(2))
            self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))

        def forward(self, x):
            return [norm(conv(x)) for conv, norm in zip(self.convs, self.norms, strict=True)]

    model, x = Sum(), images()
    apply_(model, lowered(model, NEAREST))
    run, factors = compiled(model, saved="int8"), torch.randn(4, 8, 6, 6)

    def gradients():
        model.zero_grad(set_to_none=True)
        sum((y * factors).sum() for y in run(x)).backward()
        applied_to(model).advance()
        return torch.stack([norm.weight.grad for norm in model.norms])

    draws = torch.stack([gradients() for _ in range(200)])
    assert len({tuple(draw.flatten().tolist()) for draw in draws}) == 200
    y = torch.stack([conv(x).detach() for conv in model.convs])
    normal = (y - y.mean((1, 3, 4), keepdim=True)) / y.var((1, 3, 4), keepdim=True, correction=0).add(1e-5).sqrt()
    error = (draws.mean(0) - (normal * factors).sum((1, 3, 4))).abs() / (draws.std(0) / 200**0.5)
    assert float(error.max()) < 5


@pytest.mark.parametrize("least, reference", [(1 << 24, "no backend"), (1, "aten")])
def test_small_batch_norms_and_the_reference_are_left_to_the_compiler(fused, monkeypatch, least, reference):
    monkeypatch.setattr(rewriting, "LEAST_ELEMENTS", least)
    monkeypatch.setattr(rewriting, "FLOAT_BACKEND", reference)
    model = ResNet()
    apply_(model, lowered(model, NEAREST))
    compiled(model)(images())
    assert len(fused()) == 6
    assert not [message for message in fused() if "0 readers" in message]


class Pair(nn.Module):
    """A chain before one product, whose result is summed with fixed factors: the gradient is linear in what is rounded."""

    def __init__(self):
        super().__init__()
        self.bn, self.conv = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1, bias=False)
        self.bn.weight.data.uniform_(0.5, 2)
        self.factors = torch.randint(-2, 3, (8, 1, 1)).float()

    def forward(self, x, residual):
        return (self.conv(F.relu(self.bn(x) + residual)) * self.factors).sum()


@pytest.mark.parametrize("saved", nightly_but(["int8"], [None, "int8"]))
def test_stochastic_rounding_is_unbiased(saved):
    model, x, residual, runs = Pair(), images(), images() / 2, 300
    model.double()(x.double(), residual.double()).backward()
    exact = {name: p.grad.float() for name, p in model.named_parameters()}
    model.float().zero_grad(set_to_none=True)
    apply_(model, lowered(model, STOCHASTIC))
    run = compiled(model, saved=saved)
    draws = {name: [] for name in exact}
    for _ in range(runs):
        model.zero_grad(set_to_none=True)
        run(x, residual).backward()
        applied_to(model).advance()
        for name, parameter in model.named_parameters():
            draws[name].append(parameter.grad)
    assert len({tuple(grads.flatten().tolist()) for grads in draws["conv.weight"]}) == runs  # no two steps draw alike
    for name, expected in exact.items():
        grads = torch.stack(draws[name])
        error = (grads.mean(0) - expected).abs() / (grads.std(0) / runs**0.5).clamp(min=1e-4 * expected.abs().max())
        assert float(error.max()) < 5, name


def kept_bytes(run, x, shape):
    """Of tensors with as many elements as ``shape`` that forward keeps, by their dtypes."""
    kept = {}

    def pack(tensor):
        if tensor.numel() == shape.numel():
            kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(x)
    counts = {}
    for tensor in kept.values():
        counts[tensor.dtype] = counts.get(tensor.dtype, 0) + 1
    return counts


class Deep(nn.Module):
    """Four times batch norm, shortcut, ReLU and convolution."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(5))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(4))

    def forward(self, x):
        x = self.convs[0](x)
        for conv, norm in zip(self.convs[1:], self.norms, strict=True):
            x = conv(F.relu(norm(x)))
        return x


@pytest.mark.parametrize("saved, floats", [(None, 4), ("int8", 0)])
def test_forward_keeps_no_float_activation_where_there_is_a_copy(saved, floats):
    model, x = Deep(), images(16)
    applied = apply_(model, lowered(model))
    before = kept_bytes(model, x, x.shape)
    assert before[torch.float32] == 8, "without fusion: every batch norm's input and every ReLU's result"
    applied.step = 0
    after = kept_bytes(compiled(model, saved=saved), x, x.shape)
    assert after.get(torch.float32, 0) == floats
    assert after[torch.int8] == 5 + (4 if saved else 0)


def test_a_checkpoint_continues():
    model, x = ResNet(), images()
    applied = apply_(model, lowered(model))
    run = compiled(model)
    first = step(run, model, x)
    state, rounding = copy.deepcopy(model.state_dict()), applied.state_dict()
    second = step(run, model, x)
    assert not torch.equal(first["y"], second["y"])
    model.load_state_dict(state)
    applied.load_state_dict(rounding)
    again = step(run, model, x)
    assert all(torch.equal(value, again[name]) for name, value in second.items())
    assert applied.step == 2


def test_other_sizes_of_a_batch():
    model = Bert()
    applied = apply_(model, lowered(model, NEAREST))
    run = compiled(model)
    for batch in (4, 3, 5):
        x = torch.randn(batch, 5, 16)
        expected, found = step(model, model, x), step(run, model, x)
        assert distance(found, expected) < 1e-3
    assert applied.step == 6


@pytest.mark.parametrize("base", [Precision.FLOAT32, Precision.BFLOAT16])
def test_with_16_bit_results_it_is_no_worse(base, fused):
    """The unfused copy is of a result that was rounded to 16 bits first."""
    model, x = Bert(), tokens()
    exact = step(model, model, x)
    applied = apply_(model, lowered(model, attrs.evolve(ROWS, output=Precision.BFLOAT16)), base=base)
    run = compiled(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=base is Precision.BFLOAT16):
        unfused = step(model, model, x)
        applied.step = 0
        found = step(run, model, x)
    assert len(fused()) == 4
    assert distance(found, exact) < 1.25 * distance(unfused, exact)


class Checkpointed(nn.Module):
    """A block of which forward keeps the input alone."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def block(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


def test_gradient_checkpointing(fused):
    model, x = Checkpointed(), tokens()
    unfused, found = unfused_and_fused(model, x, NEAREST)
    assert len(fused()) == 2
    assert distance(found, unfused) < 1e-3


@pytest.mark.slow
def test_frozen_parameters_and_no_gradients():
    model, x = ResNet(), images()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("bn1" not in name and "conv2" not in name)
    applied = apply_(model, lowered(model, NEAREST))
    run = compiled(model)
    run(x).sum().backward()
    assert all((parameter.grad is not None) == parameter.requires_grad for parameter in model.parameters())
    with torch.no_grad():
        assert run(x).isfinite().all()
    model.eval()
    found = run(x)
    applied.remove()
    assert distance({"y": found}, {"y": model(x)}) < 1e-5, "in eval mode the model is plain"


def test_a_chain_that_no_named_backend_runs_stays_as_it_is(fused, monkeypatch):
    monkeypatch.setattr("qsync_torch.compiling.rewriting.ProducerBinding.reasons_against", lambda *_: ["none does"])
    model, x = Bert(), tokens()
    applied = apply_(model, lowered(model, STOCHASTIC))
    expected = step(torch.compile(model, backend="aot_eager"), model, x)
    applied.step = 0
    found = step(compiled(model), model, x)
    assert [message.partition(")")[2] for message in fused()][-1] == ", 1 readers stays unfused: none does"
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


@pytest.mark.nightly
def test_inductor(fused):
    """The rest is inductor's; one of the chains is behind a residual, with bits for its ReLU."""
    model, x = nn.Sequential(*(block for block in ResNet().blocks[1:])), images(channels=16)
    exact = step(model, model, x)
    for norm in (module for module in model.modules() if isinstance(module, nn.BatchNorm2d)):
        norm.reset_running_stats()
    unfused, found = unfused_and_fused(model, x, NEAREST, statistics=1e-2, backend="inductor")
    assert len(fused()) == 3
    assert distance(found, exact) < 2 * distance(unfused, exact) + 1e-3


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ({"saved": "int4"}, "in int8, got saved='int4'"),
        ({"backend": "eager"}, "inductor or aot_eager, got backend='eager'"),
        ({"backend": "aot_eager", "mode": "max-autotune"}, "mode and options are inductor's"),
        (
            {"mode": "lite"},
            "modes in which chains are fused are default, reduce-overhead, .*, got mode='lite'",
        ),
    ],
)
def test_arguments_that_are_refused(arguments, sentence):
    model = Vgg()
    apply_(model, lowered(model))
    with pytest.raises(PlanError, match=sentence):
        qsync.compile(model, **arguments)


@pytest.mark.parametrize("mode", _MODES)
def test_modes_stand_for_the_options_that_they_stand_for_in_pytorch(mode):
    assert torch._inductor.list_mode_options(mode) == _MODES[mode]


def test_a_model_without_a_plan_is_refused():
    with pytest.raises(PlanError, match="no plan is in force on this model: call apply_"):
        qsync.compile(Vgg())


@pytest.mark.parametrize(
    "backend, config, chain",
    [
        ("cutlass+triton+aten", "", ("cutlass", "triton", "aten")),
        ("cutlass", "quantize=triton/block=4096", ("triton", "cutlass")),
        ("auto", "quantize=triton/block=4096", ("triton",)),
        ("cutlass+aten", "quantize=aten/", ("cutlass", "aten")),
        ("auto", "quantize=aten/", ("auto",)),
        ("auto", "", ("auto",)),
    ],
)
def test_whose_kernels_produce(backend, config, chain):
    """Those of the backend that would quantize the activation, then the operator's; a producer can be pinned by its name."""
    choice = producer_choice(KernelChoice.parse(backend, config))
    assert choice.chain == chain
    pinned = producer_choice(KernelChoice.parse(backend, "&".join(filter(None, (config, "batch_norm.output=aten/")))))
    assert pinned.asked_for("batch_norm.output")[0] == ("aten",)
    assert pinned.asked_for("batch_norm.grad_input")[0] == chain


def test_a_second_derivative_of_a_chain_is_refused():
    """``aot_eager`` and inductor refuse every one themselves; this is what a chain says where its gradient is recorded."""
    form, choice = ChainForm(Activation.GELU), KernelChoice.parse("aten")
    binding = producer_binding(Producer.ACTIVATION, NEAREST, choice, form)
    x = torch.randn(4, 8, requires_grad=True)
    y = CHAINS[Producer.ACTIVATION](x, False, binding.key, 0, torch.zeros(1, dtype=torch.int64))[0]
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(PlanError, match=r"the activation of a fused chain, which has no second derivative.*create_graph=True"):
        grad.sum().backward()
