"""Runs ``examples/elastic_digits.py`` and kills this process, once each, where ``ELASTIC_KILLS`` says; else leaves it as it is."""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "elastic_digits.py"
sys.path.insert(0, str(EXAMPLE.parent))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import qsync_torch  # noqa: E402
from qsync_core.artifacts import atomic_file  # noqa: E402
from qsync_torch.distributed import weighted_gradients  # noqa: E402

FOLDER, GROUP, MACHINE = Path(os.environ["ELASTIC_FOLDER"]), os.environ["QSYNC_GROUP"], os.environ["ELASTIC_MACHINE"]
KILLS = [tuple(kill.split(":")) for kill in os.environ["ELASTIC_KILLS"].split() if not (FOLDER / f"{GROUP}.{kill}").exists()]
step = 0


def die_at(moment: str) -> None:
    """Leave a note that this kill was, and go without a word."""
    for where, when in KILLS:
        if where == moment and int(when) == step:
            (FOLDER / f"{GROUP}.{where}:{when}").touch()
            os.kill(os.getpid(), signal.SIGKILL)


def watch() -> None:
    """Look for the moments: in a forward, behind an all-reduce that runs, in a checkpoint whose bytes are half on the disk."""
    micro_batches, hook, fsync = qsync_torch.AppliedPlan.micro_batches, weighted_gradients._weighted_mean, os.fsync
    save, load = qsync_torch.Checkpoints.save, qsync_torch.Checkpoints.load

    def parts(self, ddp, samples=None):
        global step
        step += 1
        for part in micro_batches(self, ddp, samples):
            die_at("forward")
            yield part

    def reduce(weighting, bucket):
        result = hook(weighting, bucket)
        die_at("all-reduce")
        return result

    def synchronise(descriptor):
        die_at("checkpoint")
        fsync(descriptor)

    def loaded(self, *arguments):
        global step
        found = load(self, *arguments)
        step = found.step if found else 0
        groups = [""] * dist.get_world_size()
        dist.all_gather_object(groups, GROUP)
        (FOLDER / f"{MACHINE}.pid").write_text(str(os.getpid()))
        with (FOLDER / "starts").open("a") as log:
            log.write(json.dumps({"groups": groups, "step": step, "machine": MACHINE, "rank": dist.get_rank()}) + "\n")
        return found

    def saved(self, *arguments):
        atomic_file.os.fsync = synchronise
        save(self, *arguments)
        atomic_file.os.fsync = fsync

    qsync_torch.AppliedPlan.micro_batches = parts
    weighted_gradients._weighted_mean = reduce
    qsync_torch.Checkpoints.load, qsync_torch.Checkpoints.save = loaded, saved


torch.use_deterministic_algorithms(True, warn_only=True)  # runs are compared to the last bit
watch()
runpy.run_path(str(EXAMPLE), run_name="__main__")
assert not dist.is_initialized()
