"""Rows I6 and I7 of ``docs/results/indicator.json``, on a CUDA device: what observing costs, and τ on models of real size.

    python bench/indicator_gpu.py [--only I6,I7] [--default] [--save FOLDER]

Those that have a target, and bfloat16's, are also rows T6 of ``docs/results/robustness.json``.

I6 is the time of all observed updates of a collector over that of one training step with the whole batch, measured in the same
process; I6b the most memory that observing holds over the most that a training step does.  Rows without an indicator's name are of
the default one.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from indicator.gpu_models import MODELS
from indicator.measuring import HessianCollector, PaperCollector
from indicator.published import named
from indicator.rows import beside_int8
from qsync_core.artifacts.files import save
from qsync_core.ir.variant import Variant
from qsync_planner.indicate import indicate
from qsync_planner.indicator_check import compare, read_truth
from qsync_torch.load_job import load_job
from qsync_torch.observing.closed_form import LossVarCollector
from qsync_torch.observing.hutchinson import HutchinsonCollector
from qsync_torch.observing.montecarlo import MonteCarloCollector
from qsync_torch.observing.observe import ObserveRequest, observe
from qsync_torch.profiling.whole_step import StepRunner
from qsync_torch.tracing.trace import trace
from results import write_rows

LADDER = tuple(map(Variant.parse, ("int8>float32", "bfloat16", "float32")))
COSTS = {"resnet50": "resnet50:batch=128,channels_last=true", "bert-base": "bert-base:seq=384,batch=12"}
DEFAULT = HutchinsonCollector.name
OBSERVED = (HutchinsonCollector, LossVarCollector, PaperCollector, HessianCollector)
Row = dict[str, Any]


def cost_rows(device: torch.device, where: str, collectors: Sequence[type[Any]]) -> Iterator[Row]:
    """I6 and I6b of both models, for each of these collectors."""
    for name, spec in COSTS.items():
        job = load_job(spec)
        dag = trace(job)
        step_s, step_bytes = _training_step(job, device)
        for collector in collectors:
            is_default = collector.name == DEFAULT
            suffix = name if is_default else f"{name}-{collector.name}"
            seconds: list[float] = []
            torch.cuda.reset_peak_memory_stats(device)
            # The warm-up is one update, which is not part of what is timed.
            found = observe(
                job, dag, ObserveRequest(LADDER, warmup=2, device=device, collectors=[_timed(collector(), device, seconds)])
            )
            peak = torch.cuda.max_memory_allocated(device)
            updates = len(found.iterations)
            # An observed update also trains on its half batch.
            total = sum(seconds) + updates * step_s / 2
            spread = (
                f"{updates} updates ({found.stopped.split(':')[0]}), {sum(seconds) / updates * 1e3:.0f} ms each beside the update "
                f"itself; training step {step_s * 1e3:.1f} ms"
            )
            what = f"{spec}, float32, {collector.name}, all observed updates over one training step of the whole batch"
            yield _row(f"I6-{suffix}", what, total / step_s, "≤ 40 (aim 20)" if is_default else "reported", spread, "steps", where)
            what = f"{spec}, float32, {collector.name}, most memory while observing over that of a training step"
            spread = f"{peak / 2**30:.2f} of {step_bytes / 2**30:.2f} GiB"
            yield _row(f"I6b-{suffix}", what, peak / step_bytes, "≤ 2" if is_default else "reported", spread, "ratio", where)


def _timed(collector: Any, device: torch.device, seconds: list[float]) -> Any:
    """A collector, per step or per call, that notes how long it takes."""

    def clocked(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any) -> Any:
            torch.cuda.synchronize(device)
            started = time.perf_counter()
            found = function(*args)
            torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - started)
            return found

        return run

    for name in ("collect_step", "collect"):
        if hasattr(collector, name):
            setattr(collector, name, clocked(getattr(collector, name)))
    return collector


def _training_step(job: Any, device: torch.device) -> tuple[float, int]:
    """Median seconds and peak bytes of a float32 training step."""
    runner = StepRunner.start(job, device)
    for step in range(3):
        runner.train_step(step)
    torch.cuda.reset_peak_memory_stats(device)
    times = []
    for step in range(10):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        runner.train_step(step)
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times), torch.cuda.max_memory_allocated(device)


def agreement_rows(
    device: torch.device, where: str, folder: Path | None, warmup: int, collectors: Sequence[type[Any]]
) -> Iterator[Row]:
    """I7 of both models, the indicators of these collectors and random numbers; of bfloat16 the default one's alone."""
    indicators = (*(collector.name for collector in collectors), "random")
    for name, make in MODELS.items():
        job = make(0)
        dag = trace(job)
        started = time.perf_counter()
        # The same updates for both: another batch has another gradient.
        options = {"warmup": warmup, "steps": 16, "device": device, "settled": None}
        observed = observe(job, dag, ObserveRequest(LADDER, collectors=[collector() for collector in collectors], **options))
        print(f"{name}: observed in {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
        truth = observe(job, dag, ObserveRequest(LADDER, collectors=[MonteCarloCollector(8)], **options))
        print(f"{name}: measured in {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            for what, artifact in (("dag", dag), ("observed", observed), ("truth", truth)):
                save(artifact, folder / f"{name}.{what}.qsync")
        losses = observed.values("run", "loss")
        check = compare({i: indicate(observed, dag, LADDER[:2], named(i)).omega for i in indicators}, read_truth(truth, dag))
        state = f"{name} after {warmup} updates (loss {losses[0]:.2f}), {len(dag.adjustable)} operators"
        for variant, of_variant in ((LADDER[0], indicators), (LADDER[1], (DEFAULT,))):
            (found,) = (one for one in check.variants if one.variant == variant)
            halves = ", ".join(f"{by} {half.ranks.tau:.3f}" for by, half in found.truth_halves.items())
            for indicator in of_variant:
                agreement = found.agreement[indicator]
                size = f"share within 2: {agreement.share_within_2:.2f}, median Ω/truth {agreement.median_ratio:.3g}"
                spread = f"{size}, Spearman {agreement.ranks.spearman:.3f}; truth's halves by {halves}"
                what = f"{state}, Kendall's τ at the same {len(losses)} updates, {variant.label}: {indicator}"
                suffix = "" if variant == LADDER[0] else f"-{variant.label}"
                suffix += "" if indicator == DEFAULT else f"-{indicator}"
                target = "reported" if suffix else "within .05 of the small models'"
                yield _row(f"I7-{name}{suffix}", what, agreement.ranks.tau or 0.0, target, spread, "τ", where)


def _row(name: str, what: str, value: float, target: str, spread: str, unit: str, device: str) -> Row:
    return {
        "id": name, "what": what, "value": round(value, 4), "unit": unit, "spread": spread, "target": target, "device": device,
    }  # fmt: skip


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="I6,I7", help="which rows")
    parser.add_argument("--warmup", type=int, default=200, help="updates before the first observed one (I7)")
    parser.add_argument("--save", type=Path, default=None, help="folder to keep measurements in")
    parser.add_argument("--directory", type=Path, default=None, help="folder of the results file (docs/results)")
    parser.add_argument(
        "--default", action="store_true", help="without the indicators beside the default, which take most of the time"
    )
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args()
    device = torch.device(options.device)
    where = torch.cuda.get_device_name(device)
    rows: list[Row] = []
    wanted = options.only.split(",")
    collectors = OBSERVED[:1] if options.default else OBSERVED
    for name, measure in (
        ("I6", lambda: cost_rows(device, where, collectors)),
        ("I7", lambda: agreement_rows(device, where, options.save, options.warmup, collectors)),
    ):
        if name in wanted:
            for row in measure():
                print(f"{row['id']}: {row['value']} {row['unit']} ({row['spread']}); target {row['target']}", flush=True)
                rows.append(row)
    directory = {"directory": options.directory} if options.directory else {}
    command = "python bench/indicator_gpu.py" + " --default" * options.default
    for topic, of_topic in (("indicator", rows), ("robustness", beside_int8(rows))):
        write_rows(topic, of_topic, command, **directory)


if __name__ == "__main__":
    main()
