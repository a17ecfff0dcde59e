"""Hybrid training on Ray: a TorchTrainer whose workers are placed by node labels, one group of the run folder after the other.

Nodes say their group when they start (``ray start … --labels qsync-group=infer``), and every one of them has the run folder at the
same path, as ``qsync prepare`` leaves it::

    python train_ray.py run/ --epochs 3 --storage /mnt/shared/results

Tested with ``pip install 'ray[train]==2.60.*'``.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import qsync_torch as qsync
from qsync_core.errors import QSyncError
from qsync_core.launching.machines import planned_job
from qsync_core.run_folder import RunFolder

if TYPE_CHECKING:
    from ray.train.torch import TorchTrainer

LABEL = "qsync-group"
EXAMPLES = Path(__file__).resolve().parents[1]


def selectors(run: Path) -> list[dict[str, str]]:
    """What node each worker needs, in the order of ranks: rank 0 is of a group that trains."""
    groups = planned_job(RunFolder(run)).groups
    return [{LABEL: group.name} for group in groups for _ in range(group.nodes * group.ranks_each)]


def make_trainer(run: Path, storage: Path, epochs: int, batch_size: int) -> TorchTrainer:
    """One worker per rank of the plan, each with a GPU where the plan is for GPUs."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    placed = selectors(run)
    gpus = any(group.plan.device.kind == "cuda" for group in planned_job(RunFolder(run)).groups)
    scaling = ScalingConfig(num_workers=len(placed), use_gpu=gpus, label_selector=placed)
    settings = {"run": str(run.resolve()), "epochs": epochs, "batch_size": batch_size}
    kept = RunConfig(name="hybrid", storage_path=str(storage.resolve()))
    return TorchTrainer(train, train_loop_config=settings, scaling_config=scaling, run_config=kept)


def train(settings: dict[str, Any]) -> None:
    """What every worker runs; Ray has made the process group."""
    import ray
    from ray import train as ray_train

    sys.path.insert(0, str(EXAMPLES))
    from digits_net import load_data, make_model, make_optimizer

    os.environ["QSYNC_GROUP"] = ray.get_runtime_context().get_node_labels()[LABEL]
    qsync.use_share(RunFolder(settings["run"]).cluster)  # before anything starts CUDA
    device = ray_train.torch.get_device()
    model = make_model().to(device)
    applied = qsync.apply_(model, settings["run"])
    ddp = DistributedDataParallel(model, **applied.ddp_options())
    optimizer = make_optimizer(ddp.parameters())
    training, _ = load_data()
    sampler = DistributedSampler(training, drop_last=True)
    loader = DataLoader(training, settings["batch_size"], sampler=sampler, drop_last=True)
    for epoch in range(settings["epochs"]):
        sampler.set_epoch(epoch)
        ddp.train()
        for x, y in loader:
            loss = cross_entropy(ddp(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        total = torch.tensor([loss.item()], device=device)
        dist.all_reduce(total)
        metrics = {"epoch": epoch, "group": applied.group, "loss": total.item() / dist.get_world_size()}
        with tempfile.TemporaryDirectory() as folder:
            torch.save(model.state_dict(), Path(folder) / "model.pt")  # a plain model's, without a trace of QSync
            ray_train.report(metrics, checkpoint=ray_train.Checkpoint(folder) if dist.get_rank() == 0 else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="the run folder that 'qsync prepare' made")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="samples per rank and step")
    parser.add_argument("--storage", type=Path, default=Path("ray-results"), help="for checkpoints, on a disk that all nodes share")
    args = parser.parse_args()
    result = make_trainer(args.run, args.storage, args.epochs, args.batch_size).fit()
    print(f"loss after epoch {result.metrics['epoch']}: {result.metrics['loss']:.4f}")


if __name__ == "__main__":
    try:
        main()
    except QSyncError as error:
        sys.exit(f"error: {error}")
