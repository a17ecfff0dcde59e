"""Rows H1 to H9 of ``docs/results/hybrid.json``: a hybrid job on two GPUs, the second one limited to half of its SMs by MPS.

    python bench/gpu_hybrid.py --out OUT [--only alone,together] [--models resnet50,bert-base] [--directory docs/results]

Needs two NVIDIA GPUs and the right to start an MPS daemon.  Every measurement runs in processes of its own, which write JSON and
artifacts into OUT after each configuration; the rows are worked out from whatever is there, also of earlier runs.  After
``--minutes`` all of them have ended: the same command goes on with the configurations that this commit has not measured, here or on
a machine of the same kind that is given OUT.  Parts come in the order of :data:`PARTS`, however they are named.

On a machine without GPUs ``--models smallest --directory DIRECTORY`` sees that the scripts run.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs

from hybrid.alone import one_group, times_of
from hybrid.page import write_page
from hybrid.processes import Deadline, Mps, NoMps, Started, finish, is_complete, mps, start, start_ranks
from hybrid.rows import (
    ablation_rows,
    alone_rows,
    budget_rows,
    device_binds,
    dynamic_rows,
    median_ms,
    on_devices,
    profile_rows,
    share_rows,
    steps_alone,
    together_rows,
    transfer_rows,
)
from hybrid.workloads import DEVICE, WORKLOADS, Variants, cluster_of, configurations, write
from qsync_core.artifacts.files import load
from qsync_core.ir.communication import CollectiveCosts
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.plan import PrecisionPlan
from qsync_core.ir.profile import Profile
from qsync_planner.allocator import Inputs, Request, allocate
from qsync_planner.estimating import estimate
from qsync_planner.replayer.ablation import Ablation
from qsync_planner.replayer.replay import Replayer
from results import RESULTS, ROOT, commit, provenance, write_rows

HERE = Path(__file__).resolve().parent
PAGE = ROOT / "docs" / "hybrid.md"
MODELS = ("resnet50", "vgg16-bn", "roberta-base", "bert-base")
PARTS = ("alone", "together", "dynamic", "whole", "quarter")
"""Rows H1, H3, H3b and H8; H2, H4, H4b, H7 and H9 at half of the SMs; H5; H6; H9 at a quarter."""
SHARES, WHOLE = "1,0.5", "1,1"
BUDGETS = 3
SMALL_GIB = {"resnet50": 4.8, "vgg16-bn": 6.0}
"""Memory of the weak rank in row H7: 30% of a T4's; VGG16-BN needs more than that in uniform 16 bit."""
ALONE_S, QUARTER_S, TOGETHER_S, DYNAMIC_S = 240, 90, 240, 75
"""After which the process of a part starts nothing new, or, with dynamic batches and at a quarter, is ended: more than it takes."""
MORE_S = 25
"""How much longer a process may go on that starts nothing new."""
LEAST_S = 20
"""With less time left a process is not started."""
SHARE_VARIABLE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
ABLATIONS = {
    "casts": Ablation.CASTS,
    "cost-mapper": Ablation.CASTS | Ablation.FORMATS,
    "dispatch": Ablation.DISPATCH,
}
"""What row H1 leaves out: casts; casts and the formats of the operators between (dPRO's assumption); the CPU's timeline."""


@attrs.frozen
class Measuring:
    """How the parts of a run are measured.

    Attributes:
        out: where everything is kept.
        daemon: of MPS.
        deadline: when all processes have to be over.
    """

    out: Path
    daemon: Mps | NoMps
    deadline: Deadline

    def is_done(self, *paths: Path) -> bool:
        """Whether these files are there, finished, of this commit."""
        return all(is_complete(path, commit()) for path in paths)

    def finish(self, what: str, started: Sequence[Started], seconds: float) -> None:
        """Wait for processes, and say how it went."""
        ended = finish(started, self.deadline.left(seconds))
        print(f"{what}: {'done' if ended else 'not finished'} at {time.strftime('%X')}", flush=True)
        if not ended and self.deadline.left(1.0):
            self.daemon.restart()

    def has_time(self, what: str) -> bool:
        """Whether it is worth while to start anything."""
        if self.deadline.left(LEAST_S) < LEAST_S:
            print(f"{what}: no time is left", flush=True)
            return False
        return True

    def measure(self, part: str, models: Sequence[str]) -> None:
        """One part, of all models."""
        if part in ("alone", "quarter"):
            self.on_each_gpu(models, self.alone if part == "alone" else self.quarter)
            return
        for name in models:
            if part == "together":
                self.together(name, SHARES)
            elif part == "whole":
                self.together(name, WHOLE, "--full-only")
            else:
                self.dynamic(name)

    def on_each_gpu(self, models: Sequence[str], measure: Callable[[str, int], None]) -> None:
        """Workloads one after the other on whichever of the two GPUs is free."""
        gpus: queue.SimpleQueue[int] = queue.SimpleQueue()
        for gpu in range(2):
            gpus.put(gpu)

        def on_a_free_one(name: str) -> None:
            gpu = gpus.get()
            try:
                measure(name, gpu)
            finally:
                gpus.put(gpu)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(on_a_free_one, models))

    def alone(self, name: str, gpu: int) -> None:
        """A workload on a whole GPU."""
        what, folder = f"{name} alone", self.out / name / "alone"
        if self.is_done(folder / "alone.1.json") or not self.has_time(what):
            return
        script, seconds = HERE / "hybrid" / "alone.py", self.deadline.left(ALONE_S)
        command = [sys.executable, script, name, folder, "--half", gpu, "--budgets", BUDGETS, "--seconds", seconds]
        own = {**self.daemon.environment, "CUDA_VISIBLE_DEVICES": str(gpu)}
        self._finish_one(what, command, self.out / f"alone.{name}.log", own, ALONE_S + MORE_S)

    def quarter(self, name: str, gpu: int) -> None:
        """A workload on a quarter of a GPU, after :meth:`alone`."""
        what, folder = f"{name} at a quarter", self.out / name / "alone"
        if self.is_done(folder / "quarter.0.25.json") or not self.has_time(what) or not (folder / "dag.qsync").exists():
            return
        own = {**self.daemon.environment, "CUDA_VISIBLE_DEVICES": str(gpu), SHARE_VARIABLE: "25"}
        command = [sys.executable, HERE / "hybrid" / "quarter.py", name, folder, "--half", gpu]
        self._finish_one(what, command, self.out / f"quarter.{name}.log", own, QUARTER_S)

    def _finish_one(self, what: str, command: Sequence[object], log: Path, environment: Mapping[str, str], seconds: float) -> None:
        """A process beside another one, whose MPS daemon has to stay."""
        ended = finish([start(what, command, log, environment)], self.deadline.left(seconds))
        print(f"{what}: {'done' if ended else 'not finished'} at {time.strftime('%X')}", flush=True)

    def together(self, name: str, shares: str, *options: object) -> None:
        """A workload on both GPUs."""
        what, folder = f"{name} at {shares}", self.out / name / "together"
        if self.is_done(*(folder / f"together.{shares}.{rank}.json" for rank in (0, 1))) or not self.has_time(what):
            return
        small = ["--memory-gib", SMALL_GIB[name]] if name in SMALL_GIB else []
        seconds = ["--seconds", self.deadline.left(TOGETHER_S)]
        command = [sys.executable, HERE / "hybrid" / "together.py", name, folder, *small, *seconds, *options]
        environment = {**self.daemon.environment, "QSYNC_SHARES": shares}
        ranks = start_ranks(what, command, self.out / f"together.{name}.{shares}.log", environment, of_weak={})
        self.finish(what, ranks, TOGETHER_S + MORE_S)

    def dynamic(self, name: str) -> None:
        """Batches that the planner balances between the ranks, after :meth:`together` has profiled them; the global batch stays.

        The same split in multiples of eight is measured too, and the faster one counts: cuDNN may take twice as long for others
        (VGG16-BN in float32: 138 ms with batches of 39 and 25, where two of 32 take 111 with one GPU at half).
        """
        what, folder = f"{name} with dynamic batches", self.out / name / "together"
        needed = [folder / file for file in ("dag.qsync", "train.qsync", "infer.qsync", "costs.qsync")]
        if self.is_done(folder / "dynamic.json") or not self.has_time(what):
            return
        if missing := [path.name for path in needed if not path.exists()]:
            print(f"{what}: {', '.join(missing)} of the hybrid job is missing", flush=True)
            return
        profiles = {group: load(folder / f"{group}.qsync", Profile) for group in ("train", "infer")}
        costs = load(folder / "costs.qsync", CollectiveCosts)
        device, share = profiles["train"].device.name, profiles["infer"].device.share
        dag, cluster = load(folder / "dag.qsync", PrecisionDag), cluster_of(device, share)
        plan = allocate(Inputs(dag, cluster, profiles, communication=costs), Request("dynamic-batch"))
        planned = plan.local_batches["train"], plan.local_batches["infer"]
        environment = {**self.daemon.environment, "NVIDIA_TF32_OVERRIDE": "0"}
        splits, measured = list(dict.fromkeys((planned, in_eights(*planned)))), []
        for batches in splits:
            text = ",".join(map(str, batches))
            if not self.has_time(f"{what} of {text}"):
                break
            command = [sys.executable, HERE / "dynamic_batch.py", WORKLOADS[name].job, "--batches", text, "--steps", 8]
            log = self.out / f"dynamic.{name}.{text}.log"
            ranks = start_ranks(what, command, log, environment, of_weak={SHARE_VARIABLE: f"{100 * share:g}"})
            self.finish(f"{what} of {text}", ranks, DYNAMIC_S)
            printed = [line for line in ranks[0].log.read_text(errors="replace").splitlines() if line.startswith('{"job"')]
            measured += [json.loads(line) for line in printed[-1:]]
        if measured:
            fastest = max(measured, key=lambda found: float(found["samples_per_s"]))
            write(
                folder / "dynamic.json",
                fastest | {**provenance(), "device": device, "tried": measured, "complete": len(measured) == len(splits)},
            )


def in_eights(first: int, second: int) -> tuple[int, int]:
    """The nearest split of the same global batch whose first part is a multiple of eight."""
    whole = first + second
    rounded = 8 * round(first / 8)
    return (rounded, whole - rounded) if 0 < rounded < whole else (first, second)


def estimated_steps(folder: Path, profile: str, share: float, plans: Mapping[str, Variants]) -> dict[str, tuple[float, bool]]:
    """Step times at a share of plans, in ms, estimated from the profile of the whole GPU, and whether the device binds them."""
    dag, whole = load(folder / "dag.qsync", PrecisionDag), load(folder / profile, Profile)
    if whole.device.is_synchronous:
        return {}  # of a CPU nothing is estimated
    guess = estimate(dag, whole, whole.device.name, share).profile
    replayer = Replayer(Inputs(dag, one_group(guess), {"infer": guess}))
    steps = {label: replayer.replay({"infer": variants}) for label, variants in plans.items()}
    return {label: (step.iteration_ns / 1e6, device_binds(times_of(step))) for label, step in steps.items()}


def rows_of_shares(out: Path, together: Mapping[str, tuple[Any, Any]]) -> list[dict[str, Any]]:
    """Row H9: half of the SMs from the weak rank's steps without communication, a quarter from ``quarter.py``."""
    half = {name: steps_alone(infer) for name, (_, infer) in together.items()}
    guesses = {}
    for name, found in half.items():
        folder = out / name / "together"
        plans: dict[str, Variants] = {"full": {}}
        for label in found["runs"].keys() - plans.keys():
            plan = load(folder / f"{label}.plan.qsync", PrecisionPlan)
            plans[label] = {op_id: entry.variant for op_id, entry in plan.group("infer").assignments.items()}
        guesses[name] = estimated_steps(folder, "train.qsync", 0.5, plans)
    rows = share_rows(0.5, half, guesses)
    quarter = read(out, "alone/quarter.0.25.json")
    guesses = {}
    for name, found in quarter.items():
        folder = out / name / "alone"
        every = configurations(load(folder / "dag.qsync", PrecisionDag))
        guesses[name] = estimated_steps(folder, "profile.1.qsync", 0.25, {label: every[label] for label in found["runs"]})
    return rows + share_rows(0.25, quarter, guesses)


def ablated(folder: Path, runs: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Per part that is left out of the model, by plan the predicted step time over the measured one less 1."""
    dag, profile = load(folder / "dag.qsync", PrecisionDag), load(folder / "profile.1.qsync", Profile)
    variants, found = configurations(dag), {}
    for title, without in ABLATIONS.items():
        replayer = Replayer(Inputs(dag, one_group(profile), {"infer": profile}), without=without)
        found[title] = {
            label: replayer.replay({"infer": variants[label]}).iteration_ns / 1e6 / median_ms(run["measured"]) - 1
            for label, run in runs.items()
        }
    return found


def read(out: Path, pattern: str) -> dict[str, Any]:
    """Files of that name by workload."""
    return {name: json.loads((out / name / pattern).read_text()) for name in WORKLOADS if (out / name / pattern).exists()}


def pairs(out: Path, shares: str) -> dict[str, tuple[Any, Any]]:
    """By workload what both ranks wrote."""
    first, second = (read(out, f"together/together.{shares}.{rank}.json") for rank in (0, 1))
    return {name: (first[name], second[name]) for name in first if name in second}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=",".join(PARTS), help="parts to measure, comma-separated; empty: only the rows")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--directory", type=Path, default=RESULTS)
    parser.add_argument("--minutes", type=float, default=0.0, help="stop what still runs after so many; 0: never")
    options = parser.parse_args()
    deadline = Deadline(60 * options.minutes)
    parts = [part for part in options.only.split(",") if part]
    models = options.models.split(",")
    if unknown := [word for word in (*parts, *models) if word not in (*PARTS, *WORKLOADS)]:
        raise SystemExit(f"no such part or model: {', '.join(unknown)}; known are {', '.join((*PARTS, *WORKLOADS))}")
    if options.directory == RESULTS and (stray := [name for name in models if name not in MODELS]):
        raise SystemExit(f"{', '.join(stray)} has no rows: name another --directory")
    options.out.mkdir(parents=True, exist_ok=True)
    if parts:
        with mps(on_gpu=DEVICE == "cuda") as daemon:
            measuring = Measuring(options.out, daemon, deadline)
            for part in (part for part in PARTS if part in parts):
                measuring.measure(part, models)
    write_all(options.out, options.directory)


def write_all(out: Path, directory: Path) -> None:
    """The rows of whatever is there, and the page."""
    found = {name: entry for name, entry in read(out, "alone/alone.1.json").items() if entry["runs"]}
    jobs = pairs(out, SHARES)
    left_out = {name: ablated(out / name / "alone", entry["runs"]) for name, entry in found.items()}
    rows = [
        *alone_rows(found),
        *on_devices(found.values(), ablation_rows(left_out)),
        *profile_rows(found, {name: load(out / name / "alone" / "profile.1.qsync", Profile) for name in found}),
        *rows_of_shares(out, jobs),
        *budget_rows(found),
        *together_rows(jobs, pairs(out, WHOLE)),
        *transfer_rows(jobs, {name: load(out / name / "together" / "costs.qsync", CollectiveCosts) for name in jobs}),
        *dynamic_rows(read(out, "together/dynamic.json"), jobs),
    ]
    for row in rows:
        if row["target"] != "reported":
            print(f"{row['id']:24} {row['value']:10.4f} {row['unit']:9} {row['target']:9} {row['what']}", flush=True)
    if rows:
        last = [*found.values(), *(ranks[0] for ranks in jobs.values())][-1]
        run = {name: last[name] for name in ("machine", "versions", "commit")}
        write_rows("hybrid", rows, "python bench/gpu_hybrid.py", directory=directory, measured=run)
    if directory == RESULTS:
        stored = json.loads((RESULTS / "hybrid.json").read_text(encoding="utf-8"))
        write_page(PAGE, [{"commit": stored["commit"], **row} for row in stored["rows"]])


if __name__ == "__main__":
    main()
