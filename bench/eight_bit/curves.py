"""Row P10: a Llama-like model trained on the text of Python's library, in 8 bit and in bfloat16, from the same seeds."""

from __future__ import annotations

import json
import math
import statistics
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import attrs
import torch

from eight_bit.steps import BASE, WAYS, Attention, Shape, Way, llama, run_of
from kernels.bench import Bench, Row

UPDATES, WARM_UP, LAST = 300, 30, 30
"""Updates of a run, those in which the learning rate rises, and those over which the final loss is averaged."""
SEEDS = 3
LEARNING_RATE = 3e-4
SHAPE = llama("Llama-like, 8 layers", 2048, 8192, 8, 4, 2048, Attention.CAUSAL)
WAY = next(way for way in WAYS if way.name == "int8, a scale a row")


@cache
def text() -> torch.Tensor:
    """The bytes of the modules of Python's library, in the order of their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))), dtype=torch.uint8)


def losses(way: Way, seed: int, bench: Bench, folder: Path) -> list[float]:
    """The loss of every update, read from the folder where an earlier call has trained this."""
    updates = 4 if bench.quick else UPDATES
    kept = folder / f"{way.name.replace(' ', '-')}-{seed}-{updates}.json"
    if kept.exists():
        found: list[float] = json.loads(kept.read_text())
        return found
    shape = attrs.evolve(SHAPE, arguments={**SHAPE.arguments, "vocab_size": 256})
    found = _trained(way, shape, seed, updates, bench)
    folder.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(found))
    bench.say(f"{way.name}, seed {seed}: loss {found[-1]:.4f}")
    return found


def _trained(way: Way, shape: Shape, seed: int, updates: int, bench: Bench) -> list[float]:
    model, run = run_of(way, shape, bench.device, bench.quick, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=bench.device.type == "cuda")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: min(1.0, (update + 1) / WARM_UP))
    batch, length = (2, 32) if bench.quick else (shape.batch, shape.length)
    source, order = text(), torch.Generator().manual_seed(seed)
    found = []
    for _ in range(updates):
        begins = torch.randint(len(source) - length, (batch,), generator=order).tolist()
        tokens = torch.stack([source[begin : begin + length] for begin in begins]).to(bench.device).long()
        with torch.autocast(bench.device.type, torch.bfloat16):
            loss = run(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        found.append(loss.detach())
    return torch.stack(found).tolist()


def apart(curves: Mapping[Way, Sequence[Sequence[float]]]) -> tuple[float, float]:
    """The mean difference of the final losses, of pairs of equal seeds, and its standard error."""
    final = {way: [statistics.fmean(run[-LAST:]) for run in runs] for way, runs in curves.items()}
    differences = [low - base for low, base in zip(final[WAY], final[BASE], strict=True)]
    return statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(len(differences))


def rows(bench: Bench, folder: Path) -> Iterator[Row]:
    """The row, once every run is there; a call that is stopped leaves the runs that it has finished in the folder."""
    curves: dict[Way, list[list[float]]] = {BASE: [], WAY: []}
    for seed in range(SEEDS):
        for way, runs in curves.items():
            runs.append(losses(way, seed, bench, folder))
    mean, error = apart(curves)
    told = "; ".join(
        f"{way.name} {', '.join(f'{statistics.fmean(run[-LAST:]):.4f}' for run in runs)}" for way, runs in curves.items()
    )
    what = f"{SHAPE.title}: loss of the last {LAST} of {UPDATES} updates, {WAY.name} against bfloat16, pairs of {SEEDS} seeds"
    yield bench.row("P10", f"{what}: difference over its standard error", abs(mean) / error, "", "≤ 2", f"{mean:+.4f}; {told}")
