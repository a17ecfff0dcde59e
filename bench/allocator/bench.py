"""What all rows share: how many seeds, which solver, where progress goes."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence

import attrs

from allocator.hardware import PAIRS
from allocator.instances import REGIMES, Instance, instance
from allocator.models import PAPER_SCALE
from allocator.solving import Row, Solved, solve

PROVEN = 1e-6
"""A gap that counts as optimal."""
ENOUGH_SECONDS = 60.0
"""After which a plan of the paper's scale counts as not proven."""


@attrs.define
class Bench:
    """A run of the benchmark.

    Attributes:
        seeds: of each model and regime.
        solver: used instead of the rows' own; None for these.
        quick: small models only, to try the script.
        solved: what was planned in this run; several groups of rows read the same instances.
    """

    seeds: int = 20
    solver: str | None = None
    quick: bool = False
    solved: dict[tuple[str, str, float], Solved] = attrs.field(factory=dict)

    def say(self, text: str) -> None:
        """A line of progress, which is no result."""
        print(text, file=sys.stderr, flush=True)

    @property
    def paper_models(self) -> tuple[str, ...]:
        """The models of rows A1 and A4."""
        return ("vgg16-bn", "resnet50") if self.quick else tuple(PAPER_SCALE)

    def deep(self, name: str) -> str:
        """A deep model, or a small one that stands for it in a quick run."""
        return "bert-base" if self.quick else name

    def solve(self, found: Instance, solver: str, *, seconds: float = ENOUGH_SECONDS) -> Solved:
        """Plan and say how it went, once a run."""
        solver = self.solver or solver
        key = (found.label, solver, seconds)
        if key not in self.solved:
            solved = self.solved[key] = solve(found, solver, seconds=seconds)
            self.say(f"  {found.label}: {solver} {solved.objective:.6g}, gap {solved.gap:.2g}, {solved.seconds:.2f} s")
        return self.solved[key]


def by_seed(seed: int) -> str:
    """The hardware of a seed: pairs take turns."""
    return tuple(PAIRS)[seed % len(PAIRS)]


def rotating(name: str, seed: int, *, symmetric: bool = False) -> Instance:
    """The instance of a seed where seeds take turns over hardware and regimes."""
    return instance(name, by_seed(seed), REGIMES[seed // 3 % len(REGIMES)], seed, symmetric=symmetric)


def row(name: str, what: str, value: float, unit: str, target: str, spread: str | None = None) -> Row:
    """A row as :func:`results.write_rows` takes it."""
    return {"id": name, "what": what, "value": value, "unit": unit, "spread": spread, "target": target}


def quartiles(values: Sequence[float], digits: int) -> str:
    """The middle half, the extremes and the count."""
    low, high = min(values), max(values)
    middle = ""
    if len(values) > 1:
        first, _, third = statistics.quantiles(values, n=4, method="inclusive")
        middle = f"quartiles {first:.{digits}f} to {third:.{digits}f}, "
    return f"{middle}{low:.{digits}f} to {high:.{digits}f} of {len(values)}"


def timed_turns(rounds: int, *calls: Callable[[], float]) -> list[list[float]]:
    """What each call returns, round after round in turns, so that a change of the machine's speed meets all of them."""
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for values, call in zip(found, calls, strict=True):
            values.append(call())
    return found
