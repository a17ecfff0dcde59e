"""Rows P8 and P9: hybrid jobs under compiled bfloat16 autocast, the weak GPU with 75% and 50% of its SMs.

By the README's two commands (``qsync prepare``, then the script), a job for each model and share.  The ways, trained in one start:
in the base, by the strong GPU alone, under QSync's plan, uniformly in 8 bit, with dynamic batches in the base, with precision and
uneven batches planned together, and as the verdict recommends.  A run that was ended continues in the folder of what is finished.

At a share at which products are wrong ``prepare`` refuses the job and names the nearest that are right
(docs/shared-gpus.md#canary): the job is then measured at the nearest of these, and its rows say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from hybrid.processes import mps
from jobs.measured import UNIFORM, Clock, Found, JobOf, measure
from jobs.places import Place, gpu_pair, on_cores
from kernels.bench import Bench, Row
from results import provenance

PlaceAt = Callable[[float], AbstractContextManager[Place]]
SHARES = {"P8": 0.75, "P9": 0.5}
"""Of the weak GPU's SMs."""
MODELS = {
    "llama-1b": "Llama-like 1B, 4 × 2048 tokens",
    "bert-large": "BERT-large, 16 × 512 tokens",
    "vit-large": "ViT-L, b64",
    "resnet50": "ResNet50, b64",
}
DYNAMIC, UNEVEN, ALONE = "dynamic batch", "uneven batches", "a alone"
OTHERS: Mapping[str, Sequence[str]] = {
    UNIFORM: ("--solver", "uniform"),
    DYNAMIC: ("--solver", "dynamic-batch"),
    UNEVEN: ("--batch", "free"),
}
RIVALS = ("full", UNIFORM, DYNAMIC, ALONE)
"""Ways that the recommended one is compared with."""
BEST = 2
"""Models of which row P9 wants more."""


def rows(bench: Bench, part: str, gpus: Sequence[str], folder: Path, clock: Clock, models: Sequence[str]) -> Iterator[Row]:
    """The rows of one share, of a model as soon as it is measured.

    Args:
        gpus: the strong one and the weak one; none on a CPU.
        folder: of what is finished.
        clock: of the time that is left, for all parts together.
        models: names of :data:`MODELS`, all by default.
    """
    share, finished = SHARES[part], []
    here = {**provenance(), "device": bench.device_name}
    with _places(gpus) as place_at:
        for name in models or MODELS:
            found = _at(name, share, place_at, folder, here, clock)
            if found.right_shares:
                nearest = min(found.right_shares, key=lambda other: abs(other - share))
                bench.say(f"{found.job.title}: refused, measured at {nearest:.0%}")
                found = _at(name, nearest, place_at, folder, here, clock)
            bench.say(found.told)
            if not found.is_finished:
                bench.say(f"{found.job.title}: the same command goes on with it")
                continue
            finished.append(found)
            yield from of_job(bench.row, part, name, found)
    if part == "P9":
        yield from of_all(bench.row, finished, len(models or MODELS))


def job_of(model: str, share: float) -> JobOf:
    """A compiled job under autocast on a whole GPU and a share of another."""
    title = f"{MODELS[model]}, compiled bfloat16 autocast, weak GPU at {share:.0%} of its SMs"
    return JobOf(f"{model}-{share:g}", title, model, "bfloat16", compiled=True, others=OTHERS)


def _at(model: str, share: float, place_at: PlaceAt, folder: Path, here: Mapping[str, Any], clock: Clock) -> Found:
    job = job_of(model, share)
    with place_at(share) as place:
        return measure(job, place, (folder / job.name).resolve(), here, clock.left)


@contextmanager
def _places(gpus: Sequence[str]) -> Iterator[PlaceAt]:
    """What makes the place of a share, a context each."""
    if not gpus:
        yield lambda share: on_cores({"a": 1, "b": 1}, {"a": 1.0, "b": share})
        return
    with mps(on_gpu=True) as daemon:
        yield lambda share: nullcontext(gpu_pair(",".join(gpus[:2]), share, daemon.environment))


def of_job(row: Callable[..., Row], part: str, model: str, found: Found) -> Iterator[Row]:
    """The rows of one model; what could not be measured is said."""
    ways, title = found.done, found.job.title
    if found.why:
        yield row(f"{part}-{model}", f"{title}: not measured, {found.why}", 0, "ways measured", "reported")
        return
    if part == "P8" and {"plan", UNIFORM} <= set(ways):
        ratio = ways["plan"].measured["ms"] / ways[UNIFORM].measured["ms"]
        yield row(f"P8-{model}", f"{title}: step of QSync over uniform 8 bit", ratio, "ratio", "≤ 1.01", found.told)
        if back := given_back(found):
            what = f"{title}: low-precision compute given back of what slack allows"
            yield row(f"P8b-{model}", what, back[0], "fraction", "≥ 0.90" if back[2] else "reported", back[1])
    if over := over_rivals(found):
        target = "≥ 0.99" if part == "P9" else "reported"
        name = f"P9-{model}" if part == "P9" else f"P8-{model}-recommended"
        what = f"{title}: samples per second of the recommended way ({found.recommended}) over the best of the others ({over[1]})"
        yield row(name, what, over[0], "ratio", target, found.told)


def given_back(found: Found) -> tuple[float, str, bool] | None:
    """Which part of the slack QSync's plan uses, of the weak rank's steps without communication; what they were; whether there is
    slack at all: uniform 8 bit may be slower than the strong rank.
    """
    ways = found.done
    if not {"full", "plan", UNIFORM} <= set(ways):
        return None
    local = {name: ways[name].measured["local_ms"] for name in ("full", "plan", UNIFORM)}
    strong, full, plan, uniform = local["full"][0], local["full"][-1], local["plan"][-1], local[UNIFORM][-1]
    allowed = min(strong, full) - uniform
    told = f"steps without communication: strong {strong:.1f} ms, weak {full:.1f}, QSync's {plan:.1f}, uniform {uniform:.1f}"
    if allowed <= 0:
        return 0.0, f"{told}: 8 bit does not keep up with the strong one, so there is no slack", False
    return (plan - uniform) / allowed, told, True


def over_rivals(found: Found) -> tuple[float, str] | None:
    """Samples per second of the recommended way over those of the best of the others, and its name."""
    ways = found.done
    others = [name for name in RIVALS if name in ways and name != found.recommended]
    if found.recommended not in ways or not others:
        return None
    best = max(others, key=lambda name: ways[name].rate)
    return ways[found.recommended].rate / ways[best].rate, best


def of_all(row: Callable[..., Row], found: Sequence[Found], of: int) -> Iterator[Row]:
    """Row P9: of the two models where the recommended way gains most, the lesser gain."""
    gains = {one.job.model: over[0] for one in found if (over := over_rivals(one))}
    if len(gains) < BEST:
        return
    best = sorted(gains, key=lambda name: gains[name], reverse=True)[:BEST]
    told = "; ".join(f"{name} {gains[name]:.3f}" for name in gains)
    what = f"samples per second of the recommended way over the best of the others, lesser of the best two of {len(gains)} models"
    yield row("P9", what + ("" if len(gains) == of else f" ({of} are wanted)"), gains[best[-1]], "ratio", "≥ 1.05", told)
