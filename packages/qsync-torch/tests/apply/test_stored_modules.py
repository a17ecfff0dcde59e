"""A plan that stores frozen weights: results, gradients, memory, and everything that reads or moves the module."""

from __future__ import annotations

import copy
import math
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize, prune

from qsync_core.errors import NumericsError, PlanError
from qsync_core.ir.precision import Precision, Storage
from qsync_torch import apply_
from qsync_torch.apply.stored_modules import STORED, ReadWeight

FLOATS = ["float32@nf4", "float32@int8-row", "float32@int8-block"]


class Model(nn.Module):
    """A frozen linear and a frozen convolution between trained ones."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(64, 192)
        self.frozen = nn.Linear(192, 144, dtype=dtype)
        self.conv = nn.Conv2d(4, 8, 3, padding=1, bias=False, dtype=dtype)
        self.last = nn.Linear(288, 5)
        for parameter in (*self.frozen.parameters(), *self.conv.parameters()):
            parameter.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.frozen(torch.relu(self.first(x)).to(self.frozen.bias.dtype))
        image = self.conv(h.view(-1, 4, 6, 6))
        return self.last(image.flatten(1).to(self.last.weight.dtype))


X = torch.randn(8, 64, generator=torch.Generator().manual_seed(3))


def step(model: nn.Module, x: torch.Tensor = X) -> list[torch.Tensor]:
    """The result and the gradients of what is trained."""
    model.zero_grad()
    y = model(x)
    y.square().mean().backward()
    return [y.detach(), *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]


def dequantized(model: nn.Module) -> nn.Module:
    """A plain copy: what is stored stands in its parameters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return copy.deepcopy(model)


@pytest.mark.parametrize("variant", FLOATS)
def test_steps_are_those_of_the_dequantized_weights(variant):
    model = Model()
    apply_(model, {"frozen": variant, "conv": variant})
    found, wanted = step(model), step(dequantized(model))
    assert len(found) == 5
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.equal(mine, theirs)


def test_an_int8_product_reads_what_is_stored():
    model = Model()
    apply_(model, {"frozen": "int8@int8-row", "conv": "int8@int8-row"})
    for mine, exact in zip(step(model), step(dequantized(model)), strict=True):
        assert (mine - exact).norm() < 0.1 * exact.norm()
    held = model.frozen.__dict__[STORED]
    nodes, seen = [model(X).grad_fn], set()
    while nodes:
        node = nodes.pop()
        seen.update(tensor.data_ptr() for tensor in getattr(node, "saved_tensors", ()) if tensor is not None)
        nodes.extend(next_node for next_node, _ in node.next_functions if next_node is not None)
    assert held.tensors.values.data_ptr() in seen


def test_memory_is_that_of_what_is_stored_and_optimizers_see_nothing():
    model = Model()
    names = [name for name, _ in model.named_parameters()]
    parameter = model.frozen.weight
    apply_(model, {"frozen": "float32@nf4"})
    assert parameter.untyped_storage().nbytes() == 0
    assert model.frozen.__dict__[STORED].tensors.nbytes == Storage.NF4.nbytes(144, 192, 4)
    assert [name for name, _ in model.named_parameters()] == [name for name in names if name != "frozen.weight"]
    assert not list(model.named_buffers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model)
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_weight_reads_as_the_script_has_it(dtype):
    model = Model(dtype)
    before = model.frozen.weight.detach().clone()
    apply_(model, {"frozen": f"{str(dtype).removeprefix('torch.')}@int8-row"})
    read = model.frozen.weight
    assert isinstance(read, ReadWeight)
    assert (read.shape, read.dtype, read.device, read.requires_grad) == (before.shape, dtype, before.device, False)
    assert (read.float() - before.float()).abs().max() <= before.float().abs().max() / 100
    assert type(read + 1) is torch.Tensor
    assert type(copy.deepcopy(read)) is torch.Tensor


def test_state_dict_has_the_scripts_names_shapes_and_formats():
    model = Model(torch.bfloat16)
    before = {name: (value.shape, value.dtype) for name, value in model.state_dict().items()}
    apply_(model, {"frozen": "bfloat16@nf4", "conv": "bfloat16@int8-block"})
    with pytest.warns(UserWarning, match=r"holds them dequantized, on the CPU: they are not the bits of the checkpoint"):
        state = model.state_dict()
    assert {name: (value.shape, value.dtype) for name, value in state.items()} == before
    assert torch.equal(state["frozen.weight"], dequantized(model).frozen.weight)


def test_what_is_loaded_is_stored():
    model, other = Model(), Model()
    with torch.no_grad():
        other.frozen.weight.mul_(3)
    apply_(model, {"frozen": "float32@int8-row"})
    assert not model.load_state_dict(other.state_dict()).missing_keys
    wanted = Model()
    wanted.load_state_dict(other.state_dict())
    apply_(wanted, {"frozen": "float32@int8-row"})
    assert torch.equal(model.frozen.weight, wanted.frozen.weight)
    part = {name: value for name, value in other.state_dict().items() if name != "frozen.weight"}
    assert model.load_state_dict(part, strict=False).missing_keys == ["frozen.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*frozen\.weight"):
        model.load_state_dict(part)
    with pytest.raises(RuntimeError, match=r"size mismatch for frozen\.weight"):
        model.load_state_dict({**other.state_dict(), "frozen.weight": torch.zeros(3, 3)})


def test_an_average_that_would_pair_parameters_with_others_is_refused():
    model = Model()
    apply_(model, {"frozen": "float32@nf4"})
    with pytest.raises(
        PlanError, match=r"^AveragedModel pairs parameters .* by their order, .*: average those that are trained, by name$"
    ):
        torch.optim.swa_utils.AveragedModel(model)


def test_a_copy_says_that_it_has_more_parameters():
    model = Model()
    apply_(model, {"frozen": "float32@nf4"})
    with pytest.warns(
        UserWarning, match="the weights that the plan stores are parameters of it and not of the model: pair the two by"
    ):
        copy.deepcopy(model)


def test_what_is_loaded_in_inference_mode_is_trained_through():
    model, other = Model(), Model()
    with torch.no_grad():
        other.frozen.weight.mul_(3)
    apply_(model, {"frozen": "float32@nf4"})
    with torch.inference_mode():
        model.load_state_dict(other.state_dict())
    for mine, theirs in zip(step(model), step(dequantized(model)), strict=True):
        assert torch.equal(mine, theirs)


def test_copies_and_pickles_are_plain_models():
    model = Model()
    apply_(model, {"frozen": "float32@nf4"})
    with pytest.warns(UserWarning, match="runs in full precision"):
        clone = copy.deepcopy(model)
    loaded = pickle.loads(pickle.dumps(model))
    for plain in (clone, loaded):
        assert type(plain.frozen) is nn.Linear
        assert STORED not in plain.frozen.__dict__
        assert [name for name, _ in plain.named_parameters()] == [name for name, _ in Model().named_parameters()]
        assert torch.equal(plain.frozen.weight, model.frozen.weight)
        assert not plain.frozen.weight.requires_grad


def test_remove_gives_the_parameters_back_and_says_that_they_were_rounded():
    model = Model()
    parameter, names = model.frozen.weight, [name for name, _ in model.named_parameters()]
    applied = apply_(model, {"frozen": "float32@nf4"})
    stored = model.frozen.weight.data.clone()
    with pytest.warns(UserWarning, match=r"the 1 weights that the plan stored \(frozen\.weight first\) are given back dequantized"):
        applied.remove()
    assert model.frozen.weight is parameter
    assert torch.equal(parameter, stored)
    assert [name for name, _ in model.named_parameters()] == names


def test_a_loop_that_unfreezes_a_block_is_told_that_it_has_not_met_what_is_stored():
    model = nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64, bias=False)).requires_grad_(False))
    apply_(model, {"1.1": "float32@nf4"})
    with warnings.catch_warnings(action="error"):
        for _ in range(3):
            step(model)
    for parameter in model[1].parameters():
        parameter.requires_grad_(True)
    with pytest.warns(UserWarning, match=r"1\.0\.weight was frozen when the plan was applied and is trained now; weights that the"):
        step(model)


def test_what_is_written_into_a_stored_weight_is_rounded_and_said():
    model = Model()
    apply_(model, {"frozen": "float32@int8-row"})
    before = model.frozen.weight.data
    with pytest.warns(UserWarning, match=r"frozen\.weight is stored as int8-row: what is written into it"):
        model.frozen.weight.data += 1.0
    assert (model.frozen.weight.data - before - 1).abs().max() < 0.01
    with pytest.raises(PlanError, match=r"add_ changes frozen\.weight in place, which a plan stores as int8-row: change"):
        model.frozen.weight.add_(1)
    with pytest.warns(UserWarning, match="is rounded"):
        model.frozen.weight.data.zero_()
    with pytest.warns(UserWarning, match="is rounded"):
        model.frozen.weight.data[0] = 1.0
    assert model.frozen.weight.detach().sum(1).tolist() == [192.0, *[0.0] * 143]
    with pytest.raises(PlanError, match=r"frozen\.weight has shape \[144, 192\], and what is written into it \[2, 2\]"):
        model.frozen.weight.data = torch.zeros(2, 2)


@pytest.mark.parametrize("read", [lambda layer: layer.weight, lambda layer: layer.weight.data, lambda layer: layer.weight.detach()])
def test_what_is_written_into_a_view_of_a_stored_weight_is_refused(read):
    """It would be lost; a copy of a view may be written into."""
    model = Model()
    apply_(model, {"frozen": "float32@int8-row"})
    before = model.frozen.weight.data.clone()
    for write in (
        lambda weight: weight[0].fill_(1.0),
        lambda weight: weight.view(-1)[:3].mul_(2.0),
        lambda weight: weight.t()[0].zero_(),
        lambda weight: weight.T.zero_(),
        lambda weight: weight.flatten()[1:].copy_(torch.zeros(1)),
        lambda weight: weight.detach().zero_(),
        lambda weight: weight.chunk(2)[0].zero_(),
        lambda weight: next(iter(weight)).zero_(),
        lambda weight: torch._foreach_mul_([weight[0]], 2.0),
        lambda weight: torch.mul(weight[0], 2.0, out=weight[0]),
    ):
        with pytest.raises(PlanError, match=r" changes a view of frozen.weight in place, which a plan stores as int8-row: change"):
            write(read(model.frozen))
    with pytest.raises(ValueError, match="read-only"):
        read(model.frozen).numpy()[0] = 1.0
    read(model.frozen)[0].clone().fill_(1.0)
    assert type(read(model.frozen)[0] + 1) is torch.Tensor
    assert torch.equal(model.frozen.weight, before)


def test_functions_that_write_are_seen_by_every_argument():
    model = Model()
    apply_(model, {"frozen": "float32@int8-row"})
    for write in (
        lambda weight: nn.init.kaiming_uniform_(weight),
        lambda weight: torch.mul(weight, 2.0, out=weight),
        lambda weight: torch._foreach_mul_([weight], 2.0),
    ):
        with pytest.raises(PlanError, match=r" changes frozen.weight in place, which a plan stores as int8-row: change"):
            write(model.frozen.weight)
    before = model.frozen.weight.data.clone()
    with pytest.warns(UserWarning, match="is rounded"):
        torch._foreach_mul_([model.frozen.weight.data], 2.0)
    assert torch.equal(model.frozen.weight, 2 * before)


def test_a_saved_weight_is_a_plain_tensor():
    model = Model()
    apply_(model, {"frozen": "float32@nf4"})
    loaded = pickle.loads(pickle.dumps(model.frozen.weight))
    assert type(loaded) is torch.Tensor
    assert torch.equal(loaded, model.frozen.weight)


def test_a_weight_that_is_not_finite_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model[1].weight[0, 0] = math.nan
    with pytest.raises(NumericsError, match=r"1\.weight holds NaN or infinity, which no stored format has"):
        apply_(model, {"0": "float32@nf4", "1": "float32@nf4"})
    assert torch.equal(model.state_dict()["0.weight"], before["0.weight"])
    assert [name for name, _ in model.named_parameters()] == list(before)


def test_a_saved_state_that_is_loaded_again_leaves_the_bits_that_are_stored():
    model = Model()
    apply_(model, {"frozen": "float32@nf4"})
    held = model.frozen.__dict__[STORED]
    before = held.tensors.values.clone(), held.tensors.constants.clone()
    for _ in range(3):
        with pytest.warns(UserWarning, match="not the bits"):
            state = model.state_dict()
        model.load_state_dict(state)
    assert torch.equal(held.tensors.values, before[0])
    assert torch.equal(held.tensors.constants, before[1])


def test_what_would_take_the_place_of_a_stored_weight_is_refused():
    """It would not run; what adapters give back when they are taken off is the weight itself."""
    model = Model()
    apply_(model, {"frozen": "float32@nf4"})
    layer, other = model.frozen, nn.Parameter(torch.zeros(144, 192))
    layer.weight = layer.weight
    for replace in (
        lambda: setattr(layer, "weight", other),
        lambda: setattr(layer, "weight", None),
        lambda: delattr(layer, "weight"),
        lambda: layer.register_parameter("weight", other),
        lambda: prune.l1_unstructured(layer, "weight", 0.5),
        lambda: parametrize.register_parametrization(layer, "weight", nn.Identity()),
    ):
        with pytest.raises(PlanError, match=r"is put in the place of frozen\.weight, which a plan stores and runs: assign to"):
            replace()
    assert torch.equal(model(X), dequantized(model)(X))
    layer._parameters["weight"] = other
    with pytest.raises(PlanError, match=r"another parameter was put in the place of frozen\.weight, which a plan stores and runs"):
        model.state_dict()


@pytest.mark.parametrize("variant", ["float32@nf4", "int8@int8-row"])
def test_a_functional_call_runs_with_the_weights_that_it_gives(variant):
    model = Model()
    apply_(model, {"frozen": variant})
    given = {**dequantized(model).state_dict(), "frozen.weight": torch.randn(144, 192)}
    wanted = dequantized(model)
    wanted.load_state_dict(given)
    assert torch.equal(torch.func.functional_call(model, given, (X,)), wanted(X))
    assert isinstance(model.frozen.weight, ReadWeight)


def test_training_a_stored_weight_is_refused():
    """It is no parameter, so that nothing would train it."""
    model = Model()
    apply_(model, {"frozen": "float32@nf4"})
    for unfreeze in (
        lambda: model.requires_grad_(True),
        lambda: model.frozen.requires_grad_(),
        lambda: model.frozen.weight.requires_grad_(True),
        lambda: setattr(model.frozen.weight, "requires_grad", True),
        lambda: nn.Parameter(model.frozen.weight.data),
    ):
        with pytest.raises(
            PlanError, match=r"a plan stores frozen\.weight \(on this rank nf4\), which is no parameter .* remove\(\)"
        ):
            unfreeze()
    model.frozen.requires_grad_(False).weight.requires_grad_(False)
    assert nn.Parameter(model.frozen.weight.data.clone()).requires_grad


def test_stored_weights_follow_their_module_and_keep_their_format():
    model = Model()
    apply_(model, {"frozen": "float32@nf4"})
    held = model.frozen.__dict__[STORED]
    model.to("meta")
    assert all(tensor.device.type == "meta" for tensor in held.tensors)
    assert [tensor.dtype for tensor in held.tensors] == [torch.uint8, torch.float32, torch.uint8, torch.float32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_that_changes_its_format_reads_its_stored_weights_in_that(dtype):
    """As for an evaluation: what is stored stays as it is."""
    model = Model()
    apply_(model, {"frozen": "float32@nf4", "conv": "float32@int8-row"})
    wanted = dequantized(model).to(dtype).eval()
    model.to(dtype).eval()
    assert [tensor.dtype for tensor in model.frozen.__dict__[STORED].tensors] == [
        torch.uint8,
        torch.float32,
        torch.uint8,
        torch.float32,
    ]
    assert torch.equal(model(X.to(dtype)), wanted(X.to(dtype)))
    assert {value.dtype for value in model.state_dict().values()} == {dtype}
    if dtype is torch.float64:
        with pytest.raises(PlanError, match=r"is float64, and plans are for float32 parameters"):
            model.train()(X.to(dtype))


def test_kept_weights_are_those_that_were_loaded_last():
    model, other = Model(), Model()
    with torch.no_grad():
        other.frozen.weight.mul_(3)
    apply_(model, {"frozen": "float32@nf4"}, keep_stored=True)
    for _ in range(2):
        model.load_state_dict(other.state_dict())
        assert torch.equal(model.state_dict()["frozen.weight"], other.frozen.weight)
    rounded = model.frozen.weight.detach().clone()
    model.load_state_dict({**other.state_dict(), "frozen.weight": rounded})
    assert torch.equal(model.state_dict()["frozen.weight"], rounded)
    assert torch.equal(model.frozen.weight, rounded)


@pytest.mark.parametrize("variant", ["float32@nf4", "bfloat16@int8-block", "int8@int8-row"])
def test_a_compiled_model_is_one_graph_and_computes_the_same(variant):
    model = Model()
    apply_(model, {"frozen": variant, "conv": variant})
    eager = step(model)
    compiled = step(torch.compile(model, backend="aot_eager", fullgraph=True))
    tolerance = 0.05 if variant.startswith("int8") else 0.0  # a compiler's order of operations is another
    for mine, theirs in zip(compiled, eager, strict=True):
        assert (mine - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_parts_run_again_as_they_did(reentrant):
    model = Model()
    apply_(model, {"frozen": "bfloat16@nf4"})
    plain = step(model)
    inner = model.frozen.forward
    x = X.clone().requires_grad_()

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(self.inside, x, use_reentrant=reentrant)

    assert callable(inner)
    for mine, theirs in zip(step(Checkpointed(), x), plain, strict=True):
        assert torch.equal(mine, theirs)


def test_in_eval_mode_the_dequantized_weight_runs():
    model = Model()
    apply_(model, {"frozen": "bfloat16@nf4"})
    model.eval()
    assert torch.equal(model(X), dequantized(model).eval()(X))


@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_in_eval_mode_keep_no_dequantized_weight(dtype, amp):
    """They are those of the dequantized weights there, too."""
    model = Model(dtype)
    apply_(model, {"frozen": "bfloat16@nf4", "conv": "bfloat16@int8-row"})
    plain = dequantized(model).eval()
    kept = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.add((tensor.numel(), tensor.is_floating_point()))
        return tensor

    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        found, wanted = step(model.eval()), step(plain)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            model(X)
    for mine, theirs in zip(found, wanted, strict=True):
        assert (mine.float() - theirs.float()).norm() <= (0.01 if amp or dtype is torch.bfloat16 else 1e-6) * theirs.float().norm()
    assert (144 * 192, True) not in kept
    assert (8 * 4 * 9, True) not in kept


@pytest.mark.parametrize("train", [True, False])
def test_recorded_and_in_forward_mode(train):
    model = Model().train(train)
    apply_(model, {"frozen": "float32@nf4", "conv": "float32@int8-row"})
    wanted = model(X)
    assert torch.equal(torch.jit.trace(model, (X,))(X), wanted)
    direction, plain = torch.randn_like(X), dequantized(model)
    _, tangent = torch.func.jvp(plain, (X,), (direction,))
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(model(forward_ad.make_dual(X, direction))).tangent
    assert torch.allclose(found, tangent, rtol=1e-5, atol=1e-6)


def test_under_autocast():
    model = Model(torch.bfloat16)
    apply_(model, dict.fromkeys(("first", "conv", "last"), "bfloat16") | {"frozen": "bfloat16@nf4"}, base=Precision.BFLOAT16)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(X)
        wanted = dequantized(model)(X)
    assert y.dtype is torch.bfloat16
    assert torch.equal(y, wanted)


class Tied(nn.Module):
    """An embedding whose weight is its head's too, and a weight that a functional call reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 8), nn.Linear(8, 9, bias=False)
        self.head.weight = self.embed.weight
        self.raw = nn.Parameter(torch.randn(8, 8), requires_grad=False)
        self.up = nn.ConvTranspose2d(4, 4, 2)
        self.requires_grad_(False)


@pytest.mark.parametrize("variant", ["float16@nf4", "float16", "float32@int8-row", "bfloat16@nf4"])
def test_compiled_under_autocast_a_product_is_in_the_plans_format(variant):
    """Autocast would cast operands in another format than its own."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 64))
    apply_(model, {"1": variant}, base=Precision.BFLOAT16)

    def steps(run):
        with torch.autocast("cpu", torch.bfloat16):
            y = run(X)
        (gradient,) = torch.autograd.grad(y.float().square().sum(), model[0].weight)
        return y.detach(), gradient

    eager, compiled = steps(model), steps(torch.compile(model, backend="aot_eager"))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(compiled, eager, strict=True))


@pytest.mark.parametrize(
    ("model", "name", "reason"),
    [
        (Model(), "first", "it is trained, and only weights that are not trained are stored in another format"),
        (Tied(), "head", r"another module has it too \(tied weights\)"),
        (Tied(), "raw", "it is read by a functional call"),
        (Tied(), "up", "the weight of a transposed convolution has its input channels first"),
    ],
)
def test_what_cannot_be_stored_is_refused_and_nothing_is_changed(model, name, reason):
    before = {key: value.clone() for key, value in model.state_dict().items()}
    also = {"frozen": "float32@nf4"} if isinstance(model, Model) else {}
    with pytest.raises(PlanError, match=f"the weight of {name} cannot be stored as nf4: {reason}.*; plan it as the script has it"):
        apply_(model, {**also, name: "float32@nf4"})
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(STORED in module.__dict__ for module in model.modules())


def test_weights_that_are_kept_come_back_bit_by_bit():
    model = Model(torch.bfloat16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    applied = apply_(model, {"frozen": "bfloat16@nf4"}, keep_stored=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = model.state_dict()
        applied.remove()
    for found in (state, model.state_dict()):
        assert all(torch.equal(value, before[name]) for name, value in found.items())
