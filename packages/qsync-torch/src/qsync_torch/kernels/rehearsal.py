"""Rehearsals: kernels that are compiled where they are first launched are compiled side by side, before what launches them.

Triton compiles a kernel in half a second, of one thread.  A profile launches a hundred, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress

import torch

from qsync_core.kernels.launches import rehearsal_of
from qsync_torch.kernels.selection import AUTO, find_backends


def rehearse(calls: Iterable[Callable[[], object]], device: torch.device, tell: Callable[[], None] = lambda: None) -> None:
    """Have the kernels compiled that calls would launch, so that these find them compiled when they are made in earnest.

    Calls run as they are, on memory that kernels did not write: what they compute means nothing.  Whatever fails is left to the
    call in earnest.  On a CPU, and where no backend compiles so, no call is made.

    Args:
        calls: that launch kernels on a device.
        tell: called before them.
    """
    rehearsals = [begin for backend in find_backends(AUTO) if (begin := rehearsal_of(backend)) is not None]
    if device.type == "cpu" or not rehearsals:
        return
    tell()
    with suppress(Exception), ExitStack() as stack:
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))  # a rehearsal is of one thread, its backward too
        for begin in rehearsals:
            stack.enter_context(begin())
        for call in calls:
            with suppress(Exception):
                call()
