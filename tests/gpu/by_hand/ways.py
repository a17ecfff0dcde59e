"""What a way to communicate takes from the strong rank: one thing changed at a time, kernels recorded.

    python tests/gpu/by_hand/ways.py vgg16-bn --out $OUT [--ctas 4]

Two ranks: rank 0 in float32 on a whole GPU, rank 1 in uniform bfloat16 on half of one (MPS).  Under PyTorch's own way, and with
fewer CTAs, gradients in the buckets, no broadcast of buffers, and all of them: the step, and of one recorded step on rank 0 how
long the kernels of backward take in all, how much of that lies beside a collective, how long nothing runs, and which operators take
longest more than under PyTorch's way.  The numbers are in OUT as JSON too, and as rows of hybrid.json, which
``bench/results.py`` merges; without GPUs, ``smallest`` sees that it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "bench"))

from hybrid.processes import finish, mps, start_ranks
from qsync_core.ir.communication import CommunicationSettings
from qsync_core.ir.dfg import Phase, Resource
from qsync_core.ir.timeline import Interval, Timeline
from results import write_rows

SECONDS = 150.0
Found = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ctas", type=int, default=4)
    options = parser.parse_args()
    if "RANK" in os.environ:
        of_one_rank(options)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    with mps(on_gpu=torch.cuda.is_available()) as daemon:
        own = {**daemon.environment, "QSYNC_SHARES": "1,0.5"}
        ranks = start_ranks("ways", [sys.executable, *sys.argv], options.out / f"ways.{options.name}.log", own, of_weak={})
        finish(ranks, SECONDS)
    print(*(entry.log.read_text(errors="replace") for entry in ranks[:1]))


def of_one_rank(options: argparse.Namespace) -> None:
    """Train under every way in turn; the import of ``together`` sets MPS's percentage, before CUDA starts."""
    from hybrid import together
    from hybrid.workloads import BFLOAT16, DEVICE, WORKLOADS, fresh_model, in_turn, make_job, measure, phases, take_half_of_cores
    from qsync_torch.apply.apply import apply_
    from qsync_torch.distributed.communication import options_of
    from qsync_torch.profiling.measured_timeline import measured_timeline
    from qsync_torch.tracing.trace import trace

    rank, cuda = together.RANK, DEVICE == "cuda"
    take_half_of_cores(rank)
    together.without_tf32()
    device = torch.device(DEVICE, rank) if cuda else torch.device(DEVICE)
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=100))
    batch = WORKLOADS[options.name].batch_hybrid
    job = make_job(options.name, batch)
    dag = trace(job)
    ctas = {"max_ctas": options.ctas} if cuda else {}
    ways: dict[str, dict[str, Any]] = {
        "PyTorch's own": {},
        f"{options.ctas} CTAs": ctas,
        "in the buckets": {"gradient_as_bucket_view": True},
        "no broadcast": {"broadcast_buffers": False},
        "all three": {**ctas, "gradient_as_bucket_view": True, "broadcast_buffers": False},
        "PyTorch's own, again": {},
    }
    found: dict[str, Found] = {}
    for title, changed in ways.items():
        settings = CommunicationSettings(**changed)
        with together.process_group(settings) as group:
            model = fresh_model(job)
            if rank:
                apply_(model, {operator.op_id: BFLOAT16 for operator in dag.adjustable})
            devices = [rank] if cuda else None
            ddp = DistributedDataParallel(model, device_ids=devices, process_group=group, **options_of(settings))
            step = in_turn(phases(job, ddp, batch, seed=rank))
            measured = measure(step, WORKLOADS[options.name].steps, level=dist.barrier, agree=together.largest)
            recorded = measured_timeline(model, dag, step, group=together.GROUP, device=device, steps=4)
            del ddp, step, model
        found[title] = {"step_ms": statistics.median(measured.step_ms), **of_backward(recorded)}
        if rank == 0:
            (options.out / f"ways.{options.name}.json").write_text(json.dumps(found))
    if rank == 0:
        show(found)
        write_all(options.out, options.name, found, torch.cuda.get_device_name(device) if cuda else "cpu")
    dist.destroy_process_group()


def of_backward(timeline: Timeline) -> Found:
    """Of rank 0's backward, in ms: its span, its kernels in all, beside collectives, and nothing; collectives; by operator."""
    own = [interval for interval in timeline.intervals if interval.rank == 0]
    kernels = [i for i in own if i.resource is Resource.COMPUTE and i.phase is Phase.BACKWARD]
    collectives = [i for i in own if i.resource is Resource.COMMUNICATION]

    def beside(one: Interval) -> int:
        return sum(max(0, min(one.end_ns, c.end_ns) - max(one.start_ns, c.start_ns)) for c in collectives)

    by_operator: Counter[str] = Counter()
    for kernel in kernels:
        by_operator[str(kernel.op_id)] += kernel.duration_ns
    busy = sum(kernel.duration_ns for kernel in kernels)
    span = max((k.end_ns for k in kernels), default=0) - min((k.start_ns for k in kernels), default=0)
    ms = {"span": span, "kernels": busy, "beside": sum(map(beside, kernels)), "nothing": span - busy}
    return {
        **{name: value / 1e6 for name, value in ms.items()},
        "collectives": [(c.name, c.start_ns / 1e6, c.duration_ns / 1e6) for c in collectives],
        "ends": max((i.end_ns for i in own), default=0) / 1e6,
        "operators": {name: value / 1e6 for name, value in by_operator.items()},
    }


PARTS = {
    "step_ms": "step",
    "kernels": "kernels of rank 0's backward",
    "beside": "of them beside a collective",
    "nothing": "nothing runs between the first and the last of them",
}


def write_all(out: Path, name: str, found: dict[str, Found], device: str) -> None:
    """Rows ``H2-ways-…`` of every way, into a results file in OUT."""
    rows = []
    for title, way in found.items():
        id_ = f"H2-ways-{name}-{title.replace(' ', '-')}"
        for part, what in PARTS.items():
            row = {"id": f"{id_}-{part}", "what": f"{name}, {title}: {what}", "value": way[part], "unit": "ms"}
            rows.append({**row, "target": "reported", "device": device})
    write_rows("hybrid", rows, f"python tests/gpu/by_hand/ways.py {name} --out OUT", directory=out)


def show(found: dict[str, Found]) -> None:
    """A line per way, and what takes longer under it than under PyTorch's own."""
    first = next(iter(found.values()))["operators"]
    for title, way in found.items():
        print(title, *(f"{name} {way[name]:.2f}" for name in ("step_ms", "span", "kernels", "beside", "nothing", "ends")))
        more = sorted(((took - first.get(name, 0.0), name) for name, took in way["operators"].items()), reverse=True)[:6]
        print("   longer:", *(f"{name} {value:+.2f}" for value, name in more))
        print("   collectives:", *(f"{name} {start:.1f}+{took:.2f}" for name, start, took in way["collectives"][:14]))


if __name__ == "__main__":
    main()
