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
from qsync_planner.replayer.replay import Replayer
from qsync_torch.demo.cores import check_cores, remove_abandoned_quotas
from qsync_torch.demo.measuring import LADDER
from qsync_torch.demo.messages import GROUPS, INFER, Measured, MeasureTask, Method, Trained, TrainTask, read_json
from qsync_torch.demo.outcome import Outcome, make_outcome
from qsync_torch.demo.planning import Plans, cluster_toml, infer_variants, local_batches, make_plans
from qsync_torch.demo.workers import run_workers
from qsync_torch.demo.workloads import load_workload
from qsync_torch.tracing.trace import trace

MOST_STEPS, LEAST_STEPS = 40, 30
TRAINING_NS = 90_000_000_000
"""How long the compared methods may train all together, so that a slow machine finishes in a few minutes too."""


@attrs.frozen
class Options:
    """What a run of the demo is to do.

    Attributes:
        model: ``resnet`` or ``bert``; tiny: the same at toy size (tests).
        steps: training steps of every method, None for what :data:`TRAINING_NS` allows; block: steps in a row before the next
            method's turn.
        memory_budget: bytes of the weak worker, ``auto`` or ``none``.
        predict_check: also time uniform int8, uniform bfloat16 and two random mixtures.
        prefer: how to make the weak worker weak, ``quota`` or ``load``.
        folder: where artifacts, logs and the report go.
    """

    model: str
    steps: int | None
    folder: Path
    memory_budget: str | int = "none"
    predict_check: bool = False
    prefer: str = "quota"
    tiny: bool = False
    block: int = 10
    observe_steps: int = 12


@attrs.frozen
class Result:
    """Everything that a run leaves behind.

    ``predicted`` and ``measured`` are timelines by method, for the methods that have one.
    """

    outcome: Outcome
    dag: PrecisionDag
    plans: Plans
    sensitivity: Sensitivity
    predicted: dict[str, Timeline]
    measured: dict[str, Timeline]


def run_demo(options: Options, progress: ProgressCallback) -> Result:
    """Run it; every artifact stays in ``options.folder``.

    Raises:
        QSyncError: when this machine cannot run it, or a worker failed.
    """
    started = time.monotonic()
    check_cores()
    remove_abandoned_quotas()
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    try:
        progress(0, 1, "tracing the model")
        torch.set_num_threads(1)
        workload = load_workload(options.model, tiny=options.tiny)
        dag = trace(workload.job())
        save(dag, folder / "dag.qsync")
        measured = _measure(options, progress)
        profiles = {group: load(folder / f"profile-{group}.qsync", Profile) for group in GROUPS}
        progress(0, 1, "planning")
        sensitivity = indicate(load(folder / "observations.qsync", Observations), dag, LADDER)
        plans = make_plans(dag, profiles, sensitivity, memory_budget=options.memory_budget, predict_check=options.predict_check)
        replayer = Replayer(dag, plans.cluster, profiles)
        predicted = {name: replayer.timeline({INFER: infer_variants(plan)}) for name, plan in _with_timeline(plans).items()}
        _save_plans(folder, plans, sensitivity, predicted, profiles[INFER].device.share)
        steps = options.steps or default_steps(plans)
        trained = _train(options, steps, plans, measured, dag, progress)
    finally:
        remove_abandoned_quotas()
    outcome = make_outcome(
        dag,
        plans,
        measured,
        trained,
        model=options.model,
        data=workload.data,
        steps=steps,
        seconds=time.monotonic() - started,
    )
    recorded = {name: folder / f"measured-{name}.qsync" for name in predicted}
    timelines = {name: load(path, Timeline) for name, path in recorded.items() if path.exists()}
    return Result(outcome, dag, plans, sensitivity, predicted, timelines)


def _with_timeline(plans: Plans) -> dict[str, PrecisionPlan]:
    """Methods whose steps are shown: all compared ones but dynamic batch, whose local batches were not profiled."""
    return {name: plan for name, plan in plans.compared.items() if name != "dynamic-batch"}


def _measure(options: Options, progress: ProgressCallback) -> Measured:
    folder = options.folder
    task = MeasureTask(
        model=options.model,
        tiny=options.tiny,
        folder=str(folder),
        dag=str(folder / "dag.qsync"),
        prefer=options.prefer,
        observe_steps=options.observe_steps,
        quick=options.tiny,
    )
    run_workers("measure", task, folder, progress)
    return read_json(folder / "measured.json", Measured)


def default_steps(plans: Plans) -> int:
    """Steps of every compared method that are predicted to fit into :data:`TRAINING_NS`, in whole tens."""
    each_ns = sum(plan.predicted_iteration_ns for plan in plans.compared.values())
    return max(LEAST_STEPS, min(MOST_STEPS, TRAINING_NS // max(each_ns, 1) // 10 * 10))


def _train(
    options: Options,
    steps: int,
    plans: Plans,
    measured: Measured,
    dag: PrecisionDag,
    progress: ProgressCallback,
) -> Trained:
    folder = options.folder

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
        block=options.block,
        compared=methods(dict(plans.compared)),
        probes=methods(dict(plans.probes)),
        timelines=tuple(_with_timeline(plans)),
    )
    run_workers("train", task, folder, progress)
    return read_json(folder / "trained.json", Trained)


def _plan_path(folder: Path, name: str) -> Path:
    return folder / f"plan-{name.replace(' ', '-')}.qsync"


def _save_plans(folder: Path, plans: Plans, sensitivity: Sensitivity, predicted: dict[str, Timeline], share: float) -> None:
    (folder / "cluster.toml").write_text(cluster_toml(share, plans.cluster.group(INFER).memory_bytes), encoding="utf-8")
    save(sensitivity, folder / "sensitivity.qsync")
    for name, plan in {**plans.compared, **plans.probes}.items():
        save(plan, _plan_path(folder, name))
    for name, timeline in predicted.items():
        save(timeline, folder / f"predicted-{name}.qsync")
