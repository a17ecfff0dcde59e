"""Row L5: a job of two ranks, the second of which has half of the memory that PyTorch's AMP float16 takes."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from kernels.bench import Bench, Row

from .jobs import RESNET

HERE = Path(__file__).resolve().parent
RANKS = 2


def capped_rows(bench: Bench) -> Iterator[Row]:
    """L5.

    Raises:
        RuntimeError: where there are fewer than two GPUs, or a rank failed.
    """
    if bench.device.type == "cuda" and torch.cuda.device_count() < RANKS:
        raise RuntimeError(f"L5 needs {RANKS} GPUs, and this machine has {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        command += [str(HERE / "capped_rank.py"), str(out), *(["--tiny"] if bench.quick else [])]
        path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH", "")]))
        own = os.environ | {"PYTHONPATH": path, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        done = subprocess.run(command, env=own, capture_output=True, text=True, check=False, timeout=540)
        if done.returncode:
            raise RuntimeError(f"a rank of L5 failed:\n{(done.stdout + done.stderr)[-3000:]}")
        found = json.loads(out.read_text())
    gib = {name: found[f"{name}_bytes"] / 2**30 for name in ("amp", "cap", "weak")}
    what = (
        f"{RESNET.title} per rank, two ranks: step with the second one in int8 within {gib['cap']:.3g} GiB, half of AMP's "
        f"{gib['amp']:.3g}, its first stage computed again in backward, over float16 on both without that cap"
    )
    for id_, name, title, bound in (
        ("L5", "fused", "with our fused chains", "≤ 1.05"),
        ("L5-plain", "plain", "compiled", "reported"),
    ):
        ratios = [a / b for a, b in zip(found["capped_ms"], found[f"{name}_ms"], strict=True)]
        spread = f"{min(ratios):.3f} to {max(ratios):.3f} of {len(ratios)} blocks; the second rank reserved {gib['weak']:.3g} GiB"
        yield bench.row(id_, f"{what}, {title}", statistics.median(ratios), "ratio", bound, spread)
