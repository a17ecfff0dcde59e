"""The torchrun of every machine of a planned job."""

from __future__ import annotations

import json
import shlex

import attrs
import pytest
import yaml
from click.testing import CliRunner
from job_folders import CPU, H200, HALF_T4, PLAN, run_folder

from qsync_core.artifacts.files import save
from qsync_core.cli.root import cli
from qsync_core.errors import ClusterError, PlanError
from qsync_core.ir.plan import Role
from qsync_core.launching.jobset import jobset
from qsync_core.launching.machines import planned_job
from qsync_core.launching.pods import PodSettings
from qsync_core.launching.torchrun import Meeting, machine_commands

GROUPS = {"infer": (Role.INFER, 2, HALF_T4), "train": (Role.TRAIN, 4, H200)}


def options(command: list[str]) -> dict[str, str]:
    return dict(word[2:].partition("=")[::2] for word in command if word.startswith("--") and "=" in word)


def test_node_ranks_go_through_all_machines_and_rank_0_is_of_a_training_group(tmp_path):
    job = planned_job(run_folder(tmp_path / "run", GROUPS), ranks_each={"train": 2})
    found = machine_commands(job, Meeting("node0", 1234), ["train.py", "--lr", "1e-3"])
    assert [(machine.group, machine.node_rank) for machine in found] == [("train", 0), ("train", 1), ("infer", 2), ("infer", 3)]
    assert found[0].environment == {"QSYNC_GROUP": "train"}
    assert found[2].environment == {"QSYNC_GROUP": "infer", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}
    for node, machine in enumerate(found):
        said = options(machine.command)
        assert said == {
            "nnodes": "4",
            "node-rank": str(node),
            "nproc-per-node": "2" if machine.group == "train" else "1",
            "master-addr": "node0",
            "master-port": "1234",
        }
        assert machine.command[0] == "torchrun"
        assert machine.command[-3:] == ["train.py", "--lr", "1e-3"]


def test_the_plans_number_of_ctas_is_in_the_environment_of_a_job_that_keeps_its_plan(tmp_path):
    run = run_folder(tmp_path / "run", GROUPS)
    save(attrs.evolve(run.load_plan(list(GROUPS)), communication=PLAN.communication), run.plan(GROUPS))
    job = planned_job(run)
    assert {machine.environment["NCCL_MAX_CTAS"] for machine in machine_commands(job, Meeting("node0"), ["train.py"])} == {"2"}
    written = yaml.safe_load(jobset(job, "night", PodSettings("a/b:1"), ["train.py"], Meeting("")))
    for entry in written["spec"]["replicatedJobs"]:
        (container,) = entry["template"]["spec"]["template"]["spec"]["containers"]
        assert {"name": "NCCL_MAX_CTAS", "value": "2"} in container["env"]
    elastic = machine_commands(job, Meeting("node0", elastic=True), ["train.py"])
    assert not any("NCCL_MAX_CTAS" in machine.environment for machine in elastic)


def test_an_elastic_job_needs_as_many_machines_as_the_smallest_plan(tmp_path):
    job = planned_job(run_folder(tmp_path / "run", GROUPS), ranks_each={"train": 2})
    for machine in machine_commands(job, Meeting("node0", name="run", elastic=True, max_restarts=7), ["train.py"]):
        said = options(machine.command)
        assert said["nnodes"] == "2:4"
        assert (said["rdzv-backend"], said["rdzv-endpoint"], said["rdzv-id"]) == ("c10d", "node0:29500", "run")
        assert said["max-restarts"] == "7"
        assert "node-rank" not in said
        assert machine.environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_groups_that_are_started_alone_need_a_plan_of_their_own(tmp_path):
    run = run_folder(tmp_path / "run", GROUPS)
    assert [group.name for group in planned_job(run, ["train"]).groups] == ["train"]
    with pytest.raises(PlanError, match="no plan for a job of infer"):
        planned_job(run, ["infer"])
    with pytest.raises(ClusterError, match=r"cluster\.toml has no group 'strong'; its groups are infer, train"):
        planned_job(run, ["strong"])


@pytest.mark.parametrize("each", [0, 3, 5])
def test_machines_that_do_not_add_up_are_refused(tmp_path, each):
    with pytest.raises(ClusterError, match=f"group 'train' has 4 ranks, which machines of {each} processes do not add up to"):
        planned_job(run_folder(tmp_path / "run", GROUPS), ranks_each={"train": each})


def test_a_line_is_one_that_a_shell_reads_back(tmp_path):
    script = ["train me.py", "--note", "it's $HOME", "--lr=1e-3"]
    run_folder(tmp_path / "run", {"train": (Role.TRAIN, 1, CPU)})
    done = CliRunner().invoke(cli, ["launch", str(tmp_path / "run"), "--master-addr", "node0", "--", *script])
    assert done.exit_code == 0, done.output
    comment, line = done.output.splitlines()
    assert comment == "# group train: cpu"
    words = shlex.split(line)
    assert words[:2] == ["QSYNC_GROUP=train", "torchrun"]
    assert words[-4:] == script


def test_json_has_what_the_lines_have(tmp_path):
    run_folder(tmp_path / "run", GROUPS)
    done = CliRunner().invoke(cli, ["launch", str(tmp_path / "run"), "--json", "--per-machine", "train=1", "train.py"])
    machines = json.loads(done.output)["machines"]
    assert [machine["node_rank"] for machine in machines] == list(range(6))
    for machine in machines:
        assert shlex.split(machine["line"])[-len(machine["command"]) :] == machine["command"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--jobset", "--rayjob", "--", "train.py"], "--jobset and --rayjob are two manifests of one job: ask for one of them"),
        (["--image", "a/b", "--", "train.py"], "--image is for --jobset"),
        (["--per-machine", "train", "--", "train.py"], "write GROUP=NUMBER, for example infer=2; got 'train'"),
        (["--per-machine", "train=two", "--", "train.py"], "group 'train' are a number, got 'two'"),
        ([], "Missing argument 'SCRIPT...'"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(tmp_path, arguments, sentence):
    run_folder(tmp_path / "run", GROUPS)
    done = CliRunner().invoke(cli, ["launch", str(tmp_path / "run"), *arguments])
    assert done.exit_code == 2
    assert sentence in done.output


@pytest.mark.parametrize(("given", "restarts"), [([], "100"), (["--max-restarts", "3"], "3")])
def test_machines_that_come_and_go_may_do_so_often(tmp_path, given, restarts):
    run = run_folder(tmp_path / "run", GROUPS)
    done = CliRunner().invoke(cli, ["launch", str(run.path), "--elastic", *given, "--json", "train.py"])
    assert done.exit_code == 0, done.output
    assert {options(machine["command"])["max-restarts"] for machine in json.loads(done.output)["machines"]} == {restarts}


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (["train.py", "-v", "3"], ["train.py", "-v", "3"]),
        (["train.py", "--run", "x"], ["--", "train.py", "--run", "x"]),
        (["-m", "pkg.train", "--run", "x"], ["-m", "--", "pkg.train", "--run", "x"]),
    ],
)
def test_options_of_the_script_stand_behind_dashes_in_lines_and_manifests(tmp_path, script, words):
    run_folder(tmp_path / "run", GROUPS)
    common = ["launch", str(tmp_path / "run"), "--image", "r/train:1", "--json"]
    lines = CliRunner().invoke(cli, [*common[:2], "--json", "--", *script])
    assert all(machine["command"][-len(words) :] == words for machine in json.loads(lines.stdout)["machines"])
    manifest = json.loads(CliRunner().invoke(cli, [*common, "--jobset", "--", *script]).stdout)["manifest"]
    for entry in manifest["spec"]["replicatedJobs"]:
        (container,) = entry["template"]["spec"]["template"]["spec"]["containers"]
        assert container["args"][-len(words) :] == words
