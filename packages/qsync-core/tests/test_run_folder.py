"""The run folder's names, and what it says where something is missing."""

from __future__ import annotations

import itertools

import pytest
from artifact_examples import examples
from job_folders import CPU, run_folder

from qsync_core.artifacts.files import save
from qsync_core.errors import ArtifactError, PlanError
from qsync_core.ir.plan import PrecisionPlan, Role
from qsync_core.run_folder import RunFolder

PLAN: PrecisionPlan = examples()[PrecisionPlan]


def test_the_order_of_groups_does_not_matter(tmp_path):
    folder = RunFolder(tmp_path)
    names = {folder.plan(groups) for groups in itertools.permutations(["train", "infer", "spare.1"])}
    assert names == {tmp_path / "plans" / "infer+spare.1+train.qsync"}


def test_a_plan_is_found_by_the_groups_that_are_there(tmp_path):
    folder = RunFolder(tmp_path)
    (tmp_path / "plans").mkdir()
    save(PLAN, folder.plan(["train", "infer"]))
    assert folder.load_plan(["infer", "train"]) == PLAN


def test_a_missing_plan_names_those_that_there_are(tmp_path):
    folder = RunFolder(tmp_path)
    (tmp_path / "plans").mkdir()
    for groups in (["train"], ["train", "infer"]):
        folder.plan(groups).write_bytes(b"")
    assert folder.planned_groups() == [("infer", "train"), ("train",)]
    with pytest.raises(PlanError, match=r"no plan for a job of infer \(there are plans for: infer, train; train\)"):
        folder.load_plan(["infer"])


def test_a_plan_of_other_groups_than_its_name_says_is_refused(tmp_path):
    folder = RunFolder(tmp_path)
    (tmp_path / "plans").mkdir()
    save(PLAN, folder.plan(["train"]))
    with pytest.raises(PlanError, match=r"plans/train\.qsync is a plan for a job of infer, train, as its name does not say"):
        folder.load_plan(["train"])


def test_a_plan_for_another_memory_than_the_files_is_not_trained_by(tmp_path):
    run = run_folder(tmp_path / "run", {"train": (Role.TRAIN, 1, CPU), "infer": (Role.INFER, 1, CPU)})
    assert run.load_plan_to_train(["train", "infer"]) == run.load_plan(["infer", "train"])
    run.cluster.write_text(run.cluster.read_text() + 'memory = "12 MiB"\n')
    said = (
        r"cluster\.toml has 12 MiB for the memory of group 'infer', and its plan was made for no limit: run 'qsync prepare' again"
    )
    with pytest.raises(PlanError, match=said):
        run.load_plan_to_train(["train", "infer"])
    assert run.load_plan_to_train(["train"]).groups


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(PlanError, match=r"run folder .*nowhere is not there; 'qsync prepare JOB -o .*nowhere' makes it"):
        RunFolder(tmp_path / "nowhere").read_cluster()
    with pytest.raises(PlanError, match=r"has no cluster\.toml"):
        RunFolder(tmp_path).read_cluster()


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "a/b", "a\\b", "..", "", "a+b", "a\n", "a\u202eb", ".hidden", "x" * 65])
def test_what_no_group_is_called_names_no_file(tmp_path, name):
    folder = RunFolder(tmp_path)
    for path_of in (folder.profile, lambda name: folder.plan(["train", name]), lambda name: folder.timeline("measured", [name])):
        with pytest.raises(PlanError, match="names no file of a run folder: a group's name has up to 64 letters") as error:
            path_of(name)
        assert name not in str(error.value) or name.isprintable()


def test_plans_of_names_that_no_group_has_are_not_the_folders(tmp_path):
    (tmp_path / "plans").mkdir()
    for name in ("train", "infer+train", "train+infer", "\x1b[2J", "a+", "..", "a b"):
        (tmp_path / "plans" / f"{name}.qsync").write_bytes(b"")
    assert RunFolder(tmp_path).planned_groups() == [("infer", "train"), ("train",)]


@pytest.mark.parametrize(
    "link, read",
    [
        ("cluster.toml", lambda run: run.read_cluster()),
        ("plans", lambda run: run.planned_groups()),
        ("plans", lambda run: run.load_plan(["train", "infer"])),
        ("plans/infer+train.qsync", lambda run: run.load_plan(["train", "infer"])),
        ("report.html", lambda run: run.report),
        ("job.observations.qsync.partial", lambda run: run.partial(run.observations)),
    ],
)
def test_a_link_out_of_the_folder_is_refused_and_one_within_it_followed(tmp_path, link, read):
    run = RunFolder(tmp_path / "run")
    (run.path / link).parent.mkdir(parents=True)
    (run.path / link).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArtifactError, match=r"leads out of the run folder, to .*elsewhere.*, through a link: put the file"):
        read(run)
    (tmp_path / "run" / "kept").mkdir()
    save(PLAN, tmp_path / "run" / "kept" / "plan.qsync")
    if link == "plans/infer+train.qsync":
        (run.path / link).unlink()
        (run.path / link).symlink_to(tmp_path / "run" / "kept" / "plan.qsync")
        assert read(run) == PLAN
