"""A trainer's script from nothing to a plan and through training, as the author's two commands start it."""

from __future__ import annotations

import pytest
import torch
from launching import run_ranks, scripts_of_the_page

from qsync_core.run_folder import RunFolder

NAME = "train_accelerate.py"


@pytest.mark.distributed
def test_accelerate_prepares_and_trains_in_two_processes(tmp_path):
    """Training is under the plan that was made: its checkpoint has the rounding step."""
    script, run = tmp_path / NAME, RunFolder(tmp_path / "run")
    script.write_text(scripts_of_the_page()[NAME])
    prepared = run_ranks("-m", tmp_path, ["qsync", "prepare", NAME, "-o", "run", "--group", "infer=role:infer"])
    assert run.report.is_file(), prepared[0]
    assert not (tmp_path / "trained.pt").exists()
    assert [sorted(groups) for groups in run.planned_groups()] == [["infer", "train"], ["infer"], ["train"]]

    assert "the plan was made for" not in "".join(run_ranks(script, tmp_path))  # which the first batch would say of another size
    (kept,) = (tmp_path / "checkpoint-10").glob("custom_checkpoint_*")
    assert torch.load(kept, weights_only=True) == {"step": 10, "seed": 0}
    assert (tmp_path / "trained.pt").exists()
