"""Which shares of a GPU compute right numbers: asked where one does not (docs/shared-gpus.md#canary).

A process takes its share when CUDA starts in it, so each share is tried in a process of its own, ``python -m
qsync_torch.sharing.right_shares``, on calls that come on its standard input.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence

import torch

from qsync_core.artifacts.codec import from_plain, to_plain
from qsync_core.errors import QSyncError
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_core.kernels.requests import CallShapes
from qsync_torch.distributed.ranks import SHARE_VARIABLE
from qsync_torch.kernels.canary import Canary, WrongKernel
from qsync_torch.sharing.mps import find_daemon

Probe = Callable[[int], "str | None"]
"""What is wrong under a percentage of the SMs: empty where nothing is, None where that could not be found out."""
_STEP, _MOST = 5, 6
"""Percent between shares that are tried, and how many on either side."""
_LIMIT_S = 120.0


def probe_by_process(calls: Sequence[CallShapes], precisions: Sequence[Precision], device: torch.device | None = None) -> Probe:
    """A probe of a GPU by processes under its MPS daemon.

    Args:
        precisions: in which formats, on PyTorch's own kernels.
        device: which GPU; by default the current one.
    """
    index = torch.cuda.current_device() if device is None or device.index is None else device.index
    asked = json.dumps({"calls": [to_plain(call) for call in calls], "precisions": list(map(str, precisions))})

    def probe(percent: int) -> str | None:
        environment = {**os.environ, SHARE_VARIABLE: str(percent)}
        command = [sys.executable, "-m", "qsync_torch.sharing.right_shares", str(index)]
        try:
            done = subprocess.run(
                command, input=asked, env=environment, capture_output=True, text=True, timeout=_LIMIT_S, check=True
            )
            wrong: list[str] = json.loads(done.stdout.splitlines()[-1])
        except (OSError, subprocess.SubprocessError, ValueError, IndexError):
            return None
        return wrong[0] if wrong else ""

    return probe


def main() -> None:
    """Try calls under this process's share and print what is wrong, a JSON list of sentences."""
    asked = json.load(sys.stdin)
    calls = [from_plain(plain, CallShapes) for plain in asked["calls"]]
    device = torch.device("cuda", int(sys.argv[1]))
    print(json.dumps(wrong_sentences(calls, map(Precision, asked["precisions"]), device)))


def wrong_sentences(calls: Sequence[CallShapes], precisions: Iterable[Precision], device: torch.device) -> list[str]:
    """What this process computes wrong with PyTorch's own kernels."""
    canary = Canary(device)
    for precision in precisions:
        for call in calls:
            canary.of_operator(call, Variant.of(precision))
    return list(map(str, canary.wrong))


def nearest_right(percent: int, probe: Probe) -> list[int]:
    """The nearest shares on either side of a wrong one that are right, in percent: none, one or two."""
    found = []
    for direction in (-_STEP, _STEP):
        first = percent // _STEP * _STEP + _STEP if direction > 0 else (percent - 1) // _STEP * _STEP
        tried = [share for share in range(first, first + _MOST * direction, direction) if _STEP <= share <= 100]
        right = next((share for share in tried if probe(share) == ""), None)
        found += [] if right is None else [right]
    return found


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
    right = nearest_right(round(100 * share), probe or probe_by_process(calls, [base]))
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
