"""S7: predicted against measured step time and peak memory of whole training runs on one GPU.

For each job: trace, profile on the GPU, train 50 steps at full and at uniform low precision; then observe, indicate, plan under a
memory budget that float32 does not fit, ``apply_``, and train the same steps.  The rows of a training are written when it ends.
Kernels are not tuned, unless the machine's tuning store has them.  Run it on a machine with a CUDA device::

    python bench/gpu_spine.py --out OUT [--jobs resnet50,bert-base] [--directory docs/results]
"""

from __future__ import annotations

import argparse
import faulthandler
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from kernels.whole_model import release
from qsync_core.artifacts.files import save
from qsync_core.ir.cluster import Cluster, DeviceGroup, Link
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import Profile
from qsync_core.ir.variant import Variant
from qsync_planner.allocator import Inputs, allocate
from qsync_planner.indicate import indicate
from qsync_planner.replayer.replay import Replayer
from qsync_torch.apply.apply import apply_
from qsync_torch.job import Job
from qsync_torch.load_job import load_job
from qsync_torch.observing.observe import ObserveRequest, observe
from qsync_torch.profiling.profile import ProfileRequest, profile
from qsync_torch.tracing.trace import trace
from results import write_rows

JOBS = {"resnet50": ("resnet50:image=224,channels_last=true", 128), "bert-base": ("bert-base:seq=384", 12)}
LADDER = (Variant.of(Precision.INT8), Variant.of(Precision.BFLOAT16), Variant.of(Precision.FLOAT32))
BUDGET_SHARE = 0.4
"""Where the memory budget of the planned run lies between what a process takes, as predicted, in bfloat16 (0) and float32 (1)."""
STEPS, WARM_UP = 50, 10
NVLINK = Link(("train", "infer"), alpha_ns=20_000.0, beta_ns_per_byte=1 / 200.0)


def cluster_of(profile_: Profile, budget_bytes: int) -> Cluster:
    """A training group and a memory-bound inference group of the measured device."""

    def group(name: str, role: Role, memory_bytes: int) -> DeviceGroup:
        return DeviceGroup(name, profile_.device.name, 1, role, Precision.FLOAT32, LADDER, memory_bytes)

    return Cluster("one GPU twice", (group("train", Role.TRAIN, 0), group("infer", Role.INFER, budget_bytes)), (NVLINK,))


def alone(cluster: Cluster) -> Cluster:
    """The inference group by itself, one rank: what one process can check."""
    return Cluster("alone", (cluster.group("infer"),))


def train(job: Job, variants: Mapping[OpId, Variant] | None) -> tuple[float, float, int, float, float]:
    """Train ``STEPS`` steps; (mean step s, relative interquartile range, peak bytes, first loss, last loss)."""
    torch.manual_seed(0)
    model = job.model.cuda().train()
    applied = apply_(model, variants) if variants is not None else None
    optimizer = job.optimizer([p for p in model.parameters() if p.requires_grad])
    batches = [job.batch(step, job.batch_size).to("cuda") for step in range(4)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    starts = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    losses = []
    for step in range(STEPS):
        starts[step].record()
        loss = job.compute_loss(batches[step % 4], model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    starts[STEPS].record()
    torch.cuda.synchronize()
    times = [starts[i].elapsed_time(starts[i + 1]) / 1e3 for i in range(WARM_UP, STEPS)]
    low, median, high = statistics.quantiles(times, n=4)
    peak = torch.cuda.max_memory_allocated()
    if applied is not None:
        applied.remove()
    return statistics.fmean(times), (high - low) / median, peak, float(losses[0]), float(losses[-1])


def fresh(name: str) -> Job:
    text, batch_size = JOBS[name]
    torch.manual_seed(0)
    return load_job(text, batch_size)


def report(done: int, total: int, what: str) -> None:
    """A line of progress every ten measurements."""
    if done % 10 == 0:
        print(f"  {time.strftime('%X')} {done}/{total} {what}", flush=True)


def measure(name: str, out: Path) -> Iterator[list[dict[str, object]]]:
    """The rows of one training after the other."""
    clock = time.perf_counter()

    def lap(what: str) -> None:
        nonlocal clock
        now = time.perf_counter()
        print(f"{name}: {what} took {now - clock:.1f} s", flush=True)
        clock = now

    job = fresh(name)
    dag: PrecisionDag = trace(job)
    lap(f"trace ({len(dag.operators)} operators, {len(dag.adjustable)} adjustable)")
    profile_ = profile(job, dag, ProfileRequest(device="cuda:0", ladder=LADDER), progress=report)
    lap("profile")
    release()
    profiles = {"train": profile_, "infer": profile_}
    unlimited = Replayer(Inputs(dag, cluster_of(profile_, 0), profiles))
    low = unlimited.memory("infer", {op.op_id: LADDER[1] for op in dag.adjustable}).process_bytes
    high = unlimited.memory("infer", unlimited.base_variants("infer")).process_bytes
    cluster = cluster_of(profile_, int(low + BUDGET_SHARE * (high - low)))
    replayer = Replayer(Inputs(dag, alone(cluster), {"infer": profile_}))
    uniform = {f"uniform-{rung.compute}": {op.op_id: rung for op in dag.adjustable} for rung in LADDER[:-1]}
    for run, variants in {"full": None, **uniform}.items():
        yield compared(name, run, variants, replayer)
        lap(f"train {run}")
    observations = observe(job, dag, ObserveRequest(LADDER, device="cuda:0", steps=10))
    lap(f"observe ({observations.stopped})")
    sensitivity = indicate(observations, dag, LADDER)
    plan = allocate(Inputs(dag, cluster, profiles, sensitivity))
    lap("plan")
    for artifact, kind in ((dag, "dag"), (profile_, "profile"), (sensitivity, "sensitivity"), (plan, "plan")):
        save(artifact, out / f"{name}.{kind}.qsync")
    release()
    yield compared(name, "plan", {op_id: entry.variant for op_id, entry in plan.group("infer").assignments.items()}, replayer)
    lap("train plan")
    print(f"{name}: budget {cluster.group('infer').memory_bytes / 2**30:.2f} GiB; T {plan.time_limit_ns / 1e6:.2f} ms", flush=True)


def compared(name: str, run: str, variants: Mapping[OpId, Variant] | None, replayer: Replayer) -> list[dict[str, object]]:
    """A training, and what was predicted of it."""
    job = fresh(name)
    seconds, spread, peak, first, last = train(job, variants)
    del job
    release()
    prediction = replayer.replay({"infer": variants} if variants else {})
    predicted_s, predicted_peak = prediction.iteration_ns / 1e9, prediction.groups["infer"].peak_bytes
    per = Counter(variant.label for variant in variants.values()) if variants else Counter[str]()
    counts = "".join(f", {count} {label}" for label, count in sorted(per.items()))
    title = f"{name}, batch {JOBS[name][1]}, {run}{counts}"
    loss = f"; loss {first:.3f} → {last:.3f} over {STEPS} steps"
    print(f"{title}: {seconds * 1e3:.2f} ms (predicted {predicted_s * 1e3:.2f}), peak {peak / 2**30:.2f} GiB "
          f"(predicted {predicted_peak / 2**30:.2f}){loss}", flush=True)  # fmt: skip
    values = (
        ("time-measured", f"step time, measured, {title}{loss}", seconds * 1e3, "ms"),
        ("time-predicted", f"step time, predicted, {title}", predicted_s * 1e3, "ms"),
        ("time-error", f"step time, |predicted − measured| / measured, {title}", abs(predicted_s / seconds - 1), "fraction"),
        ("peak-measured", f"peak memory, measured, {title}", peak / 2**30, "GiB"),
        ("peak-predicted", f"peak memory, predicted, {title}", predicted_peak / 2**30, "GiB"),
        ("peak-error", f"peak memory, |predicted − measured| / measured, {title}", abs(predicted_peak / peak - 1), "fraction"),
    )
    device = torch.cuda.get_device_name()
    rows: list[dict[str, object]] = [
        {"id": f"S7-{name}-{run}-{row_id}", "what": what, "value": value, "unit": unit, "target": "reported", "device": device}
        for row_id, what, value, unit in values
    ]
    rows[0]["spread"] = f"{spread:.4f} IQR/median"
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the artifacts of the run")
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--directory", type=Path, default=None, help="folder of the results file (docs/results)")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device, and torch sees none")
    # "float32" means float32 here, products and convolutions alike.
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    faulthandler.dump_traceback_later(120, repeat=True)  # a hang on a machine that is far away should say where
    failed = []
    for name in arguments.jobs.split(","):
        where = {"directory": arguments.directory} if arguments.directory else {}
        try:
            for rows in measure(name, arguments.out):
                write_rows("spine", rows, "python bench/gpu_spine.py --out OUT", **where)
        except Exception:
            traceback.print_exc()
            failed.append(name)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
