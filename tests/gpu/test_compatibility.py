"""Rows of docs/compatibility.md that need two GPUs and NCCL; each is skipped by name where there are fewer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from compatibility.page import row_of

pytestmark = pytest.mark.distributed
SCRIPT = Path(__file__).with_name("compatible_rank.py")


@pytest.fixture(autouse=True)
def two_gpus(request: pytest.FixtureRequest) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"{request.node.name} needs two CUDA devices")


def run(case: str, folder: Path) -> list[Any]:
    """What each rank printed last."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    commands = [[sys.executable, str(SCRIPT), str(rank), str(folder), case] for rank in range(2)]
    processes = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for command in commands]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def test_fully_shard(tmp_path: Path) -> None:
    """Refused without the flag, on every rank; with it, the bits of DistributedDataParallel."""
    (sentence,) = row_of("test_compatibility.py::test_fully_shard").sentences
    (tmp_path / "refused").mkdir()
    assert all(sentence.search(text) for text in run("refused", tmp_path / "refused"))
    assert run("sharded", tmp_path) == [0.0, 0.0]


def test_bf16_compress_hook(tmp_path: Path) -> None:
    assert run("compressed", tmp_path) == [0.0, 0.0]


def test_sync_batch_norm(tmp_path: Path) -> None:
    """Up to the order of sums, and to what bfloat16 makes of that."""
    assert max(run("normalized", tmp_path)) < 1e-2


def test_a_base_that_one_rank_stores(tmp_path: Path) -> None:
    """Adapters of both ranks are equal bit for bit after 20 steps, and were trained."""
    assert run("stored", tmp_path) == [0.0, 0.0]
