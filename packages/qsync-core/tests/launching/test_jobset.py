"""JobSets: what every field means to Kubernetes, text that any YAML reader reads back, and refusals."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import attrs
import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from job_folders import CPU, H200, HALF_T4, run_folder

from qsync_core.cli.root import cli
from qsync_core.errors import ClusterError
from qsync_core.ir.plan import Role
from qsync_core.ir.profile import DeviceKind, DeviceType
from qsync_core.launching.jobset import jobset
from qsync_core.launching.machines import PlannedJob, planned_job
from qsync_core.launching.pods import PodSettings, Taint
from qsync_core.launching.torchrun import Meeting

GROUPS = {"infer": (Role.INFER, 2, HALF_T4), "train": (Role.TRAIN, 4, H200)}
POD = PodSettings("registry.example.com/train:1.0")
UNBUFFERED = {"name": "PYTHONUNBUFFERED", "value": "1"}


@pytest.fixture
def job(tmp_path: Path) -> PlannedJob:
    return planned_job(run_folder(tmp_path / "run", GROUPS), ranks_each={"train": 2})


def made(job: PlannedJob, settings: PodSettings = POD, *, name: str = "night", **meeting: Any) -> dict[str, Any]:
    return yaml.safe_load(jobset(job, name, settings, ["train.py", "--lr", "1e-3"], Meeting("", **meeting)))


def pods(manifest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry["template"]["spec"]["template"]["spec"] for entry in manifest["spec"]["replicatedJobs"]}


def expanded(text: str, variables: dict[str, str]) -> str:
    """As Kubernetes replaces variables in commands and arguments."""
    return re.sub(r"\$\$|\$\((\w+)\)", lambda found: "$" if found[0] == "$$" else variables.get(found[1], found[0]), text)


def test_every_group_of_the_plan_is_a_replicated_job_with_a_pod_per_machine(job):
    manifest = made(job)
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    jobs = {entry["name"]: entry for entry in manifest["spec"]["replicatedJobs"]}
    assert list(jobs) == ["train", "infer"]
    for entry in jobs.values():
        spec = entry["template"]["spec"]
        assert (entry["replicas"], spec["parallelism"], spec["completions"], spec["completionMode"]) == (1, 2, 2, "Indexed")


def test_each_pod_asks_for_its_gpus_on_nodes_that_have_them(job):
    train, infer = pods(made(job))["train"], pods(made(job))["infer"]
    assert train["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H200"}
    assert infer["nodeSelector"] == {"nvidia.com/gpu.product": "Tesla-T4"}
    assert train["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": "2"}}
    assert infer["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu.shared": "1"}}


def test_a_share_is_asked_of_mps_whose_shared_memory_stays_and_pods_keep_apart(job):
    train, infer = pods(made(job))["train"], pods(made(job))["infer"]
    assert train["containers"][0]["env"] == [{"name": "QSYNC_GROUP", "value": "train"}, UNBUFFERED]
    assert {"name": "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "value": "50"} in infer["containers"][0]["env"]
    assert {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}} in train["volumes"]
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in train["containers"][0]["volumeMounts"]
    assert "volumes" not in infer
    (apart,) = infer["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["topologyKey"] == "kubernetes.io/hostname"
    assert apart["labelSelector"]["matchLabels"]["jobset.sigs.k8s.io/replicatedjob-name"] == "infer"


def test_what_every_pod_starts_as_the_shell_in_it_reads_it(job, tmp_path):
    """Run for real, with a torchrun that prints its arguments, after replacing variables as Kubernetes does."""
    torchrun = tmp_path / "torchrun"
    torchrun.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    torchrun.chmod(0o755)
    script = ["train.py", "--note", "it's $HOME $(QSYNC_GROUP) $$", ""]
    manifest = yaml.safe_load(jobset(job, "night", POD, script, Meeting("")))
    node_ranks = []
    for pod in pods(manifest).values():
        container = pod["containers"][0]
        variables = {entry["name"]: entry["value"] for entry in container["env"]}
        for index in ("0", "1"):
            environment = {**variables, "JOB_COMPLETION_INDEX": index, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": "/root"}
            command = [expanded(word, environment) for word in (*container["command"], *container["args"])]
            words = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split("\n")
            assert words[-len(script) - 1 : -1] == script
            said = dict(word[2:].partition("=")[::2] for word in words if word.startswith("--") and "=" in word)
            node_ranks.append(said["node-rank"])
            assert said["nnodes"] == "4"
            assert said["master-addr"] == "night-train-0-0.night"
            assert said["nproc-per-node"] == next(iter(container["resources"]["limits"].values()))
    assert node_ranks == ["0", "1", "2", "3"]
    assert manifest["spec"]["network"] == {"enableDNSHostnames": True, "subdomain": "night", "publishNotReadyAddresses": True}


def test_a_fixed_job_starts_anew_where_a_pod_fails(job):
    manifest = made(job, max_restarts=5)
    assert manifest["spec"]["failurePolicy"] == {"maxRestarts": 5}
    assert "successPolicy" not in manifest["spec"]
    for entry in manifest["spec"]["replicatedJobs"]:
        assert entry["template"]["spec"]["backoffLimit"] == 0
    assert {pod["restartPolicy"] for pod in pods(manifest).values()} == {"Never"}


def test_an_elastic_job_gets_new_pods_and_is_done_when_those_that_train_are(job):
    manifest = made(job, elastic=True, max_restarts=5)
    assert manifest["spec"]["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["train"]}
    for entry in manifest["spec"]["replicatedJobs"]:
        spec = entry["template"]["spec"]
        assert spec["backoffLimit"] == 10
        assert spec["podFailurePolicy"]["rules"][0]["action"] == "Ignore"
        command = spec["template"]["spec"]["containers"][0]["command"]
        assert command[:2] == ["torchrun", "--nnodes=2:4"]
        assert "--rdzv-endpoint=night-train-0-0.night:29500" in command
        assert "--max-restarts=5" in command
        variables = spec["template"]["spec"]["containers"][0]["env"]
        assert {"name": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "value": "1"} in variables


def test_what_a_person_says_stands_above_what_the_device_says(job):
    settings = attrs.evolve(
        POD,
        namespace="ml",
        selectors={"infer": {"pool": "inference"}},
        resources={"infer": "nvidia.com/gpu"},
        shared_memory="500Mi",
        claims={"runs": "/workspace/run"},
    )
    manifest = made(job, settings)
    train, infer = pods(manifest)["train"], pods(manifest)["infer"]
    assert manifest["metadata"] == {"name": "night", "namespace": "ml"}
    assert infer["nodeSelector"] == {"pool": "inference"}
    assert infer["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": "1"}}
    assert train["volumes"][0] == {"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}}
    assert train["containers"][0]["volumeMounts"][0] == {"name": "runs", "mountPath": "/workspace/run"}
    assert train["volumes"][1]["emptyDir"]["sizeLimit"] == "500Mi"


def test_directory_queue_labels_and_tolerations_are_where_kubernetes_reads_them(job):
    taints = [Taint.parse(text) for text in ("nvidia.com/gpu=present:NoSchedule", "spot", "night:NoExecute")]
    settings = attrs.evolve(
        POD, directory="/workspace", queue="vision", labels={"team": "a", "example.com/cost": "7"}, tolerations={"infer": taints}
    )
    manifest = made(job, settings)
    train, infer = pods(manifest)["train"], pods(manifest)["infer"]
    assert manifest["metadata"]["labels"] == {"team": "a", "example.com/cost": "7", "kueue.x-k8s.io/queue-name": "vision"}
    for entry in manifest["spec"]["replicatedJobs"]:
        assert entry["template"]["spec"]["template"]["metadata"] == {"labels": {"team": "a", "example.com/cost": "7"}}
    assert {pod["containers"][0]["workingDir"] for pod in (train, infer)} == {"/workspace"}
    assert "tolerations" not in train
    assert infer["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Equal", "value": "present", "effect": "NoSchedule"},
        {"key": "spot", "operator": "Exists"},
        {"key": "night", "operator": "Exists", "effect": "NoExecute"},
    ]


@pytest.mark.parametrize("text", ["", "=a", "a=", "a:", "a:Never", "a b", "a=b c:NoSchedule", "a\n  x: y"])
def test_what_is_no_taint_is_refused_with_the_form(text):
    with pytest.raises(ClusterError, match=r"not a taint: .*write KEY, KEY=VALUE or either with :EFFECT \(NoSchedule, Prefer"):
        Taint.parse(text)


def test_cpus_need_no_gpus(tmp_path):
    job = planned_job(run_folder(tmp_path / "run", {"train": (Role.TRAIN, 2, CPU)}))
    pod = pods(made(job))["train"]
    assert pod["containers"][0]["resources"] == {"requests": {"cpu": "2"}}
    assert "nodeSelector" not in pod


@pytest.mark.parametrize("device", ["T4", "A100", "NVIDIA A100-SXM4-80GB MIG 3g.40gb", "Tesla T4\nx: y"])
def test_a_gpu_whose_label_cannot_be_known_is_asked_for(tmp_path, job, device):
    strange = attrs.evolve(job.groups[0], device=DeviceType(device, DeviceKind.CUDA, 1.0, 0, "8.0"))
    groups = (strange, *job.groups[1:])
    with pytest.raises(ClusterError, match=r"'kubectl get nodes -L nvidia\.com/gpu\.product' and give --select train="):
        made(attrs.evolve(job, groups=groups))


def with_group_name(job: PlannedJob, name: str) -> PlannedJob:
    return attrs.evolve(job, groups=(attrs.evolve(job.groups[0], name=name), *job.groups[1:]))


def test_a_groups_name_becomes_one_for_kubernetes_and_stays_itself_in_the_environment(job):
    manifest = made(with_group_name(job, "Train_A.1"))
    assert [entry["name"] for entry in manifest["spec"]["replicatedJobs"]] == ["train-a-1", "infer"]
    assert pods(manifest)["train-a-1"]["containers"][0]["env"] == [{"name": "QSYNC_GROUP", "value": "Train_A.1"}, UNBUFFERED]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("8gpus", "group '8gpus' cannot name its pods"),
        ("train-", "group 'train-' cannot name its pods"),
        ("t" * 64, "have no others but '-' between, and 63 at most"),
        ("a; rm -rf", "cannot name its pods"),
        ("Infer", "groups 'Infer' and 'infer' would both be 'infer' in Kubernetes"),
        ("t" * 50, "would have names of 66 letters"),
    ],
)
def test_hostile_group_names_are_refused(job, name, sentence):
    with pytest.raises(ClusterError, match=re.escape(sentence)):
        made(with_group_name(job, name))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"image": ""}, "a JobSet needs a container image with torch, QSync and the script; name it"),
        ({"image": "a b"}, "not a container image: 'a b'"),
        ({"image": "a\n  privileged: true"}, "not a container image"),
        ({"namespace": "Default"}, "a namespace cannot be called 'Default'"),
        ({"selectors": {"train": {"a b": "c"}}}, "not a node label: 'a b=c'"),
        ({"selectors": {"train": {"a": "c d"}}}, "not a node label: 'a=c d'"),
        ({"selectors": {"strong": {"a": "b"}}}, "given for group 'strong', but the job's groups are train, infer"),
        ({"resources": {"train": "a: b"}}, "not a resource: 'a: b'"),
        ({"shared_memory": "8 GiB"}, "not a size as Kubernetes writes it: '8 GiB'"),
        ({"claims": {"Runs": "/run"}}, "a claim cannot be called 'Runs'"),
        ({"claims": {"runs": "run"}}, "mounted at an absolute path"),
        ({"claims": {"shared-memory": "/run"}}, "is /dev/shm's"),
        ({"directory": "workspace"}, "a working directory is an absolute path without ':', got 'workspace'"),
        ({"queue": "Night"}, "a queue cannot be called 'Night'"),
        ({"labels": {"team": "a b"}}, "not a label: 'team=a b'"),
        ({"tolerations": {"strong": ()}}, "given for group 'strong', but the job's groups are train, infer"),
    ],
)
def test_what_kubernetes_would_refuse_is_refused_first(job, change, sentence):
    with pytest.raises(ClusterError, match=re.escape(sentence)):
        made(job, attrs.evolve(POD, **change))


@pytest.mark.parametrize("name", ["", "Night", "night.1", "-n", "n" * 64, "1st", "a\nkind: Pod"])
def test_a_jobset_has_a_name_that_dns_takes(job, name):
    with pytest.raises(ClusterError, match="a JobSet cannot be called"):
        made(job, name=name)


def test_several_processes_cannot_have_one_share(tmp_path):
    job = planned_job(run_folder(tmp_path / "run", GROUPS), ranks_each={"infer": 2, "train": 4})
    with pytest.raises(ClusterError, match="group 'infer' has a share of each GPU, of which a pod gets one"):
        made(job)


def test_numbers_that_are_text_stay_text(job):
    text = jobset(job, "night", POD, ["train.py", "--lr", "1e-3"], Meeting(""))
    assert '- "1e-3"\n' in text  # a float to YAML 1.2, which Kubernetes refuses as an argument
    assert 'value: "50"\n' in text


WORDS = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(["on", "1e3", "0x1f", "~", "12:30:00", "y"])


@given(st.lists(WORDS, min_size=1))
def test_any_argument_reads_back_as_a_string(tmp_path_factory, arguments):
    job = planned_job(run_folder(tmp_path_factory.mktemp("job") / "run", {"train": (Role.TRAIN, 2, CPU)}))
    manifest = yaml.safe_load(jobset(job, "on", POD, arguments, Meeting("")))
    assert pods(manifest)["train"]["containers"][0]["args"] == [argument.replace("$", "$$") for argument in arguments]
    assert manifest["metadata"]["name"] == "on"


def test_the_command_writes_a_file_or_prints_what_kubectl_takes(tmp_path):
    run_folder(tmp_path / "night_run", GROUPS)
    common = ["launch", str(tmp_path / "night_run"), "--jobset", "--image", "r/train:1"]
    printed = CliRunner().invoke(cli, [*common, "--", "train.py", "--lr", "1e-3"])
    assert printed.exit_code == 0, printed.output
    manifest = yaml.safe_load(printed.output)
    assert manifest["metadata"]["name"] == "night-run"
    file = tmp_path / "job.yaml"
    done = CliRunner().invoke(cli, [*common, "-o", str(file), "--", "train.py", "--lr", "1e-3"])
    assert done.output == f"wrote {file}; start it with 'kubectl apply -f {file}'\n"
    assert yaml.safe_load(file.read_text()) == manifest
    refused = CliRunner().invoke(cli, [*common, "--name", "Night", "-o", str(tmp_path / "other.yaml"), "train.py"])
    assert refused.exit_code == 1
    assert refused.output.startswith("error: a JobSet cannot be called 'Night'")
    assert not (tmp_path / "other.yaml").exists()
