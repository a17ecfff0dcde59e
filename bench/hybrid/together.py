"""One workload as a hybrid job of two ranks: from nothing to trained steps under every plan, in one process per GPU.

Run by ``gpu_hybrid.py``, a process per rank, under an MPS daemon; rank 1 has a share of its GPU.  Both ranks trace and profile at
the same time, measure their collectives together, rank 0 observes and plans, and then every plan is trained under every way to
communicate that the rows need, those first that most rows need.  Rank r writes ``together.<shares>.<r>.json`` after each; rank 0
the artifacts as well.  A job started again, on this machine or one of its kind, goes on with what both ranks have not measured.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

RANK = int(os.environ["LOCAL_RANK"])
SHARE = float(os.environ["QSYNC_SHARES"].split(",")[RANK])
if SHARE < 1:
    os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(round(100 * SHARE))
GROUP = ("train", "infer")[RANK]
os.environ["QSYNC_GROUP"] = GROUP

import attrs  # noqa: E402 - MPS reads its percentage when CUDA starts
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from hybrid.workloads import (  # noqa: E402
    DEVICE,
    HYBRID_LADDER,
    WORKLOADS,
    TimeLeft,
    cap_memory,
    cluster_of,
    fresh_model,
    gpu_name,
    in_turn,
    kept,
    make_job,
    measure,
    phases,
    release,
    repeated,
    synchronize,
    take_half_of_cores,
    with_turn,
    without_tf32,
    write,
)
from qsync_core.artifacts.files import load, save  # noqa: E402
from qsync_core.ir.cluster import Cluster, Link  # noqa: E402
from qsync_core.ir.communication import CollectiveCosts, CommunicationSettings  # noqa: E402
from qsync_core.ir.dag import PrecisionDag  # noqa: E402
from qsync_core.ir.plan import PrecisionPlan  # noqa: E402
from qsync_core.ir.profile import Profile  # noqa: E402
from qsync_planner.allocator import Inputs, Request, allocate  # noqa: E402
from qsync_planner.indicate import indicate  # noqa: E402
from qsync_planner.replayer.replay import Replayer, plan_variants  # noqa: E402
from qsync_torch.apply.apply import apply_  # noqa: E402
from qsync_torch.distributed.communication import options_of  # noqa: E402
from qsync_torch.distributed.nccl import nccl_options  # noqa: E402
from qsync_torch.job import Job  # noqa: E402
from qsync_torch.observing.observe import ObserveRequest, observe  # noqa: E402
from qsync_torch.profiling.communication import measure_communication  # noqa: E402
from qsync_torch.profiling.profile import ProfileRequest, profile  # noqa: E402
from qsync_torch.tracing.trace import trace  # noqa: E402
from results import provenance  # noqa: E402

DEFAULTS = CommunicationSettings()
ORDER = ("uniform", "qsync", "full", "blind", "small")
"""Of the plans that are trained: what most rows need comes first, what may run out of memory last."""
COLLECTIVES_S = 100
"""After which a rank that waits in a collective gives up."""
SHARES = tuple(float(text) for text in os.environ["QSYNC_SHARES"].split(","))


def plans_of(
    dag: PrecisionDag, profiles: Mapping[str, Profile], sensitivity: object, costs: CollectiveCosts, memory_bytes: int
) -> dict[str, PrecisionPlan]:
    """Uniform precision and QSync's plan, QSync's plan as if communication were free of contention, and one for little memory."""
    cluster = cluster_of(profiles["train"].device.name, SHARES[1])
    made = {
        "uniform": allocate(Inputs(dag, cluster, profiles, communication=costs), Request("uniform")),
        "qsync": allocate(Inputs(dag, cluster, profiles, sensitivity, communication=costs)),
        "blind": allocate(Inputs(dag, blind_cluster(cluster), profiles, sensitivity)),
    }
    if memory_bytes:
        small = cluster_of(profiles["train"].device.name, SHARES[1], memory_bytes)
        made["small"] = allocate(Inputs(dag, small, profiles, sensitivity, communication=costs))
    return made


def blind_cluster(cluster: Cluster) -> Cluster:
    """The job with the link that a person would describe, for a plan without measured collectives."""
    return attrs.evolve(cluster, links=(Link(("train", "infer"), 20_000.0, 1 / 200),))


@contextmanager
def process_group(settings: CommunicationSettings) -> Iterator[dist.ProcessGroup]:
    """A process group of both ranks for one run: a group holds the buckets of its last collectives, which the next run would count
    as its own."""
    group = dist.new_group(pg_options=nccl_options(settings.max_ctas) if DEVICE == "cuda" else None)
    try:
        yield group
    finally:
        release()  # a wrapper that outlives its group can abort the process
        dist.destroy_process_group(group)


def largest(value: float) -> float:
    """The largest of all ranks' numbers."""
    found = torch.tensor(value, dtype=torch.float64, device=torch.device(DEVICE, RANK) if DEVICE == "cuda" else DEVICE)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def train(name: str, job: Job, batch: int, plan: PrecisionPlan | None, settings: CommunicationSettings) -> dict[str, object]:
    """Train under a plan and a way to communicate, then this rank's steps without any."""
    with process_group(settings) as group:
        return _train_in(group, name, job, batch, plan, settings)


def _train_in(
    group: dist.ProcessGroup, name: str, job: Job, batch: int, plan: PrecisionPlan | None, settings: CommunicationSettings
) -> dict[str, object]:
    """As :func:`train`; a function of its own, so that nothing of the wrapper is left when the group ends."""
    release()
    model = fresh_model(job)
    applied = None if plan is None else apply_(model, plan)
    devices = [RANK] if DEVICE == "cuda" else None
    ddp = DistributedDataParallel(model, device_ids=devices, process_group=group, **options_of(settings))
    try:
        step = in_turn(phases(job, ddp, batch, seed=RANK))
        measured = measure(step, WORKLOADS[name].steps, level=dist.barrier, agree=largest)
        steps = repeated(8, max(measured.step_ms) / 1e3)
        with ddp.no_sync():
            for _ in range(2):
                step()
            synchronize()
            begin = time.perf_counter()
            for _ in range(steps):
                step()
            synchronize()
        return attrs.asdict(measured) | {"alone_ms": (time.perf_counter() - begin) / steps * 1e3}
    finally:
        if applied is not None:
            applied.remove()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=WORKLOADS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--full-only", action="store_true", help="only full precision, without planning")
    parser.add_argument("--memory-gib", type=float, default=0.0, help="a budget for the weak rank as well (row H7)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start nothing that would end later")
    options = parser.parse_args()
    time_left = TimeLeft(options.seconds)
    without_tf32()
    device = torch.device(DEVICE, RANK) if DEVICE == "cuda" else torch.device(DEVICE)
    take_half_of_cores(RANK)
    backend: dict[str, object] = {"backend": "gloo", "timeout": timedelta(seconds=COLLECTIVES_S)}
    if DEVICE == "cuda":
        torch.cuda.set_device(device)
        backend |= {"backend": "nccl", "device_id": device}
    batch, out = WORKLOADS[options.name].batch_hybrid, options.out
    out.mkdir(parents=True, exist_ok=True)
    here: dict[str, object] = {"batch": batch, **provenance(), "device": gpu_name()}
    files = [out / f"together.{os.environ['QSYNC_SHARES']}.{rank}.json" for rank in (0, 1)]
    earlier = [kept(file, here) for file in files]  # of both ranks, before either writes
    found = earlier[RANK] if all(earlier) else here | {"runs": []}
    turns = [Counter({(run["plan"], run["label"]): run["turns"] for run in file.get("runs", ())}) for file in earlier]
    done = turns[0] & turns[1]
    found["runs"] = [run for run in found["runs"] if (run["plan"], run["label"]) in done]
    clock = time.perf_counter()

    def lap(what: str) -> None:
        nonlocal clock
        now = time.perf_counter()
        found[f"{what}_s"] = found.get(f"{what}_s", 0.0) + now - clock
        print(f"{options.name} rank {RANK}: {what} {now - clock:.1f} s", flush=True)
        clock = now

    job = make_job(options.name, batch)
    if options.full_only:
        dist.init_process_group(**backend)
        measured = train(options.name, job, batch, None, DEFAULTS)
        runs = [{"plan": "full", "settings": attrs.asdict(DEFAULTS), "label": DEFAULTS.label, "measured": measured}]
        write(files[RANK], here | {"runs": runs, "complete": True})
        leave()
        return
    if not all(earlier):
        dag = trace(job)
        lap("trace")
        save(profile(job, dag, ProfileRequest(device=device, share=SHARE, ladder=HYBRID_LADDER)), out / f"{GROUP}.qsync")
        lap("profile")
        if RANK == 0:
            for stale in out.glob("*.plan.qsync"):
                stale.unlink()
            save(dag, out / "dag.qsync")
            sensitivity = indicate(observe(job, dag, ObserveRequest(HYBRID_LADDER, device=device, steps=10)), dag, HYBRID_LADDER)
            save(sensitivity, out / "sensitivity.qsync")
            lap("observe")
    dist.init_process_group(**backend)
    dist.barrier()
    if not all(earlier):
        costs = measure_communication(job, dag, device=device, group=GROUP, share=SHARE, note=lambda text: print(text, flush=True))
        lap("communicate")
        if RANK == 0:
            profiles = {name: load(out / f"{name}.qsync", Profile) for name in ("train", "infer")}
            save(costs, out / "costs.qsync")
            for label, plan in plans_of(dag, profiles, sensitivity, costs, int(options.memory_gib * 2**30)).items():
                save(plan, out / f"{label}.plan.qsync")
            lap("plan")
        dist.barrier()
        write(files[RANK], found)
    dag, costs = load(out / "dag.qsync", PrecisionDag), load(out / "costs.qsync", CollectiveCosts)
    plans: dict[str, PrecisionPlan | None] = {"full": None}
    plans |= {file.name.split(".")[0]: load(file, PrecisionPlan) for file in sorted(out.glob("*.plan.qsync"))}
    all_done = True
    for label, settings in cases(plans):
        if done[label, settings.label]:
            done[label, settings.label] -= 1
            continue
        if not time_left.for_another(largest):
            print(f"{options.name} rank {RANK}: no time is left for {label}, {settings.label}", flush=True)
            all_done = False
            continue
        plan = plans[label]
        if label == "small" and RANK == 1:
            cap_memory(options.memory_gib * 2**30 - outside_bytes(out))
        run: dict[str, Any] = {"plan": label, "settings": attrs.asdict(settings), "label": settings.label, "turns": 1}
        run["measured"] = train(options.name, job, batch, plan, settings)
        cap_memory(None)
        if RANK == 0:
            run["predicted"] = predict(out, dag, costs, plan, settings)
        print(options.name, RANK, label, settings.label, run, flush=True)
        found["runs"] = with_turn(found["runs"], run)
        write(files[RANK], found)
    lap("runs")
    write(files[RANK], found | {"complete": all_done})
    leave()


def cases(plans: Mapping[str, PrecisionPlan | None]) -> Iterator[tuple[str, CommunicationSettings]]:
    """Which plan is trained under which way to communicate, in turn.

    First PyTorch's own way; then uniform precision and QSync's plan as they chose, to and back, because a row is their ratio and
    one model is up to 1% faster in one run than in another; then the others.
    """
    chosen = {label: plan.communication.settings if plan and plan.communication else DEFAULTS for label, plan in plans.items()}
    compared, others = ([label for label in labels if label in plans] for labels in (ORDER[:2], ORDER[2:]))
    yield from ((label, DEFAULTS) for label in compared if chosen[label] != DEFAULTS)
    yield from ((label, chosen[label]) for label in (*compared, *reversed(compared)))
    for label in others:
        yield from ((label, way) for way in dict.fromkeys([DEFAULTS, chosen[label]]) if label != "small" or way == chosen[label])


def leave() -> None:
    """End the job; a wrapper that outlives its process group can abort the process, or keep it from ending."""
    release()
    dist.barrier()
    dist.destroy_process_group()


def outside_bytes(out: Path) -> int:
    """What the weak rank's process holds outside PyTorch's allocator."""
    memory = load(out / "infer.qsync", Profile).memory
    return memory.outside_bytes if memory is not None else 0


def predict(
    out: Path, dag: PrecisionDag, costs: CollectiveCosts, plan: PrecisionPlan | None, settings: CommunicationSettings
) -> dict[str, object]:
    """The period of a plan under a way to communicate, with and without contention."""
    profiles = {name: load(out / f"{name}.qsync", Profile) for name in ("train", "infer")}
    cluster = cluster_of(profiles["train"].device.name, SHARES[1])
    variants = {} if plan is None else plan_variants(plan, cluster)
    replayer = Replayer(Inputs(dag, cluster, profiles, communication=costs), settings=settings)
    prediction = replayer.replay(variants)
    return {
        "iteration_ns": prediction.iteration_ns,
        "busy_ns": {name: group.busy_ns for name, group in prediction.groups.items()},
        "peak_bytes": {name: group.peak_bytes for name, group in prediction.groups.items()},
    }


if __name__ == "__main__":
    main()
