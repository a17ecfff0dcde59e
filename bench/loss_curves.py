"""Loss curves of ResNet-18, ResNet-50 and BERT-base under plans: rows L of ``docs/results/accuracy.json``, on a CUDA device.

    python bench/loss_curves.py --save FOLDER [--jobs 8] [--seeds 3] [--minutes 6.5]

Every run trains one model from one seed under one method; all methods of a seed see the same weights, batches and dropout masks.
Several processes share the device: eager steps of these sizes wait for the host more than for the device.  TF32 is off everywhere.

Finished runs and what the plans' indicators observed are kept in the folder, so that the same command goes on where it was
interrupted, and computes the statistics anew from all that is there; ``--page-only`` does nothing else.  All runs of a seed are
started before those of the next one.  After a change of the indicators remove the ``.qsync`` files from it.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy and torch are imported

import argparse
import functools
import itertools
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from indicator.accuracy.plans import Planner
from indicator.accuracy.store import Run, Store, plan_digest
from indicator.loss_curves.finished import Finished
from indicator.loss_curves.methods import DEFAULT, METHODS, Which, all_runs
from indicator.loss_curves.observing import STEPS, WARMUP, Found, observed
from indicator.loss_curves.page import write_page
from indicator.loss_curves.rows import CPU, rows
from indicator.loss_curves.subjects import DEFAULT as MODELS
from indicator.loss_curves.subjects import SUBJECTS
from indicator.loss_curves.training import How, train
from qsync_core.ir.op_id import OpId
from qsync_core.ir.variant import Variant
from results import names_in, write_rows

UPDATES = 400
BACKEND = "triton+aten"
"""Of the kernels on a GPU: where nothing was tuned, the default would be PyTorch's own."""
CURVES = "curves.json"
"""All curves, in the folder of runs: what the page is made from."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what is missing, print, and write."""
    options = _options(arguments)
    if options.page_only:
        write_page(Finished.load(options.save / CURVES))
        return
    finished = _finished(options)
    finished.save(options.save / CURVES)
    made = list(rows(finished))
    for row in made:
        print(f"{row['id']}: {row['value']:.5f} ({row['spread']})", flush=True)
    if not options.no_write and made:
        where = {"directory": options.directory} if options.directory else {}
        write_rows("accuracy", made, _command(options), **where)
        if options.directory is None:
            write_page(finished)


def _finished(options: argparse.Namespace) -> Finished:
    """Observe, plan, and train what the folder does not hold."""
    begin = time.monotonic()
    models, methods = names_in(options.models, SUBJECTS, "models"), names_in(options.methods, METHODS, "methods")
    wanted = all_runs(models, methods, range(options.seeds))
    backend = options.backend or (BACKEND if options.device.startswith("cuda") else None)
    how, device = How(options.updates, options.device, backend), _device_name(options.device)
    store = Store(options.save)
    with _pool(options.jobs) as pool:
        look = functools.partial(
            observed, folder=options.save, device=how.device, warmup=options.observe_after, steps=options.observe, say=say
        )
        found: Mapping[str, Found] = dict(zip(models, pool.map(look, models), strict=True))
        planners = {model: Planner(*found[model], wider=SUBJECTS[model].wider) for model in models}
        plans = {which: planners[which.model].plan(which.task) for which in wanted}
        on = f"{device} {how.backend or ''} "
        keys = {which: on + Store.key(which.task, how.updates, plan_digest(plan.variants)) for which, plan in plans.items()}
        missing = list({keys[which]: which for which in reversed(wanted) if store.get(keys[which]) is None}.values())[::-1]
        say(f"{len(wanted)} runs, {len(set(keys.values()))} of them different, {len(missing)} to do; {_passed(begin)}")
        deadline = begin + 60 * options.minutes if options.minutes else math.inf
        runs = ((which, plans[which].variants) for which in missing if time.monotonic() < deadline)
        for done, (which, run) in enumerate(_trained(pool, options.jobs, runs, how), 1):
            store.add(keys[which], run)
            last = f"loss {run['losses'][-1]:.4f}" if len(run["losses"]) == how.updates else f"diverged at {len(run['losses'])}"
            say(f"{done}/{len(missing)} {which}: {last}, {run['seconds']:.0f} s; {_passed(begin)}")
    curves = {which: run["losses"] for which in wanted if (run := store.get(keys[which])) is not None}
    if len(curves) < len(wanted):
        say(f"{len(wanted) - len(curves)} runs are still to do: the same command goes on")
    return Finished(curves, {which: plan.text for which, plan in plans.items()}, how.updates, device)


def _trained(
    pool: Executor, jobs: int, runs: Iterator[tuple[Which, Mapping[OpId, Variant]]], how: How
) -> Iterator[tuple[Which, Run]]:
    """Train, never more runs at a time than there are processes, so that none is begun before it is asked for."""
    running: dict[Future[Run], Which] = {}
    while True:
        for which, plan in itertools.islice(runs, jobs - len(running)):
            running[pool.submit(train, which, plan, how)] = which
        if not running:
            return
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            yield running.pop(future), future.result()


def _pool(jobs: int) -> Executor:
    return _Here() if jobs == 1 else ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))


class _Here(Executor):
    """One job at a time, in this process."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Do it at once."""
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def say(text: str) -> None:
    """A line of progress, which is no result."""
    print(text, file=sys.stderr, flush=True)


def _passed(begin: float) -> str:
    return f"{(time.monotonic() - begin) / 60:.1f} min in all"


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else CPU


def _command(options: argparse.Namespace) -> str:
    """The command line of these rows, with the options that decide them."""
    deciding = (("updates", UPDATES), ("backend", None), ("observe_after", WARMUP), ("observe", STEPS))
    others = [f" --{name.replace('_', '-')} {value}" for name, usual in deciding if (value := getattr(options, name)) != usual]
    return f"python bench/loss_curves.py --save FOLDER --seeds {options.seeds}{''.join(others)}"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, required=True, help="folder of finished runs to keep and to use")
    parser.add_argument("--seeds", type=int, default=3, help="pairs")
    parser.add_argument("--updates", type=int, default=UPDATES, help="of a training run")
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(SUBJECTS)}")
    parser.add_argument("--methods", default=",".join(DEFAULT), help=f"of {', '.join(METHODS)}")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--minutes", type=float, default=0.0, help="begin no run after so many (0: no limit)")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--backend", default=None, help=f"of the kernels ({BACKEND} on a GPU)")
    parser.add_argument("--observe-after", type=int, default=WARMUP, help="updates before what plans rest on is observed")
    parser.add_argument("--observe", type=int, default=STEPS, help="updates at which it is")
    parser.add_argument("--no-write", action="store_true", help="only print")
    parser.add_argument("--page-only", action="store_true", help="make the page anew from the folder, on any machine")
    parser.add_argument("--directory", type=Path, default=None, help="folder of the results file (docs/results)")
    options = parser.parse_args(arguments)
    if min(options.seeds, options.updates, options.jobs) < 1:
        parser.error("--seeds, --updates and --jobs are at least 1")
    return options


if __name__ == "__main__":
    main()
