"""Rows S7 to S13 and S15: what a step under a plan does, measured by the scripts and tests that look at it."""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from structure.rows import Row, row, shortened
from structure.running import KINDS, checkout, run_in, times_in_turns
from structure.tox_log import read_tox_log

BEFORE_RIDING = "72d2ea3"
"""The commit against which row S8 is told."""
BEFORE_DERIVED = "8fd5cc4"
"""The last commit whose random numbers hang on a counter of forwards; row S15's plans are those of its planner."""
ROUNDS = 3
_APPLY = "packages/qsync-torch/tests/apply/"
CHECKPOINTS = (
    *(f"{_APPLY}test_{name}.py" for name in ("own_checkpoints", "checkpointed_scripts", "compiled_checkpoints")),
    *(f"{_APPLY}test_{name}.py" for name in ("compiled_own_checkpoints", "two_passes")),
    f"{_APPLY}test_streams.py::test_a_checkpoint_is_bit_equal_to_none_with_gradients_in_8_bit",
    f"{_APPLY}test_compile.py::test_checkpoints_are_as_in_eager_mode_also_around_what_the_compiler_cannot_read",
)
"""Tests that hold gradients of checkpointed and other repeated forwards against those without, bit for bit."""
RESUMED = (
    "tests/compatibility/test_files.py",
    "tests/compatibility/test_sharding.py",
    "tests/distributed/test_example.py::test_a_resumed_run_ends_like_an_uninterrupted_one",
    "tests/trainers/test_settings.py::TestTrainer::test_a_resumed_run_has_the_rounding_step_of_its_checkpoint",
)
"""Tests that hold a job that was stored and goes on against one that was not, bit for bit."""


def path_rows(tree: Path) -> Iterator[Row]:
    """S7, of the second forward of ``nn.Linear`` in int8 with the backend ``aten``."""
    stack = json.loads(run_in(tree, "call_path.py"))
    files = list(dict.fromkeys(file for file, _ in stack))
    what = "from the forward of an int8 linear to the kernel of its product, which is counted"
    yield row("S7", f"files {what}", len(files), "files", ", ".join(files), "≤ 5")
    named = " → ".join(f"{file.rpartition('/')[2]}:{function.rpartition('.')[2]}" for file, function in stack)
    yield row("S7b", f"Python frames {what}", len(stack), "frames", named, "≤ 5")


def host_time_rows(tree: Path, rounds: int = ROUNDS) -> Iterator[Row]:
    """S8, as calls on GPUs run by default, and S8-python, as they run without a C++ compiler."""
    with checkout(tree, BEFORE_RIDING) as old:
        yield _host_time_row("S8", "calls replayed, as on a GPU", tree, old, rounds, replays=True)
        yield _host_time_row("S8-python", "all calls in Python", tree, old, rounds, replays=False)


def _host_time_row(id: str, setting: str, tree: Path, old: Path, rounds: int, *, replays: bool) -> Row:
    found = [times_in_turns(tree, old, replays=replays) for _ in range(rounds)]
    ratios = [one.ratio() for one in found]
    layers = []
    for kind in KINDS:
        now, before = (statistics.median(times) for times in zip(*(one.time_us(kind) for one in found), strict=True))
        layers.append(f"{kind} {now:.0f} µs a layer, before {before:.0f} µs")
    what = f"host time of int8 layers, forward and backward, kernels that do nothing, {setting}, over {BEFORE_RIDING} in turns"
    spread = "; ".join([f"{min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} rounds", *layers])
    return row(id, what, round(statistics.median(ratios), 3), "", spread, "≤ 0.75" if replays else "reported")


def test_command_rows(tree: Path, log: Path | None) -> Iterator[Row]:
    """S9: all of CI in a fresh clone, or what it printed there.

    Raises:
        ValueError: the log is not that of a run that passed.
    """
    if log is None:
        with tempfile.TemporaryDirectory() as folder:
            clone = Path(folder, "clone")
            subprocess.run(["git", "clone", "--quiet", str(tree), str(clone)], check=True)
            text = subprocess.run([str(clone / ".ci" / "run")], cwd=clone, stdout=subprocess.PIPE, text=True, check=False).stdout
    else:
        text = log.read_text(errors="replace")
    run = read_tox_log(text)
    spread = "; ".join(f"{name} {seconds / 60:.1f}" for name, seconds in sorted(run.commands_s.items(), key=lambda each: -each[1]))
    quiet = "on two quiet cores with AVX-512"
    what = "the test command (tox run), environments installed: the commands of all of them"
    yield row("S9", what, round(sum(run.commands_s.values()) / 60, 1), "min", spread, f"≤ 14, {quiet}")
    what = "the same in a fresh clone, with the installation of its environments"
    yield row("S9b", what, round(run.whole_s / 60, 1), "min", "", f"≤ 18, {quiet}")


def repeated_rows(tree: Path) -> Iterator[Row]:
    """S10."""
    what = "gradients with forwards that run again, bit-equal to those without: own and PyTorch's checkpoints, GradCache, compiled "
    what += "and around compiled, optimizers that step in the backward pass: tests that pass"
    yield _tests_row("S10", what, tree, CHECKPOINTS)
    what = "jobs that were stored and go on, bit-equal to those that were not interrupted: tests that pass"
    yield _tests_row("S10b", what, tree, RESUMED)


def _tests_row(id: str, what: str, tree: Path, tests: Sequence[str]) -> Row:
    """Runs tests, those of the nightly environment too; each folder's in a process, because folders have modules of one name."""
    cases: list[ET.Element] = []
    for _, own in itertools.groupby(tests, key=lambda test: test.partition("::")[0].rpartition("/")[0]):
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.xml")
            command = [sys.executable, "-m", "pytest", "-q", "--timeout", "900", f"--junit-xml={report}", *own]
            subprocess.run(command, cwd=tree, check=False, stdout=sys.stderr)
            cases += ET.parse(report).getroot().iter("testcase")
    wrong = [f"{case.get('name')}" for case in cases if any(part.tag in ("failure", "error") for part in case)]
    skipped = sum(any(part.tag == "skipped" for part in case) for case in cases)
    run = len(cases) - skipped
    parts = [f"{skipped} skipped on this machine"] * bool(skipped) + [f"not: {', '.join(shortened(wrong))}"] * bool(wrong)
    return row(id, what, run - len(wrong), f"of {run}", "; ".join(parts), "all")


def micro_batch_rows(tree: Path) -> Iterator[Row]:
    """S11."""
    found = json.loads(run_in(tree, "micro_batches.py", "--json"))
    ratios = {name: (value, error) for name, value, error in found["ratios"]}
    worst = max(ratios, key=lambda name: ratios[name][0])
    what = "error of the gradient of a step of 8 micro-batches, random numbers that follow from data over independent ones: worst"
    spread = "; ".join(f"{name} {value:.3f} ± {error:.3f}" for name, (value, error) in ratios.items())
    yield row("S11", f"{what} of {len(ratios)} kinds of data", round(ratios[worst][0], 4), "ratio", spread, "≤ 1.03")
    what = (
        f"mean error over {found['steps']} steps on the same data, along the exact result and gradients, in standard errors: worst"
    )
    worst = max(found["biases"], key=lambda bias: abs(bias["z"]))
    spread = "; ".join(
        f"{bias['name']} {bias['z']:+.2f}, of single numbers {bias['beyond']:.2%} beyond 3" for bias in found["biases"]
    )
    yield row("S11b", f"{what} of {len(found['biases'])}", round(abs(worst["z"]), 2), "standard errors", spread, "≤ 3")


def compiled_rows(tree: Path) -> Iterator[Row]:
    """S12."""
    found = json.loads(run_in(tree, "compiled_graphs.py"))
    yield row("S12", "graphs that torch.compile makes of 12 equal blocks with int8 operators", found["graphs"], "", "", "1")
    yield row("S12b", "recompilations over 10 training steps of these blocks", found["recompilations"], "", "", "0")
    for id, how in (("S12c", "eager"), ("S12d", "compiled")):
        what = f"quantizations of the activation that Q, K and V read, {how}"
        yield row(id, what, found[how], "", f"{found[f'{how}, all']} in all, weights among them", "1")


def silence_rows(tree: Path) -> Iterator[Row]:
    """S13: row C4, with T1 (in-place additions among the jobs) and T2, counted together."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(tree / "bench" / "cluster" / "scripts.py"), "--out", folder]
        subprocess.run(command, cwd=tree, check=False, stdout=subprocess.DEVNULL)
        found = next(row for row in json.loads(Path(folder, "cluster.json").read_text())["rows"] if row["id"] == "C4")
    what = "zoo, scripts, in-place additions: other numbers than an independent reference, without a word"
    yield row("S13", what, found["value"], "", found["spread"], "0")


def plan_rows(tree: Path) -> Iterator[Row]:
    """S15, where the limit is the same; S15b and S15c on what stands beside plans: words that say why a plan is as it is, and how
    far it is proven; S15d on limits: of two rungs of a precision the faster is uniform (docs/decisions/uniform-precision.md)."""
    with checkout(tree, BEFORE_DERIVED) as old, ThreadPoolExecutor() as pool:
        printed = pool.map(lambda each: run_in(each, "plans.py"), (tree, old))
    now, before = ([json.loads(line) for line in text.splitlines()] for text in printed)
    all_pairs = list(zip(now, before, strict=True))
    pairs = [(one, other) for one, other in all_pairs if _limit_of(one) == _limit_of(other)]
    differ = [one["name"] for one, other in pairs if one["plan"] != other["plan"]]
    refused = sum(isinstance(one["plan"], str) for one in now)
    what = f"exact plans whose bytes, but for versions, words and bounds, are others than at {BEFORE_DERIVED}, formats of outputs "
    what += "being the same"
    spread = f"of {len(now)} instances, {refused} of which have no plan, said in the same sentence"
    spread += f"; differ: {', '.join(shortened(differ))}" * bool(differ)
    alike = [one["name"] for one, other in pairs if one["name"] in differ and _omega_of(one) == _omega_of(other)]
    spread += f", of the same Σ Ω to the last bit: {', '.join(shortened(alike))}" * bool(alike)
    yield row("S15", what, len(differ), "plans", spread, "0")
    equal = [(one, other) for one, other in pairs if one["plan"] == other["plan"]]
    reworded = sum(one["words"] != other["words"] for one, other in equal)
    yield row(
        "S15b",
        f"equal plans of S15 whose words (notes, reasons, verdict) are others than at {BEFORE_DERIVED}",
        reworded,
        "plans",
        "",
    )
    looser = sum(one["bound"] < other["bound"] * (1 - 1e-9) for one, other in equal if one["bound"] and other["bound"])
    yield row("S15c", f"equal plans of S15 that are proven less far than at {BEFORE_DERIVED}", looser, "plans", "")
    others = [one["name"] for one, other in all_pairs if _limit_of(one) != _limit_of(other)]
    what = "instances of S15 left out, whose time limit is another: of two rungs of one precision the faster is uniform by now"
    yield row("S15d", what, len(others), "plans", ", ".join(shortened(others)))


def _limit_of(planned: Mapping[str, Any]) -> str:
    plan = planned["plan"]
    return "" if isinstance(plan, str) else str(plan["time_limit_ns"])


def _omega_of(planned: Mapping[str, Any]) -> str:
    plan = planned["plan"]
    return "" if isinstance(plan, str) else str(plan["objective"])
