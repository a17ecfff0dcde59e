"""The ``qsync`` command: JSON and text, one line for an error, and plugins that do not stop it."""

from __future__ import annotations

import json
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import attrs
import click
import pytest
from artifact_examples import examples
from backend_doubles import FakeBackend
from click.testing import CliRunner, Result

from qsync_core.artifacts import files as artifact
from qsync_core.cli import root
from qsync_core.cli.options import output_option, profiles_option
from qsync_core.cli.output import emit, json_option, progress_bar
from qsync_core.errors import PlanError
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.plan import PrecisionPlan
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import KernelRequest
from qsync_core.plugins import registry
from qsync_core.plugins.doctor import DoctorLine, Status
from qsync_core.plugins.hooks import hookimpl
from qsync_core.tuning.record import TuningRecord
from qsync_core.tuning.store import TuningStore


class Plugin:
    """What a plugin with everything would be."""

    @hookimpl
    def qsync_register_backends(self) -> list[Any]:
        return [FakeBackend("a", latencies_ns={"": 5, "t128": 4}), FakeBackend("b", reasons=("no such chip",))]

    @hookimpl
    def qsync_doctor(self) -> list[DoctorLine]:
        return [DoctorLine("chip", "none", Status.WARNING, "buy one")]

    @hookimpl
    def qsync_register_commands(self, cli: click.Group) -> None:
        @cli.command()
        def fail() -> None:
            raise PlanError("two\nlines")

        @cli.command()
        @profiles_option
        @output_option("result")
        @json_option
        def echo(profiles: dict[str, Path], output: Path, json_flag: bool) -> None:
            data = {name: str(path) for name, path in profiles.items()} | {"output": str(output)}
            emit(json_flag, data, lambda console: console.print("for people"))


@pytest.fixture
def qsync(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command with the plugin above and one that cannot be imported."""
    monkeypatch.setattr(sys.modules[__name__], "plugin_object", Plugin(), raising=False)
    monkeypatch.setitem(sys.modules, "qsync_test_plugin", sys.modules[__name__])
    points = [
        EntryPoint("all", "qsync_test_plugin:plugin_object", "qsync"),
        EntryPoint("broken", "no_such_module_anywhere", "qsync"),
    ]
    monkeypatch.setattr(registry.metadata, "entry_points", lambda group: points)

    def run(*arguments: object) -> Result:
        for name in ("registry", "_plugin_commands"):
            root.cli.__dict__.pop(name, None)
        return CliRunner().invoke(root.cli, [str(argument) for argument in arguments])

    yield run
    for name in ("registry", "_plugin_commands"):
        root.cli.__dict__.pop(name, None)


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.qsync"
    artifact.save(examples(layers=1)[PrecisionPlan], path)
    return path


def test_help_lists_core_and_plugin_commands(qsync: Any) -> None:
    result = qsync("--help")
    assert result.exit_code == 0
    commands = result.stdout.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in commands] == ["backends", "doctor", "echo", "fail", "launch", "show"]
    assert "warning: plugin broken is disabled: its import failed with ModuleNotFoundError" in result.stderr


def test_an_error_is_one_line_on_standard_error(qsync: Any) -> None:
    result = qsync("fail")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1] == "error: two lines"


def test_torchrun_is_told_the_sentence_and_a_file_that_cannot_be_written_changes_nothing(
    qsync: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in (tmp_path / "error.json", tmp_path / "absent" / "error.json"):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
        assert (qsync("fail").exit_code, path.exists()) == (1, path.parent == tmp_path)
    told = json.loads((tmp_path / "error.json").read_text())
    assert told.pop("message") == "two lines"
    assert list(told) == ["timestamp"]


def test_core_commands_do_not_load_plugin_commands(qsync: Any, plan_file: Path) -> None:
    assert "warning" not in qsync("show", plan_file).stderr


def test_a_command_of_a_package_that_is_not_installed(qsync: Any) -> None:
    result = qsync("plan")
    assert result.exit_code == 2
    assert "the command 'plan' belongs to qsync-planner, which is not installed; run: pip install " in result.stderr
    assert "No such command 'plann'" in qsync("plann").stderr


def test_show(qsync: Any, plan_file: Path) -> None:
    text = qsync("show", plan_file).stdout
    assert "verdict" in text
    assert "1.98 times as many samples per second" in text
    shown = json.loads(qsync("show", plan_file, "--json").stdout)
    assert shown["kind"] == "PrecisionPlan"
    assert shown["digest"] == artifact.digest(examples(layers=1)[PrecisionPlan])
    assert shown["content"]["groups"][1]["assignments"]["bert.encoder.layer.0.attention.self.query#0"]["backend"] == "aten"


def test_show_says_a_peak_and_the_communication_as_explain_does(qsync: Any, tmp_path: Path) -> None:
    plan = examples(layers=1)[PrecisionPlan]
    assert plan.communication is not None
    memory = {"infer": {"activations": 12 << 30, "outside PyTorch's allocator": 1 << 30}}
    artifact.save(attrs.evolve(plan, memory=memory), tmp_path / "plan.qsync")
    shown = dict(
        line.split(maxsplit=1) for line in qsync("show", tmp_path / "plan.qsync").stdout.replace("group ", "").splitlines()
    )
    assert shown["infer"].rstrip().endswith("peak 13 GiB of 15 GiB")
    assert shown["communication"].rstrip() == plan.communication.reason


@pytest.mark.parametrize("kind", examples(layers=1), ids=lambda kind: kind.__name__)
def test_show_every_kind(qsync: Any, kind: type, tmp_path: Path) -> None:
    artifact.save(examples(layers=1)[kind], tmp_path / "a.qsync")
    result = qsync("show", tmp_path / "a.qsync")
    assert result.exit_code == 0
    assert kind.__name__ in result.stdout
    assert len(result.stdout.splitlines()) >= 4


def test_show_what_is_no_artifact(qsync: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.qsync"
    path.write_text("hello")
    result = qsync("show", path)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith(f"error: {path} is not a QSync artifact")


def test_show_a_folder_that_is_not_there(qsync: Any, tmp_path: Path) -> None:
    said = f"error: the run folder {tmp_path / 'runn'} is not there; 'qsync prepare JOB -o {tmp_path / 'runn'}' makes it"
    assert qsync("show", tmp_path / "runn").stderr.splitlines()[-1] == said
    said = f"error: cannot read {tmp_path / 'a.qsync'}: No such file or directory"
    assert qsync("show", tmp_path / "a.qsync").stderr.splitlines()[-1] == said


def test_doctor_reports_and_fails_when_a_plugin_is_broken(qsync: Any) -> None:
    result = qsync("doctor", "--json")
    assert result.exit_code == 1
    lines = {line["topic"]: line for line in json.loads(result.stdout)["lines"]}
    assert lines["chip"] == {"topic": "chip", "finding": "none", "status": "warning", "advice": "buy one"}
    assert lines["plugin all"]["status"] == "ok"
    assert lines["plugin broken"]["status"] == "error"
    assert "no_such_module_anywhere" in lines["plugin broken"]["finding"]
    assert lines["python"]["finding"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}")
    assert "buy one" in qsync("doctor").stdout


def test_two_backends_of_one_name_do_not_stop_doctor(qsync: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    twice = [FakeBackend("x"), FakeBackend("x")]
    monkeypatch.setattr(Plugin, "qsync_register_backends", hookimpl(lambda self: twice))
    result = qsync("doctor")
    assert result.exit_code == 1
    assert "plugin all offers two backends 'x'; give one of them another name" in " ".join(result.stdout.split())


def test_backends_tells_of_those_that_are_disabled(qsync: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    offered = [FakeBackend("a"), FakeBackend("old", api_version=0)]
    monkeypatch.setattr(Plugin, "qsync_register_backends", hookimpl(lambda self: offered))
    text = qsync("backends").stdout
    assert "plugin all (backend old) is disabled: its backend API version is 0, this qsync-core has 1" in text
    assert "plugin broken is disabled: its import failed with ModuleNotFoundError" in text
    assert json.loads(qsync("backends", "--json").stdout)["disabled"].keys() == {"all (backend old)", "broken"}


def test_backends(qsync: Any, tmp_path: Path) -> None:
    listed = json.loads(qsync("backends", "--json").stdout)
    assert [backend["name"] for backend in listed["backends"]] == ["a", "b"]
    assert listed["backends"][0]["kernels"][0]["op"] == "linear.output"
    artifact.save(examples(layers=2)[PrecisionDag], tmp_path / "dag.qsync")
    operators = json.loads(qsync("backends", tmp_path / "dag.qsync", "--json").stdout)["operators"]
    # All layers have one shape: one operator, with all the kernels of an int8 one.
    assert [entry["kernel"] for entry in operators] == [
        "quantize",
        "quantize.weight",
        "linear.output",
        "linear.grad_input",
        "linear.grad_weight",
    ]
    assert operators[2] == {
        "operator": "bert.encoder.layer.0.attention.self.query#0",
        "precision": "int8",
        "kernel": "linear.output",
        "shapes": [[12 * 384, 768], [768, 768]],
        "backends": ["a"],
        "chosen": {"backend": "a", "config": "", "latency_ns": None, "exact": False},
        "others": [],
        "reasons": {"b": ["no such chip"]},
    }
    text = qsync("backends", tmp_path / "dag.qsync").stdout
    assert "b: no such chip (5 of 5 kernels)" in text
    line = next(line for line in text.splitlines() if "linear.grad_weight" in line)
    assert line.split() == ["linear.grad_weight", "4608×768", "·", "4608×768", "a", "–", "not", "tuned", "–"]


def test_backends_shows_what_was_tuned(qsync: Any, tmp_path: Path) -> None:
    artifact.save(examples(layers=1)[PrecisionDag], tmp_path / "dag.qsync")
    request = KernelRequest(
        "linear.output",
        Variant.of(Precision.INT8, sixteen_bit=Precision.FLOAT16),
        ((4608, 768), (768, 768)),
        device_kind="cuda",
        compute_capability="7.5",
    )
    store = TuningStore(tmp_path / "tuning.sqlite", "T4", {"torch": "2.12"})
    store.add(TuningRecord(store.key("a", request), "t128", 1_230_000))
    store.add(TuningRecord(store.key("a", request), "not_of_this_backend", 1_000, 99))
    asked = ("backends", tmp_path / "dag.qsync", "--device", "cuda", "--device-name", "T4", "--tuning", store.path)
    chosen = [entry["chosen"] for entry in json.loads(qsync(*asked, "--json").stdout)["operators"]]
    assert chosen[2] == {"backend": "a", "config": "t128", "latency_ns": 1_230_000, "exact": True}
    assert chosen[3]["latency_ns"] is None
    line = next(line for line in qsync(*asked).stdout.splitlines() if "linear.output" in line and "4608" in line)
    assert line.split()[-5:] == ["a", "t128", "1.23", "ms", "–"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cuda", "--compute-capability", "abc"], "--compute-capability is two numbers as in 7.5 or 9.0, got 'abc'"),
        (["--device", "cuda", "--compute-capability", "75"], "--compute-capability is two numbers as in 7.5 or 9.0, got '75'"),
        (
            ["--device", "cpu", "--compute-capability", "7.5"],
            "--compute-capability and --device-name describe a CUDA device; add --device cuda",
        ),
        (["--device", "tpu"], "--device is auto, cpu, cuda or cuda:0, got 'tpu'"),
        (["--device", "cuda", "--device-name", "Foo"], "'Foo' is not a known chip, so add its --compute-capability"),
        (["no-such-model"], "there is no file no-such-model, and no installed package that could trace a job of that name"),
        (["--rungs", "int7", "DAG"], "--rungs: not a precision or variant: 'int7'; known are int8"),
        (["--rungs", ",", "DAG"], "--rungs names no precision; write for example --rungs int8,bfloat16"),
    ],
)
def test_backends_refuses_nonsense(qsync: Any, tmp_path: Path, arguments: list[str], message: str) -> None:
    artifact.save(examples(layers=1)[PrecisionDag], tmp_path / "dag.qsync")
    result = qsync("backends", *(str(tmp_path / "dag.qsync") if argument == "DAG" else argument for argument in arguments))
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith(f"error: {message}")


def test_group_paths(qsync: Any) -> None:
    result = qsync("echo", "--profile", "a=x.qsync", "--profile", "b=y=z", "-o", "out", "--json")
    assert json.loads(result.stdout) == {"a": "x.qsync", "b": "y=z", "output": "out"}
    assert qsync("echo", "-o", "out").stdout == "for people\n"
    assert "write GROUP=PATH, for example infer=t4.qsync; got 'x.qsync'" in qsync("echo", "--profile", "x.qsync", "-o", "o").stderr
    assert "group 'a' is given twice" in qsync("echo", "--profile", "a=x", "--profile", "a=y", "-o", "o").stderr


def test_json_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    emit(True, {"name": "µ", "values": [1, 2.5, None]}, lambda console: None)
    assert json.loads(capsys.readouterr().out) == {"name": "µ", "values": [1, 2.5, None]}
    with pytest.raises(ValueError, match="Out of range float values"):
        emit(True, {"value": float("nan")}, lambda console: None)


def test_progress_is_silent_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("work") as update:
        update(1, 2, "half")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")
