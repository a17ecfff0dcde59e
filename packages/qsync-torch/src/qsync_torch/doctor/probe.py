"""What a rank measures, in a process of its own that can be given up: ``python -m qsync_torch.doctor.probe``.

A collective whose other end is missing does not return, and neither may a call into a broken driver.  This process tells what it
finds through the job's store, step by step; its parent (:mod:`qsync_torch.doctor.job`) ends it when no more is to be waited for.
"""

from __future__ import annotations

import ctypes
import os
import signal
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from qsync_torch.distributed.mailbox import Mailbox
from qsync_torch.distributed.meeting import Place
from qsync_torch.doctor.rank_facts import find_facts, own_device

SIZES = tuple(mib << 20 for mib in (1, 4, 25, 100))
"""Bytes of the all-reduces: DDP's buckets are of 1 MiB (the first) and 25 MiB unless told otherwise."""
MAIL = "qsync doctor"
"""What the processes of one run of the doctor say to each other: messages by name and rank, and signs of life."""
PAUSE_S = 0.1
BEAT_S = 0.5
_PR_SET_PDEATHSIG = 1
_NEVER = timedelta(days=1)
"""Time-out of the process group: the parent decides when something has taken too long."""
_BUDGET_NS = 1_000_000_000
_MOST, _LEAST = 20, 3
_ROUNDS = 10
_ROUND_BYTES = 1 << 20
_COPIED_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
_PRODUCT_SIZE = {"cpu": 1024, "cuda": 4096}


def main() -> None:
    """Tell facts, then, when rank 0's parent has heard all, speeds and the times of collectives."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # not to be left over, stopped or hung, when the parent is killed
    place = Place.from_environment()
    assert place is not None
    box = Mailbox.at_place(place, MAIL)
    box.beat_until_exit("probe alive", BEAT_S)
    box.say("facts", find_facts(place.rank).data())
    while not box.posted("plan"):
        time.sleep(PAUSE_S)
    plan = box.read("plan")
    own = own_device()
    device = own if plan["backend"] == "nccl" else torch.device("cpu")
    work = product(own)
    box.say("speed", [quick_median(work, own), quick_median(copy(own), own)])
    store = place.store(holds=False)
    store.set_timeout(_NEVER)
    keys = dist.PrefixStore("collectives", store)
    dist.init_process_group(plan["backend"], store=keys, rank=place.rank, world_size=place.world, timeout=_NEVER)
    all_reduce(torch.ones(1, dtype=torch.float32, device=device))
    box.say("connected")
    taken_ns = 0
    for position, nbytes in enumerate(plan["sizes"]):
        box.say(f"entered {position}")
        before = plan["sizes"][position - 1] if position else nbytes
        if taken_ns * nbytes / before > plan["timeout_s"] * 1e9 / 2:
            box.say(f"all-reduce {position}", [])  # the same on all ranks, which agree on taken_ns
            continue
        times, taken_ns = timed_all_reduces(nbytes, device)
        box.say(f"all-reduce {position}", times)
    box.say("entered rounds")
    box.say("rounds", waits(lambda: timed(work, own), device))
    os._exit(0)  # not through destroy_process_group, which waits for all


def product(device: torch.device) -> Callable[[], Any]:
    """A product of matrices in float32, always the same."""
    matrix = torch.ones(_PRODUCT_SIZE[device.type], _PRODUCT_SIZE[device.type], dtype=torch.float32, device=device)
    return lambda: matrix @ matrix


def copy(device: torch.device) -> Callable[[], Any]:
    """A copy within the device's memory."""
    source = torch.ones(_COPIED_BYTES[device.type] // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def speeds(kind: str, product_ns: float, copy_ns: float) -> tuple[float, float]:
    """What such times mean on a ``cpu`` or ``cuda`` device: 10¹² operations and 10⁹ bytes (read or written) a second."""
    return 2 * _PRODUCT_SIZE[kind] ** 3 / product_ns / 1e3, 2 * _COPIED_BYTES[kind] / copy_ns


def quick_median(work: Callable[[], Any], device: torch.device) -> float:
    """Nanoseconds that some work takes; the first time, which pays for starting, is not counted."""
    work()
    times: list[int] = []
    until = time.perf_counter_ns() + _BUDGET_NS // 4
    while len(times) < _LEAST or (time.perf_counter_ns() < until and len(times) < _MOST):
        times.append(timed(work, device))
    return statistics.median(times)


def timed(work: Callable[[], Any], device: torch.device) -> int:
    """Nanoseconds until some work has been done, on the device too."""
    synchronize(device)
    begin = time.perf_counter_ns()
    work()
    synchronize(device)
    return time.perf_counter_ns() - begin


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def all_reduce(tensor: torch.Tensor) -> None:
    """Sum over all ranks."""
    dist.all_reduce(tensor)


def timed_all_reduces(nbytes: int, device: torch.device) -> tuple[list[int], int]:
    """Nanoseconds of each, as many as the ranks have time for; and what all ranks say that one takes at most."""
    tensor = torch.ones(nbytes // 4, dtype=torch.float32, device=device)
    first_ns = torch.tensor([float(timed(lambda: all_reduce(tensor), device))], dtype=torch.float32, device=device)
    dist.all_reduce(first_ns, op=dist.ReduceOp.MAX)
    agreed_ns = int(first_ns.item())
    count = max(1, min(_MOST, _BUDGET_NS // agreed_ns))
    return [timed(lambda: all_reduce(tensor), device) for _ in range(count)], agreed_ns


def waits(work: Callable[[], Any], device: torch.device) -> list[int]:
    """How long an all-reduce takes on this rank after equal work on all, in nanoseconds a round; the work waits for its device.

    No clocks are compared: the rank that comes last to a round finds all others there, and waits for the transfer alone.
    """
    tensor = torch.ones(_ROUND_BYTES // 4, dtype=torch.float32, device=device)
    found = []
    for _ in range(_ROUNDS):
        work()
        found.append(timed(lambda: all_reduce(tensor), device))
    return found


if __name__ == "__main__":
    main()
