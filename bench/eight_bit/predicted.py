"""Rows P7: compiled steps under autocast, predicted from a profile of compiled steps and measured.

Each model is profiled with its rungs, and with three kinds of its layers alone; then plans that calibrated nothing are predicted
and measured.  What is measured is kept in a folder, so that a killed run continues.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import torch
from torch import nn

from eight_bit.steps import ALL, LARGE, TINY, Attention, Shape, batch_of, llama, made
from eight_bit.steps import job_of as transformers_job
from kernels.bench import Bench, Row
from qsync_core.artifacts.atomic_file import write_atomically
from qsync_core.artifacts.files import digest, load, save
from qsync_core.ir.cluster import Cluster, DeviceGroup
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import Compiled, Compiler, Profile
from qsync_core.ir.variant import Variant
from qsync_core.kernels.choice import KernelChoice
from qsync_planner.matching import Inputs
from qsync_planner.replayer.replay import Replayer
from qsync_torch.job import Job
from qsync_torch.load_job import load_job
from qsync_torch.profiling.bench import Efforts
from qsync_torch.profiling.profile import ProfileRequest, profile
from qsync_torch.profiling.whole_step import StepRunner, measure_step
from qsync_torch.timing import Effort, make_stopwatch
from qsync_torch.tracing.trace import trace

LOW, BASE = Variant.parse(ALL), Variant.plain(Precision.BFLOAT16)
BATCHES = 4
CUT = {**LARGE, "num_hidden_layers": 6}
TRANSFORMERS = {
    "llama": llama("Llama-like 1B cut to 4 layers", 2048, 8192, 4, 4, 2048, Attention.CAUSAL),
    "bert": Shape("BERT-large cut to 6 layers, 16 × 512", "Bert", CUT, 16, 512),
    "vit": Shape("ViT-L cut to 6 layers, b64", "ViT", {**CUT, "num_labels": 1000}, 64, 224, classes=1000),
}
RESNET, TINY_RESNET = "resnet50:image=224,channels_last=true", "resnet18:image=32,width=4,classes=10"
MODELS = (*TRANSFORMERS, "resnet50")
TINY_MODEL = attrs.evolve(TRANSFORMERS["llama"], arguments={**TRANSFORMERS["llama"].arguments, **TINY})
LEAST = 16
"""Configurations that the rows ask for."""


@attrs.frozen
class Error:
    """A plan's step and peak, predicted and measured."""

    plan: str
    predicted_ns: int
    measured_ns: int
    predicted_bytes: int
    measured_bytes: int

    @property
    def step(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_ns / self.measured_ns - 1

    @property
    def peak(self) -> float:
        """The same of memory."""
        return self.predicted_bytes / self.measured_bytes - 1


def job_of(name: str, bench: Bench) -> Job:
    """A model of the rows under bfloat16 autocast, compiled."""
    how = Compiled(Compiler.QSYNC) if bench.device.type == "cuda" else Compiled(backend="aot_eager")
    if name == "resnet50":
        plain = load_job(TINY_RESNET, 2) if bench.quick else load_job(RESNET, 64)
        return attrs.evolve(plain, amp="bfloat16", compiles=how)
    shape = TINY_MODEL if bench.quick else TRANSFORMERS[name]
    batches = [batch_of(shape, torch.device("cpu"), bench.quick) for _ in range(BATCHES)]

    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-5, fused=bench.device.type == "cuda")

    return attrs.evolve(transformers_job(name, made(shape, bench.quick), batches), optimizer=optimizer, compiles=how)


def plans(dag: PrecisionDag, quick: bool) -> dict[str, tuple[OpId, ...]]:
    """Operators that run in 8 bit, by the plan's name: none of them is a plan that a profile measures.

    Operators without kernels for all three products, as a convolution of stride 2, stay at the base.
    """
    ids = [operator.op_id for operator in dag.adjustable if operator.runs_in(LOW)]
    half, rng = len(ids) // 2, random.Random(7)
    found = {"every other": ids[1::2], "first half": ids[:half]}
    if not quick:
        found |= {"last half": ids[half:]}
        found |= {f"{share:.0%} at random": rng.sample(ids, round(share * len(ids))) for share in (0.3, 0.7)}
    return {name: tuple(sorted(chosen, key=ids.index)) for name, chosen in found.items()}


def errors_of(name: str, bench: Bench, folder: Path) -> list[Error]:
    """Every plan of a model; those that are in the folder already are not measured again."""
    job = job_of(name, bench)
    dag = trace(job)
    found = _profiled(job, dag, bench, folder / f"{name}.profile.qsync")
    replay = Replayer(Inputs(dag, _cluster(found), {"g": found}))
    kept = folder / f"{name}.json"
    content = json.loads(kept.read_text()) if kept.exists() else {}
    measured = content["plans"] if content.get("profile") == digest(found) else {}
    runner: StepRunner | None = None
    errors = []
    for plan, lowered in plans(dag, bench.quick).items():
        if plan not in measured:
            runner = runner or StepRunner.start(job, bench.device, compiled=job.compiles)
            chosen = {op_id: _choice(found, op_id) for op_id in lowered}
            stopwatch, effort = make_stopwatch(bench.device), _efforts(bench).steps
            step = measure_step(runner, LOW, dag, stopwatch, effort, found.steps[0], chosen, lowered)
            measured[plan] = {"ns": step.iteration_ns, "bytes": step.peak_bytes}
            write_atomically(kept, json.dumps({"profile": digest(found), "plans": measured}).encode())
        variants = {operator.op_id: LOW if operator.op_id in lowered else BASE for operator in dag.adjustable}
        ours, theirs = replay.replay({"g": variants}).groups["g"], measured[plan]
        errors.append(Error(plan, ours.period_ns, theirs["ns"], ours.peak_bytes, theirs["bytes"]))
        bench.say(f"{name}, {plan}: step {errors[-1].step:+.1%}, peak {errors[-1].peak:+.1%}")
    return errors


def _efforts(bench: Bench) -> Efforts:
    short = Effort(2, 2, 1.0, 0.0, 0)
    return Efforts(short, short, short) if bench.quick else Efforts()


def _profiled(job: Job, dag: PrecisionDag, bench: Bench, path: Path) -> Profile:
    if path.exists() and (kept := load(path, Profile)).dag_digest == digest(dag):
        return kept
    asked = ProfileRequest(bench.device, ladder=[LOW], with_collectives=False, efforts=_efforts(bench))
    found = profile(job, dag, asked, resume=path.with_suffix(".partial"), note=bench.say)
    save(found, path)
    gc.collect()
    return found


def _cluster(found: Profile) -> Cluster:
    return Cluster("one rank", (DeviceGroup("g", found.device.name, 1, Role.INFER, Precision.BFLOAT16, (LOW, BASE)),))


def _choice(found: Profile, op_id: OpId) -> KernelChoice:
    cost = found.cost(op_id, LOW)
    return KernelChoice.parse(cost.backend, cost.config)


def rows(bench: Bench, folder: Path, models: Sequence[str] = ()) -> Iterator[Row]:
    """A row for each model as soon as it is measured, and those of all models; of some, where several GPUs share the work."""
    folder.mkdir(parents=True, exist_ok=True)
    by_model: dict[str, list[Error]] = {}
    for name in models or (("llama", "resnet50") if bench.quick else MODELS):
        by_model[name] = errors_of(name, bench, folder)
        yield from _of_model(bench.row, name, by_model[name])
        gc.collect()
    if not models:
        yield from of_all(bench.row, by_model)


def _of_model(row: Callable[..., Row], name: str, errors: Sequence[Error]) -> Iterator[Row]:
    told = "; ".join(f"{e.plan} {e.step:+.1%}, peak {e.peak:+.1%}" for e in errors)
    title = TRANSFORMERS[name].title if name in TRANSFORMERS else "ResNet50 b64"
    what = f"{title}, compiled steps of {len(errors)} plans predicted: mean error"
    yield row(f"P7-{name}", what, statistics.fmean(abs(error.step) for error in errors), "fraction", "reported", told)


def of_all(row: Callable[..., Row], by_model: Mapping[str, Sequence[Error]]) -> Iterator[Row]:
    """P7, P7b and P7c; they say so where there are fewer plans than are asked for."""
    named = [(f"{name}, {error.plan}", error) for name, errors in by_model.items() for error in errors]
    what = f"compiled autocast steps of {len(named)} plans of {len(by_model)} models that calibrated nothing, predicted"
    enough = "" if len(named) >= LEAST else f"; {LEAST} plans are asked for"
    steps, peaks = ([abs(getattr(error, part)) for _, error in named] for part in ("step", "peak"))
    worst, median = max(named, key=lambda one: abs(one[1].step))[0], statistics.median(steps)
    yield row("P7", f"{what}: mean error", statistics.fmean(steps), "fraction", "≤ 0.02", f"median {median:.2%}{enough}")
    yield row("P7b", f"{what}: worst error", max(steps), "fraction", "≤ 0.05", f"{worst}{enough}")
    told = f"worst {max(peaks):.2%}{enough}"
    yield row("P7c", f"{what}: mean error of the peak", statistics.fmean(peaks), "fraction", "≤ 0.03", told)
