"""What the plans' indicators observed: once for each model, at seed 0, kept as files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch
from qsync_indicators_example.observing_hessian import HessianCollector
from qsync_indicators_example.observing_paper import PaperCollector

from indicator.accuracy.methods import OBSERVED
from indicator.models import SUBJECTS
from qsync_core.artifacts.files import load, save
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.observations import Observations
from qsync_torch.observing.hutchinson import HutchinsonCollector
from qsync_torch.observing.observe import ObserveRequest, observe
from qsync_torch.tracing.trace import trace

WARMUP, STEPS = 400, 16
"""As where these indicators are compared with the truth."""


def observed(model: str, folder: Path, say: Callable[[str], None]) -> tuple[PrecisionDag, Observations]:
    """From the folder, or observed now; the file's name says which variants were asked about."""
    asked = hashlib.sha256("\n".join(map(str, OBSERVED)).encode()).hexdigest()[:8]
    paths = folder / f"{model}.dag.qsync", folder / f"{model}-after{WARMUP}-steps{STEPS}-{asked}.observed.qsync"
    if not all(path.exists() for path in paths):
        torch.set_num_threads(1)
        job = SUBJECTS[model].job(0)
        dag = trace(job)
        collectors = [HutchinsonCollector(), HessianCollector(), PaperCollector()]
        say(f"{model}: observing {len(dag.adjustable)} operators")
        found = observe(job, dag, ObserveRequest(OBSERVED, warmup=WARMUP, steps=STEPS, collectors=collectors, settled=None))
        folder.mkdir(parents=True, exist_ok=True)
        save(dag, paths[0])
        save(found, paths[1])
    return load(paths[0], PrecisionDag), load(paths[1], Observations)
