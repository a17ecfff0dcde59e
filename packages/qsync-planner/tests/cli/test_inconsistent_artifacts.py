"""Artifacts that are sealed but do not hold together: every command says one sentence, or gives a result; never a traceback."""

from __future__ import annotations

import os
import random
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import click
import pytest
from click.testing import CliRunner, Result
from planning_cases import LADDERS, random_case, random_costs

from nightly import nightly
from qsync_core.artifacts.files import digest, to_bytes
from qsync_core.errors import QSyncError
from qsync_core.ir.observations import LOSSVAR, W_VAR_GRAD, X_VAR_GRAD, Y_VAR_GRAD, Observations, Series
from qsync_planner.allocator import Inputs, Request, allocate
from qsync_planner.plugin import qsync_register_commands
from qsync_planner.replayer.replay import Replayer, plan_variants

ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(ROOT / "bench" / "robustness"))
import inconsistent  # noqa: E402

TRIALS, SEED = int(os.environ.get("QSYNC_FUZZ_TRIALS", "120")), os.environ.get("QSYNC_FUZZ_SEED", "inconsistent")
CASE = random_case(1, blocks=1, ladder=LADDERS[0], shared=True)
CLUSTER = """
[[group]]
name = "train0"
device = "device-train0"
count = 2
role = "train"

[[group]]
name = "infer0"
device = "device-infer0"
count = 2
role = "infer"
ladder = [LADDER]
MEMORY

[[link]]
between = ["train0", "infer0"]
latency_us = 1
bandwidth_gbps = 16
"""


def set_of_files() -> dict[str, bytes]:
    """One job's artifacts, and a second graph and profile at twice its batch."""
    dag, cluster, profiles, sensitivity = CASE.arguments
    plan = allocate(CASE.inputs, Request("greedy"))
    replayer = Replayer(Inputs(dag, cluster, profiles))
    series = tuple(
        Series(operator.op_id, variant, LOSSVAR, term, (1.0 + i, 2.0))
        for i, operator in enumerate(dag.adjustable)
        for variant in LADDERS[0][:-1]
        for term in (X_VAR_GRAD, W_VAR_GRAD, Y_VAR_GRAD)
    )
    batch = attrs.evolve(dag, batch_size=2 * dag.batch_size)
    timeline = replayer.timeline(plan_variants(plan, cluster))
    found = {
        "dag": dag,
        "batch": batch,
        "profile@batch": attrs.evolve(profiles["infer0"], dag_digest=digest(batch)),
        "train0": profiles["train0"],
        "infer0": profiles["infer0"],
        "sensitivity": sensitivity,
        "observations": Observations(dag.model, digest(dag), (10, 11), 2, "budget", series),
        "plan": plan,
        "other": allocate(CASE.inputs, Request("full")),
        "timeline": timeline,
        "measured": attrs.evolve(timeline, source="measured"),
        "costs": random_costs(CASE, random.Random(1)),
    }
    return {name: to_bytes(artifact) for name, artifact in found.items()}


def commands(at: Path) -> list[list[object]]:
    """Every command that reads artifacts."""
    job = ["--dag", at / "dag", "--cluster", at / "cluster.toml"]
    job += ["--profile", f"train0={at}/train0", "--profile", f"infer0={at}/infer0"]
    plan: list[object] = ["plan", *job, "--sensitivity", at / "sensitivity", "-o", at / "out"]
    batch: list[object] = ["--batch-dag", at / "batch", "--batch-profile", f"infer0={at}/profile@batch"]
    indicate: list[object] = ["indicate", at / "observations", "--dag", at / "dag", "-o", at / "out"]
    return [
        plan,
        [*plan, "--solver", "greedy"],
        [*plan, "--solver", "dynamic-batch", *batch],
        [*plan, "--minimise", "memory"],
        [*plan, "--communication", at / "costs"],
        ["plan", *job, "-o", at / "out", "--solver", "uniform"],
        ["plan", "--diff", at / "plan", at / "other"],
        ["explain", at / "plan"],
        ["explain", at / "plan", "head", "--json"],
        ["replay", at / "plan", *job, "-o", at / "out", "--perfetto", at / "trace.json"],
        ["replay", at / "plan", *job, *batch, "--json"],
        ["replay", at / "plan", *job, "--communication", at / "costs"],
        ["verify", at / "timeline", at / "measured"],
        indicate,
        [*indicate, "--cluster", at / "cluster.toml"],
    ]


class Program(click.Group):
    """The program's handling of errors: a QSyncError is a sentence."""

    def main(self, *args: Any, **extra: Any) -> Any:
        try:
            return super().main(*args, **extra)
        except QSyncError as error:
            click.echo(f"error: {' '.join(str(error).split())}", err=True)
            sys.exit(1)


def run(arguments: Sequence[object]) -> Result:
    program = Program()
    qsync_register_commands(program)
    return CliRunner().invoke(program, [str(argument) for argument in arguments])


def write(at: Path, files: Mapping[str, bytes], memory_bytes: int = 0) -> None:
    for name, data in files.items():
        (at / name).write_bytes(data)
    ladder = ", ".join(f'"{variant}"' for variant in LADDERS[0][:-1])
    memory = f"memory = {memory_bytes}" if memory_bytes else ""
    (at / "cluster.toml").write_text(CLUSTER.replace("LADDER", f'{ladder}, "float32"').replace("MEMORY", memory))


def wrong_with(result: Result) -> str:
    """What a command did that it must not; empty where it ended well or said one sentence."""
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return "".join(traceback.format_exception(result.exception)[-6:])
    lines = [line for line in result.stderr.splitlines() if line.startswith(("error: ", "Error: "))]
    if result.exit_code and (len(lines) != 1 or not 20 < len(lines[0]) < 3000):
        return f"exit {result.exit_code}: {result.stderr[-500:]!r}"
    return ""


def test_every_command_works_on_the_files_as_they_are(tmp_path: Path) -> None:
    write(tmp_path, set_of_files())
    for arguments in commands(tmp_path):
        result = run(arguments)
        assert result.exit_code == 0, (arguments, result.output)


@pytest.mark.parametrize("part", [0, *nightly(*range(1, 6))])
def test_inconsistent_content_is_a_sentence_or_a_result(part: int, tmp_path: Path) -> None:
    rng, files, wrong = random.Random(f"{SEED} {part}"), set_of_files(), []
    peaks = Replayer(Inputs(*CASE.arguments[:3])).replay({}).groups["infer0"].peak_bytes
    for number in range(TRIALS // 6):
        changed, what = inconsistent.mutate(rng, files)
        write(tmp_path, changed, rng.choice((0, 0, peaks, peaks * 9 // 10)))
        for arguments in rng.sample(commands(tmp_path), 4):
            if problem := wrong_with(run(arguments)):
                wrong.append(f"{number}: {what}\n  {' '.join(map(str, arguments[:2]))} …\n{problem}")
    assert not wrong, "\n".join([f"{len(wrong)} wrong", *wrong[:5]])


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "0", "1e400"])
@pytest.mark.parametrize("option", ["--tolerance", "--time-limit", "--omega-limit", "--budget", "--max-error", "--top"])
def test_numeric_options_that_make_no_sense(option: str, value: str, tmp_path: Path) -> None:
    if value == "0" and option in ("--tolerance", "--omega-limit", "--max-error", "--top"):
        return  # that makes sense
    write(tmp_path, set_of_files())
    plan, *_ = commands(tmp_path)
    arguments = {
        "--omega-limit": [*plan, "--minimise", "time"],
        "--budget": ["indicate", tmp_path / "observations", "--dag", tmp_path / "dag", "--check", "--job", "resnet"],
        "--max-error": ["verify", tmp_path / "timeline", tmp_path / "measured"],
        "--top": ["verify", tmp_path / "timeline", tmp_path / "measured"],
    }.get(option, plan)
    result = run([*arguments, option, value])
    assert result.exit_code in (1, 2), result.output
    assert not wrong_with(result), wrong_with(result)
    assert any(word in result.stderr for word in ("finite", "range", "integer", "number")), result.stderr
