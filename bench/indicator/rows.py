"""Rows I1 to I5 from judged tasks."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from indicator.agreement import (
    DEFAULT,
    NAMES,
    SPLITS,
    Figure,
    Judged,
    decrement_tau,
    on_same_updates,
    regret,
    share_within_1_4,
    share_within_2,
    tau,
)
from indicator.measuring import BFLOAT16, SETS, VARIATION_NAMES
from indicator.models import SUBJECTS

Row = dict[str, Any]
ByModel = Mapping[str, Sequence[Judged]]
"""Judged seeds of every model."""
TARGETS = {"I1a": "≥ 0.90", "I1b": "≥ 0.90", "I2": "≥ 0.75", "I3": "≥ 0.75", "I4": "≤ 1.05", "I5": "≥ 0.90"}
REPORTED = "reported"
"""Of a row without a target."""
MEAN = (statistics.fmean, min)
"""Over models, and what is worst."""


def beside_int8(rows: Sequence[Row]) -> list[Row]:
    """Rows T6 of ``docs/results/robustness.json``: those that have a target, and bfloat16's.

    Each is the same measurement: every variant of a ladder is observed at once, which must not change what any of them is rated.
    """
    return [
        row | {"id": f"T6-{row['id']}", "what": f"bfloat16 observed beside int8: {row['what']}"}
        for row in rows
        if row["target"] != REPORTED or row["id"].endswith("-bfloat16")
    ]


def ladder_rows(judged: ByModel) -> Iterator[Row]:
    """I1 and I2 of the models there are, and I3 to I5 where all of them are."""
    for model, seeds in judged.items():
        yield from _state_rows(model, seeds)
        name = SUBJECTS[model].row
        what = f"{model}, Kendall's τ of Ω against the measured truth, over {len(seeds[0].check.subjects)} operators"
        yield from _rows(name, f"{what}, int8", {model: seeds}, tau, *MEAN)
        yield from _rows(
            f"{name}-same", f"{what}, int8, over the truth's updates alone", {model: seeds}, on_same_updates(tau), *MEAN
        )
        at_bfloat16 = functools.partial(tau, variant=BFLOAT16)
        yield from _rows(f"{name}-bfloat16", f"{what}, bfloat16", {model: seeds}, at_bfloat16, *MEAN)
    if len(judged) < len(SUBJECTS):
        return
    what = "τ of the decrement int8→bfloat16, worst of the models"
    yield from _rows("I3", what, judged, decrement_tau, min, min)
    yield from _rows("I3-same", f"{what}, over the truth's updates alone", judged, on_same_updates(decrement_tau), min, min)
    what = "true error left over the least possible, the worst of keeping 25, 40 and 50% high, int8, worst of the models"
    yield from _rows("I4", what, judged, regret, max, max)
    what = "share of operators with Ω/truth in {}, int8, over the same updates, mean over the models"
    yield from _rows("I5", what.format("0.5–2"), judged, share_within_2, *MEAN)
    yield from _rows("I5b", what.format("0.7–1.4"), judged, share_within_1_4, *MEAN)


def variation_rows(judged: ByModel) -> Iterator[Row]:
    """Other ways to quantize to int8: the default indicator's τ, and the others' beside it."""
    for model, (found, *_) in judged.items():
        for short, variant in zip(VARIATION_NAMES, SETS["variations"], strict=True):
            others = ", ".join(f"{name} {tau(found, name, variant):.3f}" for name in NAMES if name != DEFAULT)
            halves = _halves(found, lambda split, at=variant, of=found: tau(of, split, at))
            of = "per-tensor weights, stochastic rounding" if short == "per-tensor" else f"per-channel weights, {short} rounding"
            yield _row(
                f"{SUBJECTS[model].row}-{short}",
                f"{model}, Kendall's τ, int8 with {of}, seed {found.measured.task.seed}",
                tau(found, DEFAULT, variant),
                REPORTED,
                f"{others}; truth's halves {halves}",
                "τ",
            )


def _state_rows(model: str, seeds: Sequence[Judged]) -> Iterator[Row]:
    reached = [one.measured.reached for one in seeds]
    yield _row(
        f"I-state-{model}",
        f"{model}, loss on held-out data after the warm-up of {seeds[0].measured.observed.settings['warmup']} updates",
        statistics.fmean(r.loss for r in reached),
        REPORTED,
        "; ".join(f"loss {r.loss:.3f}, accuracy {r.accuracy:.1%}, training loss {r.training_loss:.3f}" for r in reached),
        "nats",
    )
    together = [one.variant().together for one in seeds]
    yield _row(
        f"I-together-{model}",
        f"{model}, true error of all operators in int8 at once over the sum of theirs one by one",
        statistics.fmean(together),
        REPORTED,
        "seeds " + ", ".join(f"{value:.3f}" for value in together),
        "ratio",
    )


def _rows(
    name: str,
    what: str,
    judged: ByModel,
    figure: Figure,
    over_models: Callable[[list[float]], float],
    worst: Callable[[list[float]], float],
) -> Iterator[Row]:
    """A row for each indicator: the mean over seeds, and the same of the truth's halves."""
    unit = {regret: "ratio", share_within_2: "fraction", share_within_1_4: "fraction"}.get(figure, "τ")
    for indicator in (DEFAULT,) if name.endswith("-same") else (*NAMES, *SPLITS):
        by_model = {
            model: [figure(one, indicator) for one in seeds]
            for model, seeds in judged.items()
            if indicator not in SPLITS or all(_has(one, figure, indicator) for one in seeds)
        }
        if len(by_model) < len(judged):
            continue
        means = {model: statistics.fmean(values) for model, values in by_model.items()}
        every = [value for values in by_model.values() for value in values]
        seeds_text = "; ".join(f"{model} {', '.join(f'{v:.3f}' for v in values)}" for model, values in by_model.items())
        if indicator in SPLITS:
            row_id = f"{name}-ceiling" if indicator == "iterations" else f"{name}-ceiling-draws"
            halves = "even and odd updates" if indicator == "iterations" else "the two halves of the draws"
            text, target = f"{what}: the truth's own, {halves} against each other", REPORTED
        else:
            row_id = name if indicator == DEFAULT else f"{name}-{indicator}"
            text, target = f"{what}: {indicator}", TARGETS.get(name, REPORTED) if indicator == DEFAULT else REPORTED
        yield _row(row_id, text, over_models(list(means.values())), target, f"worst {worst(every):.3f}; {seeds_text}", unit)


def _has(judged: Judged, figure: Figure, split: str) -> bool:
    """Whether the truth can be halved this way: what is not drawn has no halves of its draws."""
    try:
        figure(judged, split)
    except KeyError:
        return False
    return True


def _halves(judged: Judged, value: Callable[[str], float]) -> str:
    known = [split for split in SPLITS if _has(judged, lambda _, split: value(split), split)]
    return ", ".join(f"{value(split):.3f} by {split}" for split in known)


def _row(name: str, what: str, value: float, target: str, spread: str, unit: str) -> Row:
    return {"id": name, "what": what, "value": round(value, 4), "unit": unit, "spread": spread, "target": target}
