"""``qsync launch --prepare``: every rank of a cluster file's groups prepares, started as training is."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from qsync_core.cli.root import cli

CLUSTER = """
[[group]]
name = "infer"
device = "Tesla T4"
count = 2
role = "infer"
share = 0.5
ladder = ["float16", "float32"]

[[group]]
name = "train"
device = "NVIDIA H200"
count = 4
role = "train"
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER)
    return path


def launched(*arguments: object) -> str:
    done = CliRunner().invoke(cli, ["launch", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.output


def test_lines_start_prepare_on_every_rank_with_the_scripts_arguments_behind_it(cluster):
    script = ["--", "train.py", "--note", "it's $HOME"]
    shown = launched("night/run", "--prepare", cluster, "--per-machine", "train=2", "--json", *script)
    machines = json.loads(shown)["machines"]
    assert [(machine["group"], machine["node_rank"]) for machine in machines] == [
        ("train", 0),
        ("train", 1),
        ("infer", 2),
        ("infer", 3),
    ]
    for machine in machines:
        words = shlex.split(machine["line"])
        started = words[words.index("-m") :]
        prepare = ["-m", "qsync", "prepare", "train.py", "-o", "night/run", "--cluster", str(cluster)]
        assert started == [*prepare, "--", "--note", "it's $HOME"]
        each = "2" if machine["group"] == "train" else "1"
        assert {"--nnodes=4", f"--nproc-per-node={each}", f"--node-rank={machine['node_rank']}"} <= set(words)
    assert machines[0]["environment"] == {"QSYNC_GROUP": "train"}
    assert machines[2]["environment"] == {"QSYNC_GROUP": "infer", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}


def test_a_gpu_that_no_known_chip_is_called_is_said_at_once(cluster):
    assert "no known chip" not in launched("run", "--prepare", cluster, "--", "train.py")
    cluster.write_text(CLUSTER.replace("NVIDIA H200", "A100X").replace("Tesla T4", "Telsa accelerator"))
    said = launched("run", "--prepare", cluster, "--", "train.py")
    assert (
        "note: no known chip is called 'A100X', the device of group 'train' (did you mean A100?): 'qsync prepare' refuses ranks "
        "whose device has another name"
    ) in said
    assert "'Telsa accelerator', the device of group 'infer': 'qsync prepare'" in said


def test_a_jobset_prepares_in_pods_that_are_those_of_training_and_has_a_name_of_its_own(cluster):
    common = ("--prepare", cluster, "--jobset", "--image", "r/train:1", "--workdir", "/workspace", "--", "train.py:make_job")
    manifest = yaml.safe_load(launched("night_run", *common))
    assert manifest["metadata"]["name"] == "night-run-prepare"
    jobs = {entry["name"]: entry["template"]["spec"] for entry in manifest["spec"]["replicatedJobs"]}
    assert {name: spec["completions"] for name, spec in jobs.items()} == {"train": 1, "infer": 2}
    for spec in jobs.values():
        (container,) = spec["template"]["spec"]["containers"]
        assert container["args"] == ["-m", "qsync", "prepare", "train.py:make_job", "-o", "night_run", "--cluster", str(cluster)]
        assert "--nnodes=3 " in container["command"][2]
        assert "--master-addr=night-run-prepare-train-0-0.night-run-prepare " in container["command"][2]
        assert {"name": "PYTHONUNBUFFERED", "value": "1"} in container["env"]
    assert jobs["train"]["template"]["spec"]["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H200"}


def test_a_rayjobs_script_prepares_by_itself(cluster):
    script = ("--", "train_ray.py", "run", "--cluster", "cluster.toml")
    manifest = yaml.safe_load(launched("run", "--prepare", cluster, "--rayjob", "--image", "r/train:1", *script))
    assert manifest["metadata"]["name"] == "run-prepare"
    assert manifest["spec"]["entrypoint"] == "exec python train_ray.py run --cluster cluster.toml"
    groups = manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert [(group["groupName"], group["replicas"]) for group in groups] == [("train", 1), ("infer", 2)]


@pytest.mark.parametrize("options", [[], ["--jobset", "--image", "a"]])
@pytest.mark.parametrize(
    ("script", "got", "file"),
    [
        (["-m", "pkg.train", "--epochs", "3"], "-m pkg.train", "pkg/train.py"),
        (["-m"], "-m", "train.py"),
        (["--no-python", "./start.sh"], "--no-python ./start.sh", "train.py"),
    ],
)
def test_a_module_is_refused_with_what_to_write(cluster, options, script, got, file):
    done = CliRunner().invoke(cli, ["launch", "run", "--prepare", str(cluster), *options, "--", *script])
    assert done.exit_code == 1
    said = " ".join(done.output.split())
    assert f"neither modules nor options before it, got {got}: write the file, as in -- {file}, or -- {file}:make_job" in said


def test_a_rayjob_prepares_in_a_module(cluster):
    made = launched("run", "--prepare", cluster, "--rayjob", "--image", "r/train:1", "--", "-m", "pkg.train", "run")
    assert yaml.safe_load(made)["spec"]["entrypoint"] == "exec python -m pkg.train run"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--elastic"], "--elastic is for training: all ranks of the cluster file's groups prepare"),
        (["--group", "train"], "--group is for training"),
        (["--workdir", "/a"], "--workdir is for --jobset and --rayjob"),
        (["--tolerate", "infer=spot"], "--tolerate is for --jobset and --rayjob"),
        (["--shm", "1Gi"], "--shm is for --jobset and --rayjob"),
        (["--namespace", "ml"], "--namespace is for --jobset and --rayjob"),
        (["--name", "mine"], "--name is for --jobset and --rayjob"),
        (["-o", "lines.yaml"], "-o is for --jobset and --rayjob"),
        (
            ["--per-machine", "strong=2"],
            "per machine are given for group 'strong', but the job's groups are train, infer",
        ),
        (["--per-machine", "train=3"], "group 'train' has 4 ranks, which machines of 3 processes do not add up to"),
        (["--jobset", "--image", "a", "--tolerate", "infer=a:Never"], "not a taint: 'a:Never'"),
    ],
)
def test_what_does_not_go_with_it_is_refused(cluster, options, sentence):
    done = CliRunner().invoke(cli, ["launch", "run", "--prepare", str(cluster), *options, "--", "train.py"])
    assert done.exit_code != 0
    assert sentence in " ".join(done.output.split())
