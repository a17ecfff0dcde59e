"""Stored weights of layers that hold their adapters beside them: what functional calls compute with them, keep and refuse."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from qsync_core.errors import PlanError
from qsync_core.ir.formats import OutputFormats
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment, GroupPlan, PrecisionPlan, Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import DeviceKind, DeviceType
from qsync_core.ir.variant import Variant
from qsync_torch import apply_, load_planned
from qsync_torch.apply.kernel_check import check_backends
from qsync_torch.apply.plan_fit import Assigned, locate
from qsync_torch.apply.stored_modules import STORED
from qsync_torch.torch_internals import DisableTorchFunction

pytestmark = pytest.mark.filterwarnings("ignore:the copy of a model that runs under a plan")
VARIANTS = ["bfloat16@nf4", "bfloat16@int8-row", "bfloat16@int8-block", "float32@nf4"]


class LoRALinear(nn.Module):
    """As torchtune's: the weight is the layer's own parameter."""

    def __init__(self, in_dim: int, out_dim: int, rank: int = 4) -> None:
        super().__init__()
        linear = nn.Linear(in_dim, out_dim)
        self.weight, self.bias = linear.weight.requires_grad_(False), linear.bias.requires_grad_(False)
        self.lora_a, self.lora_b = nn.Linear(in_dim, rank, bias=False), nn.Linear(rank, out_dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias) + 2 * self.lora_b(self.lora_a(x))


class Model(nn.Module):
    """Two such layers in a row."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = LoRALinear(64, 192), LoRALinear(192, 64)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.up(x)))


X = torch.randn(8, 64, generator=torch.Generator().manual_seed(3)).bfloat16()


def stored(variant: str = "bfloat16@nf4", model: nn.Module | None = None) -> nn.Module:
    """A model whose two weights are stored."""
    model = model or Model()
    base = Precision.BFLOAT16 if variant.startswith("bfloat16") else Precision.FLOAT32
    apply_(model, {"up.weight": variant, "down.weight": variant}, base=base)
    return model


def step(model: nn.Module, x: torch.Tensor = X) -> list[torch.Tensor]:
    """The result and the gradients of the adapters."""
    model.zero_grad()
    y = model(x)
    y.float().square().mean().backward()
    return [y.detach(), *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) == 5 and all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_of_adapters_are_those_of_the_dequantized_weights(variant):
    """Bit by bit those of a plain copy; and, in float32, those of autograd in float64."""
    dtype = torch.bfloat16 if variant.startswith("bfloat16") else torch.float32
    model = stored(variant, Model(dtype))
    x = X.to(dtype)
    assert all(module.__dict__[STORED].storage.is_quantized for module in (model.up, model.down))
    found = step(model, x)
    assert same(found, step(copy.deepcopy(model), x))
    exact = step(copy.deepcopy(model).double(), x.double())
    for mine, wanted in zip(found, exact, strict=True):
        assert (mine.double() - wanted).norm() <= (0.02 if dtype is torch.bfloat16 else 1e-6) * wanted.norm()


@pytest.mark.parametrize("is_training", [True, False])
def test_no_dequantized_copy_waits_for_backward(is_training):
    """In eval mode too, where the layer runs as the script has it."""
    model, kept = stored().train(is_training), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        found = step(model)
    assert kept
    assert max(tensor.nbytes for tensor in kept) < 2 * 64 * 192
    assert same(found, step(copy.deepcopy(model)))


def test_under_checkpoints_and_a_compiler():
    wanted = step(copy.deepcopy(stored()))
    model = Model()
    model.up, model.down = checkpoint_wrapper(model.up), checkpoint_wrapper(model.down)
    names = [f"{name}._checkpoint_wrapped_module.weight" for name in ("up", "down")]
    apply_(model, dict.fromkeys(names, "bfloat16@nf4"), base=Precision.BFLOAT16)
    assert same(step(model), wanted)
    assert same(step(torch.compile(stored(), backend="aot_eager", fullgraph=True)), wanted)


READS = {
    "to": lambda x, w, bias: F.linear(x, w.to(x.dtype), bias),
    "type_as": lambda x, w, bias: F.linear(x, w.type_as(x), bias),
    "detach": lambda x, w, bias: F.linear(x, w.detach(), bias),
    "matmul": lambda x, w, bias: x @ w.t() + bias,
    "addmm": lambda x, w, bias: torch.addmm(bias, x, w.T),
    "transpose": lambda x, w, bias: torch.matmul(x, w.to(x.dtype).transpose(0, 1)) + bias,
}


class Reading(LoRALinear):
    """Gets its weight ready for its product in another way."""

    read = "to"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return READS[self.read](x, self.weight, self.bias) + 2 * self.lora_b(self.lora_a(x))


def reading(how: str, dtype: torch.dtype) -> nn.Module:
    model = Model(dtype)
    for layer in (model.up, model.down):
        layer.__class__, layer.read = Reading, how
    return model


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize(("variant", "dtype"), [("bfloat16@nf4", torch.bfloat16), ("float32@int8-row", torch.float32)])
@pytest.mark.parametrize("how", READS)
def test_a_weight_that_is_cast_or_turned_for_its_product_is_not_kept_either(how, variant, dtype, is_training):
    model, kept = stored(variant, reading(how, dtype)).train(is_training), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.nbytes), t)[1], lambda t: t):
        found = step(model, X.to(dtype))
    assert max(kept) < dtype.itemsize * 64 * 192
    for mine, wanted in zip(found, step(copy.deepcopy(model), X.to(dtype)), strict=True):
        assert (mine - wanted).norm() <= (0.01 if dtype is torch.bfloat16 else 1e-6) * wanted.norm()


@pytest.mark.parametrize("is_training", [True, False])
def test_a_cast_in_a_model_under_autocast_is_not_kept_either(is_training):
    """Of float32 weights, to the format in which the layer computes."""
    model, kept = Model(torch.float32), []
    for layer in (model.up, model.down):
        layer.__class__ = Reading
        layer.forward = lambda x, layer=layer: Reading.forward(layer, x.bfloat16())
    apply_(model, {"up.weight": "bfloat16@nf4", "down.weight": "bfloat16@nf4"}, base=Precision.BFLOAT16)
    model.train(is_training)
    assert model.up.weight.bfloat16().dtype is torch.bfloat16
    plain = copy.deepcopy(model)
    for layer in (plain.up, plain.down):
        layer.forward = lambda x, layer=layer: Reading.forward(layer, x.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.nbytes), t)[1], lambda t: t):
            found = step(model, X.float())
        wanted = step(plain, X.float())
    assert max(kept) < 2 * 64 * 192
    assert all((mine - other).norm() <= 0.01 * other.norm() for mine, other in zip(found, wanted, strict=True))


def test_a_cast_is_a_tensor_of_its_own():
    """What is written into one is seen where it is multiplied with; what is stored later is not."""
    model = stored()
    cast, wanted = model.up.weight.float(), copy.deepcopy(model).up.weight.detach().float()
    row, x = cast[0], X.float()
    row.zero_()
    wanted[0] = 0
    assert torch.equal(F.linear(x, cast), F.linear(x, wanted))
    cast.mul_(2)
    assert torch.equal(cast, 2 * wanted)
    backup, wanted = model.up.weight.float(), copy.deepcopy(model).up.weight.detach().float()
    with pytest.warns(UserWarning, match="is rounded to that format"):
        model.up.weight.data.zero_()
    assert not model.up.weight.any()
    assert torch.equal(backup, wanted)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.weight.t().data.zero_(),
        lambda layer: layer.weight.detach().T.zero_(),
        lambda layer: setattr(layer.weight.t(), "data", torch.zeros(64, 192)),
        lambda layer: setattr(layer, "weight", layer.weight.t()),
        lambda layer: setattr(layer, "weight", layer.weight.float()),
        lambda layer: nn.Parameter(layer.weight.float()),
        lambda layer: nn.Parameter(layer.weight, requires_grad=False),
    ],
)
def test_what_would_not_reach_a_weight_through_a_cast_or_a_transpose_is_refused(change):
    with pytest.raises(PlanError, match=r"up.weight\b.*(call remove\(\) first|may be trained)"):
        change(stored().up)


def test_the_address_of_a_weight_is_that_of_its_numbers():
    """As long as the tensor lives that was asked for it."""
    weight = stored().up.weight
    address = weight.data_ptr()
    others = [torch.zeros(192, 64, dtype=torch.bfloat16) for _ in range(4)]
    assert all(other.data_ptr() != address for other in others)
    assert weight.data_ptr() == address


class SubLinear(nn.Linear):
    """As in Microsoft's loralib: a linear module with adapters, and a forward of its own."""

    def __init__(self, in_dim: int, out_dim: int, rank: int = 4) -> None:
        super().__init__(in_dim, out_dim)
        self.requires_grad_(False)
        self.lora_a, self.lora_b = nn.Linear(in_dim, rank, bias=False), nn.Linear(rank, out_dim, bias=False)

    forward = LoRALinear.forward


@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_subclasses_of_linear_modules_that_have_a_forward_of_their_own_are_stored(suffix):
    model = Model()
    model.up, model.down = SubLinear(64, 192).bfloat16(), SubLinear(192, 64).bfloat16()
    applied = apply_(model, {f"up{suffix}": "bfloat16@nf4", f"down{suffix}": "bfloat16@int8-row"}, base=Precision.BFLOAT16)
    assert all(module.__dict__[STORED].storage.is_quantized for module in (model.up, model.down))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.nbytes), t)[1], lambda t: t):
        found = step(model)
    assert max(kept) < 2 * 64 * 192
    assert same(found, step(copy.deepcopy(model)))
    applied.remove()
    assert same(found, step(model))


@pytest.mark.parametrize("strict", [True, False])
def test_exported(strict):
    model = stored("float32@nf4", Model(torch.float32)).eval()
    wanted = copy.deepcopy(model)(X.float())
    assert torch.allclose(torch.export.export(model, (X.float(),), strict=strict).module()(X.float()), wanted, atol=1e-6)


def test_a_weight_that_is_not_read_by_a_product_is_said_to_take_memory():
    model = Model()
    model.up.forward = lambda x: torch.einsum("bi,oi->bo", x, model.up.weight) + model.up.lora_b(model.up.lora_a(x))
    stored(model=model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    step(model)
    with pytest.warns(UserWarning, match="the plan stores up.weight#0, which the first step did not run .* gets it dequantized"):
        optimizer.step()


class _Formula(torch.autograd.Function):
    """A gradient of its own, which reads the weight past functions of tensor classes."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        with DisableTorchFunction():
            return torch.mm(x, torch.t(weight))

    @staticmethod
    def backward(ctx, grad):
        return torch.mm(grad, ctx.saved_tensors[0]), None


def _past_classes(weight):
    """A list, read past functions of tensor classes."""
    with DisableTorchFunction():
        return torch.cat([weight, weight])


def test_what_else_reads_the_weight_reads_it_dequantized():
    model = stored()
    weight, wanted = model.up.weight, copy.deepcopy(model).up.weight.detach()
    assert (weight.shape, weight.dtype, weight.stride(), weight.requires_grad) == (
        wanted.shape,
        wanted.dtype,
        wanted.stride(),
        False,
    )
    x = X.clone().requires_grad_()
    for read in (
        lambda w: w.norm(dim=1),
        lambda w: torch.cat([w, w]),
        lambda w: X @ w.t(),
        lambda w: w[3:5],
        lambda w: w.detach().float(),
        lambda w: w.data,
        _past_classes,
        lambda w: _Formula.apply(x, w),
        lambda w: torch.autograd.grad(_Formula.apply(x, w).sum(), x)[0],
        lambda w: copy.deepcopy(w),
    ):
        assert torch.equal(read(model.up.weight), read(wanted))


def test_changes_in_place_are_refused_and_whole_ones_are_stored():
    model = stored()
    for change in (
        lambda: model.up.weight.add_(1),
        lambda: model.up.weight[0].zero_(),
        lambda: model.up.weight.detach().zero_(),
        lambda: nn.init.zeros_(model.up.weight),
    ):
        with pytest.raises(PlanError, match="in place, which a plan stores as nf4"):
            change()
    for train in (lambda: model.up.weight.requires_grad_(True), lambda: model.up.requires_grad_(True)):
        with pytest.raises(PlanError, match=r"a plan stores up.weight \(on this rank nf4\), which is no parameter"):
            train()
    with pytest.raises(PlanError, match=r"another parameter is put in the place of up.weight"):
        model.up.weight = nn.Parameter(torch.zeros(192, 64))
    for write in (lambda: model.up.weight.data.fill_(1.0), lambda: setattr(model.up.weight, "data", torch.ones(192, 64))):
        with pytest.warns(UserWarning, match="up.weight is stored as nf4: what is written into it"):
            write()
        assert torch.equal(model.up.weight.float(), torch.ones(192, 64))


def test_a_removed_plan_gives_the_parameter_back():
    model = Model()
    names, before = [name for name, _ in model.named_parameters()], model.up.weight.clone()
    applied = apply_(model, {"up.weight": "bfloat16@nf4"}, base=Precision.BFLOAT16, keep_stored=True)
    assert "up.weight" not in dict(model.named_parameters())
    assert list(model.state_dict()) == names
    applied.remove()
    assert [name for name, _ in model.named_parameters()] == names
    assert torch.equal(model.up.weight, before)


def test_operators_are_found_again_once_their_weights_are_stored():
    """As when the model has come to another device."""
    model = stored()
    wanted = {OpId(f"{name}.weight"): Assigned(Variant.parse("bfloat16@nf4")) for name in ("up", "down")}
    addressed = locate(model, wanted)
    assert addressed.planned == tuple(wanted)
    check_backends(addressed, torch.device("cpu"))


def moved(applied) -> None:
    """As when the script sends the model to another device: the next forward asks for kernels anew."""
    applied.in_model._placed_on = None


@pytest.mark.parametrize("layer", [LoRALinear, SubLinear])
def test_names_may_change_before_the_model_comes_to_its_device(layer):
    model = Model()
    model.up, model.down = layer(64, 192).bfloat16(), layer(192, 64).bfloat16()
    applied = apply_(model, {"up.weight": "bfloat16@nf4", "down.weight": "int8"}, base=Precision.BFLOAT16, seed=1)
    wanted = step(model)
    model.up, model.down = checkpoint_wrapper(model.up), checkpoint_wrapper(model.down)
    moved(applied)
    assert same(step(model), wanted)


@pytest.mark.parametrize("group", ["train", "infer"])
def test_a_rank_that_keeps_what_others_store_asks_for_kernels_on_its_device(group):
    """Of a layer with its adapters beside its weight, and of modules of PyTorch's own."""
    model = nn.Sequential(Model(torch.float32), nn.Unflatten(1, (4, 4, 4)), nn.Conv2d(4, 4, 3).requires_grad_(False))
    adapters = tuple(OpId(name) for name, module in model.named_modules() if name.endswith(("lora_a", "lora_b")))
    names = (OpId("0.up.weight"), OpId("0.down.weight"), OpId("2"))

    def of(name: str, role: Role, variant: str) -> GroupPlan:
        chosen = dict.fromkeys(names, Assignment(Variant.parse(variant), "aten", "", "by hand"))
        return GroupPlan(name, role, 1, DeviceType("cpu", DeviceKind.CPU), Precision.FLOAT32, chosen)

    groups = (of("train", Role.TRAIN, "int8"), of("infer", Role.INFER, "float32@nf4"))
    plan = PrecisionPlan(
        "beside", "", names, {}, "by hand", "", 1, 1, 0.0, None, groups, "train",
        unaddressed_ids=adapters, output_formats=OutputFormats(decides=False),
    )  # fmt: skip
    applied = apply_(model, plan, group=group, allow_flags=["share"])
    assert "weight" not in dict(model[2].named_parameters())
    wanted = model(X.float())
    moved(applied)
    assert torch.equal(model(X.float()), wanted)


def test_a_checkpoint_is_loaded_straight_into_layers_behind_checkpoint_wrappers(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    wanted = Model()
    safetensors.save_file(wanted.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Model()
    model.up, model.down = checkpoint_wrapper(model.up), checkpoint_wrapper(model.down)
    names = [f"{name}._checkpoint_wrapped_module.weight" for name in ("up", "down")]
    load_planned(model, dict.fromkeys(names, "bfloat16@nf4"), tmp_path, base=Precision.BFLOAT16)
    assert same(step(model), step(stored(model=wanted)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = model.state_dict()
    assert torch.equal(state["up.weight"], Model().up.weight)


class Others(nn.Module):
    """Weights that functional calls read, and that are no linear layer's of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(8, 8), nn.LayerNorm(8)
        self.own = nn.ParameterDict({"matrix": torch.randn(8, 8)})
        self.filter = nn.Module()
        self.filter.weight = nn.Parameter(torch.randn(8, 8, 3, 3))
        self.requires_grad_(False)


@pytest.mark.parametrize("name", ["own.matrix", "filter.weight", "embed.weight"])
def test_other_weights_of_functional_calls_are_refused(name):
    with pytest.raises(
        PlanError, match=f"the weight of {name} cannot be stored as nf4: it is read by a functional call other than"
    ):
        apply_(Others(), {name: Assignment(Variant.parse("float32@nf4"), "aten", "", "by hand")})
