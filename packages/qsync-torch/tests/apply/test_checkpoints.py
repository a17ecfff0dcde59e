"""Checkpoints: whole or not there, without code, with the random numbers of every rank, on every machine's disk."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import attrs
import pytest
import torch

from forked import Forked
from qsync_core.errors import ArtifactError, PlanError
from qsync_torch import Checkpoints, apply_

from .communicating_plans import plan_with, small_model
from .test_ranks import run_ranks


def state_of(value: float) -> dict[str, object]:
    return {"model": {"weight": torch.full((3,), value)}, "epoch": 2, "rates": [0.1, 0.2], "name": "night"}


def test_the_two_newest_are_kept_and_the_newest_is_loaded(tmp_path):
    checkpoints = Checkpoints(tmp_path / "new" / "folder")
    assert checkpoints.load() is None
    for step in (9, 100, 1000):
        checkpoints.save(step, state_of(step))
    assert Checkpoints(tmp_path / "new" / "folder").steps() == [1000, 100]
    found = Checkpoints(tmp_path / "new" / "folder").load()
    assert found.step == 1000
    assert torch.equal(found.state.pop("model")["weight"], torch.full((3,), 1000.0))
    assert found.state == {"epoch": 2, "rates": [0.1, 0.2], "name": "night"}


def test_random_numbers_go_on_where_they_were(tmp_path):
    def start(seed):
        torch.manual_seed(seed)
        model = small_model()
        applied = apply_(model, plan_with(None), group="infer")
        return model, applied, Checkpoints(tmp_path, applied)

    def steps(model, applied):
        found = []
        for _ in range(2):
            found.append(model(torch.rand(2, 3, 8, 8)).detach())
            applied.advance()
        return found

    model, applied, checkpoints = start(0)
    steps(model, applied)
    checkpoints.save(2, {"model": model.state_dict()})
    expected = [*steps(model, applied), torch.rand(3)]

    model, applied, checkpoints = start(1)
    model.load_state_dict(checkpoints.load().state["model"])
    assert applied.step == 2
    assert all(map(torch.equal, [*steps(model, applied), torch.rand(3)], expected))


@attrs.frozen
class OfBatches:
    """A plan in force as checkpoints see it."""

    global_batch: int | None
    planned_batch: int | None
    place: str = "train/0"
    resize: str | None = None

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: object) -> None: ...

    def share_buffers(self) -> None: ...


WHOLE, RECOMMENDED, KEPT_LOCAL, UNKNOWN = OfBatches(64, 64), OfBatches(32, 32), OfBatches(32, 64), OfBatches(64, None)


@pytest.mark.parametrize("saved, now", [(WHOLE, RECOMMENDED), (RECOMMENDED, WHOLE)])
def test_another_global_batch_that_was_not_chosen_is_refused(tmp_path, saved, now):
    Checkpoints(tmp_path, saved).save(1, {})
    said = f"is of a job with {saved.global_batch} samples a step, and this one has {now.global_batch}: go on with the groups"
    with pytest.raises(PlanError, match=said):
        Checkpoints(tmp_path, now).load()


@pytest.mark.parametrize("resize", ["keep-local", "keep-global"])
def test_a_job_of_the_recommended_groups_goes_on_with_all_where_the_script_says_what_stays(tmp_path, resize):
    Checkpoints(tmp_path, RECOMMENDED).save(1, {})
    with pytest.warns(
        UserWarning, match="is of a job with 32 samples a step, and this one has 64: the learning rate is to be for 64"
    ):
        assert Checkpoints(tmp_path, attrs.evolve(WHOLE, resize=resize)).load().step == 1


@pytest.mark.parametrize(
    "saved, now",
    [(WHOLE, WHOLE), (WHOLE, KEPT_LOCAL), (KEPT_LOCAL, WHOLE), (KEPT_LOCAL, RECOMMENDED), (WHOLE, UNKNOWN), (None, WHOLE)],
)
def test_a_batch_that_was_chosen_or_is_not_known_goes_on(tmp_path, saved, now):
    Checkpoints(tmp_path, saved).save(1, {})
    assert Checkpoints(tmp_path, now).load().step == 1


class Surprise:
    pass


def test_what_cannot_be_read_without_running_code_is_refused_when_it_is_saved(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(
        ArtifactError, match=r"step-0000000001\.pt cannot be read \(.*it may have tensors, numbers, texts, lists and"
    ):
        checkpoints.save(1, {"surprise": Surprise()})
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_and_one_of_another_kind_are_named(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state_of(1))
    checkpoints.save(2, state_of(2))
    checkpoints.path(2).write_bytes(checkpoints.path(2).read_bytes()[:500])
    with pytest.raises(ArtifactError, match=r"step-0000000002\.pt cannot be read .* remove it to go on from the one before"):
        checkpoints.load()
    checkpoints.path(2).unlink()
    assert checkpoints.load().step == 1
    torch.save({"model": {}}, checkpoints.path(3))
    with pytest.raises(ArtifactError, match=r"step-0000000003\.pt was not written by Checkpoints\.save"):
        checkpoints.load()


def test_a_folder_that_cannot_be_written_is_named_and_older_ones_stay(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state_of(1))
    checkpoints.path(2).mkdir()
    with pytest.raises(ArtifactError, match=r"cannot write the checkpoint .*step-0000000002\.pt: .*; those before it are whole"):
        checkpoints.save(2, state_of(2))
    assert checkpoints.path(1).is_file()
    with pytest.raises(PlanError, match="at least one checkpoint, got keep=0"):
        Checkpoints(tmp_path, keep=0)


def test_a_checkpoint_of_another_seed_is_refused(tmp_path):
    model = small_model()
    Checkpoints(tmp_path, apply_(model, plan_with(None), group="infer", seed=4)).save(1, {})
    other = apply_(small_model(), plan_with(None), group="infer")
    with pytest.raises(PlanError, match="written under seed 4, and this run rounds with seed 0"):
        Checkpoints(tmp_path, other).load()


KILLED = """
import os, signal, sys
import torch
from qsync_core.artifacts import atomic_file
from qsync_torch import Checkpoints

checkpoints = Checkpoints(sys.argv[1])
checkpoints.save(1, {"weight": torch.ones(4)})
if sys.argv[2] == "writing":
    atomic_file.os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
else:
    atomic_file.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
checkpoints.save(2, {"weight": torch.zeros(4)})
"""


@pytest.mark.parametrize("moment", ["writing", "renaming"])
def test_a_kill_during_a_checkpoint_leaves_the_one_before_and_its_rest_goes_with_the_next(tmp_path, moment):
    killed = Forked(["-c", KILLED, str(tmp_path), moment])
    assert killed.wait(60) == -signal.SIGKILL, killed.communicate()
    checkpoints = Checkpoints(tmp_path)
    assert torch.equal(checkpoints.load().state["weight"], torch.ones(4))
    assert len(list(tmp_path.glob(".*.tmp"))) == 1
    checkpoints.save(3, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0000000001.pt", "step-0000000003.pt"]


TWO_MACHINES = (
    f"HERE = {str(Path(__file__).parent)!r}"
    + """
import json, shutil
from pathlib import Path
from forked import Forked
from qsync_core.errors import QSyncError
from qsync_torch import Checkpoints, apply_
sys.path.insert(0, HERE)
from communicating_plans import plan_with, small_model

folder = Path(sys.argv[2]).parent / f"disk{rank}"
place = ("train", "infer")
found = {}

def start(groups):
    model = small_model()
    return model, Checkpoints(folder, apply_(model, plan_with(None), group=groups[rank]))

model, checkpoints = start(place)
with torch.no_grad():
    model[1].running_mean.fill_(rank + 1)
torch.manual_seed(10 + rank)
checkpoints.save(3, {"model": model.state_dict()})
found["own"] = torch.rand(1).item()
found["disk"] = checkpoints.steps()

if rank == 0:
    shutil.rmtree(folder)
model, checkpoints = start(place[::-1])  # this time the machines have each other's rank
loaded = checkpoints.load()
found["loaded"] = [loaded.step, loaded.state["model"]["1.running_mean"].unique().tolist()]
found["other"] = torch.rand(1).item()
found["kept"] = checkpoints.steps()
try:
    checkpoints.save(4 + rank, {})
except QSyncError as error:
    found["steps"] = str(error)
if rank == 1:
    checkpoints.folder = Path("/dev/null/nowhere")
try:
    checkpoints.save(5, {})
except QSyncError as error:
    found["refused"] = str(error)
print(json.dumps(found))
"""
)


@pytest.mark.distributed
def test_every_machine_keeps_a_copy_and_gets_what_it_has_not(tmp_path):
    first, second = (json.loads(out.splitlines()[-1]) for out in run_ranks(tmp_path, TWO_MACHINES))
    assert first["disk"] == second["disk"] == first["kept"] == second["kept"] == [3]
    assert first["loaded"] == second["loaded"] == [3, [1.0]]  # statistics of the rank that trains
    assert first["own"] != second["own"]
    assert (first["other"], second["other"]) == (second["own"], first["own"])  # random numbers follow the place
    sentence = "the ranks of this job save different steps (4 on rank 0; 5 on rank 1); save on all of them after the same step"
    assert first["steps"] == second["steps"] == sentence
    assert second["refused"].startswith("cannot write the checkpoint /dev/null/nowhere/step-0000000005.pt: Not a directory")
    assert first["refused"] == f"rank 1 refuses: {second['refused']}"
