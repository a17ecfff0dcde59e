"""Row L8: 400 updates with fused int8 and in float32, paired by seed: what the loss becomes is not told apart."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path

import torch

import qsync_torch
from indicator.loss_curves.subjects import SUBJECTS
from indicator.loss_curves.training import be_exact, learning_rate_share
from kernels.bench import Bench, Row
from kernels.whole_model import Setting, compiled, release
from qsync_core.artifacts.atomic_file import write_atomically
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_torch.tracing.trace import trace
from results import commit

UPDATES, LAST, SEEDS = 400, 50, 3
STUDENT = 4.303
"""Student's t of three pairs: 2 degrees of freedom, 95% two-sided."""
MODELS = {"resnet18": "resnet18", "bert-base": "bert-base"}
TRIAL = {"resnet18": "trial-resnet", "bert-base": "trial-bert"}


def learning_rows(bench: Bench) -> Iterator[Row]:
    """L8-resnet18, L8-bert-base, and L8, the worse of them.

    Losses are kept in the folder of profiles as they come, and a run of the same commit on the same device goes on from there.
    """
    losses = _Losses(bench)
    rows = []
    for model in MODELS:
        pairs = [(losses.of(model, seed, None), losses.of(model, seed, "int8")) for seed in range(SEEDS)]
        found = [low - full for full, low in pairs]
        mean, error = statistics.fmean(found), statistics.stdev(found) / math.sqrt(SEEDS)
        title = SUBJECTS[MODELS[model]].what
        what = f"{title}: loss after {UPDATES} updates, fused int8 minus float32, over {STUDENT} standard errors"
        spread = f"{mean:+.4f} ± {error:.4f} of " + ", ".join(f"{full:.4f} → {low:.4f}" for full, low in pairs)
        rows.append(bench.row(f"L8-{model}", what, abs(mean) / (STUDENT * error), "ratio", "≤ 1", spread))
        yield rows[-1]
    worst = max(rows, key=lambda row: row["value"])
    yield bench.row("L8", f"the worse of: {worst['what']}", worst["value"], "ratio", "≤ 1", worst["spread"])


class _Losses:
    """Final losses by model, seed and what is kept; in a file, if there is a folder for it."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        of_run = f"L8-losses-{commit()}-{bench.device_name}{'-tiny' if bench.quick else ''}.json"
        self._path: Path | None = None if bench.out is None else bench.out / of_run.replace(" ", "-")
        self._found: dict[str, float] = json.loads(self._path.read_text()) if self._path and self._path.exists() else {}

    def of(self, model: str, seed: int, saved: str | None) -> float:
        """The loss, trained for if it is not known."""
        key = f"{model} {seed} {saved}"
        if key not in self._found:
            self._found[key] = _final_loss(self._bench, model, seed, saved)
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self._path, json.dumps(self._found, indent=1).encode())
        return self._found[key]


def _final_loss(bench: Bench, model_name: str, seed: int, saved: str | None) -> float:
    """Mean of the last losses, in nats."""
    be_exact()
    updates = 6 if bench.quick else UPDATES
    job = SUBJECTS[(TRIAL if bench.quick else MODELS)[model_name]].job(seed)
    for module in job.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # compilers draw other masks than eager PyTorch
    operators: list[OpId] = [] if saved is None else [operator.op_id for operator in trace(job).adjustable]
    model = job.model.to(bench.device).train()
    run = model
    if saved is not None:
        variant = Variant.of(Precision.INT8, sixteen_bit=Precision.BFLOAT16, output=Precision.BFLOAT16)
        backend = "triton+aten" if bench.device.type == "cuda" else "aten"
        qsync_torch.apply_(model, dict.fromkeys(operators, variant), seed=seed, backend=backend)
        run = compiled(model, Setting("fused", variant, fused=True, saved=saved), bench.device)
    optimizer = job.optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: learning_rate_share(update, updates))
    losses = torch.empty(updates, device=bench.device)
    for update in range(updates):
        loss = job.compute_loss(job.batch(update, job.batch_size).to(bench.device), run)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        losses[update] = loss.detach()
    final = losses[-LAST:].mean().item()
    bench.say(f"{model_name}, seed {seed}, {'float32' if saved is None else 'fused int8'}: {final:.4f}")
    del model, run, optimizer
    release()
    return final
