"""Row L5: a job of two ranks, the second of which has half of the memory that PyTorch's AMP float16 takes."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from hybrid.processes import finish, start_ranks
from kernels.bench import Bench, Row

from .jobs import RESNET

HERE = Path(__file__).resolve().parent
RANKS = 2
SECONDS = 540.0
OVER = {"fused": "with our fused chains", "plain": "compiled by PyTorch alone"}
"""What the capped step is compared with: the row L5 is over the faster of both, which have rows of their own."""


def capped_rows(bench: Bench, *, tuned: bool) -> Iterator[Row]:
    """L5-fused, L5-plain and L5, as far as they were measured when the ranks had to end.

    Raises:
        RuntimeError: where there are fewer than two GPUs, or nothing was measured.
    """
    if bench.device.type == "cuda" and torch.cuda.device_count() < RANKS:
        raise RuntimeError(f"L5 needs {RANKS} GPUs, and this machine has {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        log = (bench.out or Path(folder)) / "L5.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        settings = {"--tiny": bench.quick, "--untuned": not tuned}
        command = [sys.executable, HERE / "capped_rank.py", out, *(name for name, holds in settings.items() if holds)]
        finish(start_ranks("L5", command, log, {}, of_weak={}), SECONDS)
        if not out.exists():
            raise RuntimeError(f"the ranks of L5 measured nothing; what they say is in {log.with_suffix('.0.log')} and .1.log")
        found = json.loads(out.read_text())
    yield from rows_of(bench, found)


def rows_of(bench: Bench, found: Mapping[str, Any]) -> Iterator[Row]:
    """The rows of what rank 0 wrote."""
    gib = {name: found[f"{name}_bytes"] / 2**30 for name in ("amp", "cap", "weak")}
    what = (
        f"{RESNET.title} per rank, two ranks: step with the second one in int8 ({found['mode']}) within {gib['cap']:.3g} GiB, half "
        f"of AMP's {gib['amp']:.3g}, its first {found['blocks']} blocks computed again in backward, over float16 on both without "
        "that cap, one after the other"
    )

    def row(id_: str, title: str, under: str, bound: str) -> Row:
        sides = found["capped_ms"], found[f"{under}_ms"]
        ratios = [a / b for a, b in zip(*sides, strict=True)]
        times = " over ".join(f"{statistics.median(ms):.2f} ms ({min(ms):.2f} to {max(ms):.2f})" for ms in sides)
        spread = f"{min(ratios):.3f} to {max(ratios):.3f} of {len(ratios)} blocks; {times}; "
        spread += f"the second rank reserved {gib['weak']:.3g} GiB"
        if left := found["capped_left"] + found[f"{under}_left"]:
            spread += f"; {left} graphs of both sides were left to the CPU"
        return bench.row(id_, f"{what}, {title}", statistics.median(ratios), "ratio", bound, spread)

    measured = [name for name in OVER if f"{name}_ms" in found]
    for name in measured:
        yield row(f"L5-{name}", OVER[name], name, "reported")
    if len(measured) == len(OVER):
        faster = min(measured, key=lambda name: statistics.median(found[f"{name}_ms"]))
        yield row("L5", f"the faster of two: {OVER[faster]}", faster, "≤ 1.05")
