"""The workers' first task: calibrate the weak one, profile both groups at the same time, observe."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import attrs
import torch

from qsync_core.artifacts.files import load, save
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.variant import Variant
from qsync_torch.demo.messages import GROUPS, Measured, MeasureTask, Rendezvous, report, write_json
from qsync_torch.demo.weak_worker import Weakness, WeakWorker
from qsync_torch.demo.workloads import load_workload
from qsync_torch.job import Job
from qsync_torch.observing.observe import observe
from qsync_torch.profiling.collective import measure_collective
from qsync_torch.profiling.profile import CAST_EFFORT, OPERATOR_EFFORT, profile
from qsync_torch.profiling.whole_step import StepRunner, measure_while
from qsync_torch.timing import Effort

_STEPS = Effort(min_repeats=3, max_repeats=40, target=0.005, budget_s=2.5, warmup=0)
"""The effort for whole steps: more than a profile usually spends, because QSync fills what it predicts to be free completely."""
_RATIO_SECONDS = 1.5
_LEAST_STEPS = 3
_LEAST = Effort(min_repeats=2, max_repeats=2, budget_s=0.0)
_EFFORTS = {
    "whole": (OPERATOR_EFFORT, CAST_EFFORT, _STEPS),
    "short": (
        Effort(min_repeats=3, max_repeats=20, budget_s=0.1),
        Effort(min_repeats=3, max_repeats=10, budget_s=0.02),
        Effort(min_repeats=3, max_repeats=12, budget_s=2.0, warmup=0),
    ),
    "least": (_LEAST, _LEAST, _LEAST),
}
"""The efforts for operators, casts and whole steps, by :attr:`MeasureTask.effort`."""


def measure(task: MeasureTask, rendezvous: Rendezvous, core: int) -> None:
    """Leaves ``measured.json``, a profile per group and ``observations.qsync`` in the task's folder."""
    folder, rank = Path(task.folder), rendezvous.rank
    dag = load(Path(task.dag), PrecisionDag)
    job = load_workload(task.model, tiny=task.tiny, batch_size=task.batch_size).job()
    runner = StepRunner.start(job, torch.device("cpu"))
    weak = WeakWorker(core, prefer=task.prefer) if rank else None
    try:
        measured = _calibrate(task, rendezvous, runner, weak)
        if rank == 0:
            write_json(measured, folder / "measured.json")
        _profile(task, rendezvous, job, dag, runner, _share(measured, rank))
    finally:
        if weak:
            weak.close()


def _share(measured: Measured, rank: int) -> float:
    """The share of a core that a rank's profile is for: what it turned out to be, by the time of its step."""
    return 1.0 if rank == 0 else round(1 / max(1.0, measured.ratio), 3)


def _calibrate(task: MeasureTask, rendezvous: Rendezvous, runner: StepRunner, weak: WeakWorker | None) -> Measured:
    """Both workers run float32 steps in turns until the weak one's take the wanted multiple of the strong one's."""
    rounds = 0
    last: StepRatio | None = None

    def measure_ratio() -> float:
        nonlocal rounds, last
        rounds += 1
        if weak is None:
            report(rounds, WeakWorker.ROUNDS + 1, "making the weak worker weak")
        last = measure_step_ratio(runner, rendezvous, quick=task.effort == "least")
        return last.ratio

    if weak is None:
        for _ in range(WeakWorker.ROUNDS):
            measure_ratio()
    else:
        weak.calibrate(measure_ratio)
    found = rendezvous.gather(attrs.asdict(weak.weakness) if weak else None)[1]
    ratio = measure_ratio()
    assert last is not None
    return Measured(Weakness(**found), ratio, dict(zip(GROUPS, last.medians_ns, strict=True)), last.core_shares[0])


def _profile(task: MeasureTask, rendezvous: Rendezvous, job: Job, dag: PrecisionDag, runner: StepRunner, share: float) -> None:
    folder, rank = Path(task.folder), rendezvous.rank
    operators, casts, steps = _EFFORTS[task.effort]
    rungs = tuple(map(Variant.parse, task.ladder))

    def progress(done: int, total: int, what: str) -> None:
        if rank == 1:  # it takes longer
            report(done, total, f"profiling both workers at once: {what}")

    ladder = rungs if rank else rungs[-1:]  # the strong worker runs in full precision only
    with rendezvous.process_group():
        found = profile(
            job,
            dag,
            device="cpu",
            share=share,
            ladder=ladder,
            with_collectives=False,
            progress=progress,
            operator_effort=operators,
            cast_effort=casts,
            step_effort=steps,
        )
        if rank == 0:
            # It is done first: it observes while the weak one is still measuring, and then both measure under the load of training.
            observations = observe(job, dag, rungs, steps=task.observe_steps)
            save(observations, folder / "observations.qsync")
        rendezvous.announce("profiled")
        if rank == 0:
            step = measure_while(runner, found.steps[0], lambda: not rendezvous.all_announced("profiled"))
            found = attrs.evolve(found, steps=(step,))
        collective = measure_collective([bucket.nbytes for bucket in dag.buckets], torch.device("cpu"))
    save(attrs.evolve(found, collective=collective), folder / f"profile-{GROUPS[rank]}.qsync")


@attrs.frozen
class StepRatio:
    """How much slower the weak worker is.

    Attributes:
        medians_ns: every rank's median step, in rank order.
        core_shares: CPU time over elapsed time of every rank meanwhile.
    """

    medians_ns: tuple[int, ...]
    core_shares: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """The weak worker's step over the strong one's."""
        return self.medians_ns[1] / self.medians_ns[0]


def measure_step_ratio(runner: StepRunner, rendezvous: Rendezvous, *, quick: bool) -> StepRatio:
    """Run float32 steps on one worker after the other for a while (``quick``: a few); all ranks must call it.

    Side by side they would slow each other down (they share memory and power) as they do not in training, where the faster one
    waits for the slower.
    """
    medians_ns, core_shares = [], []
    for rank in range(rendezvous.world_size):
        mine = _time_steps(runner, quick) if rendezvous.rank == rank else None
        median_ns, share = rendezvous.gather(mine)[rank]
        medians_ns.append(median_ns)
        core_shares.append(share)
    return StepRatio(tuple(medians_ns), tuple(core_shares))


def _time_steps(runner: StepRunner, quick: bool) -> tuple[int, float]:
    """This rank's median step, and its CPU time over elapsed time meanwhile."""
    before, cpu_before = time.perf_counter(), time.process_time()
    times: list[int] = []
    while len(times) < _LEAST_STEPS or (not quick and time.perf_counter() - before < _RATIO_SECONDS):
        start = time.perf_counter_ns()
        runner.train_step(len(times))
        times.append(time.perf_counter_ns() - start)
    share = (time.process_time() - cpu_before) / (time.perf_counter() - before)
    return round(statistics.median(times)), share
