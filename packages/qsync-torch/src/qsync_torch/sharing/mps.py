"""NVIDIA's Multi-Process Service: whether its daemon answers, and which share of the SMs it gives this process.

Nothing here starts CUDA.  A client takes its share from ``CUDA_MPS_ACTIVE_THREAD_PERCENTAGE`` at the moment at which CUDA starts in
it, and runs on the whole GPU, without a word, where no daemon answers.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import attrs
import torch

from qsync_torch.devices import nvidia_smi

PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
CONTROL = "nvidia-cuda-mps-control"
START = f"start it with '{CONTROL} -d' (docs/shared-gpus.md)"
_DEFAULT_PIPES = "/tmp/nvidia-mps"
_NOT_FOUND = "cannot find mps control daemon"
_TIMEOUT_S = 10.0
_NOT_INITIALIZED = 3
"""CUDA's error for a call before ``cuInit``."""


@attrs.frozen
class Daemon:
    """What the control daemon says.

    Attributes:
        problem: why processes that start now get no share; empty where it answers.
        servers: process numbers of its servers, with the status of each (``ACTIVE``, ``FAULT``) where it tells.
    """

    problem: str = ""
    servers: Mapping[int, str] = {}


def pipe_directory() -> str:
    """The folder in which processes of this environment look for the daemon."""
    return os.environ.get(PIPE_VARIABLE) or _DEFAULT_PIPES


def find_daemon() -> Daemon:
    """Ask the control daemon for its servers; where its program is not installed, as in a container, look for its pipe."""
    absent = Daemon(f"no MPS daemon answers at {pipe_directory()}")
    pipe = (Path(pipe_directory()) / "control").exists()
    if shutil.which(CONTROL) is None:
        return Daemon() if pipe else absent
    answer = _ask("get_server_list")
    if answer is None:
        return absent if not pipe else Daemon(f"the MPS daemon at {pipe_directory()} does not answer within {_TIMEOUT_S:g} s")
    if _NOT_FOUND in answer.lower():
        return absent
    servers = [int(word) for word in answer.split() if word.isdigit()]
    return Daemon(servers={server: (_ask(f"get_server_status {server}") or "").strip() for server in servers})


def _ask(command: str) -> str | None:
    try:
        done = subprocess.run([CONTROL], input=f"{command}\n", capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout + done.stderr


def cuda_has_started() -> bool:
    """Whether this process has called CUDA's driver, as ``torch.cuda.is_available()`` does: then it is too late for a share."""
    if torch.cuda.is_initialized():
        return True
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED)


def gpu_names() -> tuple[str, ...]:
    """Names of this machine's GPUs as ``nvidia-smi`` has them, each once; empty where it finds none."""
    return tuple(dict.fromkeys(nvidia_smi("gpu=name")))
