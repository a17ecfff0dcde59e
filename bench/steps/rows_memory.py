"""Rows L4 and L4-bert: peak memory of a training step, uniform int8 over PyTorch's AMP float16."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator

import torch

from kernels.bench import Bench, Row
from kernels.whole_model import Mode, release
from qsync_torch.profiling.memory import memory_rise

from .jobs import AMP, BERT, INT8, RESNET, Contender, StepJob, Steps, low_settings, names

GIB = 2**30
BOUNDS = {"L4": (RESNET, 0.65), "L4-bert": (BERT, 0.80)}
WARM_UP = 3


def peak_bytes(steps: Steps, contender: Contender) -> int:
    """Bytes allocated at the highest point of a training step: weights, optimizer's state and batch included."""
    device = steps.bench.device
    release()
    if device.type != "cuda":
        model = steps.open(contender)
        for _ in range(WARM_UP):
            model.step()
        return memory_rise(model.step)[0]
    before = torch.cuda.memory_allocated(device)
    model = steps.open(contender)
    for _ in range(WARM_UP):
        model.step()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(2):
        model.step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def memory_rows(bench: Bench, id_: str, *, tuned: bool, words: str) -> Iterator[Row]:
    """L4 or L4-bert, again after every 8-bit contender.

    Steps are eager or compiled, and not captured: a graph's pool keeps what eager steps give back.
    """
    job, bound = BOUNDS[id_]
    steps = Steps(bench, job, tuned=tuned)
    contenders = [Contender(AMP, Mode.EAGER), *(Contender(setting, Mode.COMPILED) for setting in low_settings(INT8, fused=True))]
    contenders += [Contender(setting, Mode.EAGER) for setting in low_settings(INT8, fused=False)]
    wanted = [word for word in words.split("|") if word]
    contenders = [c for c in contenders if c.family == "amp" or not wanted or any(word in c.name for word in wanted)]
    steps.prepare(contenders)
    amp, found = contenders[0], {}
    for contender, peak in _measured(steps, job, contenders):
        found[contender] = peak
        if contender is amp or amp not in found:
            continue
        low = min(found.keys() - {amp}, key=found.__getitem__)
        every = "; ".join(f"{contender.name} {peak / GIB:.3g} GiB" for contender, peak in found.items())
        what = f"{job.title}, peak memory of a training step: {low.name}, over {amp.name}"
        yield bench.row(id_, what, found[low] / found[amp], "ratio", f"≤ {bound:.2f}", every)
    if amp not in found or len(found) < 2:
        raise RuntimeError(f"{id_} compares with {amp.name}, and what ran is {names(found)}; stderr says why")


def _measured(steps: Steps, job: StepJob, contenders: list[Contender]) -> Iterator[tuple[Contender, int]]:
    for contender in contenders:
        try:
            peak = peak_bytes(steps, contender)
        except Exception as error:  # the others still count
            print(f"{job.title}, {contender.name}: {type(error).__name__}: {error}", file=sys.stderr)
            traceback.print_exc()
            continue
        steps.bench.say(f"{job.title}, {contender.name}: {peak / GIB:.3g} GiB")
        yield contender, peak
