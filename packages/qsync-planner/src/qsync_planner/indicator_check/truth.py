"""The truth: what the collector ``montecarlo`` measured, averaged as indicators are, and in two halves to see how sure it is."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

import attrs

from qsync_core.chains.finding import chains_of
from qsync_core.errors import ObservationError
from qsync_core.ir import observations as terms
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.observations import Observations
from qsync_core.ir.op_id import OpId
from qsync_core.ir.variant import Variant
from qsync_planner.indicators.series import UpdateMean, check_values, non_negative
from qsync_planner.matching import check_observations

Subject = tuple[OpId, ...]
"""Operators that share a variant (the calls of one module): they were lowered at once, and their Ω are added."""
ITERATIONS, DRAWS = "iterations", "draws"


@attrs.frozen
class Column:
    """Measured Ω in one variant, one entry per subject.

    Attributes:
        values: over all iterations and draws.
        halves: by how the measurement was split: even against odd iterations (where there are at least two), and the first
            against the second half of the draws of every iteration (where the variant rounds at random).
        together: Ω of all adjustable operators lowered at once; None where that was not measured.
    """

    values: tuple[float, ...]
    halves: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]]
    together: float | None


@attrs.frozen
class Truth:
    """Measured Ω of a model.

    Attributes:
        subjects: what was lowered one at a time, in order of execution.
        columns: by variant.
        adjustable: how many subjects the model has; fewer may have been measured.
    """

    model: str
    subjects: tuple[Subject, ...]
    columns: Mapping[Variant, Column]
    iterations: int
    adjustable: int

    @property
    def is_whole(self) -> bool:
        """Whether every adjustable operator was measured."""
        return len(self.subjects) == self.adjustable


def subjects_of(dag: PrecisionDag) -> list[Subject]:
    """The adjustable operators, those that share a variant together."""
    groups: dict[str, list[OpId]] = {}
    for operator in dag.adjustable:
        groups.setdefault(operator.variant_group or str(operator.op_id), []).append(operator.op_id)
    return [tuple(group) for group in groups.values()]


def read_truth(observations: Observations, dag: PrecisionDag) -> Truth:
    """The truth in observations.

    Raises:
        ObservationError: when they are of another graph, hold no montecarlo terms, or NaN, infinite or negative ones.
    """
    check_observations(observations, dag, "the truth is of", "measure it for this one")
    check_values(observations)
    every = subjects_of(dag)
    found = _measured(observations, {None, *itertools.chain(*every)})
    variants = sorted({variant for op_id, variant in found if op_id is not None}, key=str)
    subjects = [subject for subject in every if all((op_id, v) in found for op_id in subject for v in variants)]
    if not variants or not subjects:
        raise ObservationError(
            f"these observations of {observations.model} hold no truth: no operator has terms of the collector "
            f"{terms.MONTECARLO!r}; measure it with 'qsync indicate --check --job JOB --truth FILE'"
        )
    return Truth(
        model=dag.model,
        subjects=tuple(subjects),
        columns={variant: _column(found, subjects, variant, UpdateMean.of(observations)) for variant in variants},
        iterations=len(observations.iterations),
        adjustable=len(every),
    )


def read_kept_inputs(observations: Observations, dag: PrecisionDag, rated: Collection[OpId]) -> Truth | None:
    """The truth of what fused chains keep in 8 bit; None where it was not measured.

    Args:
        observations: as :func:`read_truth` takes them.
        rated: the chains that an indicator rates; of others there is nothing to compare.
    """
    names = [chain.name for chain in chains_of(dag) if chain.name in rated]
    found = _measured(observations, set(names))
    variants = sorted({variant for _, variant in found}, key=str)
    subjects = [(name,) for name in names if all((name, variant) in found for variant in variants)]
    if not variants or not subjects:
        return None
    columns = {variant: _column(found, subjects, variant, UpdateMean.of(observations)) for variant in variants}
    return Truth(dag.model, tuple(subjects), columns, len(observations.iterations), len(subjects))


_Measured = Mapping[tuple[OpId | None, Variant], tuple[Sequence[float], Sequence[float]]]


def _measured(observations: Observations, known: Collection[OpId | None]) -> _Measured:
    """Both halves of what was measured of some operators or chains."""
    return {
        (series.op_id, series.variant): _halves(observations, series.op_id, series.variant)
        for series in observations.series
        if (series.collector, series.term) == (terms.MONTECARLO, terms.FIRST_HALF) and series.op_id in known
        if series.variant is not None
    }


def _halves(observations: Observations, op_id: OpId | None, variant: Variant) -> tuple[Sequence[float], Sequence[float]]:
    owner = "all operators" if op_id is None else op_id
    columns = []
    for term in (terms.FIRST_HALF, terms.SECOND_HALF):
        try:
            values = observations.values(terms.MONTECARLO, term, op_id, variant)
        except KeyError:
            raise ObservationError(
                f"the truth lacks {terms.MONTECARLO}.{term} of {owner} at {variant.label}; measure it again"
            ) from None
        columns.append(non_negative(values, observations.iterations, f"{terms.MONTECARLO}.{term} of {owner} at {variant.label}"))
    return columns[0], columns[1]


def _column(found: _Measured, subjects: Sequence[Subject], variant: Variant, averaged: UpdateMean) -> Column:
    first = [_added([found[op_id, variant][0] for op_id in subject]) for subject in subjects]
    second = [_added([found[op_id, variant][1] for op_id in subject]) for subject in subjects]
    mean = [[(x + y) / 2 for x, y in zip(a, b, strict=True)] for a, b in zip(first, second, strict=True)]
    halves = {}
    if len(mean[0]) >= 2:
        # Every second one, so that neither half has the later, smaller gradients to itself.
        halves[ITERATIONS] = (_averaged(mean, averaged, slice(0, None, 2)), _averaged(mean, averaged, slice(1, None, 2)))
    if first != second:
        halves[DRAWS] = (_averaged(first, averaged), _averaged(second, averaged))
    at_once = found.get((None, variant))
    return Column(
        values=_averaged(mean, averaged),
        halves=halves,
        together=None if at_once is None else averaged.mean([(x + y) / 2 for x, y in zip(*at_once, strict=True)]),
    )


def _added(rows: Sequence[Sequence[float]]) -> list[float]:
    return [sum(values) for values in zip(*rows, strict=True)]


def _averaged(rows: Sequence[Sequence[float]], averaged: UpdateMean, part: slice = slice(None)) -> tuple[float, ...]:
    of_part = averaged.over(part)
    return tuple(of_part.mean(row[part]) for row in rows)
