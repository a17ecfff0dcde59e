"""Rows K7, K8 and K9: whole training steps with every adjustable operator int8 over the same with every one float16."""

from __future__ import annotations

import statistics
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
import torch

from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant

from .bench import Bench, Row
from .job_kernels import JobKernels
from .step_profile import write_profile
from .whole_model import Mode, Setting, StepTimes, WholeModel, release, time_in_turns

FLOAT16 = Setting("float16", Variant.of(Precision.FLOAT16))
AMP = Setting("amp-float16", autocast=torch.float16)


@attrs.frozen
class StepJob:
    """A job of the table; ``quick`` is what stands for it when the script is tried on a CPU."""

    id: str
    title: str
    text: str
    batch: int
    quick: str


JOBS = (
    StepJob("K7", "ResNet50, batch 128", "resnet50:image=224,channels_last=true", 128, "resnet18:image=32,width=8,classes=10"),
    StepJob("K8", "BERT-base 12×384", "bert-base:seq=384", 12, "bert-base:seq=16,layers=1,hidden=32,heads=2,vocab=99"),
)


SUFFIX = {Mode.EAGER: "", Mode.GRAPH: "g", Mode.COMPILED: "c"}


def int8_settings(backend: str | None, outputs: Sequence[Precision], *, has_linear: bool) -> list[Setting]:
    """Every int8 way that the row may choose from: formats of the output and of the backward products.

    No backend computes a convolution's weight gradient in int8, so that is a choice of models of linear operators only.
    """
    found = []
    for output in outputs:
        sixteen = Variant.of(Precision.INT8, sixteen_bit=output, output=output)
        found.append(Setting(f"int8→{output}, {output} backward", sixteen, backend))
        if has_linear:
            both = attrs.evolve(sixteen, grad_input=Precision.INT8, grad_weight=Precision.INT8)
            found.append(Setting(f"int8→{output}, int8 backward", both, backend))
        else:
            inputs = attrs.evolve(sixteen, grad_input=Precision.INT8)
            found.append(Setting(f"int8→{output}, int8 grad_input, {output} grad_weight", inputs, backend))
    return found


def prepare(bench: Bench, job: StepJob, settings: Sequence[Setting]) -> JobKernels:
    """Trace the job, compile and (where nobody named a backend) tune the kernels of its int8 settings."""
    text, batch = (job.quick, 2) if bench.quick else (job.text, job.batch)
    kernels = JobKernels(bench, text, batch)
    tuned = [setting.variant for setting in settings if setting.variant is not None and setting.backend is None]
    variants = [variant for variant in tuned if variant.compute.needs_scale]
    if variants:
        kernels.build(variants)
        if not bench.quick:
            kernels.tune(variants)
    return kernels


def step_rows(
    bench: Bench,
    id_: str,
    *,
    backend: str | None,
    outputs: Sequence[Precision],
    modes: Sequence[Mode],
    profile: bool,
    wanted: str = "",
) -> Iterator[Row]:
    """K7 or K8 in the given modes: K7 eager, K7c by torch.compile, K7g as a CUDA graph.

    ``wanted`` leaves out int8 settings without that text in their names.
    """
    (job,) = (entry for entry in JOBS if entry.id == id_)
    eights = [setting for setting in int8_settings(backend, outputs, has_linear=id_ == "K8") if wanted in setting.name]
    settings = [FLOAT16, AMP, *eights]
    kernels = prepare(bench, job, settings)
    best_settings: list[Setting] = []
    for mode in modes:
        measured = settings
        if mode is Mode.COMPILED:
            # Compiling takes a minute a setting: only what the earlier modes found fastest is.
            measured = [setting for setting in best_settings or settings if setting is not AMP]
        times = _measure(bench, job, kernels, measured, mode)
        yield from _rows(bench, job, times, mode)
        best_settings = [setting for setting in settings if setting.name in (FLOAT16.name, AMP.name, _best(times))]
        if profile:
            for setting in best_settings:
                if setting is not AMP:
                    _profile(bench, job, kernels, setting, mode)


def _best(times: Mapping[str, StepTimes]) -> str:
    return min((name for name in times if name.startswith("int8")), key=lambda name: times[name].median_ms)


def _open(bench: Bench, job: StepJob, kernels: JobKernels, setting: Setting, mode: Mode) -> WholeModel:
    text, batch = (job.quick, 2) if bench.quick else (job.text, job.batch)
    chosen = None if setting.variant is None else kernels.assignments(setting.variant, setting.backend, setting.config)
    return WholeModel(text, batch, setting, bench.device, mode=mode, assignments=chosen)


def _measure(bench: Bench, job: StepJob, kernels: JobKernels, settings: Sequence[Setting], mode: Mode) -> dict[str, StepTimes]:
    """All settings in turns; one that cannot run is left out, with the reason on stderr."""
    steps: dict[str, Callable[[], None]] = {}
    for setting in settings:
        try:
            model = _open(bench, job, kernels, setting, mode)
            model.step()
        except Exception as error:  # the others still count
            print(f"{job.id} {mode}, {setting.name}: {type(error).__name__}: {' '.join(str(error).split())[:600]}", file=sys.stderr)
            traceback.print_exc()
            release()
            continue
        steps[setting.name] = model.step
        bench.say(f"{job.title}, {mode}, {setting.name}: first step done")
    blocks, each = (2, 1) if bench.quick else (5, 6)
    times = time_in_turns(steps, bench.device, blocks=blocks, steps=each)
    for name, found in times.items():
        bench.say(f"{job.title}, {mode}, {name}: {found.median_ms:.2f} ms a step")
    steps.clear()
    release()
    return times


def _rows(bench: Bench, job: StepJob, times: Mapping[str, StepTimes], mode: Mode) -> Iterator[Row]:
    id_ = job.id + SUFFIX[mode]
    eights = [name for name in times if name.startswith("int8")]
    if not eights or FLOAT16.name not in times:
        raise RuntimeError(f"{id_} needs an int8 and a float16 run; what ran: {', '.join(times) or 'nothing'}")
    best = _best(times)
    over = [a / b for a, b in zip(times[best].blocks_ms, times[FLOAT16.name].blocks_ms, strict=True)]
    every = ", ".join(f"{name} {found.median_ms:.2f} ms" for name, found in times.items())
    what = f"{job.title}, whole step with all adjustable operators int8 ({best}) over all float16, {mode}"
    spread = f"{min(over):.3f} to {max(over):.3f} of {len(over)} pairs of blocks; {every}"
    yield bench.row(id_, what, statistics.median(over), "ratio", "≤ 1.05", spread)
    if AMP.name in times:
        amp = statistics.median(a / b for a, b in zip(times[best].blocks_ms, times[AMP.name].blocks_ms, strict=True))
        yield bench.row(f"{id_}-over-amp", f"{job.title}: the same int8 step over PyTorch's own AMP float16, {mode}", amp, "ratio")


def _profile(bench: Bench, job: StepJob, kernels: JobKernels, setting: Setting, mode: Mode) -> None:
    if bench.out is None:
        return
    model = _open(bench, job, kernels, setting, mode)
    for _ in range(3):
        model.step()
    name = f"profile-{job.id}-{mode}-{setting.name}".replace(" ", "-").replace(",", "").replace("→", "-to-")
    bench.say(write_profile(model.step, bench.device, bench.out / f"{name}.txt", f"{job.title}, {mode}, {setting.name}"))
    del model
    release()


def ablation_rows(bench: Bench, *, backend: str | None) -> Iterator[Row]:
    """K9: the paper's Fig. 8: ResNet50, int8 over float16, without and with the min/max kernels and the fusion."""
    sixteen = Variant.of(Precision.INT8, sixteen_bit=Precision.FLOAT16)
    variant = attrs.evolve(sixteen, output=Precision.FLOAT32)
    quantize = "&".join(f"{role}={_quantizer(bench)}/" for role in ("quantize", "quantize.weight"))
    job = attrs.evolve(JOBS[0], id="K9")
    settings = {
        "K9a": Setting("ATen quantization and separate dequantization, output float32", variant, "aten"),
        "K9b": Setting("our min/max and quantization kernels, separate dequantization, output float32", variant, "aten", quantize),
        "K9c": Setting("our quantization, dequantization fused into the product, output float32", variant, backend),
        "K9d": Setting("the same, output float16", sixteen, backend),
    }
    kernels = prepare(bench, job, list(settings.values()))
    for mode, suffix in ((Mode.EAGER, ""), (Mode.GRAPH, "-graph")):
        if mode is Mode.GRAPH and bench.device.type != "cuda":
            continue
        times = _measure(bench, job, kernels, [FLOAT16, *settings.values()], mode)
        for id_, setting in settings.items():
            if setting.name not in times or FLOAT16.name not in times:
                print(f"{id_}{suffix}: not measured", file=sys.stderr)
                continue
            over = [a / b - 1 for a, b in zip(times[setting.name].blocks_ms, times[FLOAT16.name].blocks_ms, strict=True)]
            what = f"{job.title}, {mode}: overhead of all int8 over all float16; {setting.name} (paper: 10%, then 5%)"
            both = f"{times[setting.name].median_ms:.2f} and {times[FLOAT16.name].median_ms:.2f} ms"
            spread = f"{min(over):.3f} to {max(over):.3f}; {both}"
            yield bench.row(id_ + suffix, what, statistics.median(over), "fraction", "reported", spread)


def _quantizer(bench: Bench) -> str:
    return "triton" if "triton" in bench.backends.by_name and bench.device.type == "cuda" else "aten"
