"""One workload on one GPU: profile it, then measure the plans of row H1 and plans for memory budgets (H3b).

Run by ``gpu_hybrid.py``; writes ``alone.<share>.json`` after every plan, and the artifacts, into a folder, and goes on with what an
earlier process left there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import attrs
import torch

from hybrid.workloads import (
    DEVICE,
    LADDER,
    WORKLOADS,
    TimeLeft,
    Variants,
    cap_memory,
    configurations,
    fresh_model,
    gpu_name,
    host_times,
    in_turn,
    kept,
    make_job,
    measure,
    phases,
    release,
    take_half_of_cores,
    without_tf32,
    write,
)
from qsync_core.artifacts.files import load, save
from qsync_core.errors import QSyncError
from qsync_core.ir.cluster import Cluster, DeviceGroup
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.plan import Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import Profile
from qsync_core.ir.sensitivity import Sensitivity
from qsync_planner.allocator import Inputs, Request, allocate
from qsync_planner.indicate import indicate
from qsync_planner.replayer.prediction import Prediction
from qsync_planner.replayer.replay import Replayer
from qsync_torch.apply.apply import apply_
from qsync_torch.job import Job
from qsync_torch.observing.observe import ObserveRequest, observe
from qsync_torch.profiling.profile import ProfileRequest, profile
from qsync_torch.timing import Stopwatch
from qsync_torch.tracing.trace import trace
from results import provenance

T = TypeVar("T", PrecisionDag, Profile, Sensitivity)


def one_group(profile_: Profile, memory_bytes: int = 0) -> Cluster:
    """A cluster of this GPU alone."""
    device = profile_.device
    group = DeviceGroup("infer", device.name, 1, Role.INFER, Precision.FLOAT32, LADDER, memory_bytes, device.share)
    return Cluster("one GPU", (group,))


def times_of(prediction: Prediction) -> dict[str, int]:
    """Of one rank: its step, and the CPU's and the device's part of it."""
    group = prediction.groups["infer"]
    compute = group.forward_ns + group.backward_ns + group.optimizer_ns
    return {"iteration_ns": prediction.iteration_ns, "dispatch_ns": group.dispatch_ns, "compute_ns": compute}


def run(name: str, job: Job, batch: int, variants: Variants) -> dict[str, object]:
    """Train under a plan for some steps."""
    release()
    model = fresh_model(job)
    applied = apply_(model, variants) if any(variant != LADDER[-1] for variant in variants.values()) else None
    try:
        parts = phases(job, model, batch)
        return attrs.asdict(measure(in_turn(parts), WORKLOADS[name].steps)) | host_times(parts)
    finally:
        if applied is not None:
            applied.remove()


def budgets_of(replayer: Replayer, dag: PrecisionDag, count: int) -> list[int]:
    """Memory budgets between uniform bfloat16's and float32's needs, in bytes."""
    ids = [operator.op_id for operator in dag.adjustable]
    low, high = (replayer.memory("infer", dict.fromkeys(ids, rung)).process_bytes for rung in LADDER[1:])
    return [int(low + (high - low) * (number + 0.5) / count) for number in range(count)]


def run_within(
    name: str, job: Job, batch: int, dag: PrecisionDag, profile_: Profile, sensitivity: Sensitivity, budget: int
) -> dict[str, object]:
    """A plan for a memory budget, run under a cap of that budget."""
    outside = profile_.memory.outside_bytes if profile_.memory is not None else 0
    row: dict[str, object] = {"budget_bytes": budget, "outside_bytes": outside}
    try:
        plan = allocate(Inputs(dag, one_group(profile_, budget), {"infer": profile_}, sensitivity), Request(tolerance=10.0))
        variants = {op_id: entry.variant for op_id, entry in plan.group("infer").assignments.items()}
        row["predicted_bytes"] = plan.group("infer").predicted_peak_bytes
        cap_memory(budget - outside)
        row |= run(name, job, batch, variants)
    except (RuntimeError, QSyncError) as error:  # out of memory in PyTorch's allocator or a library's, or no such plan
        row["error"] = f"{type(error).__name__}: {error}"[:300]
    finally:
        cap_memory(None)
    return row


class Laps:
    """How long each part of a profile takes, by what it says of its progress before a colon."""

    def __init__(self) -> None:
        self._part, self._since = "compile", time.perf_counter()
        self._taken: dict[str, float] = {}

    def at(self, done: int, total: int, what: str) -> None:
        """A part begins."""
        self.taken()
        part = what.partition(":")[0]
        self._part = {"compiling": "compile", "canary": "compile"}.get(part, part or self._part)

    def taken(self) -> dict[str, float]:
        """Seconds by part, up to now."""
        now = time.perf_counter()
        self._taken[self._part] = self._taken.get(self._part, 0.0) + now - self._since
        self._since = now
        return self._taken


def artifact(path: Path, kind: type[T], make: Callable[[], T]) -> T:
    """The artifact of an earlier process, or a new one that is kept."""
    if path.exists():
        return load(path, kind)
    made = make()
    save(made, path)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=WORKLOADS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--budgets", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start nothing that would end later")
    parser.add_argument("--half", type=int, choices=(0, 1), required=True, help="which half of the cores it runs on")
    options = parser.parse_args()
    take_half_of_cores(options.half)
    time_left = TimeLeft(options.seconds)
    without_tf32()
    batch = options.batch or WORKLOADS[options.name].batch_alone
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"alone.{options.share:g}.json"
    here: dict[str, object] = {"batch": batch, "share": options.share, **provenance(), "device": gpu_name()}
    found = kept(path, here)
    if not found:
        for stale in options.out.glob("*.qsync"):
            stale.unlink()
        found = here | {"runs": {}}
    job = make_job(options.name, batch)
    dag = artifact(options.out / "dag.qsync", PrecisionDag, lambda: trace(job))
    laps = Laps()
    asked = ProfileRequest(device=DEVICE, share=options.share, ladder=LADDER)
    measure_profile = partial(profile, job, dag, asked, progress=laps.at)
    profile_ = artifact(options.out / f"profile.{options.share:g}.qsync", Profile, measure_profile)
    found.setdefault("profile_s", laps.taken())
    found.setdefault("call_us", Stopwatch(torch.device("cpu")).overhead_ns / 1e3)
    write(path, found)
    print(options.name, "profile, s:", {part: round(seconds, 1) for part, seconds in found["profile_s"].items()}, flush=True)
    replayer = Replayer(Inputs(dag, one_group(profile_), {"infer": profile_}))
    for label, variants in configurations(dag).items():
        if label in found["runs"]:
            continue
        if not time_left.for_another():
            print(options.name, f"no time is left for {label} and what follows", flush=True)
            return
        prediction = replayer.replay({"infer": variants})
        memory = replayer.memory("infer", variants)
        predicted = {**times_of(prediction), "peak_bytes": memory.peak_bytes, "reserved_bytes": memory.reserved_bytes}
        measured = run(options.name, job, batch, variants)
        found["runs"][label] = {"predicted": predicted, "measured": measured}
        print(options.name, options.share, label, f"{prediction.iteration_ns / 1e6:.2f}", measured, flush=True)
        write(path, found)
    if options.budgets:
        observed = partial(observe, job, dag, ObserveRequest(LADDER, device=DEVICE, steps=10))
        sensitivity = artifact(options.out / "sensitivity.qsync", Sensitivity, lambda: indicate(observed(), dag, LADDER))
        rows = found.setdefault("budgets", [])
        for budget in budgets_of(replayer, dag, options.budgets)[len(rows) :]:
            if not time_left.for_another():
                print(options.name, f"no time is left for {budget} bytes and what follows", flush=True)
                return
            rows.append(run_within(options.name, job, batch, dag, profile_, sensitivity, budget))
            print(options.name, "budget", rows[-1], flush=True)
            write(path, found)
    write(path, found | {"complete": True})


if __name__ == "__main__":
    main()
