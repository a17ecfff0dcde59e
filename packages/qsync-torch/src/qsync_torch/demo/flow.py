"""The demo from end to end: a worker is made weak, ``qsync prepare`` measures and plans, :mod:`train` trains with each method."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import attrs
import torch
from torch.utils.data import DataLoader

from qsync_core.artifacts.files import save
from qsync_core.errors import QSyncError
from qsync_core.run_folder import RunFolder
from qsync_planner.reporting import require_pages
from qsync_planner.reporting.report import read_job
from qsync_torch.capturing.capture import capture
from qsync_torch.demo.measuring import MethodResult, read_results
from qsync_torch.demo.outcome import Outcome
from qsync_torch.demo.planning import GROUPS, Plans, cluster_toml, make_plans
from qsync_torch.demo.probe import IMPORTS, LADDER, Probe, fitting_batch, sample_seconds
from qsync_torch.demo.stored_profiles import replay_stored
from qsync_torch.demo.weak_worker import WeakWorker, remove_abandoned_quotas
from qsync_torch.demo.workloads import load_workload, loss
from qsync_torch.job import Job
from qsync_torch.profiling.paying import compared_rungs, largest_operator
from qsync_torch.profiling.whole_step import StepRunner
from qsync_torch.tracing.trace import trace

SCRIPT = Path(__file__).with_name("train.py")
MOST_STEPS, LEAST_STEPS = 40, 30
TRAINING_NS = 90_000_000_000
"""How long the compared methods may train all together, so that a slow machine finishes in a few minutes too."""
_STEPS_AFTER = 15
"""Starting, peaks, held-out data, a timeline and gradient errors take as long as this many steps of each method."""
_LOOK_EVERY_S = 0.1

Say = Callable[[str], None]


@attrs.frozen
class Options:
    """What a run of the demo is to do.

    Attributes:
        model: ``resnet`` or ``bert``; tiny: the same at toy size (tests).
        steps: training steps of every method, None for what :data:`TRAINING_NS` allows; block: steps in a row before the next
            method's turn.
        folder: the run folder, which gets logs and the plans of all methods too.
        memory_budget: bytes of the weak worker, ``auto`` or ``none``; None for ``auto`` where no lower precision saves time.
        predict_check: also time uniform int8, uniform bfloat16 and two random mixtures.
        prefer: how to make the weak worker weak, ``quota`` or ``load``.
        seconds: how long it may take; what does not fit is made smaller.  None for the whole size and every rung, however long.
        import_s: how long this process took to import torch, which its workers will do again.
    """

    model: str
    steps: int | None
    folder: Path
    memory_budget: str | int | None = None
    predict_check: bool = False
    prefer: str = "quota"
    tiny: bool = False
    block: int = 10
    seconds: float | None = None
    import_s: float = 0.0

    @property
    def script_options(self) -> list[str]:
        """The options of :data:`SCRIPT` that say what is trained."""
        return ["--model", self.model, *(["--tiny"] if self.tiny else [])]


def run_demo(options: Options, say: Say) -> Outcome:
    """Run it; every artifact stays in ``options.folder``.

    Raises:
        QSyncError: when this machine cannot run it, or a worker failed.
    """
    started = time.monotonic()
    require_pages()
    remove_abandoned_quotas()
    torch.set_num_threads(1)
    run = RunFolder(options.folder)
    run.path.mkdir(parents=True, exist_ok=True)
    probe, job = _sized(options, say)
    runner = StepRunner.start(job, torch.device("cpu"))
    with WeakWorker(partial(runner.train_step, 0), prefer=options.prefer, quick=options.tiny) as weak:
        say("making the weak worker weak")
        weakness = weak.calibrate()
        share = round(1 / max(1.0, weakness.ratio), 3)  # by the time of its step
        run.cluster.write_text(cluster_toml(share, probe.ladder), encoding="utf-8")
        batch = ["--batch-size", str(probe.batch_size)]
        prepare = ["-m", "qsync", "prepare", str(SCRIPT), "-o", str(run.path), "--device", "cpu", "--fresh"]
        say("preparing: torchrun ... -m qsync prepare train.py")
        run_workers("prepare", [*prepare, "--", *options.script_options, *batch], run.path, weak)
        measured, _ = read_job(run)
        budget = options.memory_budget or ("none" if probe.saves_time else "auto")
        plans = make_plans(measured, memory_budget=budget, predict_check=options.predict_check)
        if plans.cluster != measured.inputs.described:  # the plan that the report shows is within the budget
            memory = f"memory = {plans.cluster.group(GROUPS[1]).memory_bytes}\n"
            run.cluster.write_text(cluster_toml(share, probe.ladder) + memory, encoding="utf-8")
            save(plans.compared["qsync"], run.plan(GROUPS))
        left_s = None if options.seconds is None else options.seconds - (time.monotonic() - started)
        say("making the weak worker as weak as it was profiled")
        weak.keep(weakness.ratio)
        say("training with each method: torchrun ... train.py")
        trained = _train(options, [*options.script_options, *batch], probe, plans, run, left_s, weak)
    stored = None
    if not probe.saves_time:
        say("replaying profiles of GPUs")
        stored = replay_stored()
    return Outcome.of(
        plans,
        trained,
        measured.dag,
        weakness=weak.weakness.description,
        step_ratio=weakness.ratio,
        strong_core_share=weakness.core_share,
        model=options.model,
        data=load_workload(options.model, tiny=True).data,
        seconds=time.monotonic() - started,
        notes=tuple(probe.notes),
        saves_time=probe.saves_time,
        stored=stored,
    )


def _sized(options: Options, say: Say) -> tuple[Probe, Job]:
    """The size that fits into the time, and the rungs that pay; the whole and all rungs where time does not matter."""
    workload = load_workload(options.model, tiny=options.tiny)
    whole = size = workload.batch_size
    job = capture(workload.model, workload.optimizer, loss, DataLoader(workload.training, whole, drop_last=True))
    if options.seconds is not None:
        say("timing a step")
        started = time.monotonic()
        sample_s = sample_seconds(job)
        size = fitting_batch(sample_s, whole, options.seconds - (time.monotonic() - started) - IMPORTS * options.import_s)
        job = attrs.evolve(job, batch_size=size)
    say(f"tracing the model, {size} samples a step")
    dag = trace(job)
    ratios = dict.fromkeys(LADDER[:-1], 0.0)
    if options.seconds is not None:
        say("trying each lower precision")
        compared = compared_rungs(dag, dict(workload.model.named_parameters()))
        ratios = {rung: ratio.value for rung, ratio in compared.items()}
    return Probe(size, whole, str(largest_operator(dag).op_id), ratios), job


def default_steps(plans: Plans, left_s: float | None = None) -> int:
    """Steps of every compared method that are predicted to fit into the time, in whole tens (fives).

    Args:
        left_s: time that is left for training and for what follows it; None for :data:`TRAINING_NS` and :data:`LEAST_STEPS`.
    """
    each_ns = _round_ns(plans)
    if left_s is None:
        return max(LEAST_STEPS, min(MOST_STEPS, TRAINING_NS // each_ns // 10 * 10))
    return max(5, min(MOST_STEPS, round(left_s * 1e9) // each_ns - _STEPS_AFTER) // 5 * 5)


def _round_ns(plans: Plans) -> int:
    """A step of every compared method."""
    return max(1, sum(plan.predicted_iteration_ns for plan in plans.compared.values()))


def _train(
    options: Options, script: Sequence[str], probe: Probe, plans: Plans, run: RunFolder, left_s: float | None, weak: WeakWorker
) -> dict[str, MethodResult]:
    folder = run.path / "methods"
    folder.mkdir(exist_ok=True)
    files = {name: folder / f"{name.replace(' ', '-')}.qsync" for name in (*plans.compared, *plans.probes)}
    for name, plan in {**plans.compared, **plans.probes}.items():
        save(plan, files[name])
    steps = options.steps or default_steps(plans, left_s)
    seconds = 0.0 if left_s is None else max(1.0, left_s - _STEPS_AFTER * _round_ns(plans) / 1e9)
    settings = {
        "--steps": steps,
        "--block": min(options.block, max(5, steps // 3)),
        "--seconds": seconds,
        "--compared": len(plans.compared),
        "--held-out": probe.batch_size / probe.whole_batch_size,
        "--results": folder / "results.json",
    }
    arguments = [*script, "--plans", *map(str, files.values()), *(str(text) for pair in settings.items() for text in pair)]
    timeline = ["--timeline", "qsync", str(run.dag), str(run.timeline("measured", GROUPS))]
    run_workers("train", [str(SCRIPT), *arguments, *timeline], run.path, weak)
    found = read_results(folder / "results.json")
    return {name: found[path.stem] for name, path in files.items()}


def run_workers(task: str, command: Sequence[str], folder: Path, weak: WeakWorker, *, grace_s: float = 15.0) -> None:
    """Run a command of Python's as both workers of one job, as torchrun on two machines would.

    The strong worker, rank 0, shows its progress on standard error; what the weak one prints goes to ``<task>.log`` in ``folder``.

    Raises:
        QSyncError: when one of them fails; the other one has then some seconds to say why, ``grace_s``.
    """
    log_path = folder / f"{task}.log"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    workers: list[subprocess.Popen[bytes]] = []
    with log_path.open("wb") as log:
        try:
            for rank, group in enumerate(GROUPS):
                workers.append(
                    subprocess.Popen(
                        [sys.executable, *command],
                        env=_environment(rank, group, port),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log if rank else None,
                        preexec_fn=weak.place(rank).take,
                    )
                )
            until = float("inf")
            while None in (states := [worker.poll() for worker in workers]) and time.monotonic() < until:
                if any(states):
                    until = min(until, time.monotonic() + grace_s)
                time.sleep(_LOOK_EVERY_S)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    if any(worker.returncode for worker in workers):
        said = log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["nothing"]
        raise QSyncError(
            f"the demo's workers failed while they should {task}: see what was printed last, and {log_path} for what the weak one "
            f"printed, which ends with: {said[-1]}"
        )


def _environment(rank: int, group: str, port: int) -> Mapping[str, str]:
    """A rank's place in the job, one thread, and gloo on the loopback interface: they are on this machine whatever its name is."""
    place = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": len(GROUPS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    own = {
        "QSYNC_GROUP": group,
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONIOENCODING": "utf-8",
    }
    given = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    return {"GLOO_SOCKET_IFNAME": "lo", **given, **own, **{name: str(value) for name, value in place.items()}}
