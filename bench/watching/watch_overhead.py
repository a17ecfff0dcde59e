"""One rank of the overhead's measurement: ``torchrun --nproc-per-node 2 watch_overhead.py OUTPUT JOB ROUNDS [calls]``.

Rank 0 writes, for each round, a step's time without and with the watch, and the CPU time that the process took for it, in ns; with
``calls`` instead, for each step that is watched, the CPU time of the process, and that in the watch's own calls.
"""

from __future__ import annotations

import json
import sys
import time
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import qsync_torch as qsync
from journey.overhead_rank import Training
from qsync_torch.job import Job
from qsync_torch.load_job import load_job
from qsync_torch.watching import phases
from watching.slow_rank_job import take_priority

WARM_UP = 10


def in_turn(job: Job, rounds: int) -> list[list[int]]:
    """Train two copies in turn, one of them watched."""
    plain, watched = Training(job, None), Training(job, None)
    watch = qsync.watch(watched.wrapper)
    times = []
    for step in range(WARM_UP + rounds):
        order = (plain, watched) if step % 2 else (watched, plain)
        found = {training: training.step_ns(step) for training in order}
        times.append([value for pair in zip(found[plain], found[watched], strict=True) for value in pair])
    watch.close()
    return times


class Calls:
    """Sums up the CPU time of the thread in the calls that PyTorch makes of a watch: what reads the clock is in it."""

    def __init__(self) -> None:
        self.ns, self._within = 0, False
        called = {phases.PhaseTimer: ("_begin", "_end", "_optimize", "_optimized", "computes", "begin_backward")}
        called[phases._Senders] = ("_before", "_after")
        for owner, names in called.items():
            for name in names:
                setattr(owner, name, self._timed(getattr(owner, name)))
        at_end = phases.at_end_of_backward
        phases.at_end_of_backward = lambda call: at_end(self._timed(call))

    def _timed(self, call: Any) -> Any:
        @wraps(call)
        def timed(*args: Any) -> None:
            if self._within:
                call(*args)
                return
            self._within, begin = True, time.thread_time_ns()
            call(*args)
            self.ns += time.thread_time_ns() - begin
            self._within = False

        return timed


def within_calls(job: Job, rounds: int) -> list[list[int]]:
    """Train one copy that is watched."""
    calls, training = Calls(), Training(job, None)
    watch = qsync.watch(training.wrapper)
    times = []
    for step in range(WARM_UP + rounds):
        before = calls.ns
        _, cpu_ns = training.step_ns(step)
        times.append([cpu_ns, calls.ns - before])
    watch.close()
    return times


def main(output: Path, name: str, rounds: int, *calls: str) -> None:
    """Measure."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    job = load_job(name)
    take_priority()
    times = (within_calls if calls else in_turn)(job, rounds)
    if dist.get_rank() == 0:
        output.write_text(json.dumps(times[WARM_UP:]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
