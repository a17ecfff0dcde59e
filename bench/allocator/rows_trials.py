"""Row A5: how many single changes of a large plan are evaluated exactly in a second."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator

import attrs

from allocator.bench import Bench, quartiles, row
from allocator.instances import Instance, instance
from allocator.solving import Row
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Role
from qsync_core.ir.variant import Variant
from qsync_planner.matching import Inputs
from qsync_planner.replayer.replay import Replayer

TRIALS, BLOCKS = 2_000, 7
COMPARED = 3
"""Trials whose answer is compared with a replay from scratch."""


def trial_rows(bench: Bench) -> Iterator[Row]:
    """A5, with each group's dispatch timeline, and A5-sync, where the loop synchronises every step."""
    found = instance(bench.deep("transformer-10000"), "V100+T4", "both", 0)
    what = "single-operator trials per second, exact, rolled back; 10,000 operators"
    for name, job, how, target in (
        ("A5", found, "dispatch and compute timelines", "≥ 10,000"),
        ("A5-sync", _synchronising(found), "the loop synchronises every step", "reported"),
    ):
        rates = _rates(job, TRIALS // 10 if bench.quick else TRIALS)
        yield row(name, f"{what}; {how}", round(statistics.median(rates)), "1/s", target, quartiles(rates, 0))


def _synchronising(found: Instance) -> Instance:
    groups = tuple(attrs.evolve(group, sync_per_step=True) for group in found.cluster.groups)
    return attrs.evolve(found, cluster=attrs.evolve(found.cluster, groups=groups))


def _rates(found: Instance, trials: int) -> list[float]:
    """Trials per second of processor time, block by block.

    Drawn: the plan at which trials begin (each operator's rung), and each trial's operator and rung.

    Raises:
        AssertionError: a trial that differs from a replay from scratch, or leaves something behind.
    """
    draw = random.Random(f"{found.label} trials")
    replayer = Replayer(Inputs(found.dag, found.cluster, found.profiles))
    group = next(group for group in found.cluster.groups if group.role is Role.INFER)
    operators = [operator.op_id for operator in found.dag.adjustable]
    variants = {op_id: draw.choice(group.ladder) for op_id in operators}
    before = replayer.start({group.name: variants})

    def change() -> dict[OpId, Variant]:
        op_id = draw.choice(operators)
        return {op_id: draw.choice([rung for rung in group.ladder if rung != variants[op_id]])}

    for _ in range(COMPARED):
        changed = change()
        assert replayer.trial(group.name, changed) == replayer.replay({group.name: variants | changed}), "a trial is not exact"
        replayer.rollback()
    rates = []
    for _ in range(BLOCKS):
        changes = [change() for _ in range(trials)]
        start = time.process_time()
        for changed in changes:
            replayer.trial(group.name, changed)
            replayer.rollback()
        rates.append(trials / (time.process_time() - start))
    assert replayer.current() == before, "a trial that was rolled back left something behind"
    return rates
