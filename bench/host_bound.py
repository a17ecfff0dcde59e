"""Mixed plans where the CPU's calls are the step: predicted against measured, on a CPU and with no GPU.

    OMP_NUM_THREADS=1 python bench/host_bound.py [JOB] [--rounds 40]

A transformer of small layers takes a CPU as long to call as to compute, as a GPU's steps take it to issue.  Every configuration of
row H1 is kept ready, and all of them take steps in turn, so that each meets the same machine; the process's own CPU time is taken,
which other processes do not lengthen.  The uniform steps and the alternating one of this run calibrate the model.  A line per plan:
measured, and predicted without and with what operators that stay take longer beside lowered ones.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping

import attrs
import torch

from hybrid.alone import one_group
from hybrid.workloads import BFLOAT16, FLOAT32, LADDER, Variants, configurations, fresh_model, in_turn, phases
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.profile import AlternatingDispatch, Profile, StepMeasurement
from qsync_planner.matching import Inputs
from qsync_planner.replayer.replay import Replayer
from qsync_torch.apply.apply import apply_
from qsync_torch.job import Job
from qsync_torch.load_job import load_job
from qsync_torch.profiling.profile import ProfileRequest, profile
from qsync_torch.tracing.trace import trace

SMALL_BERT = "bert-base:seq=16,hidden=64,heads=2,intermediate=128,vocab=1000"
WARM_UP = 9
Times = tuple[float, float, float]


def measured_in_turn(job: Job, plans: Mapping[str, Variants], rounds: int) -> dict[str, Times]:
    """CPU time of forward, backward and update under every plan, in nanoseconds."""
    ready, applied = {}, []
    for label, variants in plans.items():
        model = fresh_model(job)
        if any(variant != FLOAT32 for variant in variants.values()):
            applied.append(apply_(model, variants))
        ready[label] = phases(job, model, 1)
        for _ in range(WARM_UP):
            in_turn(ready[label])()
    rows: dict[str, list[Times]] = {label: [] for label in plans}
    for _ in range(rounds):
        for label, parts in ready.items():
            in_turn(parts)()  # the caches are another plan's
            row = []
            for part in parts:
                begin = time.process_time_ns()
                part()
                row.append(float(time.process_time_ns() - begin))
            rows[label].append((row[0], row[1], row[2]))
    return {label: tuple(map(statistics.median, zip(*own, strict=True))) for label, own in rows.items()}  # type: ignore[misc]


def calibrated_by(profile_: Profile, found: Mapping[str, Times]) -> Profile:
    """The profile with the steps of this run."""
    uniform = {step.variant: found[label] for step, label in zip(profile_.steps, ("float32", "int8", "bfloat16"), strict=True)}

    def step(stored: StepMeasurement) -> StepMeasurement:
        forward, backward, update = map(round, uniform[stored.variant])
        return attrs.evolve(
            stored,
            iteration_ns=forward + backward + update,
            forward_compute_ns=forward,
            backward_compute_ns=backward,
            optimizer_compute_ns=update,
        )

    update = round(found["float32"][2])
    return attrs.evolve(profile_, steps=tuple(map(step, profile_.steps)), optimizer_compute_ns=update, optimizer_dispatch_ns=0)


def predicted_ms(dag: PrecisionDag, profile_: Profile, plans: Mapping[str, Variants]) -> dict[str, float]:
    replayer = Replayer(Inputs(dag, one_group(profile_), {"infer": profile_}))
    return {label: replayer.replay({"infer": variants}).iteration_ns / 1e6 for label, variants in plans.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", nargs="?", default=SMALL_BERT)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    torch.manual_seed(0)
    job = load_job(options.job, 1)
    dag = trace(job)
    plans = configurations(dag)  # "half": every other operator in bfloat16
    found = measured_in_turn(job, plans, options.rounds)
    calibrated = calibrated_by(profile(job, dag, ProfileRequest(ladder=LADDER, with_collectives=False)), found)
    more = [
        max(0, round(half - (none + every) / 2))
        for half, none, every in zip(found["half"], found["float32"], found["bfloat16"], strict=True)
    ]
    told = attrs.evolve(calibrated, alternating=AlternatingDispatch(BFLOAT16, more[0], more[1]))
    without, with_ = (predicted_ms(dag, each, plans) for each in (calibrated, told))
    for label, times in found.items():
        ms = sum(times) / 1e6
        print(f"{label:10} {ms:7.2f} ms   {without[label]:7.2f} ({without[label] / ms - 1:+.1%})   {with_[label]:7.2f} "
              f"({with_[label] / ms - 1:+.1%})")  # fmt: skip


if __name__ == "__main__":
    main()
