"""Two gloo processes, of which one has another plan, another model, other settings or none."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import torch

from robustness.wrong.two import SCRIPTS, Pair

RIGHT = ("right", "a training step of functions")
"""What is compared with the reference; all else is refused, on both ranks."""
RANK = """
import contextlib, os, sys, torch.distributed as dist
from torch import nn
from qsync_core.errors import QSyncError
from qsync_torch import apply_
from robustness.reference import Reference
from robustness.wrong.two import *
from robustness.wrong.two_ranks import RIGHT
dist.init_process_group("gloo")
rank, what = dist.get_rank(), sys.argv[1]
model = Two()
try:
    if what == "rank without a plan" and rank == 1:
        pass
    elif what == "another plan":
        apply_(model, plan() if rank == 0 else plan({"a": BFLOAT16, "b": INT8}), group="infer")
    elif what == "another width":
        apply_(model if rank == 0 else Two(width=8), plan(weight_shapes={"a": (16, 16), "b": (16, 16)}), group="infer")
    elif what == "wrong group":
        apply_(model, plan(), group="infer" if rank == 0 else "elsewhere")
    else:
        apply_(model, plan(), group="infer")
    run = nn.parallel.DistributedDataParallel(model) if what == "right" else model
    if what == "a training step of functions":
        step = lambda m, x: (with_functions(m, x).square().sum().backward(), gradients(m))[1]
        def compared():
            twin = Two()
            with Reference(twin, BOTH).running():
                return found, step(twin, batch(rank))
    context = autocast if what == "autocast on one rank" and rank == 0 else contextlib.nullcontext
    found = inside(context, lambda m: step(m, batch(rank)))(run)
    if what == "right":
        def compared():
            grads = []
            for seed in range(2):
                twin = Two()
                with Reference(twin, BOTH).running():
                    grads.append(step(twin, batch(seed))[1:])
            return found[1:], [(a + b) / 2 for a, b in zip(*grads)]
    if what in RIGHT:
        compare_with_either(compared)
    print("right" if what in RIGHT or what == "rank without a plan" and rank == 1 else "silent", flush=True)
except QSyncError as error:
    print("refused", str(error).replace("\\n", "|"), flush=True)
os._exit(0)
"""


def ranks(what: str) -> Pair:
    """Two gloo processes; each is right or says one sentence."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")])
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "QSYNC_RANK_TIMEOUT_S": "6",
              "PYTHONPATH": path}  # fmt: skip
    processes = [
        subprocess.Popen([sys.executable, "-c", RANK, what], env={**common, "RANK": str(rank)}, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=120) for process in processes]
    lines = [out.strip().split("\n")[-1] for out, _ in said]
    if any(not line.startswith(("right", "refused")) or "|" in line for line in lines):
        raise AssertionError(f"{lines} {[err[-800:] for _, err in said]}")
    expected = [what in RIGHT, what in RIGHT or what == "rank without a plan"]
    return torch.tensor([line == "right" for line in lines]).float(), torch.tensor(expected).float()


for _what in (
    "right",
    "rank without a plan",
    "another plan",
    "another width",
    "wrong group",
    "autocast on one rank",
    "a training step of functions",
):
    SCRIPTS[f"two_ranks_{_what.replace(' ', '_')}"] = ((lambda what: lambda: ranks(what))(_what), ())
