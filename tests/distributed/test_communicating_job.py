"""``qsync prepare`` of a model whose forward and backward wait for all ranks, of which one is measured at a time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forked import run_forked
from processes import free_port
from qsync_core.run_folder import RunFolder

pytestmark = pytest.mark.distributed

JOB = Path(__file__).with_name("communicating_job.py")


def test_it_is_planned(tmp_path: Path) -> None:
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    common |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "QSYNC_RANK_TIMEOUT_S": "20"}
    environments = [{**os.environ, **common, "RANK": str(rank), "QSYNC_GROUP": "ab"[rank]} for rank in range(2)]
    command = ["-m", "qsync", "prepare", str(JOB), "-o", str(tmp_path / "run"), "--device", "cpu"]
    ended = run_forked([command] * 2, environments, cwd=tmp_path, timeout_s=240)
    assert [one.status for one in ended] == [0, 0], ended
    assert "as if all others did as this rank does" in ended[0].output
    plan = RunFolder(tmp_path / "run").load_plan(["a", "b"])
    assert {str(op_id) for op_id in plan.group("b").assignments} >= {"q.0#0", "q.2#0"}
