"""Loading a model straight into its planned formats: the same numbers, little memory, and each bad checkpoint in one sentence."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from qsync_core.errors import PlanError
from qsync_torch import apply_, load_planned
from qsync_torch.apply.stored_modules import STORED

safetensors = pytest.importorskip("safetensors.torch")

NAMES = ["layers.0", "layers.1", "layers.2", "layers.3"]
PLAN = dict.fromkeys(NAMES, "bfloat16@nf4")


class Model(nn.Module):
    """Frozen layers in bfloat16 and a trained head that shares its weight with an embedding."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.layers = nn.ModuleList(nn.Linear(width, width, dtype=torch.bfloat16) for _ in NAMES)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight
        self.layers.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x).bfloat16()
        for layer in self.layers:
            h = torch.relu(layer(h))
        return self.head(h.float())


def saved(folder: Path, width: int = 64, sharded: bool = False) -> Model:
    """A model whose checkpoint is in the folder."""
    torch.manual_seed(0)
    model = Model(width)
    state = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    if not sharded:
        safetensors.save_file(state, folder / "model.safetensors")
        return model
    files = {name: f"part-{index % 2}.safetensors" for index, name in enumerate(state)}
    for file in set(files.values()):
        safetensors.save_file({name: value for name, value in state.items() if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return model


def on_meta(width: int = 64) -> Model:
    with torch.device("meta"):
        return Model(width)


@pytest.mark.parametrize("sharded", [False, True])
def test_it_is_the_model_that_is_loaded_and_then_planned(tmp_path, sharded):
    wanted = saved(tmp_path, sharded=sharded)
    checkpoint = {name: value.clone() for name, value in wanted.state_dict().items()}
    apply_(wanted, PLAN)
    model = on_meta()
    load_planned(model, PLAN, tmp_path)
    assert model.head.weight is model.embed.weight
    x = torch.arange(8)
    for one in (model, wanted):
        one(x).square().mean().backward()
    assert torch.equal(model(x), wanted(x))
    assert torch.equal(model.head.weight.grad, wanted.head.weight.grad)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what the checkpoint has, and no warning that it is not
        state = model.state_dict()
    assert state.keys() == checkpoint.keys()
    assert all(torch.equal(value, checkpoint[name]) for name, value in state.items())


def test_tied_weights_may_have_either_name_in_a_checkpoint(tmp_path):
    """``save_model`` of safetensors keeps the one that comes first in the alphabet, here another than the model's first."""
    wanted = saved(tmp_path)
    state = wanted.state_dict()
    state["a_head.weight"] = state.pop("head.weight")
    del state["embed.weight"]
    safetensors.save_file(state, tmp_path / "model.safetensors")
    model = on_meta()
    model.a_head = model._modules.pop("head")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_planned(model, PLAN, tmp_path)
    assert model.a_head.weight is model.embed.weight
    assert torch.equal(model.embed.weight, wanted.embed.weight)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            lambda file: file.unlink(),
            r"model.safetensors cannot be read any more \(No such file or directory\): what a plan stores",
        ),
        (lambda file: _doubled(file), "model.safetensors was written to since the model was loaded from it: what a plan stores of"),
    ],
)
def test_a_checkpoint_that_is_gone_costs_no_trained_weights(tmp_path, spoil, said):
    """What is stored is dequantized then: a script that saves its adapters asks for all of the state."""
    saved(tmp_path)
    model = on_meta()
    applied = load_planned(model, PLAN, tmp_path)
    stored = model.layers[0].weight.clone()
    spoil(tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match=said), pytest.warns(UserWarning, match="holds them dequantized"):
        state = model.state_dict()
    assert torch.equal(state["layers.0.weight"], stored)
    assert torch.equal(state["embed.weight"], model.embed.weight)
    with pytest.warns(UserWarning, match="are given back dequantized"):
        applied.remove()
    assert torch.equal(model.layers[0].weight, stored)


def _doubled(file: Path) -> None:
    state = safetensors.load_file(file)
    safetensors.save_file({name: value * 2 for name, value in state.items()} | {"more": torch.ones(1)}, file)


def test_a_removed_plan_leaves_what_the_checkpoint_has(tmp_path):
    wanted = saved(tmp_path)
    model = on_meta()
    applied = load_planned(model, PLAN, tmp_path / "model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        applied.remove()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(model.parameters(), wanted.parameters(), strict=True))


def test_peft_names_are_those_of_the_base(tmp_path):
    peft = pytest.importorskip("peft")
    wanted = saved(tmp_path)
    model = peft.get_peft_model(on_meta(), peft.LoraConfig(r=2, target_modules=["layers.0", "layers.2"]))
    for module in model.modules():  # adapters have values of their own
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad:
                module._parameters[name] = nn.Parameter(torch.full(parameter.shape, 0.01))
    names = {"0": "layers.0.base_layer", "1": "layers.1", "2": "layers.2.base_layer", "3": "layers.3"}
    load_planned(model, {f"base_model.model.{name}": "bfloat16@int8-row" for name in names.values()}, tmp_path)
    held = model.get_submodule("base_model.model.layers.0.base_layer").__dict__[STORED]
    assert torch.equal(held.known(), wanted.layers[0].weight)


def _index(folder: Path, text: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(text)


def _int8(folder: Path) -> None:
    state = safetensors.load_file(folder / "model.safetensors")
    safetensors.save_file({**state, "layers.1.weight": state["layers.1.weight"].to(torch.int8)}, folder / "model.safetensors")


def _packed(folder: Path) -> None:
    """As bitsandbytes has a weight in 4 bits: under the same name, two numbers in each of a column."""
    state = safetensors.load_file(folder / "model.safetensors")
    state["layers.1.weight"] = torch.zeros(64 * 64 // 2, 1, dtype=torch.uint8)
    safetensors.save_file(state, folder / "model.safetensors")


def _other_shape(folder: Path) -> None:
    state = safetensors.load_file(folder / "model.safetensors")
    safetensors.save_file({**state, "layers.1.weight": torch.zeros(3, 4)}, folder / "model.safetensors")


def _without(folder: Path) -> None:
    state = safetensors.load_file(folder / "model.safetensors")
    del state["layers.1.weight"], state["layers.2.weight"]
    safetensors.save_file(state, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "there is neither model.safetensors nor model.safetensors.index"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"nothing"), "cannot be read as a safetensors file"),
        (lambda folder: _index(folder, "{}"), r"is no index of safetensors files \(KeyError\): it lacks a weight_map"),
        (lambda folder: _index(folder, "[" * 100_000), r"is no index of safetensors files \(RecursionError\)"),
        (lambda folder: _index(folder, json.dumps({"weight_map": {"a": "b" * 300}})), "names b+, which is not beside it"),
        (lambda folder: _index(folder, '{"weight_map": {"a": "b.safetensors"}}'), "names b.safetensors, which is not beside it"),
        (_without, r"holds no layers.1.weight, which layers.1.weight of this Model waits for, nor 1 others"),
        (_other_shape, r"layers.1.weight has shape \[3, 4\] in .* and \[64, 64\] in the model"),
        (_packed, "layers.1.weight is uint8 in .*, a checkpoint that another library quantized: name one with float weights"),
        (_int8, "layers.1.weight is int8 in .*, a checkpoint that another library quantized: name one with float weights"),
    ],
)
def test_what_is_wrong_with_a_checkpoint_is_said_in_a_sentence(tmp_path, spoil, said):
    saved(tmp_path)
    spoil(tmp_path)
    model = on_meta()
    with pytest.raises(PlanError, match=said) as error:
        load_planned(model, PLAN, tmp_path)
    assert "\n" not in str(error.value)
    assert not any(STORED in module.__dict__ for module in model.modules())


def test_what_a_checkpoint_has_besides_is_said(tmp_path):
    """It may be that of a deeper model; a tied head under its own name is not meant."""
    state = saved(tmp_path).state_dict()
    safetensors.save_file({name: value.clone() for name, value in state.items()}, tmp_path / "model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_planned(on_meta(), PLAN, tmp_path)
    safetensors.save_file(
        {name: value.clone() for name, value in state.items()} | {"layers.4.weight": torch.ones(64, 64)},
        tmp_path / "model.safetensors",
    )
    with pytest.warns(UserWarning, match=r"holds layers\.4\.weight, which this Model has no place for, .* left out"):
        load_planned(on_meta(), PLAN, tmp_path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(PlanError, match=r"there is no checkpoint '.*missing.safetensors': name a safetensors file"):
        load_planned(on_meta(), PLAN, tmp_path / "missing.safetensors")


def test_a_buffer_without_values(tmp_path):
    saved(tmp_path)
    model = on_meta()
    model.register_buffer("scale", torch.empty(3, device="meta"), persistent=False)
    with pytest.raises(PlanError, match=r"buffer scale of this Model is on the meta device and .* does not hold it: build"):
        load_planned(model, PLAN, tmp_path)
