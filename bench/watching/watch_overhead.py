"""One rank of the overhead's measurement: ``torchrun --nproc-per-node 2 watch_overhead.py OUTPUT JOB ROUNDS``.

Rank 0 writes, for each round, a step's time without and with the watch, and the CPU time that the process took for it, in ns.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import qsync_torch as qsync
from journey.overhead_rank import Training
from qsync_torch.load_job import load_job
from watching.slow_rank_job import take_priority

WARM_UP = 10


def main(output: Path, name: str, rounds: int) -> None:
    """Train both in turn."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    job = load_job(name)
    take_priority()
    plain, watched = Training(job, None), Training(job, None)
    watch = qsync.watch(watched.wrapper)
    times = []
    for step in range(WARM_UP + rounds):
        order = (plain, watched) if step % 2 else (watched, plain)
        found = {training: training.step_ns(step) for training in order}
        times.append([value for pair in zip(found[plain], found[watched], strict=True) for value in pair])
    watch.close()
    if dist.get_rank() == 0:
        output.write_text(json.dumps(times[WARM_UP:]))
    del plain, watched, order, found, watch
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
