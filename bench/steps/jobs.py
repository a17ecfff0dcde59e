"""The jobs of the table, the ways to run them that it compares, and their steps in turns."""

from __future__ import annotations

import statistics
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import attrs
import torch

from kernels.bench import Bench
from kernels.job_kernels import JobKernels
from kernels.whole_model import Mode, Setting, StepTimes, WholeModel, release, time_in_turns
from qsync_core.ir.precision import Granularity, Precision
from qsync_core.ir.variant import Variant

INT8, FLOAT8, FLOAT16 = Precision.INT8, Precision.FLOAT8_E4M3FN, Precision.FLOAT16
LOW = ("int8", "float8")
"""Families of contenders in 8 bit."""
TINY = {
    "resnet50": "resnet18:image=32,width=4,classes=10,channels_last=true",
    "bert-base": "bert-base:seq=16,layers=1,hidden=32,heads=2,vocab=99",
}
"""What stands for the jobs where a script is tried on a CPU."""


@attrs.frozen
class StepJob:
    """A model of the table: its short name, its title, the job's text, its batch, and in which steps batches are searched."""

    name: str
    title: str
    text: str
    batch: int
    granule: int = 1

    def sized(self, bench: Bench) -> tuple[str, int]:
        """Job and batch, or what stands for them where a script is only tried."""
        return (TINY[self.name], 2) if bench.quick else (self.text, self.batch)


RESNET = StepJob("resnet50", "ResNet50 b128", "resnet50:image=224,channels_last=true", 128, granule=8)
BERT = StepJob("bert-base", "BERT-base 12×384", "bert-base:seq=384", 12)


@attrs.frozen
class Contender:
    """One way to run a job: a setting, and how its step is issued."""

    setting: Setting
    mode: Mode

    @property
    def name(self) -> str:
        """For people and for files."""
        mode = str(self.mode)
        return f"{self.setting.name}, {mode.replace('torch.compile', 'qsync.compile') if self.setting.fused else mode}"

    @property
    def family(self) -> str:
        """``amp``, ``float16``, ``int8`` or ``float8``."""
        return self.setting.name.partition(" ")[0].partition("→")[0]


AMP = Setting("amp float16", autocast=torch.float16)
PLAIN16 = Setting("float16", Variant.of(FLOAT16))
FUSED16 = attrs.evolve(PLAIN16, name="float16 fused", fused=True)


def eight_bit(compute: Precision, *, gradients: bool = False, fused: bool = False, saved: str = "", rows: bool = False) -> Setting:
    """All adjustable operators in 8 bit with output in float16, and 8-bit gradients where a backend offers them.

    ``rows``: with a scale for each row of an activation, instead of one.
    """
    variant = Variant.of(compute, sixteen_bit=FLOAT16, output=FLOAT16)
    if rows:
        variant = attrs.evolve(variant, x_granularity=Granularity.PER_ROW)
    if gradients:
        variant = attrs.evolve(variant, grad_input=INT8, grad_weight=INT8)
    name = "int8" if compute is INT8 else "float8"
    told = {"rows scaled": rows, "int8 gradients": gradients, f"{saved} saved": saved}
    parts = [f"{name}→float16", *(text for text, holds in told.items() if holds)]
    return Setting(" ".join(parts), variant, fused=fused, saved=saved)


def low_settings(compute: Precision, *, fused: bool, rows: bool = False) -> list[Setting]:
    """Every setting of a format that a row may choose from: 16-bit and 8-bit gradients, what fused chains keep, and scales."""
    gradients = (False, True) if compute is INT8 and not rows else (False,)
    kept = ("", "int8") if fused else ("",)
    return [eight_bit(compute, gradients=gi, fused=fused, saved=saved, rows=rows) for gi in gradients for saved in kept]


class Steps:
    """The kernels of a job, once for all that is measured of it."""

    def __init__(self, bench: Bench, job: StepJob, *, tuned: bool) -> None:
        self.bench, self.job, self._tuned = bench, job, tuned and not bench.quick
        text, batch = job.sized(bench)
        self.kernels = JobKernels(bench, text, batch)

    def prepare(self, contenders: Iterable[Contender]) -> None:
        """Compile the kernels of all, and tune them: what the tuning store has already is not measured again."""
        planned = {contender.setting.variant for contender in contenders} - {None}
        variants = [variant for variant in planned if variant.compute.needs_scale]
        if variants:
            self.kernels.build(variants)
            if self._tuned:
                self.kernels.tune(variants)

    def open(self, contender: Contender, **options: object) -> WholeModel:
        """The model, ready to train."""
        text, batch = self.job.sized(self.bench)
        setting = contender.setting
        backend = setting.backend if setting.backend or self._tuned else "auto" if self.bench.device.type == "cuda" else "aten"
        chosen = None if setting.variant is None else self.kernels.assignments(setting.variant, backend, setting.config)
        return WholeModel(text, batch, setting, self.bench.device, mode=contender.mode, assignments=chosen, **options)

    def stepped(self, contender: Contender, **options: object) -> WholeModel | None:
        """The model after its first step; None for one that cannot run, with the reason on stderr: the others still count."""
        try:
            model = self.open(contender, **options)
            model.step()
        except Exception as error:
            print(f"{self.job.title}, {contender.name}: {type(error).__name__}: {error}", file=sys.stderr)
            traceback.print_exc()
            release()
            return None
        self.bench.say(f"{self.job.title}, {contender.name}: first step done")
        return model

    def races(self, contenders: Sequence[Contender], **options: object) -> Iterator[dict[Contender, StepTimes]]:
        """Steps in turns, as soon as an 8-bit contender is ready: with those in 16 bit and the fastest in 8 bit so far.

        Raises:
            RuntimeError: when none in 8 bit ran.
        """
        steps: dict[Contender, Callable[[], None]] = {}
        times: dict[Contender, StepTimes] = {}
        blocks, each = (2, 1) if self.bench.quick else (7, 8)
        for contender in contenders:
            model = self.stepped(contender, **options)
            if model is not None:
                steps[contender] = model.step
            del model  # the fastest alone stay in memory
            if contender not in steps or contender.family not in LOW:
                continue
            times = time_in_turns(steps, self.bench.device, blocks=blocks, steps=each)
            self.bench.say(f"{self.job.title}, {contender.name}: {times[contender].median_ms:.2f} ms a step")
            yield times
            for slower in {one for one in steps if one.family in LOW} - {best(times, *LOW)}:
                del steps[slower]
            release()
        if not times:
            raise RuntimeError(f"none of the 8-bit contenders ran (what did: {names(steps)}); stderr says why")


def best(times: Mapping[Contender, StepTimes], *families: str) -> Contender:
    """The fastest of some families.

    Raises:
        RuntimeError: when none of them ran.
    """
    found = [contender for contender in times if contender.family in families]
    if not found:
        raise RuntimeError(f"no contender of {' or '.join(families)} ran (what did: {names(times)}); stderr says why")
    return min(found, key=lambda contender: times[contender].median_ms)


def names(contenders: Iterable[Contender]) -> str:
    """For messages."""
    return ", ".join(contender.name for contender in contenders) or "nothing"


def each_time(times: Mapping[Contender, StepTimes]) -> str:
    """For the spread of a row."""
    return "; ".join(f"{contender.name} {found.median_ms:.2f} ms" for contender, found in times.items())


def ratio(over: StepTimes, under: StepTimes) -> tuple[float, str]:
    """Median of the ratios of neighbouring blocks, and their range."""
    found = [a / b for a, b in zip(over.blocks_ms, under.blocks_ms, strict=True)]
    return statistics.median(found), f"{min(found):.3f} to {max(found):.3f} of {len(found)} pairs of blocks"
