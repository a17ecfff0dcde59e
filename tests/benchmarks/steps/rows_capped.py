"""Row L5: a job of two ranks, the second of which has half of the memory that PyTorch's AMP float16 takes."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from hybrid.processes import finish, start_ranks
from kernels.bench import Bench, Row

from .jobs import RESNET

HERE = Path(__file__).resolve().parent
RANKS = 2
SECONDS = 540.0
OVER = (("L5", "fused", "with our fused chains", "≤ 1.05"), ("L5-plain", "plain", "compiled", "reported"))
"""Rows, what the step is compared with, and the bound."""


def capped_rows(bench: Bench, *, tuned: bool) -> Iterator[Row]:
    """L5 and L5-plain, as far as they were measured when the ranks had to end.

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
    gib = {name: found[f"{name}_bytes"] / 2**30 for name in ("amp", "cap", "weak")}
    blocks = "first block" if found["blocks"] == 1 else f"first {found['blocks']} blocks"
    what = (
        f"{RESNET.title} per rank, two ranks: step with the second one in int8 ({found['mode']}) within {gib['cap']:.3g} GiB, half "
        f"of AMP's {gib['amp']:.3g}, its {blocks} computed again in backward, over float16 on both without that cap, one after the "
        "other"
    )
    for id_, name, title, bound in OVER:
        if under := found.get(f"{name}_ms"):
            ratios = [a / b for a, b in zip(found["capped_ms"], under, strict=True)]
            spread = (
                f"{min(ratios):.3f} to {max(ratios):.3f} of {len(ratios)} blocks; the second rank reserved {gib['weak']:.3g} GiB"
            )
            if left := found["capped_left"] + found[f"{name}_left"]:
                spread += f"; {left} graphs of both sides were left to the CPU"
            yield bench.row(id_, f"{what}, {title}", statistics.median(ratios), "ratio", bound, spread)
