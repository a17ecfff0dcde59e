"""What the plans' indicators observed: once for each model, at seed 0, kept as files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from qsync_indicators_example.observing_paper import PaperCollector

from indicator.loss_curves.subjects import SUBJECTS
from indicator.loss_curves.training import be_exact
from indicator.measuring import FLOAT32, INT8
from qsync_core.artifacts.files import load, save
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.observations import Observations
from qsync_torch.observing.hutchinson import HutchinsonCollector
from qsync_torch.observing.observe import ObserveRequest, observe
from qsync_torch.tracing.trace import trace

OBSERVED = (INT8, FLOAT32)
WARMUP, STEPS = 100, 8
Found = tuple[PrecisionDag, Observations]


def observed(model: str, folder: Path, device: str, warmup: int, steps: int, say: Callable[[str], None]) -> Found:
    """From the folder, or observed now."""
    paths = folder / f"{model}.dag.qsync", folder / f"{model}-after{warmup}-steps{steps}.observed.qsync"
    if not all(path.exists() for path in paths):
        be_exact()
        job = SUBJECTS[model].job(0)
        dag = trace(job)
        say(f"{model}: observing {len(dag.adjustable)} operators")
        collectors = [HutchinsonCollector(), PaperCollector()]
        found = observe(
            job, dag, ObserveRequest(OBSERVED, warmup=warmup, steps=steps, device=device, collectors=collectors, settled=None)
        )
        folder.mkdir(parents=True, exist_ok=True)
        save(dag, paths[0])
        save(found, paths[1])
        say(f"{model}: observed")
    return load(paths[0], PrecisionDag), load(paths[1], Observations)
