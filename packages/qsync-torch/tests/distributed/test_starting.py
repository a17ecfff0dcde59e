"""Commands of several ranks, one of which cannot take part: before there is a process group, and without a GPU."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from clusters import cluster_text
from forked import Forked

pytestmark = pytest.mark.distributed
JOB = f"{Path(__file__).parents[4] / 'examples' / 'digits_net.py'}:job"
CLUSTER = cluster_text("half of a GPU", train={}, infer={"device": "H200", "share": 0.5, "ladder": ["bfloat16", "float32"]})
COMMANDS = {
    "communicate": ["communicate", JOB, "--cluster", "cluster.toml", "-o", "costs.qsync"],
    "prepare": ["prepare", JOB, "--group", "infer=share:0.5", "-o", "run"],
    "profile": ["profile", JOB, "--cluster", "cluster.toml", "-o", "profile.qsync"],
}


def ended(command: list[str], folder: Path, *devices: str) -> list[str]:
    """What each rank's sentence is; group ``train`` is rank 0."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(found.getsockname()[1]), "WORLD_SIZE": "2"}
    job |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_MPS_PIPE_DIRECTORY": "/nonexistent", "COLUMNS": "400"}
    processes = []
    for rank, device in enumerate(devices):
        group = ("train", "infer")[rank]
        more = ["--device", device, *(["--group", group] if command[0] == "profile" else [])]
        environment = os.environ | job | {"RANK": str(rank), "QSYNC_GROUP": group}
        processes.append(Forked(["-m", "qsync_core.cli", *command, *more], env=environment, cwd=folder))
    try:
        errors = [process.communicate(timeout=90)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [1, 1], errors
    return [error.rpartition("error: ")[2].strip() for error in errors]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_share_without_mps_on_one_rank_ends_both(tmp_path, command):
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    heard, own = ended(COMMANDS[command], tmp_path, "cpu", "cuda")
    assert "has share 0.5 of its GPU, but no MPS daemon answers at /nonexistent: start it with" in own
    assert heard == f"rank 1 refuses: {own}"


def test_a_device_that_one_rank_does_not_have_ends_both(tmp_path):
    heard, own = ended(["communicate", JOB, "-o", "costs.qsync"], tmp_path, "cpu", "cuda:99")
    assert own.startswith("cuda:99 was asked for, but ")
    assert heard == f"rank 1 refuses: {own}"
