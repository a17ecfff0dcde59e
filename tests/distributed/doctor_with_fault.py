"""Runs ``qsync doctor`` as one rank of a job, with something wrong: ``doctor_with_fault.py FAULT RANK ARGUMENTS…``.

On that rank the probe is this script as well, with the fault in it.
"""

import os
import signal
import sys
import time

FAULT, RANK, ARGUMENTS = sys.argv[1], sys.argv[2], sys.argv[3:]
TIMED = 3
"""The third all-reduce is the first whose time counts."""


def probe() -> None:
    from qsync_torch.doctor import probe

    calls = 0
    reduce, product = probe.all_reduce, probe.product

    def all_reduce(tensor):
        nonlocal calls
        calls += 1
        if calls == TIMED and FAULT in AT_ALL_REDUCE:
            AT_ALL_REDUCE[FAULT]()
        reduce(tensor)

    def slow_product(device):
        work = product(device)
        return lambda: (work(), time.sleep(0.4))

    probe.all_reduce = all_reduce
    if FAULT == "stops whole":
        probe.find_facts = stop_whole
    if FAULT == "slow":
        probe.product = slow_product
    probe.main()


def stop_whole(rank):
    """As a machine that freezes."""
    os.kill(os.getppid(), signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)


AT_ALL_REDUCE = {
    "stops": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "stops its rank": lambda: os.kill(os.getppid(), signal.SIGSTOP),
    "dies": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hangs": lambda: time.sleep(1000),
    "ends whole": lambda: os.kill(os.getppid(), signal.SIGKILL),
}


def doctor() -> None:
    from qsync_core.cli import main
    from qsync_torch.doctor import job

    if os.environ["RANK"] == RANK:
        job.PROBE = (sys.executable, __file__, FAULT, "probe")
        if FAULT == "other version":
            job.versions_text = lambda: "qsync-core 0.1.0, qsync-torch 9.9.9"
    sys.argv = ["qsync", "doctor", *ARGUMENTS]
    main()


if __name__ == "__main__":
    probe() if RANK == "probe" else doctor()
