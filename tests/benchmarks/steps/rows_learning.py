"""Row L8: 400 updates with fused int8 and in float32, paired by seed: what the loss becomes is not told apart."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

import torch
from indicator.loss_curves.subjects import SUBJECTS
from indicator.loss_curves.training import be_exact, learning_rate_share
from kernels.bench import Bench, Row
from kernels.whole_model import Setting, compiled, release

import qsync_torch
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_torch.tracing.trace import trace

UPDATES, LAST, SEEDS = 400, 50, 3
STUDENT = 4.303
"""Student's t of three pairs: 2 degrees of freedom, 95% two-sided."""
MODELS = {"resnet18": "resnet18", "bert-base": "bert-base"}
TRIAL = {"resnet18": "trial-resnet", "bert-base": "trial-bert"}


def learning_rows(bench: Bench) -> Iterator[Row]:
    """L8-resnet18, L8-bert-base, and L8, the worse of them."""
    rows = []
    for model in MODELS:
        pairs = [(_final_loss(bench, model, seed, None), _final_loss(bench, model, seed, "int8")) for seed in range(SEEDS)]
        found = [low - full for full, low in pairs]
        mean, error = statistics.fmean(found), statistics.stdev(found) / math.sqrt(SEEDS)
        title = SUBJECTS[MODELS[model]].what
        what = f"{title}: loss after {UPDATES} updates, fused int8 minus float32, over {STUDENT} standard errors"
        spread = f"{mean:+.4f} ± {error:.4f} of " + ", ".join(f"{full:.4f} → {low:.4f}" for full, low in pairs)
        rows.append(bench.row(f"L8-{model}", what, abs(mean) / (STUDENT * error), "ratio", "≤ 1", spread))
    worst = max(rows, key=lambda row: row["value"])
    yield from rows
    yield bench.row("L8", f"the worse of: {worst['what']}", worst["value"], "ratio", "≤ 1", worst["spread"])


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
