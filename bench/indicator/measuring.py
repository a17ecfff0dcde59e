"""One model at one seed: trained, observed by every collector, and measured.  What was measured is kept as files."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import attrs
import torch
from qsync_indicators_example.observing_hessian import HessianCollector
from qsync_indicators_example.observing_paper import PaperCollector

from indicator.models import SUBJECTS, Reached, reached
from qsync_core.artifacts.files import load, save
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.observations import Observations
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_torch.observing.closed_form import LossVarCollector
from qsync_torch.observing.hutchinson import HutchinsonCollector
from qsync_torch.observing.montecarlo import MonteCarloCollector
from qsync_torch.observing.observe import ObserveRequest, observe
from qsync_torch.tracing.trace import trace

INT8 = Variant.of(Precision.INT8, output=Precision.FLOAT32)
BFLOAT16, FLOAT32 = Variant.of(Precision.BFLOAT16), Variant.of(Precision.FLOAT32)
SETS = {
    "ladder": (INT8, BFLOAT16, FLOAT32),
    "variations": (
        attrs.evolve(INT8, w_granularity=Granularity.PER_TENSOR),
        attrs.evolve(INT8, rounding=Rounding.NEAREST),
        attrs.evolve(INT8, rounding=Rounding.FLOOR),
    ),
}
"""What is observed and measured together: what the rows are about, and other ways to quantize to int8."""
VARIATION_NAMES = ("per-tensor", "nearest", "floor")


@attrs.frozen
class Effort:
    """How much is measured.

    Attributes:
        warmup: updates before the first that is observed.
        steps: updates that indicators observe; truth_steps: those of them, from the first on, that the truth is measured at.
        draws: of the truth, for each operator, variant and update.
    """

    warmup: int = 400
    steps: int = 16
    truth_steps: int = 8
    draws: int = 8


@attrs.frozen
class Task:
    """One process's work: a model, its seed, and which variants."""

    model: str
    seed: int
    variants: str = "ladder"

    def __str__(self) -> str:
        return f"{self.model}-{self.seed}-{self.variants}"


@attrs.frozen
class Measured:
    """What a task found."""

    task: Task
    dag: PrecisionDag
    observed: Observations
    truth: Observations
    reached: Reached


@attrs.frozen
class Kept:
    """The folder of measurements; names hold whatever decides the numbers, except the code that measures."""

    folder: Path
    effort: Effort

    def path(self, task: Task, what: str) -> Path:
        """The file of one part."""
        e = self.effort
        settings = {
            "dag": "",
            "observed": f"-after{e.warmup}-steps{e.steps}",
            "truth": f"-after{e.warmup}-steps{e.truth_steps}-draws{e.draws}",
            "reached": f"-after{e.warmup}",
        }[what]
        return self.folder / f"{task}{settings}.{what}.{'json' if what == 'reached' else 'qsync'}"

    def is_complete(self, task: Task) -> bool:
        """Whether all parts of a task are there."""
        return all(self.path(task, what).exists() for what in ("dag", "observed", "truth", "reached"))

    def read(self, task: Task) -> Measured:
        """A complete task."""
        return Measured(
            task,
            load(self.path(task, "dag"), PrecisionDag),
            load(self.path(task, "observed"), Observations),
            load(self.path(task, "truth"), Observations),
            Reached(**json.loads(self.path(task, "reached").read_text(encoding="utf-8"))),
        )


def measure(task: Task, kept: Kept, say: Callable[[str], None], *, again: bool = False) -> None:
    """Measure the parts that are missing; with ``again`` all but the truth, which takes by far the longest.

    Truth and indicators are observed in two runs of the same seed, which see the same parameters, batches and dropout masks.
    """
    torch.set_num_threads(1)
    subject, effort, variants = SUBJECTS[task.model], kept.effort, SETS[task.variants]
    job = subject.job(task.seed)
    dag = trace(job)
    kept.folder.mkdir(parents=True, exist_ok=True)
    save(dag, kept.path(task, "dag"))
    asked = functools.partial(ObserveRequest, variants, warmup=effort.warmup, settled=None, seed=task.seed)
    if again or not kept.path(task, "observed").exists():
        collectors = [HutchinsonCollector(), HessianCollector(), LossVarCollector(), PaperCollector()]
        save(observe(job, dag, asked(steps=effort.steps, collectors=collectors)), kept.path(task, "observed"))
        say(f"{task}: {len(dag.adjustable)} operators observed")
    if again or not kept.path(task, "reached").exists():
        found = reached(subject, task.seed, effort.warmup)
        kept.path(task, "reached").write_text(json.dumps(attrs.asdict(found)), encoding="utf-8")
        say(f"{task}: held-out loss {found.loss:.3f}, accuracy {found.accuracy:.1%}, training loss {found.training_loss:.3f}")
    if not kept.path(task, "truth").exists():
        collector = MonteCarloCollector(effort.draws)
        save(observe(job, dag, asked(steps=effort.truth_steps, collectors=[collector])), kept.path(task, "truth"))
        say(f"{task}: measured")
