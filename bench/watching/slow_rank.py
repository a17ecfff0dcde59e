"""Rows W3 and W3b: one rank of two is slowed by 30% of a step, in each phase in turn; is it named, and what does the watch cost?

The same two processes run all trials.  In each a new model trains some steps as it is, then the rank sleeps in one phase.  What is
counted is from there on: how many steps pass until a sentence is said, and whether it names the rank and the phase.  What is said
before is wrong, and is counted beside.

The overhead is of the same steps with the watch and without, in turn.  A process's CPU time counts, because it does not hold the
time in which other programs have the cores; the time by the clock stands beside it.  That scatters by more than the bound where
other programs share caches and cores, so what the watch's calls take by themselves is a row beside it.

Where other programs keep the machine busy, ``QSYNC_BENCH_PRIORITY=1`` runs both with real-time priority: the watch would
name, rightly, the rank that the others' programs slow down.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from journey.overhead import JOBS

WITHIN = 50
ROUNDS = 150


def rows() -> Iterator[dict[str, Any]]:
    """Run the trials."""
    load = os.getloadavg()[0]
    trials = _run("slow_rank_job.py")
    named = [trial for trial in trials if trial["right"] and trial["steps"] <= WITHIN]
    steps = [trial["steps"] for trial in named]
    missed = [f"{trial['phase']} of rank {trial['rank']}: {trial['said']}" for trial in trials if trial not in named]
    yield {
        "id": "W3",
        "what": "a rank of two (gloo, CPU) that is slowed by 30% of a step: named with its phase within 50 steps; input, forward, "
        "backward, communication (before a bucket is sent, and after it has come) and optimizer, on either rank",
        "value": f"{len(named)} of {len(trials)}",
        "unit": "trials",
        "spread": (f"{min(steps)} to {max(steps)} steps; " if steps else "")
        + f"the excess that is told is {_shares(named)} of what was injected; missed: {'; '.join(missed) or 'none'}",
        "target": "12 of 12",
    }
    yield {
        "id": "W3-false",
        "what": "sentences said while no rank was slowed, in the 45 steps before each of these trials",
        "value": sum(len(trial["early"]) for trial in trials),
        "unit": "sentences",
        "spread": "; ".join([f"load of the machine {load:.1f} before", *itertools.chain(*(trial["early"] for trial in trials))]),
        "target": "0",
    }


def overhead() -> Iterator[dict[str, Any]]:
    """Measure both models of row U7."""
    within = {name: _run("watch_overhead.py", job, str(ROUNDS), "calls") for name, job in JOBS.items()}
    shares = {name: sum(calls for _, calls in times) / sum(step for step, _ in times) for name, times in within.items()}
    yield {
        "id": "W3b-calls",
        "what": "CPU time in the watch's own calls, by that of all steps, in the same jobs",
        "value": round(max(shares.values()), 5),
        "unit": "share",
        "spread": "; ".join(
            f"{name}: {shares[name]:.4f}, median of a step {statistics.median(calls for _, calls in times) / 1e3:.0f} us of "
            f"{statistics.median(step for step, _ in times) / 1e6:.0f} ms"
            for name, times in within.items()
        ),
        "target": "reported",
    }
    found = {name: _run("watch_overhead.py", job, str(ROUNDS)) for name, job in JOBS.items()}
    cpu = {name: _ratios(times, 2) for name, times in found.items()}
    clock = {name: _ratios(times, 0) for name, times in found.items()}
    yield {
        "id": "W3b",
        "what": "overhead of the watch: CPU time of a step with it by that without, two gloo processes, in turn, the worse of "
        + " and ".join(JOBS),
        "value": round(max(map(statistics.median, cpu.values())) - 1, 5),
        "unit": "share",
        "spread": "; ".join(
            f"{name}, steps of {statistics.median(times[0] for times in found[name]) / 1e6:.0f} ms: "
            f"{statistics.median(cpu[name]) - 1:.4f} ± {_error(cpu[name]):.4f}, by the clock "
            f"{statistics.median(clock[name]) - 1:.4f} ± {_error(clock[name]):.4f}"
            for name in found
        )
        + f" (median of {ROUNDS} rounds, ± its standard error from the interquartile range)",
        "target": "≤ 0.005",
    }


def _run(script: str, *arguments: str) -> Any:
    """What rank 0 of two writes."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "found.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += [str(Path(__file__).with_name(script)), str(output), *arguments]
        path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path})
        return json.loads(output.read_text())


def _shares(trials: Sequence[dict[str, Any]]) -> str:
    shares = [trial["excess_ms"] / trial["injected_ms"] for trial in trials]
    return f"{min(shares):.2f} to {max(shares):.2f}" if shares else "nothing"


def _ratios(times: Sequence[Sequence[float]], first: int) -> list[float]:
    return [entry[first + 1] / entry[first] for entry in times]


def _error(ratios: Sequence[float]) -> float:
    """Standard error of the median, as for normal scatter."""
    low, _, high = statistics.quantiles(ratios, n=4)
    return 1.2533 * 0.7413 * (high - low) / len(ratios) ** 0.5
