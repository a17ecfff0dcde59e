"""The demo from end to end: trace, measure, indicate, plan, train, compare."""

from __future__ import annotations

import time
from pathlib import Path

import attrs
import torch

from qsync_core.artifacts.files import load, save
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.observations import Observations
from qsync_core.ir.plan import PrecisionPlan
from qsync_core.ir.profile import Profile
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.timeline import Timeline
from qsync_core.progress import ProgressCallback
from qsync_planner.indicate import indicate
from qsync_planner.matching import Inputs
from qsync_planner.replayer.replay import Replayer
from qsync_planner.reporting import require_pages
from qsync_torch.demo.cores import check_cores, remove_abandoned_quotas
from qsync_torch.demo.messages import GROUPS, INFER, Measured, MeasureTask, Method, Trained, TrainTask, read_json
from qsync_torch.demo.outcome import Outcome, make_outcome
from qsync_torch.demo.planning import Plans, cluster_toml, infer_variants, local_batches, make_plans
from qsync_torch.demo.probe import IMPORTS, LADDER, Probe, fitting_batch, sample_seconds
from qsync_torch.demo.stored_profiles import replay_stored
from qsync_torch.demo.workers import run_workers
from qsync_torch.demo.workloads import Workload, load_workload
from qsync_torch.profiling.paying import compared_rungs, largest_operator
from qsync_torch.tracing.trace import trace

MOST_STEPS, LEAST_STEPS = 40, 30
TRAINING_NS = 90_000_000_000
"""How long the compared methods may train all together, so that a slow machine finishes in a few minutes too."""
_STEPS_AFTER = 15
"""Starting, peaks, held-out data, timelines and gradient errors take as long as this many steps of each method."""
_OBSERVED_IN_HASTE = 4
"""Updates; each takes as long as several steps."""


@attrs.frozen
class Options:
    """What a run of the demo is to do.

    Attributes:
        model: ``resnet`` or ``bert``; tiny: the same at toy size (tests).
        steps: training steps of every method, None for what :data:`TRAINING_NS` allows; block: steps in a row before the next
            method's turn.
        memory_budget: bytes of the weak worker, ``auto`` or ``none``; None for ``auto`` where no lower precision saves time.
        seconds: how long it may take; what does not fit is made smaller.  None for the whole size and every rung, however long.
        import_s: how long this process took to import torch, which its workers will do again.
        predict_check: also time uniform int8, uniform bfloat16 and two random mixtures.
        prefer: how to make the weak worker weak, ``quota`` or ``load``.
        folder: where artifacts, logs and the report go.
    """

    model: str
    steps: int | None
    folder: Path
    memory_budget: str | int | None = None
    predict_check: bool = False
    prefer: str = "quota"
    tiny: bool = False
    block: int = 10
    observe_steps: int = 12
    seconds: float | None = None
    import_s: float = 0.0


@attrs.frozen
class Result:
    """Everything that a run leaves behind.

    ``predicted`` and ``measured`` are timelines by method, for the methods that have one.
    """

    outcome: Outcome
    dag: PrecisionDag
    plans: Plans
    profiles: dict[str, Profile]
    sensitivity: Sensitivity
    predicted: dict[str, Timeline]
    measured: dict[str, Timeline]


def run_demo(options: Options, progress: ProgressCallback) -> Result:
    """Run it; every artifact stays in ``options.folder``.

    Raises:
        QSyncError: when this machine cannot run it, or a worker failed.
    """
    started = time.monotonic()
    require_pages()
    check_cores()
    remove_abandoned_quotas()
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    try:
        torch.set_num_threads(1)
        workload, dag, probe = _prepare(options, progress)
        save(dag, folder / "dag.qsync")
        measured = _measure(options, probe, progress)
        profiles = {group: load(folder / f"profile-{group}.qsync", Profile) for group in GROUPS}
        progress(0, 1, "planning")
        sensitivity = indicate(load(folder / "observations.qsync", Observations), dag, probe.ladder)
        budget = options.memory_budget or ("none" if probe.saves_time else "auto")
        plans = make_plans(
            dag,
            profiles,
            sensitivity,
            memory_budget=budget,
            predict_check=options.predict_check,
            ladder=probe.ladder,
        )
        replayer = Replayer(Inputs(dag, plans.cluster, profiles))
        predicted = {name: replayer.timeline({INFER: infer_variants(plan)}) for name, plan in _with_timeline(plans).items()}
        _save_plans(folder, plans, sensitivity, predicted, profiles[INFER].device.share)
        left_s = None if options.seconds is None else options.seconds - (time.monotonic() - started)
        steps = options.steps or default_steps(plans, left_s)
        trained = _train(options, probe, steps, plans, measured, dag, left_s, progress)
        stored = None
        if not probe.saves_time:
            progress(0, 1, "replaying profiles of GPUs")
            stored = replay_stored()
    finally:
        remove_abandoned_quotas()
    outcome = make_outcome(
        dag,
        plans,
        measured,
        trained,
        model=options.model,
        data=workload.data,
        steps=len(trained.methods["full"].losses),
        seconds=time.monotonic() - started,
        notes=tuple(probe.notes),
        saves_time=probe.saves_time,
        stored=stored,
    )
    recorded = {name: folder / f"measured-{name}.qsync" for name in predicted}
    timelines = {name: load(path, Timeline) for name, path in recorded.items() if path.exists()}
    return Result(outcome, dag, plans, profiles, sensitivity, predicted, timelines)


def _with_timeline(plans: Plans) -> dict[str, PrecisionPlan]:
    """Methods whose steps are shown: all compared ones but dynamic batch, whose local batches were not profiled."""
    return {name: plan for name, plan in plans.compared.items() if name != "dynamic-batch"}


def _prepare(options: Options, progress: ProgressCallback) -> tuple[Workload, PrecisionDag, Probe]:
    """The workload at the size that fits into the time, its graph, and the rungs that pay; all rungs where time does not matter."""
    workload = load_workload(options.model, tiny=options.tiny)
    whole, in_haste = workload.batch_size, False
    if options.seconds is not None:
        progress(0, 1, "timing a step")
        started = time.monotonic()
        sample_s = sample_seconds(workload.job())
        left_s = options.seconds - (time.monotonic() - started) - IMPORTS * options.import_s
        size, in_haste = fitting_batch(sample_s, whole, left_s)
        workload = attrs.evolve(workload, batch_size=size)
    progress(0, 1, f"tracing the model, {workload.batch_size} samples a step")
    dag = trace(workload.job())
    ratios = dict.fromkeys(LADDER[:-1], 0.0)
    if options.seconds is not None:
        progress(0, 1, "trying each lower precision")
        compared = compared_rungs(dag, dict(workload.model.named_parameters()))
        ratios = {rung: ratio.value for rung, ratio in compared.items()}
    return workload, dag, Probe(workload.batch_size, whole, str(largest_operator(dag).op_id), ratios, in_haste)


def _measure(options: Options, probe: Probe, progress: ProgressCallback) -> Measured:
    folder = options.folder
    task = MeasureTask(
        model=options.model,
        tiny=options.tiny,
        folder=str(folder),
        dag=str(folder / "dag.qsync"),
        prefer=options.prefer,
        observe_steps=_OBSERVED_IN_HASTE if probe.in_haste else options.observe_steps,
        ladder=tuple(map(str, probe.ladder)),
        batch_size=probe.batch_size,
        effort="least" if options.tiny or probe.in_haste else "whole" if options.seconds is None else "short",
    )
    run_workers("measure", task, folder, progress)
    return read_json(folder / "measured.json", Measured)


def default_steps(plans: Plans, left_s: float | None = None) -> int:
    """Steps of every compared method that are predicted to fit into the time, in whole tens (fives).

    Args:
        left_s: time that is left for training and for what follows it; None for :data:`TRAINING_NS` and :data:`LEAST_STEPS`.
    """
    each_ns = max(1, sum(plan.predicted_iteration_ns for plan in plans.compared.values()))
    if left_s is None:
        return max(LEAST_STEPS, min(MOST_STEPS, TRAINING_NS // each_ns // 10 * 10))
    return max(5, min(MOST_STEPS, round(left_s * 1e9) // each_ns - _STEPS_AFTER) // 5 * 5)


def _train(
    options: Options,
    probe: Probe,
    steps: int,
    plans: Plans,
    measured: Measured,
    dag: PrecisionDag,
    left_s: float | None,
    progress: ProgressCallback,
) -> Trained:
    folder = options.folder
    each_s = sum(plan.predicted_iteration_ns for plan in plans.compared.values()) / 1e9

    def methods(named: dict[str, PrecisionPlan]) -> tuple[Method, ...]:
        return tuple(
            Method(name, str(_plan_path(folder, name)), local_batches(plan, dag.batch_size)) for name, plan in named.items()
        )

    task = TrainTask(
        model=options.model,
        tiny=options.tiny,
        folder=str(folder),
        weakness=measured.weakness,
        step_ratio=measured.ratio,
        steps=steps,
        block=min(options.block, max(5, steps // 3)),
        compared=methods(dict(plans.compared)),
        probes=methods(dict(plans.probes)),
        timelines=tuple(_with_timeline(plans)),
        batch_size=dag.batch_size,
        held_out_share=probe.batch_size / probe.whole_batch_size / (2 if probe.in_haste else 1),
        seconds=0.0 if left_s is None else max(1.0, left_s - _STEPS_AFTER * each_s),
    )
    run_workers("train", task, folder, progress)
    return read_json(folder / "trained.json", Trained)


def _plan_path(folder: Path, name: str) -> Path:
    return folder / f"plan-{name.replace(' ', '-')}.qsync"


def _save_plans(folder: Path, plans: Plans, sensitivity: Sensitivity, predicted: dict[str, Timeline], share: float) -> None:
    weak = plans.cluster.group(INFER)
    (folder / "cluster.toml").write_text(cluster_toml(share, weak.memory_bytes, weak.ladder), encoding="utf-8")
    save(sensitivity, folder / "sensitivity.qsync")
    for name, plan in {**plans.compared, **plans.probes}.items():
        save(plan, _plan_path(folder, name))
    for name, timeline in predicted.items():
        save(timeline, folder / f"predicted-{name}.qsync")
