"""Row A6: agreement with brute force, which shares no code with the product."""

from __future__ import annotations

from collections.abc import Iterator

from allocator.bench import Bench, row
from allocator.solving import Row

INSTANCES, SEED = 500, 4


def agreement_rows(bench: Bench) -> Iterator[Row]:
    """A6: ``brute_force.agreement(count, seed)`` stands beside the planner's tests, with the instances that it draws."""
    from brute_force import agreement

    agreeing, total, examples = agreement(20 if bench.quick else INSTANCES, SEED)
    yield row(
        "A6",
        "random instances of at most 9 adjustable operators on which the exact allocator and brute force agree",
        agreeing,
        f"of {total}",
        f"{INSTANCES}",
        "; ".join(str(example) for example in examples[:5]) or None,
    )
