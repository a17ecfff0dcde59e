"""RayJobs: a group of workers per group of the plan, on nodes with its label; what the head's shell reads; refusals."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import attrs
import pytest
import yaml
from click.testing import CliRunner
from job_folders import H200, HALF_T4, run_folder

from qsync_core.cli.root import cli
from qsync_core.errors import ClusterError
from qsync_core.ir.plan import Role
from qsync_core.launching.machines import PlannedJob, planned_job
from qsync_core.launching.pods import PodSettings, Taint
from qsync_core.launching.rayjob import rayjob
from qsync_core.launching.torchrun import Meeting

GROUPS = {"Infer_1": (Role.INFER, 2, HALF_T4), "train": (Role.TRAIN, 4, H200)}
POD = PodSettings("registry.example.com/train:1.0")


@pytest.fixture
def job(tmp_path: Path) -> PlannedJob:
    return planned_job(run_folder(tmp_path / "run", GROUPS), ranks_each={"train": 2})


def made(job: PlannedJob, settings: PodSettings = POD, script: tuple[str, ...] = ("train_ray.py", "run/")) -> dict[str, Any]:
    return yaml.safe_load(rayjob(job, "night", settings, script, Meeting("", max_restarts=5)))


def named(job: PlannedJob, name: str) -> PlannedJob:
    """The job with another name of its first group."""
    return attrs.evolve(job, groups=(attrs.evolve(job.groups[0], name=name), *job.groups[1:]))


def workers(manifest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {group["groupName"]: group for group in manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"]}


def test_every_group_has_its_machines_its_label_and_its_gpus(job):
    manifest = made(job)
    assert (manifest["apiVersion"], manifest["kind"], manifest["metadata"]) == ("ray.io/v1", "RayJob", {"name": "night"})
    assert manifest["spec"]["backoffLimit"] == 5
    found = workers(manifest)
    assert list(found) == ["train", "infer-1"]
    for group, label, each, resource in (
        (found["train"], "train", "2", "nvidia.com/gpu"),
        (found["infer-1"], "Infer_1", "1", "nvidia.com/gpu.shared"),
    ):
        assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (2, 2, 2)
        assert group["labels"] == {"qsync-group": label}
        assert group["rayStartParams"] == {"num-gpus": each}
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"] == {"limits": {resource: each}}
        assert "command" not in container
        assert {"name": "QSYNC_GROUP", "value": label} in container["env"]
    (apart,) = found["infer-1"]["template"]["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["labelSelector"]["matchLabels"] == {"qsync-job": "night", "ray.io/group": "infer-1"}


def test_pods_of_another_rayjob_with_the_same_groups_are_kept_from_no_machine(job):
    def infer(name: str) -> dict[str, Any]:
        return workers(yaml.safe_load(rayjob(job, name, POD, ["train_ray.py"], Meeting(""))))["infer-1"]["template"]

    def keep_apart(one: str, other: str) -> bool:
        (term,) = infer(one)["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        labels = infer(other)["metadata"]["labels"] | {"ray.io/group": "infer-1"}  # KubeRay's own
        return term["labelSelector"]["matchLabels"].items() <= labels.items()

    assert keep_apart("night", "night")
    assert not keep_apart("night", "day")


def test_no_rank_is_placed_on_the_head_which_sees_the_run_folder(job):
    settings = attrs.evolve(POD, claims={"runs": "/workspace"}, directory="/workspace", labels={"team": "a"}, queue="vision")
    manifest = made(job, settings)
    head = manifest["spec"]["rayClusterSpec"]["headGroupSpec"]
    assert head["rayStartParams"] == {"num-cpus": "0"}
    (container,) = head["template"]["spec"]["containers"]
    assert container["volumeMounts"] == [{"name": "runs", "mountPath": "/workspace"}]
    assert container["workingDir"] == "/workspace"
    assert {"name": "PYTHONUNBUFFERED", "value": "1"} in container["env"]
    assert manifest["metadata"]["labels"] == {"team": "a", "kueue.x-k8s.io/queue-name": "vision"}
    assert [group["template"]["metadata"]["labels"] for group in (head, *workers(manifest).values())] == [
        {"team": "a", "qsync-job": "night"}
    ] * 3


def test_the_heads_shell_starts_the_script_in_its_directory_with_its_arguments(job, tmp_path):
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "said.py").write_text("import json, os, sys\nprint(json.dumps([os.getcwd(), *sys.argv[1:]]))\n")
    settings = attrs.evolve(POD, directory=str(tmp_path / "a b"))
    words = ("it's $HOME", "", "$(date)", "ä\n")
    entrypoint = made(job, settings, ("said.py", *words))["spec"]["entrypoint"]
    done = subprocess.run(["sh", "-c", entrypoint], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [str(tmp_path / "a b"), *words]
    assert made(job, POD, ("bash", "start.sh"))["spec"]["entrypoint"] == "exec bash start.sh"


def test_a_module_is_started_by_python(job, tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "train.py").write_text("import sys\nprint(__name__, __package__, sys.argv[1:])\n")
    settings = attrs.evolve(POD, directory=str(tmp_path))
    entrypoint = made(job, settings, ("-m", "pkg.train", "--epochs", "3"))["spec"]["entrypoint"]
    done = subprocess.run(["sh", "-c", entrypoint], capture_output=True, text=True, check=True)
    assert done.stdout == "__main__ pkg ['--epochs', '3']\n"


def test_tolerations_are_those_of_the_group(job):
    found = workers(made(job, attrs.evolve(POD, tolerations={"Infer_1": [Taint("spot")]})))
    assert found["infer-1"]["template"]["spec"]["tolerations"] == [{"key": "spot", "operator": "Exists"}]
    assert "tolerations" not in found["train"]["template"]["spec"]


def test_what_kubernetes_would_refuse_is_refused_as_for_a_jobset(job):
    with pytest.raises(ClusterError, match="a RayJob needs a container image with torch, QSync and the script"):
        made(job, attrs.evolve(POD, image=""))
    with pytest.raises(ClusterError, match="a RayJob cannot be called 'Night'"):
        rayjob(job, "Night", POD, ["train_ray.py"], Meeting(""))
    with pytest.raises(ClusterError, match="group 'train-' cannot name its pods"):
        rayjob(named(job, "train-"), "night", POD, ["train_ray.py"], Meeting(""))


def test_what_kuberay_would_refuse_or_overwrite_is_refused(job):
    assert yaml.safe_load(rayjob(job, "n" * 47, POD, ["train_ray.py"], Meeting("")))["metadata"]["name"] == "n" * 47
    for length in (48, 64):
        with pytest.raises(ClusterError, match=rf"which has {length} letters: KubeRay allows 47; give a shorter --name$"):
            rayjob(job, "n" * length, POD, ["train_ray.py"], Meeting(""))
    with pytest.raises(ClusterError, match="the label 'qsync-job' is the RayJob's name on its pods"):
        made(job, attrs.evolve(POD, labels={"qsync-job": "mine"}))


def test_kuberay_shortens_names_of_pods_which_need_not_be_short(job):
    long = "n" * 47, "t" * 50
    manifest = yaml.safe_load(rayjob(named(job, long[1]), long[0], POD, ["train_ray.py"], Meeting("")))
    assert long[1] in workers(manifest)


def test_the_command_writes_one_and_refuses_what_is_torchruns(tmp_path):
    run_folder(tmp_path / "run", GROUPS)
    common = ["launch", str(tmp_path / "run"), "--rayjob", "--image", "r/train:1"]
    printed = CliRunner().invoke(cli, [*common, "--", "train_ray.py", "run/"])
    assert printed.exit_code == 0, printed.output
    assert yaml.safe_load(printed.output)["kind"] == "RayJob"
    refused = CliRunner().invoke(cli, [*common, "--elastic", "train_ray.py"])
    assert refused.exit_code == 2
    assert "--elastic is torchrun's: in a RayJob the script's ScalingConfig says how few workers do" in refused.output
