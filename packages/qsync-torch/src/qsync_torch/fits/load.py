"""A job as ``qsync fits`` takes it: its model without memory wherever its code allows it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import attrs
import torch

from qsync_core.errors import QSyncError
from qsync_torch.capturing.script import job_of_script
from qsync_torch.job import Job
from qsync_torch.load_job import is_script, load_job


def job_without_memory(text: str, arguments: Sequence[str] = (), batch_size: int | None = None) -> Job:
    """The job that a text names: a script runs up to its line; other jobs are made on the device without memory if they can be.

    Raises:
        QSyncError: when it names none, or arguments are given to one that is no script.
    """
    if is_script(text, arguments):
        with _one_rank():
            job = job_of_script(text, arguments).job
        return job if batch_size is None else attrs.evolve(job, batch_size=batch_size)
    try:
        with torch.device("meta"):
            return load_job(text, batch_size)
    except QSyncError:
        return load_job(text, batch_size)  # its code needs values, or it is wrong, which this says


def tf32_allowed() -> tuple[bool, bool]:
    """Whether convolutions and linear layers may run in TF32, as the job has left PyTorch's settings."""
    return torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision() != "highest"


@contextmanager
def _one_rank() -> Iterator[None]:
    """The environment of a job of one rank, for a script that makes a process group before its line, which nothing started."""
    if "RANK" in os.environ:
        yield
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    alone = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    before = {name: os.environ.get(name) for name in alone}
    os.environ.update(alone)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
