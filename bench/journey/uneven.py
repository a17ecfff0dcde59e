"""U5: weighted gradients of unequal batches against one process with the whole batch, in float64.

Every split trains an epoch of some models over gloo, its last global batch smaller than the others, at once and accumulated in
three passes.  Batch norms use stored statistics, because those of a batch differ with its size, and there is no dropout.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from qsync_torch import UnevenBatchSampler, weight_gradients
from qsync_torch.job import Batch, Job
from qsync_torch.load_job import load_job

MODELS = (
    "resnet18:image=16,small_stem=true,width=8,classes=10",
    "bert-base:layers=2,hidden=64,heads=4,intermediate=128,vocab=200,seq=16",
)
SPLITS = ((40, 24), (7, 3), (2, 6, 3), (25, 4, 3))
TARGETS = {"float64": 1e-12, "float32": 1e-6}


def rows() -> list[dict[str, Any]]:
    """Run every split, and take the worst step of each format."""
    found: dict[str, list[float]] = {name: [] for name in TARGETS}
    for sizes in SPLITS:
        for name, errors in _run(sizes).items():
            found[name] += errors
    return [
        {
            "id": "U5" if name == "float64" else f"U5-{name}",
            "what": f"unequal batches: gradient in {name} against one process with the whole batch in float64, worst of all ranks "
            f"and steps ({', '.join('+'.join(map(str, sizes)) for sizes in SPLITS)} samples, partial batches, accumulation)",
            "value": max(errors),
            "unit": "of its norm",
            "spread": "",
            "target": f"≤ {TARGETS[name]:g}",
        }
        for name, errors in found.items()
    ]


def _run(sizes: tuple[int, ...]) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        command = [sys.executable, __file__, str(store), ",".join(map(str, sizes))]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        ranks = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True, env=environment)
            for rank in range(len(sizes))
        ]
        outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"a rank of the split {sizes} failed, see above")
    return {name: [e for out in outputs for e in json.loads(out)[name]] for name in TARGETS}


def _of(batch: Batch, rows: list[int], dtype: torch.dtype) -> Batch:
    """Some samples of a batch, its real numbers in a format."""
    whole = batch.size

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        leaf = leaf[rows] if leaf.dim() and leaf.shape[0] == whole else leaf
        return leaf.to(dtype) if leaf.is_floating_point() else leaf

    return Batch(*pytree.tree_map(take, (batch.args, batch.kwargs, batch.target)))


def _errors(job: Job, sizes: list[int], rank: int, dtype: torch.dtype, passes: int) -> Iterator[float]:
    """‖g − g_ref‖ / ‖g_ref‖ of every step of an epoch."""
    whole = 2 * sum(sizes) + len(sizes) + 2
    data = job.batch(0, whole)
    model, reference = copy.deepcopy(job.model).to(dtype).eval(), copy.deepcopy(job.model).double().eval()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.05)
    weight_gradients(ddp)
    sampler = UnevenBatchSampler(range(whole), sizes, rank, shuffle=False)
    for step, indices in enumerate(sampler):
        parts = [part for part in (indices[i::passes] for i in range(passes)) if part]
        for number, part in enumerate(parts):
            with ddp.no_sync() if number + 1 < len(parts) else nullcontext():
                (job.compute_loss(_of(data, part, dtype), ddp) / len(parts)).backward()
        everyone = list(range(step * sum(sizes), min(whole, (step + 1) * sum(sizes))))
        job.compute_loss(_of(data, everyone, torch.float64), reference).backward()
        difference = norm = 0.0
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            difference += float((ours.grad.double() - theirs.grad).square().sum())
            norm += float(theirs.grad.square().sum())
        yield (difference / norm) ** 0.5
        ddp.zero_grad()
        reference.zero_grad()


def main() -> None:
    """One rank of a split; prints its errors by format."""
    store, sizes, rank = sys.argv[1], [int(size) for size in sys.argv[2].split(",")], int(sys.argv[3])
    dist.init_process_group("gloo", store=dist.FileStore(store, len(sizes)), rank=rank, world_size=len(sizes))
    found: dict[str, list[float]] = {}
    for name in TARGETS:
        for model in MODELS:
            torch.manual_seed(0)
            job = load_job(model, batch_size=sum(sizes))
            for passes in (1, 3):
                found.setdefault(name, []).extend(_errors(job, sizes, rank, getattr(torch, name), passes))
    print(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # without the destructors of wrappers and a process group, which now and then abort


if __name__ == "__main__":
    main()
