"""The error of a whole plan from Ω of single operators, and where it is told."""

from __future__ import annotations

import math

import attrs
import pytest
from planning_cases import random_case
from synthetic import FLOAT16, INT8

from qsync_core.artifacts.files import digest
from qsync_core.ir import observations as terms
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.observations import Observations, Series
from qsync_core.ir.op_id import OpId
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.variant import Variant
from qsync_planner.allocator import allocate
from qsync_planner.allocator.verdict import FLIP_EXPONENT, plan_error
from qsync_planner.indicate import indicate

I8, F16 = Variant.of(INT8), Variant.of(FLOAT16)
A, B, C = OpId("a"), OpId("b"), OpId("c")


def rated(flips: dict[OpId, dict[Variant, float]]) -> Sensitivity:
    omega = {A: {I8: 9.0, F16: 1.0}, B: {I8: 10.0, F16: 2.0}, C: {I8: 3.0}}
    return Sensitivity("m", "", "", "by hand", omega, flips=flips)


def test_without_flips_the_parts_add_up() -> None:
    assert plan_error(rated({}), {A: I8, B: F16}) == pytest.approx(11.0)
    assert plan_error(rated({}), {A: I8, C: F16, OpId("elsewhere"): I8}) == pytest.approx(9.0)
    assert plan_error(rated({}), {}) == 0.0


def test_flips_add_up_to_less_than_their_sum_and_more_than_in_squares() -> None:
    sensitivity = rated({A: {I8: 8.0}, B: {I8: 8.0, F16: 1.0}})
    assert plan_error(sensitivity, {A: I8}) == pytest.approx(9.0)  # one operator alone is what it is
    assert plan_error(sensitivity, {A: I8, B: I8}) == pytest.approx(1 + 2 + 8 * 2 ** (1 / FLIP_EXPONENT))
    assert 3 + math.hypot(8, 8) < plan_error(sensitivity, {A: I8, B: I8}) < 3 + 8 + 8


def test_a_part_is_at_most_the_whole() -> None:
    for part in (9.5, -1.0, math.nan):
        with pytest.raises(ValueError, match=r"of Ω of a#0 at int8 that comes from flipping masks must be from 0 to Ω itself, 9.0"):
            rated({A: {I8: part}})


def test_hutchinson_tells_which_part_is_flips() -> None:
    """The mean of A + B/√noise, less that of A: of B/√noise."""
    dag: PrecisionDag = random_case(3, blocks=1).dag
    values = {
        terms.OPERANDS: (3.0, 1.0),
        terms.OUTPUT: (0.0, 0.0),
        terms.GRADIENT: (1.0, 1.0),
        terms.OPERANDS_FLIPS: (6.0, -5.0),
        terms.OUTPUT_FLIPS: (0.0, 0.0),
        terms.OPERANDS_NOISE: (0.25, 0.04),
        terms.OUTPUT_NOISE: (0.0, 0.0),
    }
    series = [
        Series(operator.op_id, F16, terms.HUTCHINSON, term, found) for operator in dag.adjustable for term, found in values.items()
    ]
    series.append(Series(None, None, terms.RUN, terms.GRADIENT_SQ_NORM, (4.0, 1.0)))
    found = indicate(Observations(dag.model, digest(dag), (0, 1), 4, "budget", tuple(series)), dag)
    op_id = dag.adjustable[0].op_id
    assert found.omega[op_id][F16] == pytest.approx(2.0 * ((4 + 12) / 4 + 2 / 1) / 2)
    assert found.flips[op_id][F16] == pytest.approx(2.0 * (12 / 4) / 2)
    smooth = [s for s in series if s.term not in (terms.OPERANDS_FLIPS, terms.OUTPUT_FLIPS)]
    assert indicate(Observations(dag.model, digest(dag), (0, 1), 4, "budget", tuple(smooth)), dag).flips == {}


def test_a_plan_says_what_it_does_as_a_whole_where_that_is_not_the_sum() -> None:
    case = random_case(0, blocks=2)
    plan = allocate(*case.arguments, solver="uniform")
    assert not any("as a whole" in note for note in plan.notes)
    omega = case.sensitivity.omega
    rates = attrs.evolve(case.sensitivity, flips=omega)
    noted = allocate(case.dag, case.cluster, case.profiles, rates, solver="uniform")
    variants = {op_id: assignment.variant for op_id, assignment in noted.group("infer0").assignments.items()}
    parts = [omega[op_id][variant] for op_id, variant in variants.items()]
    together = sum(part**FLIP_EXPONENT for part in parts) ** (1 / FLIP_EXPONENT)
    (note,) = [note for note in noted.notes if "as a whole" in note]
    expected = f"group infer0 as a whole is about {together:.3g} a device, {together / sum(parts):.0%} of its Σ Ω {sum(parts):.3g}:"
    assert expected in note
    assert noted.objective == plan.objective  # what the allocator minimises stays the sum


def test_a_plan_says_how_sure_its_error_is() -> None:
    """Errors of operators add up, as they were observed along the same directions; masks in common shrink them with Ω."""
    case = random_case(0, blocks=2)
    omega = case.sensitivity.omega
    errors = {op_id: {v: 0.25 * value for v, value in by_variant.items()} for op_id, by_variant in omega.items()}
    for flips in ({}, omega):
        rated = attrs.evolve(case.sensitivity, errors=errors, flips=flips)
        plan = allocate(case.dag, case.cluster, case.profiles, rated, solver="uniform")
        together = plan_error(rated, {op_id: a.variant for op_id, a in plan.group("infer0").assignments.items()})
        (note,) = [note for note in plan.notes if "Ω of group infer0 as a whole" in note]
        assert note.startswith(f"Ω of group infer0 as a whole is about {together:.3g} ± {0.25 * together:.1g} a device")
        assert ("share the masks" in note) == bool(flips)
