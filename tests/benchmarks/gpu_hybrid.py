"""Rows H1 to H9 of ``docs/results/hybrid.json``: a hybrid job on two GPUs, the second one limited to half of its SMs by MPS.

    python tests/benchmarks/gpu_hybrid.py --out OUT [--only alone,together] [--models resnet50,bert-base] [--directory docs/results]

Needs two NVIDIA GPUs and the right to start an MPS daemon.  Every measurement runs in processes of its own, which write JSON and
artifacts into OUT; the rows are worked out from whatever is there, also of earlier runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hybrid.alone import one_group
from hybrid.page import write_page
from hybrid.rows import ablation_rows, alone_rows, budget_rows, dynamic_rows, median_ms, share_rows, steps_alone, together_rows
from hybrid.workloads import WORKLOADS, Variants, cluster_of, configurations, gpu_name
from results import RESULTS, ROOT, provenance, write_rows

from qsync_core.artifacts.files import load
from qsync_core.ir.communication import CollectiveCosts
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.plan import PrecisionPlan
from qsync_core.ir.profile import Profile
from qsync_planner.allocator import allocate
from qsync_planner.estimating import estimate
from qsync_planner.replayer.ablation import Ablation
from qsync_planner.replayer.replay import Replayer

HERE = Path(__file__).resolve().parent
PAGE = ROOT / "docs" / "hybrid.md"
MODELS = ("resnet50", "bert-base", "vgg16-bn", "roberta-base")
PARTS = ("alone", "quarter", "together", "whole", "dynamic")
SHARES, WHOLE = "1,0.5", "1,1"
BUDGETS = 3
SMALL_GIB = {"resnet50": 4.8, "vgg16-bn": 6.0}
"""Memory of the weak rank in row H7: 30% of a T4's; VGG16-BN needs more than that in uniform 16 bit."""
TIMEOUT_S = 280
ABLATIONS = {
    "casts": Ablation.CASTS,
    "cost-mapper": Ablation.CASTS | Ablation.FORMATS,
    "dispatch": Ablation.DISPATCH,
}
"""What row H1 leaves out: casts; casts and the formats of the operators between (dPRO's assumption); the CPU's timeline."""


@contextmanager
def mps() -> Iterator[dict[str, str]]:
    """An MPS daemon of our own; yields what its clients need in their environment."""
    with tempfile.TemporaryDirectory() as folder:
        own = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for path in own.values():
            Path(path).mkdir()
        environment = os.environ | own
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env=environment, check=True)
        time.sleep(3)
        try:
            yield own
        finally:
            subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", env=environment, check=False, timeout=30)


def start(arguments: Sequence[object], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A process whose output goes to a file."""
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))
    own = os.environ | {"PYTHONPATH": path, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as output:
        return subprocess.Popen([str(word) for word in arguments], env=own | environment, stdout=output, stderr=subprocess.STDOUT)


def finish(process: subprocess.Popen[bytes], what: str, log: Path) -> None:
    """Wait, and say so where it failed; whatever it wrote until then counts."""
    try:
        code = process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        code = -1
    if code:
        print(f"{what} failed with {code}:", *log.read_text(errors="replace").splitlines()[-25:], sep="\n  ", flush=True)


def alone(models: Sequence[str], out: Path, environment: Mapping[str, str]) -> None:
    """Two workloads at a time, one on each whole GPU."""
    for first in range(0, len(models), 2):
        running = []
        for gpu, name in enumerate(models[first : first + 2]):
            log = out / f"alone.{name}.log"
            command = [sys.executable, HERE / "hybrid" / "alone.py", name, out / name / "alone", "--budgets", BUDGETS]
            running.append((start(command, log, {**environment, "CUDA_VISIBLE_DEVICES": str(gpu)}), name, log))
        for process, name, log in running:
            finish(process, f"{name} alone", log)
        print(f"alone: {', '.join(models[first : first + 2])} done at {time.strftime('%X')}", flush=True)


def quarter(models: Sequence[str], out: Path, environment: Mapping[str, str]) -> None:
    """Two workloads at a time, each on a quarter of a GPU."""
    for first in range(0, len(models), 2):
        running = []
        for gpu, name in enumerate(models[first : first + 2]):
            log = out / f"quarter.{name}.log"
            own = {**environment, "CUDA_VISIBLE_DEVICES": str(gpu), "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25"}
            command = [sys.executable, HERE / "hybrid" / "quarter.py", name, out / name / "alone"]
            running.append((start(command, log, own), name, log))
        for process, name, log in running:
            finish(process, f"{name} at a quarter", log)


def estimated_ms(folder: Path, profile: str, share: float, plans: Mapping[str, Variants]) -> dict[str, float]:
    """Step times at a share of plans, estimated from the profile of the whole GPU."""
    dag, whole = load(folder / "dag.qsync", PrecisionDag), load(folder / profile, Profile)
    guess = estimate(dag, whole, whole.device.name, share).profile
    replayer = Replayer(dag, one_group(guess), {"infer": guess})
    return {label: replayer.replay({"infer": variants}).iteration_ns / 1e6 for label, variants in plans.items()}


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
        guesses[name] = estimated_ms(folder, "train.qsync", 0.5, plans)
    rows = share_rows(0.5, half, guesses)
    quarter = read(out, "alone/quarter.0.25.json")
    guesses = {}
    for name, found in quarter.items():
        folder = out / name / "alone"
        every = configurations(load(folder / "dag.qsync", PrecisionDag))
        guesses[name] = estimated_ms(folder, "profile.1.qsync", 0.25, {label: every[label] for label in found["runs"]})
    return rows + share_rows(0.25, quarter, guesses)


def ablated(folder: Path, runs: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Per part that is left out of the model, by plan the predicted step time over the measured one less 1."""
    dag, profile = load(folder / "dag.qsync", PrecisionDag), load(folder / "profile.1.qsync", Profile)
    variants, found = configurations(dag), {}
    for title, without in ABLATIONS.items():
        replayer = Replayer(dag, one_group(profile), {"infer": profile}, without=without)
        found[title] = {
            label: replayer.replay({"infer": variants[label]}).iteration_ns / 1e6 / median_ms(run["measured"]) - 1
            for label, run in runs.items()
        }
    return found


def together(models: Sequence[str], out: Path, environment: Mapping[str, str], shares: str, *options: object) -> None:
    """One workload after the other on both GPUs."""
    for name in models:
        log = out / f"together.{name}.{shares}.log"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
        small = ["--memory-gib", SMALL_GIB[name]] if name in SMALL_GIB else []
        command = [*torchrun, HERE / "hybrid" / "together.py", name, out / name / "together", *small, *options]
        finish(start(command, log, {**environment, "QSYNC_SHARES": shares}), f"{name} at {shares}", log)
        print(f"{name} at {shares} done at {time.strftime('%X')}", flush=True)


def dynamic(models: Sequence[str], out: Path, environment: Mapping[str, str]) -> None:
    """Batches that the planner balances between the ranks, after ``together.py`` has profiled them; the global batch stays."""
    for name in models:
        folder, log = out / name / "together", out / f"dynamic.{name}.log"
        profiles = {group: load(folder / f"{group}.qsync", Profile) for group in ("train", "infer")}
        costs = load(folder / "costs.qsync", CollectiveCosts)
        cluster = cluster_of(profiles["train"].device.name, profiles["infer"].device.share)
        plan = allocate(
            load(folder / "dag.qsync", PrecisionDag), cluster, profiles, None, solver="dynamic-batch", communication=costs
        )
        batches = f"{plan.local_batches['train']},{plan.local_batches['infer']}"
        script = f"{HERE / 'dynamic_batch.py'} {WORKLOADS[name].job} --batches {batches} --steps 8"
        weak = '[ "$LOCAL_RANK" = 1 ] && export CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50'
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "--no-python"]
        command = [*torchrun, "bash", "-c", f"{weak}; exec {sys.executable} {script}"]
        finish(start(command, log, {**environment, "NVIDIA_TF32_OVERRIDE": "0"}), f"{name} with batches {batches}", log)
        if printed := [line for line in log.read_text(errors="replace").splitlines() if line.startswith('{"job"')]:
            (folder / "dynamic.json").write_text(json.dumps(json.loads(printed[-1]) | {**provenance(), "device": gpu_name()}))


def read(out: Path, pattern: str) -> dict[str, Any]:
    """Files of that name by workload."""
    return {name: json.loads((out / name / pattern).read_text()) for name in MODELS if (out / name / pattern).exists()}


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
    options = parser.parse_args()
    parts = [part for part in options.only.split(",") if part]
    models = options.models.split(",")
    if unknown := [word for word in (*parts, *models) if word not in (*PARTS, *MODELS)]:
        raise SystemExit(f"no such part or model: {', '.join(unknown)}; known are {', '.join((*PARTS, *MODELS))}")
    options.out.mkdir(parents=True, exist_ok=True)
    if parts:
        with mps() as environment:
            if "alone" in parts:
                alone(models, options.out, environment)
            if "quarter" in parts:
                quarter(models, options.out, environment)
            if "together" in parts:
                together(models, options.out, environment, SHARES)
            if "dynamic" in parts:
                dynamic(models, options.out, environment)
            if "whole" in parts:
                together(models, options.out, environment, WHOLE, "--full-only")
    found = read(options.out, "alone/alone.1.json")
    jobs = pairs(options.out, SHARES)
    left_out = {name: ablated(options.out / name / "alone", entry["runs"]) for name, entry in found.items()}
    rows = [
        *alone_rows(found),
        *ablation_rows(left_out),
        *rows_of_shares(options.out, jobs),
        *budget_rows(found),
        *together_rows(jobs, pairs(options.out, WHOLE)),
        *dynamic_rows(read(options.out, "together/dynamic.json"), jobs),
    ]
    for row in rows:
        if row["target"] != "reported":
            print(f"{row['id']:24} {row['value']:10.4f} {row['unit']:9} {row['target']:9} {row['what']}", flush=True)
    if rows:
        last = [*found.values(), *(ranks[0] for ranks in jobs.values())][-1]
        run = {name: last[name] for name in ("machine", "versions", "commit")}
        write_rows("hybrid", rows, "python tests/benchmarks/gpu_hybrid.py", directory=options.directory, measured=run)
    if options.directory == RESULTS:
        write_page(PAGE, json.loads((RESULTS / "hybrid.json").read_text(encoding="utf-8"))["rows"])


if __name__ == "__main__":
    main()
