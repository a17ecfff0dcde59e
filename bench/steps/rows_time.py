"""Rows L1, L1-fused, L1f, L2 (replayed steps) and L3 (plain eager DDP): int8 over 16 bit."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from kernels.bench import Bench, Row
from kernels.whole_model import Mode, StepTimes, release

from .jobs import (
    AMP,
    BERT,
    FLOAT8,
    FUSED16,
    INT8,
    LOW,
    PLAIN16,
    RESNET,
    Contender,
    Steps,
    best,
    each_time,
    low_settings,
    ratio,
)
from .roofline import copy_bytes_per_s, floor_bytes, host_lines, kernels_of, lines, recorded

GRAPH, COMPILED, EAGER = Mode.GRAPH, Mode.COMPILED_GRAPH, Mode.EAGER
CONTENDERS = {
    "L1": [
        Contender(AMP, GRAPH),
        Contender(PLAIN16, GRAPH),
        Contender(FUSED16, COMPILED),
        *(Contender(setting, COMPILED) for setting in low_settings(INT8, fused=True)),
        *(Contender(setting, GRAPH) for setting in low_settings(INT8, fused=False)),
    ],
    "L2": [
        Contender(AMP, COMPILED),
        Contender(FUSED16, COMPILED),
        *(Contender(setting, COMPILED) for setting in low_settings(INT8, fused=True, rows=True)),
        *(Contender(setting, COMPILED) for compute in (INT8, FLOAT8) for setting in low_settings(compute, fused=True)),
        *(Contender(setting, GRAPH) for setting in low_settings(INT8, fused=False)),
    ],
    "L3": [
        Contender(AMP, EAGER),
        Contender(PLAIN16, EAGER),
        *(Contender(setting, EAGER) for setting in low_settings(INT8, fused=False)),
    ],
}
"""By row: what is measured in turns; PyTorch's own first, those in 8 bit last, the ones that may win before the others."""
JOBS = {"L1": (RESNET,), "L2": (BERT,), "L3": (RESNET, BERT)}


def chosen(row: str, words: str) -> list[Contender]:
    """Contenders of a row: 16-bit ones, and of the others those with one of the words in their names; empty: all."""
    wanted = [word for word in words.split("|") if word]
    keep = lambda c: c.family in ("amp", "float16") or not wanted or any(word in c.name for word in wanted)  # noqa: E731
    return [contender for contender in CONTENDERS[row] if keep(contender)]


def prepare_rows(bench: Bench, row: str, *, tuned: bool, words: str) -> Iterator[Row]:
    """No rows: compiles and tunes the kernels of a row, and runs what it compiles once, so that caches are warm."""
    for job in JOBS[row]:
        steps = Steps(bench, job, tuned=tuned)
        contenders = chosen(row, words)
        steps.prepare(contenders)
        for contender in contenders:
            if contender.mode is COMPILED:
                steps.stepped(contender)
                release()
    yield from ()


def step_rows(bench: Bench, row: str, *, tuned: bool, words: str) -> Iterator[Row]:
    """L1 with L1-fused and L1f, or L2; again after every 8-bit contender, so that a run that is stopped leaves the best so far."""
    (job,) = JOBS[row]
    steps, contenders = Steps(bench, job, tuned=tuned), chosen(row, words)
    steps.prepare(contenders)
    every: dict[Contender, StepTimes] = {}
    missed: dict[str, tuple[Contender, Contender]] = {}
    for times in steps.races(contenders):
        every |= times
        amp, float16, low = (best(times, *families) for families in (("amp",), ("float16",), LOW))
        of_row = {"L2": (low, amp, 1.00)}
        if row == "L1":
            of_row = {"L1": (low, amp, 0.90), "L1-fused": (low, float16, 1.03), "L1f": (float16, amp, 0.84)}
        missed.clear()
        for id_, (over, under, bound) in of_row.items():
            value, spread = ratio(times[over], times[under])
            what = f"{job.title}, whole step: {over.name}, over {under.name}"
            yield bench.row(id_, what, value, "ratio", f"≤ {bound:.2f}", f"{spread}; {each_time(every)}")
            if value > bound:
                missed[id_] = over, under
    for id_, pair in missed.items():
        explain(bench, id_, steps, pair)


def eager_rows(bench: Bench, *, tuned: bool, words: str) -> Iterator[Row]:
    """L3: one rank under DistributedDataParallel, whose hooks and buckets are those of any number of ranks; of a model again after
    every 8-bit contender."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    kind = "nccl" if bench.device.type == "cuda" else "gloo"
    dist.init_process_group(kind, store=dist.HashStore(), rank=0, world_size=1)
    try:
        found: list[tuple[float, str, Steps, tuple[Contender, Contender]]] = []
        for job in JOBS["L3"]:
            steps, contenders = Steps(bench, job, tuned=tuned), chosen("L3", words)
            steps.prepare(contenders)
            every: dict[Contender, StepTimes] = {}
            for times in steps.races(contenders, wrap=DistributedDataParallel):
                every |= times
                amp, low = best(times, "amp"), best(times, "int8")
                value, spread = ratio(times[low], times[amp])
                what = f"{job.title}, whole step under DDP: {low.name}, over {amp.name}"
                yield bench.row(f"L3-{job.name}", what, value, "ratio", "≤ 1.15", f"{spread}; {each_time(every)}")
            found.append((value, what, steps, (low, amp)))
        value, what, *_ = max(found, key=lambda entry: entry[0])
        yield bench.row("L3", f"the worse of the models: {what}", value, "ratio", "≤ 1.15")
        for value, _, steps, pair in found:
            if value > 1.15:
                explain(bench, f"L3-{steps.job.name}", steps, pair)
    finally:
        dist.destroy_process_group()


def explain(bench: Bench, id_: str, steps: Steps, contenders: Sequence[Contender]) -> None:
    """Say, and write to the folder of profiles, what the steps of a row that missed are made of."""
    rate, text = copy_bytes_per_s(bench), list[str]()
    for contender in contenders:
        model = steps.open(contender)
        for _ in range(3):
            model.step()
        events = recorded(model.step, bench.device)
        floors = floor_bytes(steps.kernels.dag, contender.setting, bench.device)
        text += lines(contender.name, kernels_of(events, bench.device), floors, rate)
        if contender.mode is EAGER:
            text += host_lines(contender.name, events)
        del model
        release()
    for line in text:
        bench.say(f"{id_} missed: {line}")
    if bench.out is not None:
        bench.out.mkdir(parents=True, exist_ok=True)
        (bench.out / f"roofline-{id_}.txt").write_text("\n".join(text) + "\n", encoding="utf-8")
