"""What every rank of a small gloo job runs: its weighted gradients against one process with the whole batch in float64.

``python weighting_ranks.py RANK STORE SIZES [gloo|nccl] [cpu|cuda]`` prints as JSON, by case, the relative error of the gradient in
every step.  With nccl, each rank has the GPU of its number.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from qsync_torch import InStepGradScaler, UnevenBatchSampler, weight_gradients

rank, store, sizes = int(sys.argv[1]), sys.argv[2], [int(size) for size in sys.argv[3].split(",")]
backend, kind = sys.argv[4:6] or ("gloo", "cpu")
device = torch.device(kind, rank if backend == "nccl" else 0) if kind == "cuda" else torch.device("cpu")
if kind == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group(backend, store=dist.FileStore(store, len(sizes)), rank=rank, world_size=len(sizes))
WHOLE = sum(sizes)
SAMPLES = 2 * WHOLE + len(sizes) + 2
PADDING = -100


class Model(torch.nn.Module):
    """Two classes for each of three tokens; the loss does not see ``unused``."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.nn.Linear(5, 7)
        self.unused = torch.nn.Linear(2, 2)
        self.out = torch.nn.Linear(7, 6)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.out(torch.tanh(self.hidden(x))).unflatten(1, (3, 2))}


def loss_of(output: dict[str, torch.Tensor], y: torch.Tensor, reduction: str) -> torch.Tensor:
    return F.cross_entropy(output["logits"].flatten(0, 1), y.flatten(), reduction=reduction, ignore_index=PADDING)


def gradient(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


class Case:
    """One job, from one initial state and data set."""

    def __init__(self, dtype: torch.dtype = torch.float64, **options: Any) -> None:
        torch.manual_seed(0)
        model = Model()
        if not options.get("find_unused_parameters"):
            model.unused.requires_grad_(False)
        self.x, self.y = torch.randn(SAMPLES, 5, dtype=dtype).to(device), torch.randint(0, 2, (SAMPLES, 3)).to(device)
        self.model, self.reference = model.to(device, dtype), copy.deepcopy(model).double().to(device)
        self.ddp = DistributedDataParallel(self.model, **{"bucket_cap_mb": 1e-4} | options)

    def expected(self, indices: list[int], reduction: str = "mean") -> torch.Tensor:
        self.reference.zero_grad()
        loss_of(self.reference(self.x[indices].double()), self.y[indices], reduction).backward()
        return gradient(self.reference)

    def backward(self, indices: list[int], reduction: str = "mean", share: int = 1) -> None:
        (loss_of(self.ddp(self.x[indices]), self.y[indices], reduction) / share).backward()

    def error(self, indices: list[int], reduction: str = "mean") -> float:
        expected = self.expected(indices, reduction)
        found = float((gradient(self.model) - expected).norm() / expected.norm())
        self.ddp.zero_grad()
        return found

    def epoch(self, passes: int = 1, reduction: str = "mean", join: bool = False) -> list[float]:
        """Every step of an epoch, the last one of fewer samples; ``passes`` accumulate, of unequal sizes in some steps."""
        sampler, errors = UnevenBatchSampler(self.x, sizes, join=join), []
        order = sampler._order()
        with self.ddp.join() if join else nullcontext():
            for step, indices in enumerate(sampler):
                parts = [part for part in (indices[i::passes] for i in range(passes)) if part]
                for number, part in enumerate(parts):
                    with nullcontext() if number == len(parts) - 1 else self.ddp.no_sync():
                        self.backward(part, reduction, len(parts))
                errors.append(self.error(order[step * WHOLE : (step + 1) * WHOLE], reduction))
        return errors


def plain(**options: Any) -> Case:
    case = Case(**options)
    weight_gradients(case.ddp)
    return case


def summed() -> list[float]:
    case = Case()
    weight_gradients(case.ddp, reduction="sum")
    return case.epoch(reduction="sum")


def by_token() -> list[float]:
    """A mean over tokens that are no padding, which rank 0 has fewer of than samples, and in the second step none."""
    case = Case()
    weight_gradients(case.ddp, count=lambda x: (case.y[case.rows] != PADDING).sum())
    sampler, errors = UnevenBatchSampler(case.x, sizes, shuffle=False, drop_last=True), []
    case.y[: sizes[0] - 1, 1:] = PADDING
    for step, indices in enumerate(sampler):
        if step == 1 and rank == 0:
            case.y[indices] = PADDING
        everyone = list(range(step * WHOLE, (step + 1) * WHOLE))
        labels = [torch.empty_like(case.y) for _ in sizes]
        dist.all_gather(labels, case.y)
        case.y = torch.stack(labels).amin(0)
        case.rows = indices
        case.backward(indices)
        errors.append(case.error(everyone))
    return errors


def empty_batch() -> list[float]:
    """Rank 1 has no samples of one step: its loss is a mean over none."""
    case = plain()
    rows = [list(range(i * 3, i * 3 + 3)) if i != 1 else [] for i in range(len(sizes))]
    case.backward(rows[rank])
    return [case.error([index for part in rows for index in part])]


def joined() -> list[float]:
    """An epoch whose last global batch has one sample, of the rank with the largest batch."""
    case = plain()
    case.x, case.y = case.x[: WHOLE + 1], case.y[: WHOLE + 1]
    errors = case.epoch(join=True)
    assert len(errors) == (2 if sizes[rank] == max(sizes) else 1)
    return errors


def siamese() -> list[float]:
    """Two forwards before a backward; a forward in between that no backward comes to."""
    case = plain()
    sampler = UnevenBatchSampler(case.x, sizes, shuffle=False)
    indices = next(iter(sampler))
    first, _, second = (case.ddp(case.x[rows]) for rows in (indices, [0], indices))
    (loss_of(first, case.y[indices], "mean") / 2 + loss_of(second, case.y[indices], "mean") / 2).backward()
    return [case.error(list(range(WHOLE)))]


def scaled_and_clipped() -> list[float]:
    """The parameters after a step with a loss scale and a clipped norm."""
    case = plain()
    optimizer = torch.optim.SGD(case.ddp.parameters(), lr=1.0)
    scaler = InStepGradScaler(device.type, init_scale=1024.0)
    indices = next(iter(UnevenBatchSampler(case.x, sizes, shuffle=False)))
    scaler.scale(loss_of(case.ddp(case.x[indices]), case.y[indices], "mean")).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(case.ddp.parameters(), 0.1)
    case.expected(list(range(WHOLE)))
    torch.nn.utils.clip_grad_norm_(case.reference.parameters(), 0.1)
    error = float((gradient(case.model) - gradient(case.reference)).norm() / gradient(case.reference).norm())
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 1024.0
    return [error]


def buckets() -> list[float]:
    """How many buckets a step has, by a hook of the script's own."""
    case, seen = Case(), []

    def recording(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Any:
        seen.append(bucket.index())
        return allreduce_hook(group, bucket)

    recording.__annotations__ = {}
    weight_gradients(case.ddp, hook=recording)
    assert max(case.epoch()) < 1e-12
    return [float(max(seen) + 1)]


def compressed() -> list[float]:
    case = Case()
    weight_gradients(case.ddp, hook=bf16_compress_hook)
    return case.epoch()


def refused(message: str, run: Any) -> list[float]:
    try:
        run()
        error = "nothing"
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    assert error == message, error
    return [0.0]


def other_batches() -> None:
    case = Case()
    weight_gradients(case.ddp, local_batch=sizes[rank])
    case.backward(list(range(4)))


def past_the_output() -> None:
    case = plain()
    case.ddp(case.x)
    sum(p.square().sum() for p in case.model.parameters()).backward()


def multiples() -> list[float]:
    """Three accumulating passes of a local batch each, and an epoch that begins with a partial batch, are as planned."""
    case = Case()
    weight_gradients(case.ddp, local_batch=sizes[rank])
    errors = case.epoch(passes=1)
    again = Case()
    weight_gradients(again.ddp, local_batch=sizes[rank])
    sampler = UnevenBatchSampler(again.x, sizes, shuffle=False)
    first, second = list(sampler)[:2]
    with again.ddp.no_sync():
        again.backward(first, share=2)
    again.backward(second, share=2)
    return [*errors, again.error(list(range(2 * WHOLE)))]


def compiled() -> list[float]:
    case = plain(bucket_cap_mb=25)
    case.ddp = torch.compile(case.ddp, backend="aot_eager")
    return case.epoch()


planned = " + ".join(map(str, sizes))
everyone = 4 * len(sizes)
first_share = {"7,3": 6, "2,6,3": 2}[sys.argv[3]]  # 5.6 + 2.4 and 2.2 + 6.5 + 3.3 samples
CASES = {
    "float64": lambda: plain().epoch(),
    "float32": lambda: plain(dtype=torch.float32).epoch(),
    "unweighted": lambda: Case().epoch(),
    "bucket views": lambda: plain(gradient_as_bucket_view=True).epoch(),
    "static graph": lambda: plain(static_graph=True).epoch(),
    "unused parameters": lambda: plain(find_unused_parameters=True).epoch(),
    "accumulated": lambda: plain().epoch(passes=2),
    "accumulated in views": lambda: plain(gradient_as_bucket_view=True).epoch(passes=3),
    "summed": summed,
    "by token": by_token,
    "empty batch": empty_batch,
    "joined": joined,
    "siamese": siamese,
    "scaled and clipped": scaled_and_clipped,
    "buckets": buckets,
    "compressed": compressed,
    "multiples": multiples,
    "compiled": compiled,
    "other batches": lambda: refused(
        f"PlanError: rank 0 trained on 4 of the {everyone} samples of the first step, and the plan's local batches ({planned}) "
        f"give it {first_share}: take batches of applied.local_batch samples, or DataLoader(dataset, "
        "batch_sampler=applied.batch_sampler(dataset))",
        other_batches,
    ),
    "past the output": lambda: refused(
        "PlanError: gradients came to DistributedDataParallel before a backward pass came to its output, so that their samples are "
        "not known: call the wrapper in every step, and let the loss depend on its output",
        past_the_output,
    ),
}
found = {}
for name, run in CASES.items():
    found[name] = run()
    dist.barrier()
print(json.dumps(found))
sys.stdout.flush()
os._exit(0)  # without the destructors of wrappers and a process group, which now and then abort
