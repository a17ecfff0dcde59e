"""Which shares of a GPU compute right numbers: asked where one does not (docs/shared-gpus.md#canary).

A process takes its share when CUDA starts in it, so each share is tried in a process of its own.  One process (``python -m
qsync_torch.sharing.right_shares``) imports PyTorch and forks for each of them; from its standard input it reads the calls, and then
shares to try, a line of JSON each.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing.connection import Connection

import torch

from qsync_core.artifacts.codec import from_plain, to_plain
from qsync_core.errors import QSyncError
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_core.kernels.requests import CallShapes
from qsync_torch.distributed.ranks import SHARE_VARIABLE
from qsync_torch.kernels.canary import Canary, WrongKernel
from qsync_torch.sharing.mps import find_daemon

Probe = Callable[[Sequence[int]], "dict[int, str | None]"]
"""What is wrong under some percentages of the SMs: empty where nothing is, None where that could not be found out."""
_STEP, _MOST = 5, 6
"""Percent between shares that are tried, and how many on either side."""
_SIDE_AT_ONCE = 3
_AT_ONCE = 2 * _SIDE_AT_ONCE
"""Shares that are tried at the same time: of each side, and in all."""
_LIMIT_S, _START_S = 60.0, 60.0
"""How long these may take, and the process that they are forked from to import PyTorch."""


@contextmanager
def probing(calls: Sequence[CallShapes], precisions: Sequence[Precision], device: torch.device | None = None) -> Iterator[Probe]:
    """A probe of a device by processes under its MPS daemon.

    Args:
        precisions: in which formats, on PyTorch's own kernels.
        device: by default the current GPU.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if device is None else device
    asked: dict[str, object] = {
        "calls": [to_plain(call) for call in dict.fromkeys(calls)],
        "precisions": list(map(str, precisions)),
        "device": str(device),
    }
    command, pipe = [sys.executable, "-m", "qsync_torch.sharing.right_shares"], subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, start_new_session=True)
    written, read = process.stdin, process.stdout
    assert written is not None
    assert read is not None
    lines = [asked]

    def end() -> None:
        with suppress(OSError):  # forks that hang would stay on the device, and keep their end of the pipe open
            os.killpg(process.pid, signal.SIGKILL)

    def probe(percents: Sequence[int]) -> dict[int, str | None]:
        rounds = math.ceil(len(percents) / _AT_ONCE)
        timer = threading.Timer(_START_S + _LIMIT_S * rounds, end)  # which ends the reading
        timer.start()
        try:
            lines.append({"percents": [*percents]})
            written.writelines(json.dumps(line) + "\n" for line in lines)
            lines.clear()
            written.flush()
            return {int(percent): said for percent, said in json.loads(read.readline()).items()}
        except (OSError, ValueError):
            return dict.fromkeys(percents)
        finally:
            timer.cancel()

    try:
        yield probe
    finally:
        end()
        with suppress(OSError):  # what it was not sent
            written.close()
        read.close()
        process.wait()


def main() -> None:
    """Answer each line with what is wrong under its shares, until there are no more."""
    asked = json.loads(sys.stdin.readline())
    calls = [from_plain(plain, CallShapes) for plain in asked["calls"]]
    precisions, device = list(map(Precision, asked["precisions"])), torch.device(asked["device"])
    for line in sys.stdin:
        percents = json.loads(line)["percents"]
        print(json.dumps(under_shares(percents, lambda: wrong_sentences(calls, precisions, device))), flush=True)


def under_shares(percents: Sequence[int], run: Callable[[], Sequence[str]]) -> dict[int, str | None]:
    """The first sentence that a function returns under each share, of a process that has not started CUDA.

    Args:
        percents: of the SMs.
        run: called in a fork for each; None stands for one that failed, or took too long.
    """
    forking, found = multiprocessing.get_context("fork"), dict[int, "str | None"]()
    for first in range(0, len(percents), _AT_ONCE):
        until, started = time.monotonic() + _LIMIT_S, []
        for percent in percents[first : first + _AT_ONCE]:
            receiving, sending = forking.Pipe(duplex=False)
            process = forking.Process(target=_say, args=(percent, run, sending))
            process.start()
            sending.close()
            started.append((percent, process, receiving))
        for percent, process, receiving in started:
            try:
                said = receiving.recv() if receiving.poll(max(0.0, until - time.monotonic())) else None
            except (EOFError, OSError):
                said = None
            found[percent] = said
            process.kill()
            process.join()
    return found


def _say(percent: int, run: Callable[[], Sequence[str]], sending: Connection) -> None:
    os.environ[SHARE_VARIABLE] = str(percent)
    sending.send(next(iter(run()), ""))


def wrong_sentences(calls: Sequence[CallShapes], precisions: Iterable[Precision], device: torch.device) -> list[str]:
    """What this process computes wrong with PyTorch's own kernels."""
    canary = Canary(device)
    for precision in precisions:
        for call in calls:
            canary.of_operator(call, Variant.of(precision))
    return list(map(str, canary.wrong))


def nearest_right(percent: int, probe: Probe) -> list[int]:
    """The nearest shares on either side of a wrong one that are right, in percent: none, one or two.  Some are tried at once."""
    below, above = (percent - 1) // _STEP * _STEP, percent // _STEP * _STEP + _STEP
    sides = [range(below, below - _MOST * _STEP, -_STEP), range(above, above + _MOST * _STEP, _STEP)]
    left = [[share for share in side if _STEP <= share <= 100] for side in sides]
    found: list[int | None] = [None, None]
    while any(left):
        said = probe([share for shares in left for share in shares[:_SIDE_AT_ONCE]])
        for side, shares in enumerate(left):
            if not shares:
                continue
            found[side] = next((share for share in shares[:_SIDE_AT_ONCE] if said.get(share) == ""), None)
            left[side] = [] if found[side] else shares[_SIDE_AT_ONCE:]
    return [share for share in found if share]


def wrong_base_error(
    wrong: Sequence[WrongKernel],
    calls: Sequence[CallShapes],
    base: Precision,
    share: float,
    device: str,
    probe: Probe | None = None,
) -> QSyncError:
    """The refusal of a device on which the job computes wrong numbers without any plan.

    Args:
        wrong: kernels of the job's base precision.
        calls: what all of its operators compute.
        base: that precision.
        probe: by default processes on the current GPU.
    """
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    where = f"a share of {share:g} of this {device}" if share < 1 else f"this {device}"
    said = f"{where} computes wrong numbers in {base}, the precision that the job has without a plan: {wrong[0]}{more}"
    if share == 1 or (probe is None and find_daemon().problem):
        return QSyncError(
            f"{said}; install other versions of torch, CUDA and the driver, train in another precision, or leave this device out "
            "(docs/shared-gpus.md#canary)"
        )
    with nullcontext(probe) if probe else probing(calls, [base]) as ask:
        right = nearest_right(round(100 * share), ask)
    if not right:
        return QSyncError(
            f"{said}; no share near it is right: give the group the whole GPU, or a share that 'qsync doctor' calls right "
            "(docs/shared-gpus.md#canary)"
        )
    shares = " and ".join(f"{percent / 100:g}" for percent in right)
    return QSyncError(
        f"{said}; the nearest shares that are right here: {shares}; set the group's share to one of them in the cluster file, or "
        "--share (docs/shared-gpus.md#canary)"
    )


if __name__ == "__main__":
    main()
