"""Two processes of one job, and the scripts of docs/trainers.md."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
PAGE = ROOT / "docs" / "trainers.md"
GROUPS = ("train", "infer")
TIMEOUT_S = 240


def scripts_of_the_page() -> dict[str, str]:
    """By file name, as its first line says: the blocks of the page that are whole scripts."""
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return dict(blocks)


def run_ranks(script: Path, folder: Path, arguments: Sequence[str] = (), groups: Sequence[str] = GROUPS) -> list[str]:
    """Run a script as torchrun would on one machine, in ``folder``; by default the first rank trains, the second is lowered.

    Returns:
        What each rank printed.  A rank that fails fails the test.
    """
    ended = end_ranks(script, folder, arguments, groups)
    assert [status for status, _ in ended] == [0, 0], "\n".join(output for _, output in ended)
    return [output for _, output in ended]


def end_ranks(script: Path, folder: Path, arguments: Sequence[str] = (), groups: Sequence[str] = GROUPS) -> list[tuple[int, str]]:
    """:func:`run_ranks`, with the status of each rank."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("QSYNC_", "ACCELERATE_"))}
    job = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "1",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "trainers",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "ACCELERATE_USE_CPU": "true",
        "ACCELERATE_TORCH_DEVICE": "cpu",  # with the cpu:0 that it finds itself, transformers cannot read its checkpoint
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "examples"), str(HERE), os.environ.get("PYTHONPATH", "")]),
    }
    processes = []
    for rank, group in enumerate(groups):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "QSYNC_GROUP": group}
        processes.append(
            subprocess.Popen(
                [sys.executable, str(script), *arguments],
                cwd=folder,
                env=inherited | job | own,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]
