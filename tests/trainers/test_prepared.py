"""A trainer's script from nothing to a plan and through training, as the author's two commands start it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launching import run_ranks, scripts_of_the_page

from qsync_core.run_folder import RunFolder


def by_accelerate(folder: Path) -> object:
    """What its checkpoint has of the rounding."""
    (kept,) = folder.glob("checkpoint-10/custom_checkpoint_*")
    return torch.load(kept, weights_only=True)


def by_hugging_face(folder: Path) -> object:
    """The same; a step has two passes, which it is counted once for."""
    state = json.loads((folder / "checkpoints" / "checkpoint-10" / "trainer_state.json").read_text())
    return state["stateful_callbacks"]["PlanCallback"]["attributes"]["rounding"]


def by_lightning(folder: Path) -> object:
    """The same."""
    return torch.load(folder / "checkpoints" / "step=10.ckpt", weights_only=True)["qsync"]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "line", "kept"),
    [
        ("train_accelerate.py", "hybrid(accelerator, ..., run='run')", by_accelerate),
        ("train_transformers.py", "hybrid(trainer, run='run')", by_hugging_face),
        ("train_lightning.py", "HybridStrategy('run')", by_lightning),
    ],
    ids=["accelerate", "transformers", "lightning"],
)
def test_a_trainer_prepares_and_trains_in_two_processes(tmp_path: Path, name: str, line: str, kept: Callable[[Path], object]):
    """Training is under the plan that was made: its checkpoint has the rounding step."""
    script, run = tmp_path / name, RunFolder(tmp_path / "run")
    script.write_text(scripts_of_the_page()[name])
    prepared = run_ranks("-m", tmp_path, ["qsync", "prepare", name, "-o", "run", "--group", "infer=role:infer"])
    assert run.report.is_file(), prepared[0]
    assert not list(tmp_path.glob("trained*"))
    assert [sorted(groups) for groups in run.planned_groups()] == [["infer", "train"], ["infer"], ["train"]]
    assert f"\nthe line of the script is {line}" in run.start.read_text()

    assert "the plan was made for" not in "".join(run_ranks(script, tmp_path))  # which the first batch would say of another size
    assert kept(tmp_path) == {"step": 10, "seed": 0}
    assert len(list(tmp_path.glob("trained*"))) == 1
