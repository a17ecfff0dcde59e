"""``qsync bench`` from the command line: the table, the page, the JSON, and what it refuses with."""

import json

import pytest
from click.testing import CliRunner

from qsync_core.cli.root import cli

from .doubles import SpoiltBackend, forgets_the_last_row

JOB = """
import torch
from qsync_torch.job import Batch, Job

def tiny():
    return Job(
        "tiny",
        torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)),
        lambda step, size: Batch((torch.randn(size, 6),), target=torch.arange(size) % 3),
        lambda output, batch: torch.nn.functional.cross_entropy(output, batch.target),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=4,
    )
"""
SHAPE = ("--shape", "16x24x8", "--device", "cpu", "--rounds", "5")


@pytest.fixture
def qsync(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        return CliRunner().invoke(cli, ["bench", *map(str, arguments)])

    return run


def refused(done):
    assert done.exit_code in (1, 2)
    assert isinstance(done.exception, SystemExit)
    return done.stderr.strip().splitlines()[-1]


def test_backends_beside_pytorchs_own_product(qsync, install, tmp_path):
    install(SpoiltBackend("mine", configs=("tile=1", "tile=2")), SpoiltBackend("other"))
    done = qsync(*SHAPE, "--backend", "aten+mine", "--html", "page.html", "--op", "output")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].startswith("kernels on CPU (")
    table = [line.split() for line in lines[2:5]]
    assert table[0][:3] == ["linear.output", "int8→bfloat16", "16×24×8"]
    assert [row[3 if not number else 0] for number, row in enumerate(table)] == ["aten", "mine", "bfloat16"]
    assert table[1][1] in ("tile=1", "tile=2")
    assert "other" not in done.stdout
    assert lines[-1] == "wrote page.html"
    page = (tmp_path / "page.html").read_text()
    assert all(f"<td>{name}</td>" in page for name in ("aten", "mine", "bfloat16"))


def test_the_json_holds_times_shares_and_errors(qsync, install):
    install()
    done = qsync(*SHAPE, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    rows = [(row["op"], row["formats"], row["contender"]) for row in found["rows"]]
    assert ("linear.grad_weight", "int8 gradient", "aten") in rows
    assert len(rows) == len(set(rows)) == 10
    for row in found["rows"]:
        assert 0 < row["error"] <= row["allowed"] < 0.1
        assert row["tflops"] == pytest.approx(2 * 16 * 24 * 8 / row["median_ns"] / 1e3)
        limits = found["peaks"]
        compute = limits["bfloat16" if "bfloat16" in (row["contender"], row["formats"].split()[0]) else "int8"]
        assert (row["wrong"], row["share_note"] != "") == (False, row["share"] >= 1.005)
        assert row["bound"] == "bandwidth" or row["share"] == pytest.approx(row["tflops"] * 1e12 / compute)
    assert found["left_out"] == {}


def test_without_shapes_a_cpu_has_small_ones_and_says_which_device(qsync, install):
    install()
    done = qsync("--rounds", 5, "--op", "output", "--json")
    assert done.exit_code == 0, done.output
    assert "device: " in done.stderr
    if "device: cpu" in done.stderr:
        assert {row["shape"] for row in json.loads(done.stdout)["rows"]} == {"256×256×256", "2×64×14×14 → 64, 3×3/1"}


def test_a_jobs_products_are_each_there_once_with_how_often(qsync, install, tmp_path):
    install()
    (tmp_path / "job.py").write_text(JOB)
    done = qsync("job.py:tiny", "--device", "cpu", "--rounds", 5, "--op", "output", "--batch-size", 3)
    assert done.exit_code == 0, done.output
    shapes = [line.split("int8→bfloat16")[1].split("  ")[1].strip() for line in done.stdout.splitlines() if "int8→" in line]
    assert shapes == ["3×6×8", "3×8×8 (2×)"]
    assert CliRunner().invoke(cli, ["trace", "job.py:tiny", "-o", "dag.qsync"]).exit_code == 0
    traced = qsync("dag.qsync", "--device", "cpu", "--rounds", 5, "--op", "output", "--json")
    assert {(row["set_name"], row["shape"], row["count"]) for row in json.loads(traced.stdout)["rows"]} == {
        ("tiny", "4×6×8", 1), ("tiny", "4×8×8", 2),
    }  # fmt: skip
    assert "is a graph, whose batch size is fixed" in refused(qsync("dag.qsync", "--batch-size", 4))


def test_a_wrong_kernel_is_told_and_the_page_is_there_all_the_same(qsync, install, tmp_path):
    install(SpoiltBackend("short", forgets_the_last_row))
    done = qsync(*SHAPE, "--backend", "short", "--html", "page.html", "--op", "output")
    said = refused(done)
    assert "short is wrong on linear.output int8→bfloat16 16×24×8: its relative error against float64 is 1.0e+00" in said
    assert "3.1e-02 is what its formats explain" in said
    assert "pytest --pyargs qsync_torch.conformance --backend short" in said
    assert done.exit_code == 1
    (line,) = (line for line in done.stdout.splitlines() if line.endswith(" WRONG"))
    assert line.split()[-3:] == ["–", "1.0e+00", "WRONG"]  # neither a share nor, three columns before, a factor
    assert "*" not in line
    standings = [line.split() for line in done.stdout.splitlines()[-4:-1]]
    assert standings[0][:5] == ["contender", "ran", "fastest", "(*)", "wrong"]
    assert standings[1][:5] == ["short", "1", "0", "1", "–"]
    assert standings[2][:4] == ["bfloat16", "1", "1", "0"]
    assert "wrong on 1" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("configs", [("tile=1",), ("tile=1", "tile=2")])
def test_a_named_backend_that_fails_ends_with_1_and_its_line(qsync, install, configs):
    def fails(kernel, *arguments):
        raise ZeroDivisionError("not today")

    install(SpoiltBackend("ill", fails, configs=configs))
    done = qsync(*SHAPE, "--backend", "aten+ill", "--op", "output")
    error = f"ZeroDivisionError: not today (test_cli_bench.py:{fails.__code__.co_firstlineno + 1})"
    why = error if len(configs) == 1 else "; ".join(f"{config}: {error}" for config in configs)
    assert refused(done) == f"error: ill: failed: {why}; --backend names it (kernels without it: 1)"
    assert done.exit_code == 1
    assert f"left out: ill: failed: {why} (1: " in done.stdout
    assert qsync(*SHAPE, "--op", "output").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (("--backend", "nobody"), ("kernel backend 'nobody' is not installed here", "found: aten", "install the package")),
        (("--backend", "aten+"), ("not a kernel backend: '' in 'aten+'",)),
        (("--shape", "16x24", "--shape", "16 by 24"), ("--shape '16 by 24' is no shape", "4096x4096x1024")),
        (("resnet49",), ("no model is named 'resnet49'", "resnet50", "file.py:function")),
        (("nowhere.py:job",), ("there is no file 'nowhere.py'",)),
        (("nowhere.py",), ("there is no file 'nowhere.py'",)),
        (("resnet50", "--", "--lr", "1"), ("resnet50 takes no arguments (--lr 1)", "for a script")),
        (
            ("--shape", "999999999x999999999x9"),
            ("no operands can be made for linear.output int8→bfloat16 999999999×999999999×9", "choose a smaller shape"),
        ),
        (("--batch-size", "4"), ("--batch-size is for a JOB",)),
        (("--op", "pool"), ("--op 'pool' is in no kernel's name", "linear.output, linear.grad_input, linear.grad_weight")),
        (("--html", "nowhere/page.html"), ("nowhere/page.html",)),
    ],
)
def test_what_can_not_be_compared_is_told_in_one_sentence(qsync, install, arguments, facts):
    install()
    done = qsync("--device", "cpu", *arguments)
    said = refused(done)
    assert all(fact in said for fact in facts), said
    assert done.stdout == ""


def test_backends_that_all_refuse_are_told_with_their_reasons(qsync, install, tmp_path):
    install(SpoiltBackend("shy", refuses=["it never runs"]))
    assert refused(qsync(*SHAPE, "--backend", "shy", "--html", "page.html")).endswith(
        "none of the backends ran a kernel: shy: it never runs"
    )
    assert not (tmp_path / "page.html").exists()
