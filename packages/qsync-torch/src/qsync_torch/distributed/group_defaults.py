"""A process group ends where the script ends it, not with the interpreter."""

from __future__ import annotations

from types import FunctionType

import torch.distributed.nn.functional as collectives
from torch.distributed import ProcessGroup


def hold_no_group() -> None:
    """Let the functions of :mod:`torch.distributed.nn.functional` take the default group when they are called.

    PyTorch (2.11 to 2.13) writes it into their signatures when they are imported, which DistributedDataParallel does by way of the
    compiler: the group then outlives ``destroy_process_group``, and Gloo's threads the interpreter, where the last collective to be
    freed now and then aborts the process or keeps it from ending.  None is what they have where they are imported before
    ``init_process_group``, and means the default group to all of them.
    """
    for function in vars(collectives).values():
        if isinstance(function, FunctionType) and function.__defaults__:
            defaults = (None if isinstance(value, ProcessGroup) else value for value in function.__defaults__)
            function.__defaults__ = tuple(defaults)
