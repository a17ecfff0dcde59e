"""Rows A1 to A3: how good plans are proven to be, and how long that takes."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from allocator.bench import PROVEN, Bench, by_seed, quartiles, rotating, row
from allocator.instances import REGIMES, instance, large_instance
from allocator.solving import Row, Solved

REAL = ("real:bert-base", "real:resnet50")
DEEP_SECONDS, DEEP_SEARCH_SECONDS, DEEP_GAP = 5.0, 3.5, 0.001
"""The whole plan, start to end; of that the search, the rest being baselines, verdict and reasons."""
LARGE_SECONDS, LARGE_SEEDS = 20.0, 3


def paper_scale_rows(bench: Bench) -> Iterator[Row]:
    """A1, A1b and A1c: every model, seed and regime; seeds take turns over the hardware."""
    cases = [(name, regime, seed) for name in bench.paper_models for regime in REGIMES for seed in range(bench.seeds)]
    solved = [bench.solve(instance(name, by_seed(seed), regime, seed), "exact") for name, regime, seed in cases]
    what = f"{len(bench.paper_models)} models of the paper's scale, {bench.seeds} seeds, three regimes"
    yield from _share_and_seconds("A1", what, solved, ("1", "≤ 0.3", "≤ 2"))
    for regime in REGIMES:
        found = [entry for case, entry in zip(cases, solved, strict=True) if case[1] == regime]
        yield from _share_and_seconds(f"A1-{regime}", f"the same, regime {regime} alone", found, ("reported",) * 3)


def real_rows(bench: Bench) -> Iterator[Row]:
    """A1-real: profiles and sensitivities measured on an H200; seeds draw the memory budgets."""
    seeds = {"time": 1, "memory": bench.seeds, "both": bench.seeds}
    cases = [(name, regime, seed) for name in REAL for regime in REGIMES for seed in range(seeds[regime])]
    solved = [bench.solve(instance(name, "", regime, seed), "exact") for name, regime, seed in cases]
    what = f"measured profiles of BERT-base and ResNet50 (H200), three regimes, {bench.seeds} drawn budgets"
    yield from _share_and_seconds("A1-real", what, solved, ("reported",) * 3)


def _share_and_seconds(name: str, what: str, solved: Sequence[Solved], targets: Sequence[str]) -> Iterator[Row]:
    """Share proven optimal; median and worst seconds as rows b and c."""
    missed = sorted((entry for entry in solved if entry.gap > PROVEN), key=lambda entry: -entry.gap)
    times = [entry.seconds for entry in solved]
    worst = max(solved, key=lambda entry: entry.seconds)
    b, c = (f"{name}{letter}" if name == "A1" else f"{name}-{letter}" for letter in "bc")
    yield row(
        name,
        f"{what}: share proven optimal, gap ≤ 1e-6",
        round((len(solved) - len(missed)) / len(solved), 4),
        "fraction",
        targets[0],
        f"{len(solved) - len(missed)} of {len(solved)}" + "".join(f"; {entry.instance} {entry.gap:.1e}" for entry in missed[:5]),
    )
    yield row(
        b, f"{what}: median processor time of a plan", round(statistics.median(times), 3), "s", targets[1], quartiles(times, 3)
    )
    yield row(c, f"{what}: longest processor time of a plan", round(worst.seconds, 3), "s", targets[2], worst.instance)


def deep_rows(bench: Bench) -> Iterator[Row]:
    """A2 and A2b: 2,000 operators; seeds take turns over hardware and regimes."""
    name = bench.deep("transformer-2000")
    solved = [bench.solve(rotating(name, seed), "auto", seconds=DEEP_SEARCH_SECONDS) for seed in range(bench.seeds)]
    good = [entry for entry in solved if entry.gap <= DEEP_GAP and entry.seconds <= DEEP_SECONDS]
    yield row(
        "A2",
        f"2,000 operators, {bench.seeds} seeds: share with a proven gap ≤ 0.1% after at most 5 s of processor time, start to plan",
        round(len(good) / len(solved), 4),
        "fraction",
        "≥ 0.95",
        f"worst gap {max(entry.gap for entry in solved):.1e}, longest {max(entry.seconds for entry in solved):.2f} s",
    )
    alike = [rotating(name, seed, symmetric=True) for seed in range(bench.seeds)]
    symmetric = [bench.solve(entry, "auto", seconds=DEEP_SEARCH_SECONDS) for entry in alike]
    worst = max(symmetric, key=lambda entry: entry.gap)
    yield row(
        "A2b",
        f"2,000 operators, identical layers with Ω equal up to 0, 1e-6 or 1e-3, {bench.seeds} seeds: worst proven gap in 5 s",
        round(worst.gap, 8),
        "fraction",
        "≤ 0.01",
        f"{worst.instance}; longest {max(entry.seconds for entry in symmetric):.2f} s",
    )


def large_rows(bench: Bench) -> Iterator[Row]:
    """A3: 10,000 operators on eight device groups."""
    name = bench.deep("transformer-10000")
    seeds = range(min(bench.seeds, LARGE_SEEDS))
    solved = [bench.solve(large_instance(seed, name=name), "auto", seconds=LARGE_SECONDS) for seed in seeds]
    worst = max(solved, key=lambda entry: entry.gap)
    yield row(
        "A3",
        f"10,000 operators, 8 device groups (6 of them planned), {len(solved)} seeds: worst proven gap after 20 s of search",
        round(worst.gap, 8),
        "fraction",
        "≤ 0.005",
        ", ".join(f"{entry.gap:.1e}, {entry.seconds:.1f} s of processor time with baselines and verdict" for entry in solved),
    )
