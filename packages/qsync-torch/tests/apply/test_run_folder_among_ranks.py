"""A run folder in the place of a plan: each rank finds its group in its own copy; all apply the plan of the groups there are."""

from __future__ import annotations

import json
import socket
import warnings
from contextlib import ExitStack

import pytest

from qsync_core.artifacts.files import load
from qsync_core.errors import ArtifactError, ClusterError, PlanError
from qsync_core.ir.plan import PrecisionPlan
from qsync_torch import apply_, process_group_options
from qsync_torch.distributed import nccl

from .run_folders import make_run_folder, model
from .test_refusals_among_ranks import run

RANKS = 3


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """By case, what each of the three ranks got, or raised."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(2)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        ports = [str(one.getsockname()[1]) for one in sockets]
    folder = tmp_path_factory.mktemp("runs")
    ended = run("ranks_of_run_folder.py", [[str(rank), str(folder), *ports] for rank in range(RANKS)], [{}] * RANKS)
    assert [status for status, _, _ in ended] == [0] * RANKS, ended
    found = [json.loads(out) for _, out, _ in ended]
    return {case: [one[case] for one in found] for case in found[0]}


@pytest.mark.distributed
@pytest.mark.parametrize(
    "case, groups", [("all_groups", "train infer spare"), ("two_groups", "train infer infer"), ("one_group", "train train train")]
)
def test_the_plan_is_that_of_the_groups_which_ranks_are_of(given, case, groups):
    runs_in = {"train": "float32", "infer": "bfloat16", "spare": "int8"}
    of_plan = [name for name in runs_in if name in groups]
    assert given[case] == [["", [name, runs_in[name], of_plan]] for name in groups.split()]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "case, kind, sentence",
    [
        ("no_folder", "PlanError", "the run folder RUN is not there; 'qsync prepare JOB -o RUN' makes it"),
        (
            "other_cluster",
            "ClusterError",
            "QSYNC_GROUP is 'infer', but the cluster file's groups are train, spare; set it to one of them",
        ),
        ("half_a_cluster_file", "ClusterError", "RUN/cluster.toml is not valid TOML: "),
        ("half_a_plan", "ArtifactError", "RUN/plans/infer+train.qsync "),
        ("renamed_plan", "PlanError", "RUN/plans/infer+train.qsync is a plan for a job of train, as its name does not say: "),
        ("no_folder_before_ranks_meet", "PlanError", "the run folder RUN is not there; 'qsync prepare JOB -o RUN' makes it"),
    ],
)
def test_a_folder_that_is_wrong_on_one_rank_ends_all_with_its_sentence(given, case, kind, sentence):
    own = given[case][1][1]
    assert own.startswith(sentence)
    assert given[case] == [[kind, own if rank == 1 else f"rank 1 refuses: {own}"] for rank in range(RANKS)]


@pytest.mark.distributed
def test_groups_that_there_is_no_plan_for_are_named_on_all_ranks(given):
    kind, own = given["groups_without_a_plan"][0]
    assert kind == "PlanError"
    assert own.startswith(
        "the run folder RUN has no plan for a job of infer, spare (there are plans for: infer, spare, train; infer, train; "
        "spare, train; infer; spare; train); run 'qsync prepare' with these groups"
    )
    assert [kind for kind, _ in given["groups_without_a_plan"]] == ["PlanError"] * RANKS


@pytest.mark.distributed
def test_plans_that_differ_from_disk_to_disk_are_refused_in_one_sentence(given):
    kind, text = given["other_plan"][0]
    assert kind == "PlanError"
    assert text.startswith("the ranks of this job hold different plans (digests ")
    assert given["other_plan"] == [[kind, text]] * RANKS


@pytest.mark.distributed
def test_before_ranks_meet_they_tell_each_other_their_groups(given):
    assert given["before_ranks_meet"] == [["", [2, 3]]] * RANKS


def test_outside_a_process_group_it_is_the_plan_of_the_own_group(tmp_path, monkeypatch):
    folder = make_run_folder(tmp_path / "run")
    monkeypatch.setenv("QSYNC_GROUP", "infer")
    applied = apply_(model(), folder)
    assert [entry.group for entry in applied.plan.groups] == ["infer"]
    assert apply_(model(), folder.path, group="spare").group == "spare"


def test_a_group_that_the_cluster_does_not_have_is_refused(tmp_path):
    folder = make_run_folder(tmp_path / "run")
    with pytest.raises(PlanError, match=r"cluster\.toml has no group 'night'; its groups are train, infer, spare"):
        apply_(model(), folder, group="night")


def test_a_device_that_no_group_has_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("QSYNC_GROUP", raising=False)
    with pytest.raises(ClusterError, match="groups train, infer, spare all match this device"):
        apply_(model(), make_run_folder(tmp_path / "run"))


@pytest.mark.parametrize("path", ["nowhere", "nowhere/", "night.1"])
def test_a_folder_that_is_not_there_is_named(tmp_path, path):
    for call in (lambda folder: apply_(model(), folder), process_group_options):
        with pytest.raises(PlanError, match=f"the run folder .*{path.strip('/')} is not there; 'qsync prepare"):
            call(f"{tmp_path}/{path}")


def test_a_plans_file_that_is_not_there_is_a_plans_file(tmp_path):
    with pytest.raises(ArtifactError, match=r"none\.qsync: No such file or directory"):
        apply_(model(), tmp_path / "none.qsync")


def test_where_nobody_says_which_ranks_there_are_options_are_those_of_all_groups(tmp_path, monkeypatch):
    for name in ("WORLD_SIZE", "QSYNC_GROUP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    monkeypatch.setattr(nccl, "nccl_options", lambda max_ctas: max_ctas)
    folder = make_run_folder(tmp_path / "run")
    assert process_group_options(folder) == 3
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert process_group_options(load(folder.plan(["train"]), PrecisionPlan)) == 1
    monkeypatch.setenv("QSYNC_GROUP", "train")
    assert process_group_options(folder) == 1


@pytest.mark.parametrize("restarts, shared, warned", [("3", "True", True), ("0", "True", False), ("3", "False", False)])
def test_a_job_that_torchrun_could_not_start_again_is_warned_of_it(tmp_path, monkeypatch, restarts, shared, warned):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shared)
    monkeypatch.delenv("RANK", raising=False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        apply_(model(), make_run_folder(tmp_path / "run"), group="train")
        process_group_options(tmp_path / "run")  # before the ranks meet, where a restart would hang
    found = [one for one in said if "restart by torchrun would hang" in str(one.message)]
    sentences = [str(one.message) for one in found]
    assert len(sentences) == 2 * warned
    assert {one.filename for one in found} <= {__file__}
    assert all("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in sentence for sentence in sentences)
