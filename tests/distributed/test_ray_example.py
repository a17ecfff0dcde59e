"""The Ray example: every group of the run folder gets its ranks on nodes of its label, and trains under its plan."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
import torch
from launching import EXAMPLES

from clusters import cluster_text
from qsync_core.run_folder import RunFolder

pytestmark = pytest.mark.distributed
CLUSTER = cluster_text(infer={"ladder": ["int8", "bfloat16", "float32"]}, train={})


@pytest.fixture
def run(make_plan, tmp_path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.plan(["train", "infer"]).parent.mkdir(parents=True)
    shutil.copy(make_plan(), folder.plan(["train", "infer"]))
    folder.cluster.write_text(CLUSTER)
    return folder


@pytest.fixture
def example():
    spec = importlib.util.spec_from_file_location("train_ray", EXAMPLES / "ray" / "train_ray.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_workers_are_placed_by_their_groups_and_rank_0_trains(run, example):
    assert example.selectors(run.path) == [{"qsync-group": "train"}, {"qsync-group": "infer"}]


def test_two_nodes_train_hybrid(run, example, monkeypatch, tmp_path):
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray[train]'")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "1")
    nodes = [{"num_cpus": 1, "labels": {"qsync-group": group}} for group in ("infer", "train")]
    cluster = Cluster(initialize_head=True, head_node_args=nodes[0])
    try:
        cluster.add_node(**nodes[1])
        ray.init(address=cluster.address)
        result = example.make_trainer(run.path, tmp_path / "results", epochs=1, batch_size=32).fit()
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert result.error is None
    assert result.metrics["group"] == "train"  # as rank 0 reports
    assert 0 < result.metrics["loss"] < 2.3  # of ten digits, less than by guessing
    state = torch.load(Path(result.checkpoint.path) / "model.pt", weights_only=True)
    assert {tensor.dtype for name, tensor in state.items() if not name.endswith("num_batches_tracked")} == {torch.float32}
