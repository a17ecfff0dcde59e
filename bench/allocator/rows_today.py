"""Rows A1 to A3 of ``docs/results/today.json``: what ``auto`` proves, and how long that takes (``bench/today.py``)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

from allocator.bench import PROVEN, Bench, by_seed, quartiles, rotating, row
from allocator.instances import REGIMES, instance, large_instance, many_groups_instance
from allocator.solving import Row, Solved, solve

NEAR = 1e-4
"""A gap that rows A2 and A3 ask for."""
OBJECTIVES = ("omega", "memory", "time")
DEEP_SEEDS, LARGE_SEEDS, GROUPS = 6, 3, 64


def paper_scale_rows(bench: Bench) -> Iterator[Row]:
    """A1, A1b and A1c: every model, seed and regime of the paper's scale; seeds take turns over the hardware."""
    cases = [(name, regime, seed) for name in bench.paper_models for regime in REGIMES for seed in range(bench.seeds)]
    solved = [_solved(bench, solve(instance(name, by_seed(seed), regime, seed), "auto")) for name, regime, seed in cases]
    what = f"{len(solved)} plans of the paper's scale, auto"
    missed = [entry for entry in solved if entry.gap > PROVEN]
    times, worst = [entry.seconds for entry in solved], max(solved, key=lambda entry: entry.seconds)
    share = (len(solved) - len(missed)) / len(solved)
    told = f"{len(solved) - len(missed)} of {len(solved)}" + "".join(f"; {e.instance} {e.gap:.1e}" for e in missed[:5])
    yield row("A1", f"{what}: share proven to 1e-6", round(share, 4), "fraction", "1", told)
    median = round(statistics.median(times), 3)
    yield row("A1b", f"{what}: median processor time, start to plan", median, "s", "≤ 0.25", quartiles(times, 3))
    yield row("A1c", f"{what}: longest processor time, start to plan", round(worst.seconds, 3), "s", "≤ 1.0", worst.instance)


def deep_rows(bench: Bench) -> Iterator[Row]:
    """A2: 2,000 operators for each objective; seeds take turns over hardware and regimes."""
    name, seeds = bench.deep("transformer-2000"), range(min(bench.seeds, DEEP_SEEDS))
    solved = [_solved(bench, solve(rotating(name, seed), "auto", objective=wanted)) for wanted in OBJECTIVES for seed in seeds]
    yield _longest("A2", f"2,000 operators, objectives {', '.join(OBJECTIVES)}, {len(seeds)} seeds each", solved, "≤ 5")


def large_rows(bench: Bench) -> Iterator[Row]:
    """A3: 10,000 operators on eight device groups; A3b: 64 groups with a profile of their own each."""
    name, seeds = bench.deep("transformer-10000"), range(min(bench.seeds, LARGE_SEEDS))
    solved = [_solved(bench, solve(large_instance(seed, name=name), "auto")) for seed in seeds]
    yield _longest("A3", f"10,000 operators, 8 device groups, {len(seeds)} seeds", solved, "≤ 20")
    groups = 8 if bench.quick else GROUPS
    solved = [_solved(bench, solve(many_groups_instance(seed, groups, alike=False), "auto")) for seed in seeds]
    yield _longest("A3b", f"{groups} device groups, each with a profile of its own, {len(seeds)} seeds", solved, "≤ 8")


def _solved(bench: Bench, solved: Solved) -> Solved:
    bench.say(f"  {solved.instance}: {solved.objective:.6g}, gap {solved.gap:.2g}, {solved.seconds:.2f} s")
    return solved


def _longest(name: str, what: str, solved: Sequence[Solved], target: str) -> Row:
    """The longest processor time of plans that are meant to be near their bound; what is not is said."""
    missed = [entry for entry in solved if entry.gap > NEAR]
    worst, widest = max(solved, key=lambda entry: entry.seconds), max(solved, key=lambda entry: entry.gap)
    if missed:
        what += f" ({len(missed)} of {len(solved)} plans are not within 1e-4)"
    told = f"{quartiles([e.seconds for e in solved], 2)}; {worst.instance}; widest gap {widest.gap:.1e}, {widest.instance}"
    return row(name, f"{what}: longest processor time, start to a plan within 1e-4", round(worst.seconds, 2), "s", target, told)


PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {"A1": paper_scale_rows, "A2": deep_rows, "A3": large_rows}
"""What measures rows, by the name of the first."""


def rows(part: str, *, quick: bool) -> Iterator[Row]:
    """Measure one of :data:`PARTS`; ``quick``: two seeds of small models, to try the script."""
    for found in PARTS[part](Bench(seeds=2 if quick else 20, quick=quick)):
        print(f"{found['id']}: {found['value']} {found['unit']} ({found['spread']}); target {found['target']}", flush=True)
        yield found
