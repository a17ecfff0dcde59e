"""Rows I1 to I5 of ``docs/results/indicator.json``: indicators against the measured truth, on three small models and three seeds.

Those that have a target, and bfloat16's, are also rows T6 of ``docs/results/robustness.json``.

    python bench/indicator_rows.py [--jobs 9] [--save FOLDER]

Each model and seed is measured in a process of its own, on one core.  With ``--save`` the measurements are kept, and what is kept
already is not measured again, so that rows can be computed anew in seconds; ``--again`` observes the indicators anew beside the
kept truth, after one of them was changed.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy and torch are imported

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs

from indicator.agreement import Judged
from indicator.measuring import Effort, Kept, Task, measure
from indicator.models import SUBJECTS
from indicator.rows import Row, beside_int8, ladder_rows, variation_rows
from results import names_in, write_rows

VARIATIONS_SEED = 0


def main() -> None:
    """Measure what is missing, print, and write."""
    options = _options()
    names = names_in(options.models, SUBJECTS, "model")
    if options.draws < 2 or options.draws % 2 or min(options.seeds, options.steps, options.truth_steps, options.jobs) < 1:
        raise SystemExit("--draws is even and at least 2; --seeds, --steps, --truth-steps and --jobs are at least 1")
    effort = Effort(options.warmup, options.steps, options.truth_steps, options.draws)
    if options.task:
        model, seed, variants = options.task.split(",")
        measure(Task(model, int(seed), variants), Kept(options.save, effort), say, again=options.again)
        return
    with tempfile.TemporaryDirectory() as scratch:
        kept = Kept(options.save or Path(scratch), effort)
        tasks = [Task(name, seed) for name in names for seed in range(options.seeds)]
        if not options.no_variations:
            tasks += [Task(name, VARIATIONS_SEED, "variations") for name in names]
        with ThreadPoolExecutor(options.jobs) as pool:
            failed = [
                task for task, fine in zip(tasks, pool.map(lambda task: _run(task, kept, options), tasks), strict=True) if not fine
            ]
        if failed:
            raise SystemExit(f"not measured: {', '.join(map(str, failed))}")
        rows = list(_rows([Judged.of(kept.read(task)) for task in tasks]))
    wanted = [name.strip() for name in options.only.split(",") if name.strip()]
    rows = [row for row in rows if not wanted or any(row["id"] == name or row["id"].startswith(f"{name}-") for name in wanted)]
    for row in rows:
        print(f"{row['id']}: {row['value']} {row['unit']} ({row['spread']}); target {row['target']}", flush=True)
    if not options.no_write:
        where = {"directory": options.directory} if options.directory else {}
        for topic, of_topic in (("indicator", rows), ("robustness", beside_int8(rows))):
            if of_topic:
                write_rows(topic, of_topic, _command(options, effort), **where)


def say(text: str) -> None:
    """A line of progress, which is no result."""
    print(text, file=sys.stderr, flush=True)


def _rows(judged: list[Judged]) -> Iterator[Row]:
    by_set: dict[str, dict[str, list[Judged]]] = {"ladder": {}, "variations": {}}
    for one in judged:
        task = one.measured.task
        by_set[task.variants].setdefault(task.model, []).append(one)
    yield from ladder_rows(by_set["ladder"])
    yield from variation_rows(by_set["variations"])


def _run(task: Task, kept: Kept, options: argparse.Namespace) -> bool:
    """In a process of its own; whether it went well."""
    if kept.is_complete(task) and not options.again:
        return True
    arguments = ["--task", f"{task.model},{task.seed},{task.variants}", "--save", str(kept.folder)]
    for name, value in attrs.asdict(kept.effort).items():
        arguments += [f"--{name.replace('_', '-')}", str(value)]
    return subprocess.run([sys.executable, __file__, *arguments, *["--again"] * options.again], check=False).returncode == 0


def _command(options: argparse.Namespace, effort: Effort) -> str:
    """The command line of these rows, with the options that decide them."""
    parts = ["python bench/indicator_rows.py"]
    if options.seeds != 3:
        parts.append(f"--seeds {options.seeds}")
    default = Effort()
    for name, value in attrs.asdict(effort).items():
        if value != getattr(default, name):
            parts.append(f"--{name.replace('_', '-')} {value}")
    return " ".join(parts)


def _options() -> argparse.Namespace:
    default = Effort()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows to print and write, comma-separated, each with its variants: I1a,I3")
    parser.add_argument("--models", default=",".join(SUBJECTS), help="which; rows I3 to I5 need all of them")
    parser.add_argument("--seeds", type=int, default=3, help="of each model")
    parser.add_argument("--warmup", type=int, default=default.warmup, help="updates before the first that is observed")
    parser.add_argument("--steps", type=int, default=default.steps, help="updates that indicators observe")
    parser.add_argument("--truth-steps", type=int, default=default.truth_steps, help="updates that the truth is measured at")
    parser.add_argument("--draws", type=int, default=default.draws, help="of the truth, for each operator, variant and update")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--save", type=Path, default=None, help="folder of measurements to keep and to use")
    parser.add_argument("--again", action="store_true", help="observe the indicators again, beside the kept truth")
    parser.add_argument("--no-variations", action="store_true", help="without int8 per tensor, to nearest and to floor")
    parser.add_argument("--no-write", action="store_true", help="only print")
    parser.add_argument("--directory", type=Path, default=None, help="folder of the results file (docs/results)")
    parser.add_argument("--task", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
