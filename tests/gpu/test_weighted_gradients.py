"""Weighted gradients on GPUs are those of one process with the whole batch: over NCCL on two GPUs, over gloo on one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.distributed
SCRIPT = Path(__file__).parents[2] / "packages" / "qsync-torch" / "tests" / "distributed" / "weighting_ranks.py"
NOT_EXACT = {"float32", "unweighted", "buckets", "compressed", "other batches", "past the output"}


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_every_step_has_the_whole_batch_s_gradient(backend, tmp_path, request):
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip(f"{request.node.name} needs two CUDA devices")
    command = [sys.executable, str(SCRIPT)]
    processes = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store"), "7,3", backend, "cuda"], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for out in [process.communicate(timeout=300)[0] for process in processes]:
        errors = json.loads(out.splitlines()[-1])
        assert max(max(errors[case]) for case in errors.keys() - NOT_EXACT) <= 1e-12
        assert max(errors["float32"]) <= 1e-6
        assert min(errors["unweighted"]) > 0.01
        assert 1e-4 < max(errors["compressed"]) < 2e-2
