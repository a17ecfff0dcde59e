"""Indicators beside the truth: ranks against scipy and by hand, regret by brute force, the comparison worked through."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from statistics import mean

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import BFLOAT16, FLOAT32, INT8, GraphBuilder

from qsync_core.artifacts.files import digest
from qsync_core.errors import ObservationError
from qsync_core.ir import observations as terms
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.observations import Observations, Series
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Rounding
from qsync_core.ir.variant import Variant
from qsync_planner.indicator_check import compare, read_truth
from qsync_planner.indicator_check.agreement import Agreement, kendall_tau, kept, regret, spearman, split_half
from qsync_planner.indicator_check.compare import variant_names

I8, FLOORED, B16, F32 = (
    Variant.of(INT8),
    Variant.of(INT8, rounding=Rounding.FLOOR),
    Variant.of(BFLOAT16),
    Variant.of(FLOAT32),
)
A, B, C = OpId("a"), OpId("b"), OpId("c")
COLUMN = st.lists(st.integers(0, 6).map(float), min_size=2, max_size=12)
Rows = Mapping[tuple[OpId | None, Variant], tuple[Sequence[float], Sequence[float]]]


def graph(*names: str) -> PrecisionDag:
    g = GraphBuilder("net", batch_size=4)
    last = g.input("x", (4, 8))
    for name in names:
        last = g.linear(name, last, 8)
    g.loss(last)
    return g.build()


def observed(dag: PrecisionDag, rows: Rows, gradient: Sequence[float] | None = None) -> Observations:
    """Truth with both halves per (operator, variant)."""
    count = len(next(iter(rows.values()))[0])
    series = [
        Series(op_id, variant, terms.MONTECARLO, term, tuple(values))
        for (op_id, variant), halves in rows.items()
        for term, values in zip((terms.FIRST_HALF, terms.SECOND_HALF), halves, strict=True)
    ]
    series.append(Series(None, None, terms.MONTECARLO, terms.GRADIENT_SQ_NORM, tuple(gradient or [1.0] * count)))
    return Observations(dag.model, digest(dag), tuple(range(10, 10 + count)), 2, "budget", tuple(series))


def test_tau_and_spearman_by_hand() -> None:
    # Pairs of (1, 2, 3, 4) against (1, 3, 2, 4): five in order, one not.
    assert kendall_tau([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(4 / 6)
    assert spearman([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(1 - 6 * 2 / (4 * 15))
    # One tie on the left, so 2 of 3 pairs count there: 2 / √(2·3).
    assert kendall_tau([1, 1, 2], [1, 2, 3]) == pytest.approx(2 / math.sqrt(6))
    assert kendall_tau([3, 2, 1], [1, 2, 3]) == -1
    assert (kendall_tau([1], [1]), spearman([1], [1])) == (None, None)
    assert (kendall_tau([1, 1], [1, 2]), spearman([1, 1], [1, 2])) == (None, None)


@given(st.data())
def test_tau_and_spearman_against_scipy(data: st.DataObject) -> None:
    stats = pytest.importorskip("scipy.stats")
    a = data.draw(COLUMN)
    b = data.draw(st.lists(st.integers(0, 6).map(float), min_size=len(a), max_size=len(a)))
    if len(set(a)) > 1 and len(set(b)) > 1:
        assert kendall_tau(a, b) == pytest.approx(stats.kendalltau(a, b).statistic, abs=1e-12)
        assert spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic, abs=1e-12)


def test_how_many_are_kept() -> None:
    assert [kept(percent, 30) for percent in (10, 25, 40, 50)] == [3, 8, 12, 15]
    assert [kept(percent, 2) for percent in (10, 25, 40, 50)] == [1, 1, 1, 1]


def test_regret_by_hand() -> None:
    truth = [8.0, 4.0, 2.0, 1.0]
    assert regret([4, 3, 2, 1], truth, 50) == 1
    assert regret([1, 2, 3, 4], truth, 50) == pytest.approx(12 / 3)
    assert regret([9, 1, 5, 0], truth, 50) == pytest.approx(5 / 3)
    assert regret([1, 0], [1.0, 0.0], 50) == 1
    assert regret([0, 1], [1.0, 0.0], 50) == math.inf
    assert regret([1], [1.0], 50) is None


@given(st.data())
def test_regret_against_brute_force(data: st.DataObject) -> None:
    truth = data.draw(st.lists(st.integers(1, 9).map(float), min_size=2, max_size=6))
    chooser = data.draw(st.lists(st.integers(0, 3).map(float), min_size=len(truth), max_size=len(truth)))
    percent = data.draw(st.sampled_from([10, 25, 40, 50]))
    keep = kept(percent, len(truth))
    everyone = range(len(truth))
    subsets = [set(chosen) for chosen in itertools.combinations(everyone, keep)]
    best = min(sum(truth[i] for i in everyone if i not in chosen) for chosen in subsets)
    # All orders in which a person could sort by the indicator, equal values in any order.
    orders = [
        order for order in itertools.permutations(everyone) if all(chooser[i] >= chooser[j] for i, j in itertools.pairwise(order))
    ]
    got = mean(sum(truth[i] for i in order[keep:]) for order in orders)
    assert regret(chooser, truth, percent) == pytest.approx(got / best)


def test_agreement_by_hand() -> None:
    found = Agreement.of([1.0, 3.0, 8.0, 0.0], [1.0, 2.0, 3.0, 0.0])
    assert found.median_ratio == pytest.approx(1.25)
    assert found.share_within_2 == 3 / 4
    assert found.share_within_1_4 == 2 / 4
    assert found.total_ratio == 2
    assert found.ranks.tau == 1
    unreachable = Agreement.of([1.0, 2.0, 2.0], [1.0, 0.0, 0.0])
    assert unreachable.median_ratio == math.inf
    assert unreachable.as_dict()["median_ratio"] is None
    assert unreachable.as_dict()["regret"]["25"] is None
    assert unreachable.share_within_2 == pytest.approx(1 / 3)
    assert Agreement.of([1.0, 2.0], [0.0, 0.0]).total_ratio is None


def test_halves_choose_for_each_other() -> None:
    first, second = [1.0, 2.0], [3.0, 2.0]
    found = split_half(first, second)
    # The first half keeps the second operator high and leaves 3 of the second half's (2, 3); the second leaves 2 of (1, 2).
    assert found.regret[50] == pytest.approx((3 / 2 + 2 / 1) / 2)
    assert found.ranks.tau == -1


def test_truth_is_the_mean_over_updates_of_the_mean_of_both_halves() -> None:
    """‖g‖² is 1, 10 and 100, of which the geometric mean is 10."""
    dag = graph("a", "b")
    rows = {
        (A, I8): ([1.0, 10.0, 4.0], [3.0, 6.0, 12.0]),
        (B, I8): ([2.0, 2.0, 2.0], [2.0, 2.0, 6.0]),
        (A, B16): ([1.0, 4.0, 1.0],) * 2,
        (B, B16): ([1.0, 1.0, 1.0],) * 2,
        (None, I8): ([2.0, 2.0, 2.0],) * 2,
    }
    truth = read_truth(observed(dag, rows, [1.0, 10.0, 100.0]), dag)
    column = truth.columns[I8]
    assert column.values == pytest.approx((10 * (2 + 0.8 + 0.08) / 3, 10 * (2 + 0.2 + 0.04) / 3))
    assert column.halves["iterations"][0] == pytest.approx((10 * (2 + 0.08) / 2, 10 * (2 + 0.04) / 2))
    assert column.halves["iterations"][1] == pytest.approx((8.0, 2.0))
    assert column.halves["draws"][0] == pytest.approx((10 * (1 + 1 + 0.04) / 3, 10 * (2 + 0.2 + 0.02) / 3))
    assert set(truth.columns[B16].halves) == {"iterations"}
    assert (column.together, truth.columns[B16].together) == (pytest.approx(10 * (2 + 0.2 + 0.02) / 3), None)
    assert truth.is_whole


def test_one_iteration_has_halves_of_draws_only() -> None:
    dag = graph("a")
    truth = read_truth(observed(dag, {(A, I8): ([1.0], [3.0]), (A, B16): ([1.0], [1.0])}), dag)
    assert [set(column.halves) for column in truth.columns.values()] == [set(), {"draws"}]


def test_calls_of_one_module_are_one_subject() -> None:
    g = GraphBuilder("net", batch_size=4)
    once = g.linear("a", g.input("x", (4, 8)), 8)
    g.loss(g.linear("b", g.linear("a", once, 8), 8))
    dag = g.build()
    dag = attrs.evolve(dag, operators=tuple(attrs.evolve(operator, variant_group=operator.op_id.fqn) for operator in dag.operators))
    twice = OpId("a", 1)
    truth = read_truth(observed(dag, {(op_id, I8): ([1.0], [3.0]) for op_id in (A, twice, B)}), dag)
    assert truth.subjects == ((A, twice), (B,))
    assert truth.columns[I8].values == (4.0, 2.0)
    check = compare({"mine": {A: {I8: 1.0}, twice: {I8: 2.0}, B: {I8: 2.0}}}, truth)
    assert check.subjects == ("a#0 + a#1", "b#0")
    assert check.variants[0].omega["mine"] == (3.0, 2.0)


def checked() -> tuple[PrecisionDag, Rows, dict[OpId, dict[Variant, float]]]:
    dag = graph("a", "b", "c")
    rows = {
        (A, I8): ([8.0, 8.0], [8.0, 8.0]),
        (B, I8): ([3.0, 9.0], [3.0, 9.0]),
        (C, I8): ([1.0, 1.0], [3.0, 3.0]),
        (A, B16): ([7.0, 7.0],) * 2,
        (B, B16): ([1.0, 1.0],) * 2,
        (C, B16): ([0.5, 0.5],) * 2,
        (None, I8): ([8.0, 8.0],) * 2,
    }
    omega = {A: {I8: 8.0, B16: 7.0, F32: 0.0}, B: {I8: 5.0, B16: 2.0, F32: 0.0}, C: {I8: 4.0, B16: 0.5, F32: 0.0}}
    return dag, rows, omega


def test_comparison_by_hand() -> None:
    dag, rows, omega = checked()
    reversed_omega = {A: omega[C], B: omega[B], C: omega[A]}
    check = compare({"good": omega, "bad": reversed_omega}, read_truth(observed(dag, rows), dag), ["a note"])
    sixteen, eight = check.variants
    assert (eight.name, eight.truth) == ("int8", pytest.approx((8.0, 6.0, 2.0)))
    assert eight.agreement["good"].ranks.tau == 1
    assert eight.agreement["bad"].ranks.tau == -1
    # One of three is kept high at every share but 50%, where two are: the reversed indicator leaves a and b low, or only a.
    assert eight.agreement["bad"].regret[25] == pytest.approx(14 / 8)
    assert eight.agreement["bad"].regret[50] == pytest.approx(8 / 2)
    assert eight.agreement["good"].median_ratio == pytest.approx(1)
    assert eight.agreement["good"].share_within_1_4 == pytest.approx(2 / 3)
    assert eight.together == pytest.approx(0.5)
    assert sixteen.together is None
    # Even against odd iterations: (8, 3, 2) and (8, 9, 2).
    assert eight.truth_halves["iterations"].ranks.tau == pytest.approx(1 / 3)
    (decrement,) = check.decrements
    assert (decrement.low, decrement.high) == ("int8", "bfloat16")
    # Truth falls by (1, 5, 1.5), the indicator says (1, 3, 3.5).
    assert decrement.ranks["good"].tau == pytest.approx(1 / 3)
    # Halves of the draws: (8, 6, 1) and (8, 6, 3) less what bfloat16 loses in either.
    assert decrement.truth_halves["draws"].tau == pytest.approx(1 / 3)
    assert check.notes == ("a note",)
    data = json.loads(json.dumps(check.as_dict(), allow_nan=False))
    assert data["variants"][1]["agreement"]["bad"]["tau"] == -1
    assert data["decrements"][0]["truth_halves"]["draws"]["tau"] == pytest.approx(1 / 3)


def test_a_truth_of_some_operators_is_compared_with_those_and_says_so() -> None:
    dag, rows, omega = checked()
    check = compare({"good": omega}, read_truth(observed(dag, {key: value for key, value in rows.items() if key[0] != B}), dag))
    assert check.subjects == ("a#0", "c#0")
    assert check.variants[1].together is None
    assert check.notes == ("2 of 3 operators were measured; the others are not compared",)


def test_what_is_refused() -> None:
    dag, rows, omega = checked()
    with pytest.raises(ObservationError, match=r"the truth is of another graph \('net'.*it has c#0, which this model lacks"):
        read_truth(observed(dag, rows), graph("a", "b"))
    with pytest.raises(ObservationError, match="hold no truth: no operator has terms of the collector 'montecarlo'"):
        read_truth(attrs.evolve(observed(dag, rows), series=()), dag)
    with pytest.raises(ObservationError, match=r"montecarlo\.second_half of a#0 at int8 is -1\.0 in iteration 10"):
        read_truth(observed(dag, {(A, I8): ([1.0], [-1.0])}), dag)
    one = observed(dag, rows)
    lacking = attrs.evolve(one, series=tuple(s for s in one.series if s.term != terms.SECOND_HALF))
    with pytest.raises(ObservationError, match=r"the truth lacks montecarlo\.second_half of a#0 at int8; measure it again"):
        read_truth(lacking, dag)
    truth = read_truth(one, dag)
    floored = {op_id: {FLOORED: 1.0, **by_variant} for op_id, by_variant in omega.items()}
    with pytest.raises(ObservationError, match="the truth was not measured in int8 round=floor; it has bfloat16, int8 round=stoch"):
        compare({"x": floored}, truth)
    with pytest.raises(ObservationError, match="the indicator 'x' says nothing of c#0 at int8"):
        compare({"x": {**omega, C: {B16: 1.0}}}, truth)


def test_names_tell_variants_apart() -> None:
    assert variant_names([I8, FLOORED, B16]) == {I8: "int8 round=stochastic", FLOORED: "int8 round=floor", B16: "bfloat16"}
    assert variant_names([I8]) == {I8: "int8"}
