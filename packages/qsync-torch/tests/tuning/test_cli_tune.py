"""``qsync tune`` from the command line, and what ``qsync profile`` makes of its records."""

import json
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from clusters import cluster_text
from qsync_core.artifacts import files as artifact
from qsync_core.cli.root import cli
from qsync_core.ir.op_id import OpId
from qsync_core.ir.profile import Profile
from qsync_core.kernels.choice import KernelChoice
from qsync_core.tuning import search
from qsync_core.tuning.store import read_store
from qsync_torch.profiling import profile as profiling
from qsync_torch.profiling.bench import Efforts
from qsync_torch.profiling.profile import ProfileRequest
from qsync_torch.timing import Effort

from .installed_backends import CompilingNamedBackend, NamedBackend

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
"""
CLUSTER = cluster_text(train={}, infer={"ladder": ["int8", "float32"], "rounding": "nearest"})


@pytest.fixture
def qsync(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(search, "Effort", partial(search.Effort, samples=(1, 1)))
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "cluster.toml").write_text(CLUSTER)

    def run(*arguments):
        return CliRunner().invoke(cli, [str(argument) for argument in arguments])

    return run


def result_of(done):
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_broken_backend_does_not_stop_tuning(qsync, install, monkeypatch):
    broken = NamedBackend("broken")
    install(broken)
    monkeypatch.setattr(broken, "unsupported_reasons", lambda request: "no")
    found = result_of(qsync("tune", "job.py:tiny", "--device", "cpu", "--json"))
    wrong = "backend broken: its unsupported_reasons must return a list of texts, got str 'no'"
    assert all(set(kernel["backends"]) == {"aten"} for kernel in found["kernels"])
    assert all(kernel["reasons"] == {"broken": [wrong]} for kernel in found["kernels"])
    monkeypatch.setattr(broken, "unsupported_reasons", lambda request: [])
    monkeypatch.setattr(broken, "build", lambda request, config: None)
    said = qsync("tune", "job.py:tiny", "--device", "cpu", "--backend", "broken").stdout
    assert "Why none:" in said
    assert "broken: no configuration of backend broken runs quantize in int8" in said
    assert "its build must return a function for quantize, got NoneType None" in said
    assert "a failure is kept for the backend's version; when it is repaired, raise the version of its package" in said


def test_a_kernel_that_fails_is_left_out_by_name_with_the_line_that_failed(qsync, install):
    class Failing(NamedBackend):
        def build(self, request, config):
            kernel = super().build(request, config)
            return kernel if request.op != "linear.output" else fails

    def fails(*arguments):
        raise ZeroDivisionError("my kernel broke")

    install(Failing("mine"))
    done = qsync("tune", "job.py:tiny", "--device", "cpu", "--rungs", "int8")
    assert done.exit_code == 0
    (said,) = (line for line in done.stdout.splitlines() if line.startswith("left out: "))
    assert said == (
        "left out: mine, linear.output (2 kernels): its kernel failed with ZeroDivisionError: my kernel broke "
        f"({Path(__file__).name}:{fails.__code__.co_firstlineno + 1})"
    )
    assert "a failure is kept for the backend's version" in done.stdout


def test_a_job_is_tuned_once(qsync, install, own_store):
    install(NamedBackend("one"))
    first = result_of(qsync("tune", "job.py:tiny", "--device", "cpu", "--json"))
    assert first["store"] == str(own_store)
    assert first["reused"] == 0
    for kernel in first["kernels"]:
        assert set(kernel["backends"]) == {"aten", "one"}
        assert kernel["best"] == min(kernel["backends"], key=lambda name: (kernel["backends"][name]["latency_ns"], name))
        assert kernel["backends"]["one"]["tried"] == 2
    # int8 with float32 and with 16-bit output: the forward products differ, all else is shared.
    assert [kernel["role"] for kernel in first["kernels"]].count("linear.output") == 4
    again = result_of(qsync("tune", "job.py:tiny", "--device", "cpu", "--json"))
    assert again["reused"] == 2 * len(first["kernels"])
    assert again["kernels"] == first["kernels"]
    assert result_of(qsync("trace", "job.py:tiny", "-o", "dag.qsync", "--json"))
    traced = result_of(qsync("tune", "dag.qsync", "--device", "cpu", "--json"))
    assert traced["kernels"] == first["kernels"]


def test_options_narrow_it_down(qsync, install):
    install(NamedBackend("one"))
    found = result_of(
        qsync(
            "tune",
            "job.py:tiny",
            "--device",
            "cpu",
            "--backend",
            "one",
            "--budget",
            1,
            "-o",
            "own.sqlite",
            "--rungs",
            "int8",
            "--json",
        )
    )
    assert all(kernel["backends"].keys() == {"one"} for kernel in found["kernels"])
    assert all(kernel["backends"]["one"]["tried"] == 1 for kernel in found["kernels"])
    assert [kernel["role"] for kernel in found["kernels"]].count("linear.output") == 2
    grouped = result_of(qsync("tune", "job.py:tiny", "--device", "cpu", "--cluster", "cluster.toml", "--group", "infer", "--json"))
    assert all("round=nearest" in kernel["variant"] for kernel in grouped["kernels"] if kernel["op"] == "linear.output")


def test_the_table_for_people(qsync, install, own_store):
    install(NamedBackend("one", refuses={"grad_weight": "no"}))
    text = qsync("tune", "job.py:tiny", "--device", "cpu", "--rungs", "int8").stdout
    assert f"wrote {own_store}" in text
    line = next(line for line in text.splitlines() if line.startswith("linear.grad_weight int8 4×3 4×5"))
    assert line.split()[4:6] == ["aten", "–"]


def test_files_are_joined(qsync, install):
    install(NamedBackend("one"))
    for name, backend in (("a", "one"), ("b", "aten")):
        result_of(
            qsync(
                "tune", "job.py:tiny", "--device", "cpu", "--backend", backend, "-o", f"{name}.sqlite", "--rungs", "int8", "--json"
            )
        )
    joined = result_of(qsync("tune", "--merge", "a.sqlite", "--merge", "b.sqlite", "-o", "c.sqlite", "--json"))
    again = result_of(qsync("tune", "--merge", "a.sqlite", "b.sqlite", "-o", "d.sqlite", "--json"))
    assert joined["records"] == again["records"]
    tuned = result_of(qsync("tune", "job.py:tiny", "--device", "cpu", "-o", "c.sqlite", "--rungs", "int8", "--json"))
    assert tuned["reused"] == joined["records"] == 2 * len(tuned["kernels"])


def test_kernels_are_compiled_ahead_without_a_gpu(qsync, install):
    one = CompilingNamedBackend("one")
    install(one)
    found = result_of(qsync("tune", "job.py:tiny", "--compile-only", "--arch", "sm_75", "--json"))
    assert found == {
        "arch": "sm_75",
        "requests": found["requests"],
        "backends": {"one": {"requests": found["requests"], "compiled_kernels": 7}},
    }
    assert one.compiled == [("sm_75", found["requests"])]
    text = qsync("tune", "job.py:tiny", "--compile-only", "--arch", "sm_75").stdout
    assert f"one: 7 kernels for {found['requests']} of {found['requests']} requests on sm_75" in text


@pytest.mark.parametrize("options", [["--device", "cpu"], ["--compile-only", "--arch", "sm_75"]])
def test_float_formats_leave_nothing_to_do(qsync, install, own_store, options):
    install(NamedBackend("one"))
    said = "operators in float formats (float16) run PyTorch's own kernels, of which there is nothing to tune or compile."
    done = qsync("tune", "job.py:tiny", "--rungs", "float16", *options)
    assert (done.exit_code, " ".join(done.stdout.split())) == (0, said)
    assert result_of(qsync("tune", "job.py:tiny", "--rungs", "float16", *options, "--json"))["note"] == said
    assert not own_store.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["job.py:tiny", "--group", "infer"], "--group names a group of a cluster file; give --cluster too."),
        (
            ["job.py:tiny", "--compile-only", "--arch", "sm_75", "--budget", 24],
            "--compile-only measures nothing and writes no tuning file, so --budget cannot go with it.",
        ),
        (
            ["job.py:tiny", "--compile-only", "--arch", "sm_75", "-o", "x", "--kernels", 2, "--device", "cpu"],
            "so --device, --output, --kernels cannot go with it.",
        ),
        (["--merge", "a", "--budget", 2, "-o", "x"], "--merge joins files and tunes nothing, so --budget cannot go with it."),
        (["--merge", "a", "--compile-only", "--arch", "sm_75"], "so --compile-only, --arch cannot go with it."),
    ],
)
def test_options_that_would_change_nothing_are_refused(qsync, install, arguments, message):
    install(CompilingNamedBackend("one"))
    done = qsync("tune", *arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())


def test_only_what_was_added_is_said_to_be_written(qsync, install, own_store):
    install(NamedBackend("one"))
    command = ["tune", "job.py:tiny", "--device", "cpu", "--rungs", "int8"]
    assert f"; wrote {own_store}" in " ".join(qsync(*command).stdout.split())
    before = own_store.read_bytes()
    assert f"; nothing was added to {own_store}" in " ".join(qsync(*command).stdout.split())
    assert own_store.read_bytes() == before


def test_joining_into_a_link_writes_the_file_behind_it(qsync, install, tmp_path):
    install(NamedBackend("one"))
    result_of(qsync("tune", "job.py:tiny", "--device", "cpu", "-o", "a.sqlite", "--rungs", "int8", "--json"))
    (tmp_path / "shared").mkdir()
    (tmp_path / "link.sqlite").symlink_to(tmp_path / "shared" / "all.sqlite")
    joined = result_of(qsync("tune", "--merge", "a.sqlite", "-o", "link.sqlite", "--json"))
    assert (tmp_path / "link.sqlite").is_symlink()
    measured, found = read_store(tmp_path / "shared" / "all.sqlite")
    assert len(measured) >= len(found) == joined["records"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tune"], "qsync tune needs a JOB to tune"),
        (["tune", "job.py:tiny", "--device", "cpu", "--arch", "sm_75"], "--arch goes with --compile-only"),
        (["tune", "job.py:tiny", "--compile-only"], "--compile-only needs --arch, the chip to compile for"),
        (
            ["tune", "job.py:tiny", "--compile-only", "--arch", "T4"],
            "--arch names a chip as compilers do, for example sm_75 or sm_90a",
        ),
        (["tune", "job.py:tiny", "--compile-only", "--arch", "sm_75"], "no backend of aten, one compiles ahead of time"),
        (["tune", "job.py:tiny", "--device", "cuda:99"], "cuda:99 was asked for, but"),
        (["tune", "job.py:tiny", "--device", "cpu", "--backend", "three"], "kernel backend 'three' is not installed here"),
        (["tune", "job.py:tiny", "--device", "cpu", "--rungs", "int7"], "--rungs: not a precision: 'int7'"),
        (
            ["tune", "job.py:tiny", "--device", "cpu", "--rungs", "int8", "--cluster", "cluster.toml"],
            "--rungs and --cluster both give",
        ),
        (
            ["tune", "--merge", "nowhere.sqlite", "-o", "x.sqlite"],
            "cannot read tuning records from nowhere.sqlite: there is no such file",
        ),
        (["tune", "no-such-model", "--device", "cpu"], ""),
        (["tune", "dag.qsync", "--device", "cpu", "--batch-size", 2], "dag.qsync is a graph, whose batch size is fixed"),
    ],
)
def test_nonsense_is_refused_in_one_sentence(qsync, install, arguments, message):
    install(NamedBackend("one"))
    if "dag.qsync" in arguments:
        result_of(qsync("trace", "job.py:tiny", "-o", "dag.qsync", "--json"))
    done = qsync(*arguments)
    assert done.exit_code == 1
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith(f"error: {message}")


@pytest.fixture
def measured_once(monkeypatch):
    quick = Effort(min_repeats=1, max_repeats=1, budget_s=0.0, warmup=0)
    monkeypatch.setattr(profiling, "ProfileRequest", partial(ProfileRequest, efforts=Efforts(quick, quick, quick)))


def test_a_profile_measures_with_the_fastest_and_says_so(qsync, install, measured_once, own_store):
    one = NamedBackend("one")
    install(one)
    result_of(qsync("tune", "job.py:tiny", "--device", "cpu", "--rungs", "int8", "--backend", "one", "--json"))
    one.ran.clear()
    done = qsync("profile", "job.py:tiny", "-o", "p.qsync", "--backend", "auto", "--rungs", "int8,bfloat16", "--json")
    result_of(done)
    assert "never tuned" not in done.stderr
    found = artifact.load(own_store.parent / "p.qsync", Profile)
    assert found.software["backend one"] == "unknown"  # it comes from no distribution
    for op_id, by_variant in found.cost_index.items():
        for variant in by_variant:
            cost = found.cost(op_id, variant)
            if op_id == OpId("2") and variant.compute == "int8":
                assert cost.backend == "one"
                ops = dict(KernelChoice.parse(cost.backend, cost.config).pins)
                assert {choice.backend for choice in ops.values()} == {"one"}
                assert ops["quantize.weight"].config == ""
                pinned = {(role, choice.config) for role, choice in ops.items() if role.startswith("linear")}
                assert pinned <= set(one.ran)
            elif op_id != OpId("0") or variant.compute != "int8":
                assert (cost.backend, cost.config) == ("aten", "")


def test_a_profile_on_a_cpu_takes_aten_unless_told(qsync, install, measured_once, own_store):
    one = NamedBackend("one")
    install(one)
    result_of(qsync("tune", "job.py:tiny", "--device", "cpu", "--rungs", "int8", "--backend", "one", "--json"))
    one.ran.clear()
    result_of(qsync("profile", "job.py:tiny", "-o", "p.qsync", "--rungs", "int8", "--json"))
    found = artifact.load(own_store.parent / "p.qsync", Profile)
    assert {(cost.backend, cost.config) for cost in found.costs} == {("aten", "")}
    assert one.ran == []
    refused = qsync("profile", "job.py:tiny", "-o", "q.qsync", "--rungs", "int8", "--backend", "one")
    assert refused.exit_code == 1
    assert "cannot run as float32 on backend one: operators in float formats run on PyTorch's own kernels" in refused.stderr


def test_a_profile_says_that_kernels_were_never_tuned(qsync, install, measured_once):
    install(NamedBackend("one"))
    done = qsync("profile", "job.py:tiny", "-o", "p.qsync", "--backend", "auto", "--rungs", "int8", "--json")
    assert done.exit_code == 0
    assert "kernels were never tuned here and take a default; raise --tune, or run 'qsync tune' first" in done.stderr
