"""Rows of ``memory-shares.json``: what a share of the memory chooses, takes and buys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

GIB = 2**30


@attrs.frozen
class Ran:
    """Training steps on the device.

    Attributes:
        peak_bytes: in tensors, at the highest point of a step.
        fixed_bytes: in tensors, between two steps.
        reserved_bytes: most that PyTorch's allocator took from the device.
        blocks_ms: a step's time in each block of steps.
        error: why they could not be run; empty where they were.
    """

    peak_bytes: int = 0
    fixed_bytes: int = 0
    reserved_bytes: int = 0
    blocks_ms: tuple[float, ...] = ()
    error: str = ""

    @property
    def step_ms(self) -> float:
        """The median block's."""
        ordered = sorted(self.blocks_ms)
        return ordered[len(ordered) // 2]


@attrs.frozen
class ShareFound:
    """A plan for a share of the memory.

    Attributes:
        percent: the share of what float32 takes.
        budget_bytes: the same in bytes, of a process.
        smallest_bytes: the smallest budget that a plan fits, where none fits this one; 0 where one does.
        operators, chains: how many run how.
        predicted_peak_bytes, predicted_ms: of a step of the device alone.
        run: measured under a cap of the budget.
        peaks: measured peak by batch, the job's own among them.
    """

    percent: int
    budget_bytes: int
    smallest_bytes: int = 0
    operators: Mapping[str, int] = attrs.field(factory=dict)
    chains: Mapping[str, int] = attrs.field(factory=dict)
    predicted_peak_bytes: int = 0
    predicted_ms: float = 0.0
    run: Ran | None = None
    peaks: Mapping[int, int] = attrs.field(factory=dict)


@attrs.frozen
class ModelFound:
    """A model: what its shares are shares of, what they are compared with, and the shares.

    Attributes:
        batch: of the job.
        full_bytes: that a process takes in float32, as predicted: 100%.
        amp: PyTorch's autocast to 16 bit, eager.
        uniform16: all adjustable operators in 16 bit, compiled as plans are.
        uniform16_predicted_ms: the latter's step, predicted.
    """

    name: str
    title: str
    batch: int
    full_bytes: int
    amp: Ran
    uniform16: Ran
    uniform16_predicted_ms: float
    shares: tuple[ShareFound, ...] = ()


def next_batch(peaks: Mapping[int, int], fixed_bytes: int, limit_bytes: int, granule: int) -> int:
    """The batch to try next: the largest multiple of ``granule`` that should take no more than ``limit_bytes``.

    Peaks lie on a line through the two measured batches that are nearest to the limit; through the bytes that do not grow with the
    batch where there is one measured batch only.  What was measured counts before what the line says: the answer is above the
    largest batch that fits, or is that one, and below the smallest that does not.
    """
    nearest = sorted(peaks, key=lambda batch: abs(peaks[batch] - limit_bytes))[:2]
    points = [(batch, peaks[batch]) for batch in nearest] if len(nearest) > 1 else [(0, fixed_bytes), *peaks.items()]
    (first, low), (second, high) = sorted(points)
    per_sample = max(1.0, (high - low) / (second - first))
    guess = int((limit_bytes - low) / per_sample + first) // granule * granule
    fitting = max((batch for batch, peak in peaks.items() if peak <= limit_bytes), default=0)
    too_large = min((batch for batch, peak in peaks.items() if peak > limit_bytes), default=None)
    if too_large is not None:
        guess = min(guess, (too_large - 1) // granule * granule)
    return max(guess, fitting)


def rows(found: ModelFound, device: str) -> Iterator[dict[str, Any]]:
    """All rows of a model."""

    def row(id_: str, what: str, value: float, unit: str, spread: str) -> dict[str, Any]:
        named = {"id": f"{found.name}-{id_}", "what": f"{found.title}, {what}", "value": round(float(value), 4), "unit": unit}
        return named | {"spread": spread, "target": "reported", "device": device}

    reserved = f"the allocator reserved {found.amp.reserved_bytes / GIB:.3g} GiB; {times(found.amp)}"
    yield row("amp", "peak memory of a step under AMP in 16 bit, eager", found.amp.peak_bytes / GIB, "GiB", reserved)
    yield row("full", "predicted memory of a process in float32: 100%", found.full_bytes / GIB, "GiB", "of a job of two ranks")
    for share in found.shares:
        where = f"{share.percent}% of float32's memory"
        budget = f"a budget of {share.budget_bytes / GIB:.3g} GiB"
        if share.smallest_bytes:
            least = f"no plan fits {budget}; the smallest that one fits is {share.smallest_bytes / GIB:.3g} GiB"
            what = f"{where}: smallest share that a plan fits"
            yield row(f"{share.percent}-least", what, share.smallest_bytes / found.full_bytes, "ratio", least)
            continue
        lowered = sum(count for label, count in share.operators.items() if label != "float32")
        yield row(f"{share.percent}-chosen", f"{where}: what is chosen", lowered, "operators lowered", choice(share))
        predicted = f"predicted {share.predicted_peak_bytes / GIB:.3g} GiB"
        run = share.run
        if run is None or run.error:
            why = "not run" if run is None else run.error
            yield row(f"{share.percent}-runs", f"{where}: runs within it", 0, "steps", f"{predicted}, {budget}: {why}")
            continue
        spread = f"{predicted}; the allocator reserved {run.reserved_bytes / GIB:.3g} GiB, under {budget}"
        yield row(f"{share.percent}-peak", f"{where}: peak memory of a step", run.peak_bytes / GIB, "GiB", spread)
        if not found.uniform16.error:
            guess = share.predicted_ms / found.uniform16_predicted_ms
            spread = f"predicted {guess:.3g} ({share.predicted_ms:.3g} ms, eager); {times(run)} over {times(found.uniform16)}"
            what = f"{where}: compiled step over uniform 16 bit's"
            yield row(f"{share.percent}-step", what, run.step_ms / found.uniform16.step_ms, "ratio", spread)
        tried = ", ".join(f"{batch}: {peak / GIB:.3g} GiB" for batch, peak in sorted(share.peaks.items()))
        limit = found.amp.peak_bytes
        what = f"{where}: largest batch of its plan in the {limit / GIB:.3g} GiB of AMP at {found.batch}"
        if fitting := [batch for batch, peak in share.peaks.items() if peak <= limit]:
            yield row(f"{share.percent}-batch", what, max(fitting), "samples", f"measured {tried}")


def times(ran: Ran) -> str:
    """A step's time, and its range."""
    return f"{ran.step_ms:.3g} ms ({min(ran.blocks_ms):.3g} to {max(ran.blocks_ms):.3g})" if ran.blocks_ms else "not timed"


def choice(share: ShareFound) -> str:
    """What a plan chose, in words: ``12 int8, 42 float16; chains: 20 fused, 33 unfused``."""
    operators = ", ".join(f"{count} {label}" for label, count in share.operators.items())
    chains = ", ".join(f"{count} {label.replace(', ', ' with ')}" for label, count in share.chains.items())
    return f"{operators}; chains: {chains or 'none'}"
