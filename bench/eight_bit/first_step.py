"""Row P6: seconds to the first step of a new model in 8 bit, beyond those to the first step under ``torch.compile``.

Each start is a process of its own, with empty caches: for compiled graphs, Triton's kernels, tuning and compiled CUTLASS kernels.
The second start in 8 bit keeps the CUTLASS kernels of the first, which it compiled beside its steps.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import torch

import qsync_torch as qsync
from eight_bit.in_turns import COMPILES
from eight_bit.steps import ALL, SHAPES, batch_of, linears_of, made
from kernels.bench import Bench, Row
from qsync_core.ir.precision import Precision

BASE, INT8 = "torch.compile", "int8"
STEPS = 20
"""Steps behind the first, whose median is reported."""
SHAPE = "P1"


@attrs.frozen
class Started:
    """What a process has done: seconds to its first step, the median of those behind it, seconds until no compiler ran any more."""

    first_s: float
    step_ms: float
    compilers_s: float


def rows(bench: Bench) -> Iterator[Row]:
    """P6, and beside it the next start's first step and what a step takes on kernels that stand in for those being compiled."""
    with tempfile.TemporaryDirectory(prefix="first-step-") as folder:
        kernels = Path(folder) / "kernels"
        plain = started(BASE, bench, Path(folder) / "plain", kernels)
        first = started(INT8, bench, Path(folder) / "first", kernels)
        again = started(INT8, bench, Path(folder) / "again", kernels)
    title = f"{SHAPES[SHAPE].title}, int8, all three products, qsync.compile"
    told = f"torch.compile {plain.first_s:.1f} s, int8 {first.first_s:.1f} s, int8 again {again.first_s:.1f} s"
    told += f"; compilers beside it for {first.compilers_s:.0f} s"
    yield bench.row("P6", f"{title}: first step beyond torch.compile's", first.first_s - plain.first_s, "s", "≤ 60", told)
    yield bench.row("P6-again", f"{title}: the next start's", again.first_s - plain.first_s, "s", "reported", told)
    steps = f"{first.step_ms:.1f} and {again.step_ms:.1f} ms"
    over = first.step_ms / again.step_ms
    yield bench.row("P6-stand-ins", f"{title}: step of the first start over the next one's", over, "ratio", "reported", steps)


def started(way: str, bench: Bench, caches: Path, kernels: Path) -> Started:
    """Start a process with caches of its own.

    Raises:
        RuntimeError: with what it said, when it fails.
    """
    own = {name: str(caches / name.lower()) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "QSYNC_TUNING")}
    environment = os.environ | own | {"QSYNC_KERNEL_CACHE": str(kernels), "QSYNC_WAIT_FOR_KERNELS": "0"}
    caches.mkdir(mode=0o700)
    line = [sys.executable, "-m", "eight_bit.first_step", way, *(["--tiny"] if bench.quick else [])]
    done = subprocess.run(line, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[1], check=False)
    if done.returncode:
        raise RuntimeError(f"{way} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    found = Started(**json.loads(done.stdout.splitlines()[-1]))
    bench.say(f"{way}: first step after {found.first_s:.1f} s; {' '.join(said(done.stderr))}")
    return found


def said(text: str) -> list[str]:
    """What QSync said of kernels that were compiled."""
    return [line.strip() for line in text.splitlines() if line.startswith("qsync:") or "has yet to compile" in line]


def start(way: str, quick: bool) -> Started:
    """Train in this process: one step, some more, and wait for compilers."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options = {} if device.type == "cuda" else {"backend": "aot_eager"}
    shape = SHAPES[SHAPE]
    model, batch = made(shape, quick).to(device).train(), batch_of(shape, device, quick)
    wait_for(device)
    begun = time.monotonic()
    if way == INT8:
        applied = qsync.apply_(model, {f"{name}#0": ALL for name in linears_of(model)}, base=Precision.BFLOAT16)
        run: Callable[..., object] = qsync.compile(applied, **options)
    else:
        run = torch.compile(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")

    def step() -> float:
        since = time.monotonic()
        with torch.autocast(device.type, torch.bfloat16):
            loss = run(**batch).loss  # type: ignore[attr-defined]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wait_for(device)
        return time.monotonic() - since

    step()
    first_s = time.monotonic() - begun
    step_ms = statistics.median(1e3 * step() for _ in range(3 if quick else STEPS))
    for thread in threading.enumerate():
        if thread.name == COMPILES:
            thread.join()
    return Started(first_s, step_ms, time.monotonic() - begun)


def wait_for(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    print(json.dumps(attrs.asdict(start(sys.argv[1], "--tiny" in sys.argv))))
