"""Row A7: planning for 4,096 ranks takes no longer than for 32."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from allocator.bench import Bench, quartiles, row, timed_turns
from allocator.instances import large_instance
from allocator.solving import Row, solve

FEW, MANY = 32, 4096
ROUNDS = 9


def rank_rows(bench: Bench) -> Iterator[Row]:
    """A7: the same job of eight groups, in turns in one process."""
    name, solver = "vgg16-bn" if bench.quick else "bert-large", bench.solver or "auto"
    jobs = [large_instance(0, name=name, ranks=ranks) for ranks in (FEW, MANY)]
    few, many = timed_turns(ROUNDS, *(lambda job=job: solve(job, solver).seconds for job in jobs))
    ratios = [m / f for m, f in zip(many, few, strict=True)]
    yield row(
        "A7",
        f"planning time for {MANY:,} ranks over that for {FEW}, 8 device groups, BERT-large, processor time in turns",
        round(statistics.median(ratios), 4),
        "ratio",
        "≤ 1.1",
        f"{quartiles(ratios, 3)} rounds; medians {statistics.median(many):.2f} and {statistics.median(few):.2f} s",
    )
