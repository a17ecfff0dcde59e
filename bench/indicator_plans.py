"""Rows I-plans and I-equal-time of ``docs/results/indicator.json``: whole plans, predicted and measured, on small models.

    python bench/indicator_plans.py --save FOLDER

``I-plans``: how far plans drawn at random really move the gradients, beside Σ Ω of their operators and beside Ω of the whole plan.
``I-equal-time``: plans by every indicator at equal predicted time, compared by their true gradient error.  The folder is that of
``indicator_rows.py``: what is kept there is not measured again.  Everything runs in this process, on one core.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy and torch are imported

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from indicator.additivity import Row, mean_error, plan_rows
from indicator.equal_time import SETTINGS, Compared, equal_time_rows, planned
from indicator.measuring import Effort, Kept, Measured, Task, measure
from indicator.models import SUBJECTS
from indicator.plain_cnn import NAME as HELD_OUT
from indicator.plain_cnn import register
from indicator.plans import Plan, PlanEffort, drawn_plans, plan_errors
from results import names_in, write_rows


def main() -> None:
    """Measure what is missing, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join([*SUBJECTS, HELD_OUT]), help="which; rows I-equal-time are of the first three")
    parser.add_argument("--seeds", type=int, default=3, help="of each model")
    parser.add_argument("--plans", type=int, default=26, help="how many are drawn")
    parser.add_argument("--steps", type=int, default=PlanEffort().steps, help="updates that plans are measured at")
    parser.add_argument("--draws", type=int, default=PlanEffort().draws, help="of every plan at every update")
    parser.add_argument("--save", type=Path, default=None, help="folder of measurements to keep and to use")
    parser.add_argument("--no-write", action="store_true", help="only print")
    parser.add_argument("--directory", type=Path, default=None, help="folder of the results file (docs/results)")
    options = parser.parse_args()
    register()
    names = names_in(options.models, SUBJECTS, "model")
    if min(options.seeds, options.steps, options.draws) < 1 or options.plans < 3:
        raise SystemExit("--seeds, --steps and --draws are at least 1, --plans at least 3")
    if options.steps > Effort().truth_steps:
        raise SystemExit(f"--steps is at most {Effort().truth_steps}, at which the truth of single operators is measured")
    effort = PlanEffort(options.steps, options.draws)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        kept = Kept(options.save or Path(scratch), Effort())
        for row in _rows(names, options.seeds, options.plans, kept, effort):
            print(f"{row['id']}: {row['value']} {row['unit']} ({row['spread']})", flush=True)
            rows.append(row)
    if not options.no_write:
        where = {"directory": options.directory} if options.directory else {}
        write_rows("indicator", rows, _command(options), **where)


def _rows(names: list[str], seeds: int, count: int, kept: Kept, effort: PlanEffort) -> Iterator[Row]:
    for name in names:
        for seed in range(seeds):
            measured = _measured(Task(name, seed), kept)
            plans = drawn_plans(measured.dag, count, seed=0)
            errors = plan_errors(measured.task, measured.dag, plans, kept, effort)
            yield from plan_rows(name, measured, plans, errors, seed)
    for name in [name for name in names if name != HELD_OUT]:
        by_seed = [_at_equal_time(_measured(Task(name, seed), kept), kept, effort) for seed in range(seeds)]
        for setting in SETTINGS:
            yield from equal_time_rows(name, setting, [compared[setting.suffix] for compared in by_seed])


def _at_equal_time(measured: Measured, kept: Kept, effort: PlanEffort) -> dict[str, Compared]:
    """By the suffix of the setting.  Each different plan is measured once, whoever made it."""
    by_setting = [planned(measured, setting) for setting in SETTINGS]
    different: dict[frozenset[object], Plan] = {}
    for at in by_setting:
        for plan in at.plans.values():
            different.setdefault(frozenset(plan.items()), plan)
    errors = plan_errors(measured.task, measured.dag, list(different.values()), kept, effort)
    error_of = dict(zip(different, [mean_error(measured, by_update) for by_update in errors], strict=True))
    return {
        setting.suffix: Compared(at, {who: error_of[frozenset(plan.items())] for who, plan in at.plans.items()})
        for setting, at in zip(SETTINGS, by_setting, strict=True)
    }


def _measured(task: Task, kept: Kept) -> Measured:
    if not kept.is_complete(task):
        measure(task, kept, lambda text: print(text, file=sys.stderr, flush=True))
    return kept.read(task)


def _command(options: argparse.Namespace) -> str:
    """With the options that decide the rows."""
    default = {"seeds": 3, "plans": 26, "steps": PlanEffort().steps, "draws": PlanEffort().draws}
    given = [f"--{name} {getattr(options, name)}" for name, value in default.items() if getattr(options, name) != value]
    return " ".join(["python bench/indicator_plans.py", *given])


if __name__ == "__main__":
    main()
