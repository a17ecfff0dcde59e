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


def loaded(path: Path):
    spec = importlib.util.spec_from_file_location("train_ray", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def example():
    return loaded(EXAMPLES / "ray" / "train_ray.py")


@pytest.fixture
def nodes(monkeypatch):
    """Two nodes of Ray on this machine, one of each group, which workers reach as long as this lasts."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray[train]'")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "1")
    described = [{"num_cpus": 1, "labels": {"qsync-group": group}} for group in ("infer", "train")]
    cluster = Cluster(initialize_head=True, head_node_args=described[0])
    try:
        cluster.add_node(**described[1])
        ray.init(address=cluster.address)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_the_net_is_found_above_the_script_or_beside_it(example, tmp_path):
    assert example.EXAMPLES == EXAMPLES
    for name in ("ray/train_ray.py", "digits_net.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    copied = loaded(tmp_path / "train_ray.py")
    assert tmp_path == copied.EXAMPLES


def test_workers_are_those_of_the_plan_and_rank_0_trains(run, example):
    assert list(example.planned_workers(run.path).items()) == [("train", 1), ("infer", 1)]


def test_a_plan_is_for_the_groups_and_ranks_that_are_there(run, example):
    assert example.is_planned(run, {"infer": 1, "train": 1})
    assert not example.is_planned(run, {"infer": 1, "train": 2})
    assert not example.is_planned(run, {"train": 1})


@pytest.mark.nightly
def test_workers_that_have_changed_prepare_before_they_train(example, nodes, tmp_path):
    folder = RunFolder(tmp_path / "run")
    for workers, groups in (({"train": 1, "infer": 1}, [["train", "infer"], ["train"], ["infer"]]), ({"train": 1}, [["train"]])):
        result = example.make_trainer(folder.path, tmp_path / str(len(workers)), 1, 32, workers).fit()
        assert result.error is None
        assert {frozenset(names) for names in groups} <= {frozenset(names) for names in folder.planned_groups()}
    assert example.is_planned(folder, {"train": 1})


def test_two_nodes_train_hybrid(run, example, nodes, tmp_path):
    result = example.make_trainer(run.path, tmp_path / "results", epochs=1, batch_size=32).fit()
    assert result.error is None
    assert result.metrics["group"] == "train"  # as rank 0 reports
    assert 0 < result.metrics["loss"] < 2.3  # of ten digits, less than by guessing
    state = torch.load(Path(result.checkpoint.path) / "model.pt", weights_only=True)
    assert {tensor.dtype for name, tensor in state.items() if not name.endswith("num_batches_tracked")} == {torch.float32}
