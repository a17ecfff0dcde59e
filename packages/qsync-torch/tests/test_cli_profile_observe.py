import json
from functools import partial

import attrs
import pytest
import torch
from click.testing import CliRunner

from clusters import cluster_text
from qsync_core.artifacts import files as artifact
from qsync_core.cli.root import cli
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.observations import Observations
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import Profile
from qsync_core.ir.variant import Variant
from qsync_torch import devices
from qsync_torch.load_job import load_job
from qsync_torch.profiling import profile as profile_module
from qsync_torch.profiling.bench import Efforts
from qsync_torch.profiling.profile import ProfileRequest
from qsync_torch.timing import Effort
from qsync_torch.tracing.trace import trace

FLOAT32 = Variant.of(Precision.FLOAT32)
INT8, INT8_WIDE = Variant.of(Precision.INT8), Variant.of(Precision.INT8, output=Precision.FLOAT32)
JOB = """
import torch
from qsync_torch.job import Batch, Job

def tiny():
    return Job(
        "tiny",
        torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3)),
        lambda step, size: Batch((torch.randn(size, 6),), target=torch.arange(size) % 3),
        lambda output, batch: torch.nn.functional.cross_entropy(output, batch.target),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=4,
    )

def wider():
    job = tiny()
    job.model[0] = torch.nn.Linear(6, 7)
    job.model[2] = torch.nn.Linear(7, 3)
    return job
"""

CLUSTER = cluster_text(train={}, infer={"share": 0.25, "ladder": ["int8", "float32"], "rounding": "nearest"})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    quick = Effort(min_repeats=1, max_repeats=1, budget_s=0.0, warmup=0)
    monkeypatch.setattr(profile_module, "ProfileRequest", partial(ProfileRequest, efforts=Efforts(quick, quick, quick)))
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    monkeypatch.chdir(tmp_path)
    artifact.save(trace(load_job("job.py:tiny")), tmp_path / "dag.qsync")
    return tmp_path


def _run(*arguments):
    return CliRunner().invoke(cli, list(arguments), catch_exceptions=False)


def _message(*arguments):
    result = _run(*arguments)
    assert result.exit_code != 0
    return result.output


def test_profile_writes_an_artifact_and_says_what(folder):
    result = _run("profile", "job.py:tiny", "--dag", "dag.qsync", "-o", "p.qsync", "--memory-cap", "2 GiB", "--share", "0.5")
    assert result.exit_code == 0, result.output
    found = artifact.load(folder / "p.qsync", Profile)
    assert (found.device.share, found.device.memory_cap_bytes) == (0.5, 2 << 30)
    assert "tiny on cpu" in result.output
    assert "wrote p.qsync" in result.output
    assert not (folder / "p.qsync.partial").exists()


def test_a_graph_of_the_job_with_another_loss_is_not_measured(folder):
    text = JOB.replace("torch.nn.functional.cross_entropy(output, batch.target)", "output.square().mean()")
    (folder / "other.py").write_text(text)
    said = _message("profile", "other.py:tiny", "--dag", "dag.qsync", "-o", "p.qsync")
    assert "its loss is cross_entropy (mean), and the job's custom" in said
    assert "run 'qsync trace'" in said
    assert not (folder / "p.qsync").exists()


@pytest.mark.parametrize("option", [("trace", "--bucket-cap-mb", "1e300"), ("observe", "--seed", "99999999999999999999")])
def test_numbers_that_are_too_large_are_usage_errors(folder, option):
    command, name, value = option
    assert f"'{name}'" in _message(command, "job.py:tiny", name, value, "-o", "x.qsync")


def test_profile_json_is_one_object(folder):
    data = json.loads(_run("profile", "job.py:tiny", "-o", "p.qsync", "--rungs", "bfloat16,float32", "--json").stdout)
    assert data["model"] == "tiny"
    assert [step["variant"] for step in data["steps"]] == ["float32", "bfloat16"]
    assert {cast["target"] for cast in data["casts"]} == {"bfloat16", "float32"}


def test_profile_takes_ladder_and_share_from_a_cluster_file(folder):
    result = _run("profile", "job.py:tiny", "-o", "p.qsync", "--cluster", "cluster.toml", "--group", "infer")
    assert result.exit_code == 0, result.output
    found = artifact.load(folder / "p.qsync", Profile)
    variants = {str(step.variant) for step in found.steps}
    assert found.device.share == 0.25
    assert any(text.startswith("int8") and "round=nearest" in text for text in variants)


def test_observe_writes_an_artifact(folder):
    result = _run(
        "observe", "job.py:tiny", "--dag", "dag.qsync", "-o", "o.qsync", "--steps", "2", "--rungs", "int8,float32", "--json"
    )
    assert result.exit_code == 0, result.output
    found = artifact.load(folder / "o.qsync", Observations)
    data = json.loads(result.stdout)
    assert (data["iterations"], data["batch_size"], data["stopped"]) == (2, 2, "budget")
    assert data["series"] == len(found.series)
    assert found.dag_digest == artifact.digest(artifact.load(folder / "dag.qsync"))
    assert {series.variant for series in found.series} == {None, Variant.of(Precision.INT8)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rungs", "int9"], "--rungs: not a precision: 'int9'; known are int8, float8_e4m3fn, bfloat16, float16, float32"),
        (["--rungs", ","], "--rungs names no precision"),
        (["--rungs", "int8;out=int8"], "--rungs: not a variant: 'int8;out=int8'"),
        (["--rungs", "int8", "--cluster", "cluster.toml"], "--rungs and --cluster both give a ladder"),
        (["--cluster", "cluster.toml"], "describes the groups train, infer; say which one with --group"),
        (["--cluster", "cluster.toml", "--group", "x"], "has no group 'x'; its groups are train, infer"),
        (["--share", "0"], "--share is a fraction of the device, above 0 and at most 1, got 0"),
        (["--memory-cap", "much"], "--memory-cap: not a size: 'much'"),
        (["--device", "mps"], "QSync measures cpu and cuda devices, got 'mps'"),
        (["--dag", "cluster.toml"], "cluster.toml"),
        (["--rungs", "float8_e4m3fn,float32"], "operator 0#0 cannot run linear.output as float8_e4m3fn: aten: "),
        (["--backend", "nobody"], "kernel backend 'nobody' is not installed here"),
    ],
)
def test_profile_refuses_with_one_sentence(folder, options, message):
    output = _message("profile", "job.py:tiny", "-o", "p.qsync", *options)
    assert message in output
    assert "Traceback" not in output
    assert not (folder / "p.qsync").exists()


def test_observe_refuses_two_ladders(folder):
    output = _message("observe", "job.py:tiny", "-o", "o.qsync", "--rungs", "int8", "--cluster", "cluster.toml", "--group", "infer")
    assert "--rungs and --cluster both give a ladder" in output


@pytest.mark.parametrize("command", ["profile", "observe"])
def test_a_graph_of_another_model(folder, command):
    output = _message(command, "job.py:wider", "--dag", "dag.qsync", "-o", "x.qsync")
    assert "parameter 0.weight has shape [7, 6] in the job and [5, 6] in the graph; run 'qsync trace' for this job" in output


@pytest.mark.parametrize("command", ["profile", "observe"])
def test_a_graph_of_another_batch_size(folder, command):
    output = _message(command, "job.py:tiny", "--dag", "dag.qsync", "-o", "x.qsync", "--batch-size", "6")
    assert "the graph was traced with batch size 4 and the job has 6; give --batch-size 4" in output


def test_nothing_was_left_initialised(folder):
    _run("profile", "job.py:tiny", "-o", "p.qsync", "--rungs", "float32")
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("command", ["profile", "observe"])
def test_without_a_device_the_command_takes_a_gpu_where_there_is_one_and_says_what_it_took(command, folder):
    result = _run(
        command, "job.py:tiny", "--dag", "dag.qsync", "-o", "out.qsync", *(["--warmup", "0"] if command == "observe" else [])
    )
    assert result.exit_code == 0, result.output
    (said,) = [line for line in result.stderr.splitlines() if line.startswith("device: ")]
    assert said.startswith("device: cuda:" if torch.cuda.is_available() else "device: cpu; --device chooses another")
    assert "device: " not in _run(command, "job.py:tiny", "--dag", "dag.qsync", "-o", "other.qsync", "--device", "cpu").stderr


@pytest.mark.parametrize(
    ("name", "capability", "rungs"),
    [
        ("Tesla V100-SXM2-32GB", (7, 0), [Variant.of(Precision.FLOAT16), FLOAT32]),
        ("Tesla T4", (7, 5), [*devices.int8_rungs(Precision.FLOAT16), Variant.of(Precision.FLOAT16), FLOAT32]),
        ("NVIDIA GeForce RTX 3090", (8, 6), [INT8, INT8_WIDE, Variant.of(Precision.BFLOAT16), FLOAT32]),
        ("A new chip", (13, 0), [INT8, INT8_WIDE, Variant.of(Precision.BFLOAT16), FLOAT32]),
    ],
)
def test_a_profile_measures_the_ladder_of_its_chip(name, capability, rungs, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    devices.compute_capability.cache_clear()
    ladder = devices.standard_ladder(torch.device("cuda", 0))
    devices.compute_capability.cache_clear()
    assert list(ladder) == rungs
    assert set(ladder) <= set(devices.any_chips_ladder())  # what is observed where no option says otherwise


def test_all_three_products_in_int8_are_measured_where_they_pay(folder, monkeypatch):
    """Beside a 16-bit base, of a graph of linear operators: not beside float32, and not of convolutions."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    devices.compute_capability.cache_clear()
    gpu, every, tiny_dag = torch.device("cuda", 0), Variant.named("int8-all"), artifact.load(folder / "dag.qsync", PrecisionDag)
    autocast = attrs.evolve(tiny_dag, base=Precision.BFLOAT16, autocast=True)
    assert devices.standard_ladder(gpu, autocast) == (every, *devices.standard_ladder(gpu))
    assert devices.any_chips_ladder(autocast)[0] == every
    assert devices.standard_ladder(gpu, tiny_dag) == devices.standard_ladder(gpu)
    images = [attrs.evolve(one, kind="conv2d") if one.is_adjustable else one for one in autocast.operators]
    assert devices.standard_ladder(gpu, attrs.evolve(autocast, operators=tuple(images))) == devices.standard_ladder(gpu)
    assert devices.standard_ladder(torch.device("cpu"), autocast) == devices.standard_ladder(torch.device("cpu"))
    devices.compute_capability.cache_clear()
