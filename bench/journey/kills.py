"""U3 and U4: ranks and machines are killed at random moments, and the job goes on.

The example ``elastic_digits.py`` under two agents of torchrun, over gloo.  First ranks are killed (the weak group's, the strong
group's, both), which their agents start again; then whole machines, whose place is empty for a while.  Every step that was run,
those that were lost to a kill included, must have the loss that it has in a run which nobody disturbs, and the last checkpoint its
parameters and momenta, to the last bit.  Where a machine was away, that run has the same groups in the same steps.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "distributed"))

from elastic_job import GROUPS, ElasticJob, differences, make_run_folder

RANK_KILLS, MACHINE_KILLS = 36, 4
SAVE_EVERY = 5
ENDLESS = 1_000_000
LONGEST_S = 1.0
"""A kill comes at most so long after all ranks train."""


def rows() -> list[dict[str, Any]]:
    """The two rows."""
    random.seed(17)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = make_run_folder(folder / "run")
        ranks, plan_times, rank_faults = _kill_ranks(run, folder)
        machines, more_times, machine_faults = _kill_machines(run, folder)
    plan_times += more_times
    faults = rank_faults + machine_faults
    resumed = ranks + machines if not faults else 0
    how = "every step's loss, parameters and momenta bit for bit" if not faults else "; ".join(faults)
    median, worst = statistics.median(plan_times), max(plan_times)
    return [
        {
            "id": "U3",
            "what": f"kills at random moments that the job resumed from, of {RANK_KILLS} of ranks (weak, strong, both) and "
            f"{MACHINE_KILLS} of machines",
            "value": resumed,
            "unit": "kills",
            "spread": how,
            "target": f"{RANK_KILLS + MACHINE_KILLS} of {RANK_KILLS + MACHINE_KILLS}",
        },
        {
            "id": "U4",
            "what": f"plan of the ranks that are there found, loaded and applied, worst of {len(plan_times)} starts after a kill",
            "value": round(worst, 3),
            "unit": "s",
            "spread": f"median {median:.3f} s",
            "target": "at most 1 s",
        },
    ]


def _kill_ranks(run: Any, folder: Path) -> tuple[int, list[float], list[str]]:
    """Kills resumed from, times to the plan, and what was not as in the undisturbed run."""
    victims = [(("infer",), ("train",), GROUPS)[kill % 3] for kill in range(RANK_KILLS)]
    random.shuffle(victims)
    resumed = 0
    with ElasticJob(run, folder / "ranks", ENDLESS, SAVE_EVERY) as job:
        _train(job, 1)
        for kill, groups in enumerate(victims):
            time.sleep(random.uniform(0, LONGEST_S))
            pids = [job.worker(group) for group in groups]
            for pid in pids:
                assert pid is not None, job.output(groups[0])
                os.kill(pid, signal.SIGKILL)
            _train(job, kill + 2)
            resumed += 1
            print(f"{kill + 1} of {RANK_KILLS}: {' and '.join(groups)}, from step {job.starts('train')[-1].step}", flush=True)
        time.sleep(LONGEST_S)
    last = job.newest()
    with ElasticJob(run, folder / "undisturbed", last["step"], SAVE_EVERY) as reference:
        faults = differences(last, reference.finish())
        for group in GROUPS:
            expected = reference.last_losses(group)
            lines = [line for line in job.losses(group) if line["step"] <= last["step"]]
            faults += [f"loss of {group} in step {line['step']}" for line in lines if line["loss"] != expected[line["step"]]][:3]
    times = [start.plan_s for group in GROUPS for start in job.starts(group)[1:]]
    return resumed, times, faults


def _kill_machines(run: Any, folder: Path) -> tuple[int, list[float], list[str]]:
    """As :func:`_kill_ranks`, of machines, each away for a while."""
    resumed = 0
    with ElasticJob(run, folder / "machines", ENDLESS, SAVE_EVERY) as job:
        _train(job, 1)
        for kill in range(MACHINE_KILLS):
            away, stays = GROUPS[::-1] if kill % 2 == 0 else GROUPS
            time.sleep(random.uniform(0, LONGEST_S))
            before = len(job.losses(stays))
            job.kill_machine(away)
            job.wait(lambda stays=stays, before=before: 1 in _ranks_since(job, stays, before), "steps of the survivor")
            time.sleep(random.uniform(0, LONGEST_S))
            before = len(job.losses(stays))
            job.start(away)
            job.wait(lambda stays=stays, before=before: 2 in _ranks_since(job, stays, before), "steps of both")
            resumed += 1
            print(f"{kill + 1} of {MACHINE_KILLS}: the machine of {away} went and came back", flush=True)
        time.sleep(LONGEST_S)
    last = job.newest()
    faults, segments = [], list(job.segments(last["step"]))
    for groups, _, end in segments:
        with ElasticJob(run, folder / "segments", end, SAVE_EVERY, groups=groups) as reference:
            found = reference.finish()
    faults = differences(last, found)
    for group in GROUPS:
        expected = reference.last_losses(group)
        here = {step for groups, begin, end in segments if group in groups for step in range(begin + 1, end + 1)}
        mine = job.last_losses(group)
        faults += [f"loss of {group} in step {step}" for step in sorted(here) if mine[step] != expected[step]][:3]
    print(f"segments: {segments}")
    times = [start.plan_s for group in GROUPS for start in job.starts(group)[1:]]
    return resumed, times, faults


def _train(job: ElasticJob, starts: int) -> None:
    """Wait until both ranks have started so often, and train."""

    def trains() -> bool:
        return all(len(job.starts(group)) >= starts and job.worker(group) for group in GROUPS)

    job.wait(trains, f"start {starts} of both ranks")


def _ranks_since(job: ElasticJob, group: str, line: int) -> set[int]:
    return {entry["ranks"] for entry in job.losses(group)[line:]}
