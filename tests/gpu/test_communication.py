"""What communication costs, and how many CTAs it takes, with NCCL."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from qsync_core.artifacts.files import load
from qsync_core.ir.communication import CollectiveCosts
from qsync_torch.distributed.nccl import max_ctas_of, nccl_options
from qsync_torch.load_job import load_job
from qsync_torch.profiling.communication import MAX_CTAS
from qsync_torch.profiling.contention import Backward
from qsync_torch.profiling.whole_step import StepRunner

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("max_ctas", [0, 4])
def test_the_ctas_of_a_process_group_can_be_seen(monkeypatch, max_ctas):
    monkeypatch.delenv("NCCL_MAX_CTAS", raising=False)
    device = torch.device("cuda", torch.cuda.current_device())
    options = nccl_options(max_ctas) if max_ctas else None
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, pg_options=options)
    try:
        dist.all_reduce(torch.ones(1, device=device))
        assert max_ctas_of(dist.group.WORLD, device) == max_ctas
    finally:
        dist.destroy_process_group()


def test_a_backward_pass_is_timed_again_and_again():
    device = torch.device("cuda", torch.cuda.current_device())
    backward = Backward(StepRunner.start(load_job("resnet18:image=64", 8), device, batches=1), device)
    for _ in range(3):
        backward.prepare()
        assert 0 < backward.run() < 1_000_000_000


@pytest.mark.distributed
def test_the_command_measures_every_number_of_ctas_and_every_group(request, tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"{request.node.name} needs two CUDA devices")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(found.getsockname()[1]), "WORLD_SIZE": "2"}
    command = [sys.executable, "-m", "qsync_core.cli", "communicate", "resnet18:image=64", "--batch-size", "8", "--json"]
    processes = [
        subprocess.Popen(
            [*command, "-o", str(tmp_path / f"{rank}.qsync")],
            env=os.environ | job | {"RANK": str(rank), "LOCAL_RANK": str(rank), "QSYNC_GROUP": ("train", "infer")[rank]},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    costs = load(tmp_path / "0.qsync", CollectiveCosts)
    assert tuple(entry.max_ctas for entry in costs.measured) == MAX_CTAS
    assert costs.ranks == {"train": 1, "infer": 1}
    assert all(0 <= c <= 0.95 for entry in costs.measured for c in entry.slowdown.values())
    assert all(entry.transfer_share.keys() == entry.slowdown.keys() for entry in costs.measured)
    largest = [entry.all_reduce.measured[-1][1] for entry in costs.measured if entry.max_ctas]
    assert largest[0] > largest[-1]  # 2 CTAs are slower than 16
    assert costs.broadcast_ns > 0
    assert json.loads(outputs[0][0])["broadcast_ns"] == costs.broadcast_ns
    assert outputs[0][1].count("compute of group") == 2 * len(MAX_CTAS)
