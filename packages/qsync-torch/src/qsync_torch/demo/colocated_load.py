"""The other tenant of the weak worker's core: a process that answers inference requests all the time.

Started as ``python -m qsync_torch.demo.colocated_load`` by the weak worker itself: as its child it stays in the same scheduling
session (automatic grouping would otherwise hide its niceness), and the kernel ends it with its parent.
"""

from __future__ import annotations

import os
import subprocess
import sys

from qsync_torch.demo.parent_death import die_with_parent


class ColocatedLoad:
    """A process that competes for one core at a given niceness; ``close`` ends it."""

    def __init__(self, core: int) -> None:
        command = [sys.executable, "-m", "qsync_torch.demo.colocated_load", str(core)]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it is ready

    def set_niceness(self, niceness: int) -> None:
        """Its priority: 0 is the worker's own, higher takes less.  Without privileges it can only go up."""
        os.setpriority(os.PRIO_PROCESS, self._process.pid, niceness)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


def serve(core: int) -> None:
    """Run forward passes of a small network on one core until the parent is gone."""
    import torch

    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = torch.nn.Sequential(*(torch.nn.Conv2d(32, 32, 3, padding=1) for _ in range(4))).eval()
    request = torch.randn(1, 32, 8, 8)
    parent = os.getppid()
    print("ready", flush=True)
    with torch.inference_mode():
        while os.getppid() == parent:
            for _ in range(50):
                network(request)


if __name__ == "__main__":
    die_with_parent()
    serve(int(sys.argv[1]))
