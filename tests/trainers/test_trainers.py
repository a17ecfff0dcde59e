"""The scripts of docs/trainers.md end with the bits of plain loops, unbroken and resumed by new processes."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from digits_net import make_model
from launching import HERE, run_ranks, scripts_of_the_page
from safetensors.torch import load_file

pytestmark = pytest.mark.distributed
PREDICTED = {"qsync/predicted_step_ms": 1.5}
OPERATORS = {
    "digits": {"qsync/train/float32": 4, "qsync/infer/float32": 2, "qsync/infer/int8": 1, "qsync/infer/bfloat16": 1},
    "bert": {"qsync/train/float32": 14, "qsync/infer/float32": 11, "qsync/infer/int8": 2, "qsync/infer/bfloat16": 1},
}
SAID = re.compile(r"^qsync: \w+ under a plan: train .*; predicted step 1\.50 ms$", re.MULTILINE)
"""What rank 0 prints once."""


TIMES_DIFFER = "the plan's times may not hold"
"""What the first step says where DistributedDataParallel has other options than the plan's."""


class Running:
    """A script of the page in a folder of its own, with its run."""

    def __init__(self, name: str, plan: Path, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / name).write_text(scripts_of_the_page()[name])
        shutil.copy(plan, folder / "run")
        self.script = folder / name

    def run(self) -> list[str]:
        return run_ranks(self.script, self.folder)

    def trained(self) -> dict[str, torch.Tensor]:
        return torch.load(self.folder / "trained.pt", weights_only=True)

    def with_checkpoint(self, source: Path, place: str) -> None:
        """A checkpoint of another run, as the only one here."""
        target = self.folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_hugging_faces_trainer(plans, plain, tmp_path):
    whole = Running("train_transformers.py", plans / "bert.qsync", tmp_path / "whole")
    said = whole.run()
    assert [len(SAID.findall(one)) for one in said] == [1, 0]
    assert TIMES_DIFFER not in "".join(said)
    assert_same(load_file(whole.folder / "trained" / "model.safetensors"), plain["transformers"])
    history = json.loads((whole.folder / "checkpoints" / "checkpoint-20" / "trainer_state.json").read_text())["log_history"]
    logged = [entry for entry in history if "qsync/predicted_step_ms" in entry]
    assert len(logged) == 1
    assert PREDICTED.items() | OPERATORS["bert"].items() <= logged[0].items()
    assert [entry["step"] for entry in history if "eval_loss" in entry] == [10, 20]

    resumed = Running("train_transformers.py", plans / "bert.qsync", tmp_path / "resumed")
    resumed.with_checkpoint(whole.folder / "checkpoints" / "checkpoint-10", "checkpoints/checkpoint-10")
    resumed.run()
    assert_same(load_file(resumed.folder / "trained" / "model.safetensors"), plain["transformers"])


def test_accelerate(plans, plain, tmp_path):
    whole = Running("train_accelerate.py", plans / "digits.qsync", tmp_path / "whole")
    assert TIMES_DIFFER not in "".join(whole.run())
    assert_same(whole.trained(), plain["accelerate"])

    resumed = Running("train_accelerate.py", plans / "digits.qsync", tmp_path / "resumed")
    resumed.with_checkpoint(whole.folder / "checkpoint-10", "checkpoint-10")
    resumed.run()
    assert_same(resumed.trained(), plain["accelerate"])


def test_a_checkpoint_has_the_buffers_of_a_training_rank_where_rank_0_is_not_one(plans, tmp_path):
    running = Running("train_accelerate.py", plans / "digits.qsync", tmp_path / "reversed")
    text = running.script.read_text()
    saving = '        accelerator.save_state("checkpoint-10")\n'
    kept = 'torch.save(accelerator.unwrap_model(model).bn1.running_mean, f"rank{accelerator.process_index}.pt")'
    assert saving in text
    running.script.write_text(text.replace(saving, f"        {kept}\n{saving}"))
    run_ranks(running.script, running.folder, groups=("infer", "train"))
    own = [torch.load(running.folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    saved = load_file(running.folder / "checkpoint-10" / "model.safetensors")["bn1.running_mean"]
    assert not torch.equal(own[0], own[1])
    assert torch.equal(saved, own[1])


def test_lightning(plans, plain, tmp_path):
    whole = Running("train_lightning.py", plans / "module.qsync", tmp_path / "whole")
    said = whole.run()
    assert [len(SAID.findall(one)) for one in said] == [1, 0]
    assert TIMES_DIFFER not in "".join(said)
    assert_same(whole.trained(), plain["lightning"])
    with next(whole.folder.glob("logs/**/metrics.csv")).open() as file:
        logged = [row for row in csv.DictReader(file) if row["qsync/predicted_step_ms"]]
    assert len(logged) == 1
    assert {name: float(logged[0][name]) for name in (PREDICTED | OPERATORS["digits"])} == PREDICTED | OPERATORS["digits"]

    resumed = Running("train_lightning.py", plans / "module.qsync", tmp_path / "resumed")
    resumed.with_checkpoint(whole.folder / "checkpoints" / "step=10.ckpt", "checkpoints/last.ckpt")
    resumed.run()
    assert_same(resumed.trained(), plain["lightning"])


@pytest.mark.parametrize("trainer, plan", [("accelerate", "digits"), ("lightning", "module")])
def test_losses_are_scaled_where_the_plan_needs_it(plans, plain, tmp_path, trainer, plan):
    """The plain loop scales them itself, and unscales gradients before it clips them."""
    scaled = Running(f"train_{trainer}.py", plans / f"{plan}-scaled.qsync", tmp_path / "scaled")
    scaled.run()
    assert_same(scaled.trained(), plain[f"{trainer}-scaled"])


def test_a_converter_by_torchtitans_protocol(plans, plain, tmp_path):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    whole.mkdir()
    said = run_ranks(HERE / "torchtitan_loop.py", whole, [str(plans / "digits.qsync")])
    assert all(TIMES_DIFFER in one for one in said)  # torchtitan's own buckets
    assert_same(torch.load(whole / "trained.pt", weights_only=True), plain["accelerate"])

    shutil.copytree(whole / "step-10", resumed / "step-10")
    run_ranks(HERE / "torchtitan_loop.py", resumed, [str(plans / "digits.qsync")])
    found = torch.load(resumed / "trained.pt", weights_only=True)
    # Of buffers, a distributed checkpoint keeps any rank's, and BatchNorm's statistics are each rank's own.
    parameters = {name for name, _ in make_model().named_parameters()}
    assert_same({name: found[name] for name in parameters}, {name: plain["accelerate"][name] for name in parameters})
