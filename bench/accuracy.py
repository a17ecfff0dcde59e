"""What plans do to what is learned: paired training runs, rows C of ``docs/results/accuracy.json``.

    python bench/accuracy.py --save FOLDER [--jobs 16] [--seeds 10] [--minutes 6]

Every run trains one model from one seed under one method and setting, on one core.  Finished runs and what the plans'
indicators observed are kept in the folder, so that the same command goes on where it was interrupted, and computes the
statistics anew from all that is there.  All runs of a seed are started before those of the next one.  After a change of the
indicators remove the ``.qsync`` files from it.

A run takes 6 to 20 seconds of one core of an EPYC server, 12 on average, and ten pairs are about 590 runs: 7 to 8 minutes on 16
such cores.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy and torch are imported

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

from indicator.accuracy.methods import MODELS, SETTINGS, Task, tasks
from indicator.accuracy.observing import observed
from indicator.accuracy.page import write_page
from indicator.accuracy.plans import Planner
from indicator.accuracy.rows import Finished, rows
from indicator.accuracy.store import Run, Store, plan_digest
from indicator.accuracy.training import UPDATES, train
from results import names_in, write_rows


def main() -> None:
    """Train what is missing, print, and write."""
    options = _options()
    begin = time.monotonic()
    models, settings = names_in(options.models, MODELS, "models"), names_in(options.settings, SETTINGS, "settings")
    wanted = tasks(models, settings, range(options.seeds))
    with _pool(options.jobs) as pool:
        found = dict(zip(models, pool.map(observed, models, [options.save] * len(models), [say] * len(models)), strict=True))
        planners = {model: Planner(*found[model]) for model in models}
        plans = {task: planners[task.model].plan(task) for task in wanted}
        store = Store(options.save)
        keys = {task: Store.key(task, options.updates, plan_digest(plan.variants)) for task, plan in plans.items()}
        missing = list({keys[task]: task for task in reversed(wanted) if store.get(keys[task]) is None}.values())[::-1]
        say(f"{len(wanted)} runs, {len(set(keys.values()))} of them different, {len(missing)} to do")
        deadline = begin + 60 * options.minutes if options.minutes else None
        seconds: list[float] = []

        def finish(task: Task, run: Run) -> None:
            store.add(keys[task], run)
            seconds.append(run["seconds"])
            say(f"{len(seconds)}/{len(missing)} {task}: loss {run['loss']}, {run['seconds']:.0f} s")

        _run_all(pool, options, missing, lambda task: plans[task].variants, finish, deadline)
    finished = Finished({task: run for task in wanted if (run := store.get(keys[task])) is not None}, plans)
    if seconds:
        say(f"{sum(seconds) / len(seconds):.1f} s of processor a run; {(time.monotonic() - begin) / 60:.1f} min in all")
    if len(finished.runs) < len(wanted):
        say(f"{len(wanted) - len(finished.runs)} runs are still to do: the same command goes on")
    made = list(rows(finished))
    for row in made:
        print(f"{row['id']}: {row['value']:+.5f} ({row['spread']})", flush=True)
    if not options.no_write and made:
        where = {"directory": options.directory} if options.directory else {}
        write_rows("accuracy", made, _command(options), **where)
        if options.directory is None:
            write_page(finished, options.updates)


def say(text: str) -> None:
    """A line of progress, which is no result."""
    print(text, file=sys.stderr, flush=True)


def _run_all(
    pool: ProcessPoolExecutor,
    options: argparse.Namespace,
    missing: list[Task],
    plan: Callable[[Task], object],
    finish: Callable[[Task, Run], None],
    deadline: float | None,
) -> None:
    """Train, never more runs at a time than there are processes; none is begun after the deadline."""
    waiting, running = list(reversed(missing)), dict[Future[Run], Task]()
    while waiting or running:
        while waiting and len(running) < options.jobs and (deadline is None or time.monotonic() < deadline):
            task = waiting.pop()
            running[pool.submit(train, task, plan(task), options.updates)] = task
        if not running:
            return
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            finish(running.pop(future), future.result())


def _pool(jobs: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))


def _command(options: argparse.Namespace) -> str:
    """The command line of these rows, with the options that decide them."""
    updates = "" if options.updates == UPDATES else f" --updates {options.updates}"
    return f"python bench/accuracy.py --seeds {options.seeds}{updates}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, required=True, help="folder of finished runs to keep and to use")
    parser.add_argument("--seeds", type=int, default=10, help="pairs")
    parser.add_argument("--updates", type=int, default=UPDATES, help="of a training run")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--minutes", type=float, default=0.0, help="begin no run after so many (0: no limit)")
    parser.add_argument("--no-write", action="store_true", help="only print")
    parser.add_argument("--directory", type=Path, default=None, help="folder of the results file (docs/results)")
    options = parser.parse_args()
    if min(options.seeds, options.updates, options.jobs) < 1:
        parser.error("--seeds, --updates and --jobs are at least 1")
    return options


if __name__ == "__main__":
    main()
