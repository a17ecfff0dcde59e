"""What ``qsync prepare`` does with a script, on one rank: run it to its line, then work in a process group, twice.

``python script_of_two_ranks.py SCRIPT`` in torchrun's environment.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from qsync_torch.capturing.script import job_of_script
from qsync_torch.distributed.ranks import process_group_from_environment


def main() -> None:
    said = job_of_script(sys.argv[1])
    survived = dist.is_initialized()
    found = []
    for _ in range(2):
        with process_group_from_environment(torch.device("cpu")) as rank:
            total = torch.tensor([rank + 1.0])
            dist.all_reduce(total)
            found.append(total.item())
    # One write, so that the lines of two ranks do not mix.
    sys.stdout.write(f"rank {rank}: {said.job.name} {said.backend} {survived} {found}\n")


if __name__ == "__main__":
    main()
