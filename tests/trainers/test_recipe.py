"""A recipe of torchtune's structure under a plan that stores its frozen weights, as the author's two commands start it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import HERE, run_ranks

from qsync_core.ir.precision import Storage
from qsync_core.run_folder import RunFolder

safetensors = pytest.importorskip("safetensors.torch")

NAME = "lora_recipe.py"
BUDGET = "4300KiB"
"""Between what the recipe takes with all weights in NF4, 3.3 MiB, and as they are, 5.4 MiB."""


def trained(folder: Path, printed: list[str]) -> list[dict[str, Any]]:
    """What each rank holds at the end, of a run whose loss falls."""
    for text in printed:
        before, after = text.rpartition("losses from ")[2].split(" to ")
        assert float(after) < 0.85 * float(before), text
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


def alike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Bit by bit."""
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.distributed(seconds=60)
def test_a_recipe_is_prepared_and_trains_with_its_frozen_weights_stored(tmp_path: Path):
    shutil.copy(HERE / NAME, tmp_path)
    run = RunFolder(tmp_path / "run")
    groups = ["--group", "train=role:train", "--group", f"infer=role:infer,memory:{BUDGET}"]
    run_ranks("-m", tmp_path, ["qsync", "prepare", NAME, "-o", "run", *groups])
    plan = run.load_plan(["train", "infer"])
    stored = {op_id.fqn for op_id, one in plan.group("infer").assignments.items() if one.variant.storage is not Storage.AS_IS}
    beside_adapters = {name for name in stored if name.endswith(".weight")}
    assert len(beside_adapters) > 3, stored  # all but k_proj and the output
    assert plan.accumulate == 2
    assert plan.indicator == "hutchinson"  # which observes layers behind checkpoints as if there were none

    full, rounded = trained(tmp_path, run_ranks(tmp_path / NAME, tmp_path))
    assert alike(full["adapters"], rounded["adapters"])
    changed = {name for name, value in full["base"].items() if not torch.equal(value, rounded["base"][name])}
    taken_out = {name.replace("_checkpoint_wrapped_module.", "") for name in stored}
    assert changed == {name if name.endswith(".weight") else f"{name}.weight" for name in taken_out}

    safetensors.save_file(full["base"], tmp_path / "base.safetensors")
    loaded = trained(tmp_path, run_ranks(tmp_path / NAME, tmp_path, ["base.safetensors"]))
    assert alike(loaded[0]["adapters"], loaded[1]["adapters"])
    assert all(alike(one["base"], full["base"]) for one in loaded)  # state_dict() has what the checkpoint has
