"""Hybrid training on Ray: a TorchTrainer whose workers are placed by node labels, one group after the other.

Nodes say their group when they start (``ray start … --labels qsync-group=infer``), and every one of them has the run folder at the
same path.  Workers that find no plan for the groups and ranks that are there prepare first, all of them, as under torchrun::

    python train_ray.py run/ --workers train=4 --workers infer=2 --fewest 4 --storage /mnt/shared/results

Tested with ``pip install 'ray[train]==2.60.*'``.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import qsync_torch as qsync
from qsync_core.errors import PlanError, QSyncError
from qsync_core.launching.machines import planned_job
from qsync_core.launching.rayjob import NODE_LABEL
from qsync_core.run_folder import RunFolder

if TYPE_CHECKING:
    from ray.train.torch import TorchTrainer

_NET = "digits_net.py"
_FOLDERS = Path(__file__).resolve().parents
EXAMPLES = next((folder for folder in _FOLDERS if (folder / _NET).is_file()), _FOLDERS[0])
"""Where the model's file is: beside this one, as in a pod's working directory, or above."""


def planned_workers(run: Path) -> dict[str, int]:
    """How many ranks each group of the plan has, those of rank 0's group first."""
    return {group.name: group.nodes * group.ranks_each for group in planned_job(RunFolder(run)).groups}


def make_trainer(
    run: Path,
    storage: Path,
    epochs: int,
    batch_size: int,
    workers: Mapping[str, int] | None = None,
    fewest: int | None = None,
    cluster: Path | None = None,
) -> TorchTrainer:
    """One worker per rank, on a node of its group, each with a GPU where its nodes have any.

    Args:
        workers: ranks by group, the first of which has rank 0; by default the plan's.
        fewest: workers with which training goes on when nodes are lost; by default it waits for all of them.
        cluster: a file that describes the groups, for preparing.
    """
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    counts = workers or planned_workers(run)
    placed = [{NODE_LABEL: group} for group, count in counts.items() for _ in range(count)]
    gpus = ray.cluster_resources().get("GPU", 0) > 0
    scaling = ScalingConfig(
        num_workers=len(placed) if fewest is None else (fewest, len(placed)), use_gpu=gpus, label_selector=placed
    )
    described = str(cluster.resolve()) if cluster else ""
    settings = {"run": str(run.resolve()), "epochs": epochs, "batch_size": batch_size, "cluster": described}
    kept = RunConfig(name="hybrid", storage_path=str(storage.resolve()), failure_config=FailureConfig(max_failures=3))
    return TorchTrainer(train, train_loop_config=settings, scaling_config=scaling, run_config=kept)


def prepare_where_unplanned(run: RunFolder, group: str, batch_size: int, cluster: str = "") -> None:
    """``qsync prepare`` on every rank, where one of them finds no plan for the ranks that are here.

    What is measured already is kept, so that workers which have changed cost little more than a new plan.
    """
    present: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(present, group)
    planned = [False] * len(present)
    dist.all_gather_object(planned, is_planned(run, Counter(present)))
    if all(planned):
        return
    port = [free_port()]
    dist.broadcast_object_list(port)
    command = [sys.executable, "-m", "qsync", "prepare", f"{EXAMPLES / _NET}:job", "-o", str(run.path)]
    if cluster:
        command += ["--cluster", cluster]
    environment = {**os.environ, "MASTER_PORT": str(port[0])}  # all else is as Ray has set it, and torchrun would
    subprocess.run([*command, "--batch-size", str(batch_size)], env=environment, check=True)


def is_planned(run: RunFolder, ranks: Mapping[str, int]) -> bool:
    """Whether the run folder has a plan for exactly these groups, with so many ranks each."""
    try:
        plan = run.load_plan(list(ranks))
    except PlanError:
        return False
    return {group.group: group.count for group in plan.groups} == dict(ranks)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("", 0))
        return found.getsockname()[1]


def train(settings: dict[str, Any]) -> None:
    """What every worker runs, once more whenever workers have changed; Ray has made the process group."""
    import ray
    from ray import train as ray_train

    sys.path.insert(0, str(EXAMPLES))
    from digits_net import load_data, make_model, make_optimizer

    group = os.environ["QSYNC_GROUP"] = ray.get_runtime_context().get_node_labels()[NODE_LABEL]
    run = RunFolder(settings["run"])
    prepare_where_unplanned(run, group, settings["batch_size"], settings["cluster"])
    qsync.use_share(run.cluster)  # before anything starts CUDA
    device = ray_train.torch.get_device()
    model = make_model().to(device)
    applied = qsync.apply_(model, run.path, resize="keep-global")  # a step has the planned samples, whoever is there
    ddp = DistributedDataParallel(model, **applied.ddp_options())
    applied.weight_gradients(ddp)
    optimizer = make_optimizer(ddp.parameters())
    first_epoch = 0
    if checkpoint := ray_train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            model.load_state_dict(torch.load(Path(folder) / "model.pt", map_location=device, weights_only=True))
            progress = torch.load(Path(folder) / "progress.pt", map_location=device, weights_only=True)
        optimizer.load_state_dict(progress["optimizer"])
        first_epoch, applied.step = progress["epoch"], progress["step"]  # rounding goes on with fresh random numbers
    training, _ = load_data()
    sampler = applied.batch_sampler(training, drop_last=True)
    loader = DataLoader(training, batch_sampler=sampler)
    for epoch in range(first_epoch, settings["epochs"]):
        sampler.set_epoch(epoch)
        ddp.train()
        for x, y in loader:
            total = torch.zeros(1, device=device)
            for part in applied.micro_batches(ddp, len(x)):
                loss = cross_entropy(ddp(x[part.rows].to(device)), y[part.rows].to(device)) * part.weight
                loss.backward()
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(total)
        metrics = {"epoch": epoch, "group": applied.group, "loss": total.item() / dist.get_world_size()}
        with tempfile.TemporaryDirectory() as folder:
            torch.save(model.state_dict(), Path(folder) / "model.pt")  # a plain model's, without a trace of QSync
            progress = {"epoch": epoch + 1, "optimizer": optimizer.state_dict(), "step": applied.step}
            torch.save(progress, Path(folder) / "progress.pt")
            ray_train.report(metrics, checkpoint=ray_train.Checkpoint(folder) if dist.get_rank() == 0 else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="the run folder; without a plan in it the workers prepare first")
    parser.add_argument(
        "--workers", action="append", default=[], metavar="GROUP=NUMBER", help="ranks of a group, rank 0's first; as planned"
    )
    parser.add_argument("--fewest", type=int, help="workers with which training goes on when nodes are lost")
    parser.add_argument("--cluster", type=Path, help="cluster file by which to prepare, at the same path on every node")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="samples per rank and step")
    parser.add_argument("--storage", type=Path, default=Path("ray-results"), help="for checkpoints, on a disk that all nodes share")
    args = parser.parse_args()
    import ray

    ray.init()
    workers = {group: int(number) for group, _, number in (text.partition("=") for text in args.workers)}
    result = make_trainer(args.run, args.storage, args.epochs, args.batch_size, workers, args.fewest, args.cluster).fit()
    print(f"loss after epoch {result.metrics['epoch']}: {result.metrics['loss']:.4f}")


if __name__ == "__main__":
    try:
        main()
    except QSyncError as error:
        sys.exit(f"error: {error}")
