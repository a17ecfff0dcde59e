"""The run folder's names, and what it says where something is missing."""

from __future__ import annotations

import itertools

import pytest
from artifact_examples import examples

from qsync_core.artifacts.files import save
from qsync_core.errors import PlanError
from qsync_core.ir.plan import PrecisionPlan
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


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(PlanError, match=r"run folder .*nowhere is not there; 'qsync prepare JOB -o .*nowhere' makes it"):
        RunFolder(tmp_path / "nowhere").read_cluster()
    with pytest.raises(PlanError, match=r"has no cluster\.toml"):
        RunFolder(tmp_path).read_cluster()
