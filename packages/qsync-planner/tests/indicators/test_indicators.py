"""Indicators against hand-worked numbers, and what is refused."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import FLOAT16, FLOAT32, INT8, GraphBuilder

from qsync_core.artifacts.files import digest
from qsync_core.errors import ObservationError, PluginError
from qsync_core.ir import observations as terms
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.observations import Observations, Series
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Rounding
from qsync_core.ir.variant import Variant
from qsync_core.plugins.hooks import hookimpl
from qsync_core.plugins.registry import Registry
from qsync_planner.indicate import indicate
from qsync_planner.indicators import available_indicators, get_indicator
from qsync_planner.indicators.registry import BUILT_IN
from qsync_planner.indicators.series import UpdateMean, geometric_mean

I8, F16, F32 = Variant.of(INT8, sixteen_bit=FLOAT16, output=FLOAT32), Variant.of(FLOAT16), Variant.of(FLOAT32)
A, B = OpId("a"), OpId("b")


def two_linears(batch: int = 4) -> PrecisionDag:
    """x → a → b → loss; depths 1 and 2, the loss at 3."""
    g = GraphBuilder("two", batch_size=batch)
    g.loss(g.linear("b", g.linear("a", g.input("x", (batch, 8)), 6), 5))
    return g.build()


def observe(
    dag: PrecisionDag, rows: Mapping[tuple[OpId, Variant | None, str, str], Sequence[float]], batch: int = 2
) -> Observations:
    """Observations with those series."""
    count = len(next(iter(rows.values())))
    series = tuple(Series(op_id, variant, c, term, tuple(values)) for (op_id, variant, c, term), values in rows.items())
    return Observations(dag.model, digest(dag), tuple(range(10, 10 + count)), batch, "budget", series)


def lossvar_rows(
    dag: PrecisionDag, variants: Sequence[Variant], values: Sequence[float]
) -> dict[tuple[OpId, Variant | None, str, str], Sequence[float]]:
    return {
        (operator.op_id, variant, terms.LOSSVAR, term): values
        for operator in dag.adjustable
        for variant in variants
        for term in (terms.X_VAR_GRAD, terms.W_VAR_GRAD, terms.Y_VAR_GRAD)
        if term != terms.Y_VAR_GRAD or variant.output is not FLOAT32
    }


def test_lossvar_is_the_mean_of_the_sum_of_its_terms() -> None:
    dag = two_linears()
    rows = lossvar_rows(dag, [I8, F16], [1.0, 1.0])
    rows[A, I8, terms.LOSSVAR, terms.X_VAR_GRAD] = [1.0, 90.0]
    rows[A, I8, terms.LOSSVAR, terms.W_VAR_GRAD] = [1.0, 10.0]
    rows[A, F16, terms.LOSSVAR, terms.Y_VAR_GRAD] = [2.0, 2.0]
    found = indicate(observe(dag, rows), dag, [I8, F16, F32], "lossvar")
    assert found.omega[A][I8] == pytest.approx(math.sqrt(2 * 100))  # without norms, geometrically
    assert found.errors == {}
    assert found.omega[A][F16] == pytest.approx(1 + 1 + 2)
    assert found.omega[B][F16] == pytest.approx(3)
    assert found.omega[A][F32] == 0
    assert found.indicator == "lossvar"
    assert found.dag_digest == digest(dag)
    assert found.notes == (
        "geometric mean (without norms of gradients, as older versions observed) over 2 updates; gradient rounding is not part of "
        "lossvar",
    )
    rows[None, None, terms.RUN, terms.GRADIENT_SQ_NORM] = [1.0, 4.0]
    found = indicate(observe(dag, rows), dag, [I8, F16, F32], "lossvar")
    assert found.omega[A][I8] == pytest.approx(2.0 * (2 / 1 + 100 / 4) / 2)
    assert found.errors[A][I8] == pytest.approx(2.0 * (100 / 4 - 2 / 1) / 2)
    assert found.notes == ("mean over 2 updates; gradient rounding is not part of lossvar",)


def test_lossvar_takes_observed_variants_where_none_are_asked_for() -> None:
    dag = two_linears()
    found = indicate(observe(dag, lossvar_rows(dag, [I8], [3.0])), dag)
    assert list(found.omega[A]) == [I8]


def test_lossvar_needs_a_rounding_to_be_observed_once_whatever_the_gradient_format() -> None:
    dag = two_linears()
    found = indicate(observe(dag, lossvar_rows(dag, [I8], [3.0])), dag, [Variant.of(INT8, output=FLOAT32)])
    assert found.omega[A] == {Variant.of(INT8, output=FLOAT32): pytest.approx(6.0)}
    other = Variant.of(INT8, sixteen_bit=FLOAT16, output=FLOAT32, rounding=Rounding.FLOOR)
    with pytest.raises(ObservationError, match=r"the observations lack lossvar\.x_var_grad of a#0 at int8>float32 .*round=floor"):
        indicate(observe(dag, lossvar_rows(dag, [I8], [3.0])), dag, [other])
    sixteen_bit = Variant.of(INT8)
    with pytest.raises(ObservationError, match=r"the observations lack lossvar\.y_var_grad of a#0 at int8 .*out=bfloat16"):
        indicate(observe(dag, lossvar_rows(dag, [I8], [3.0])), dag, [sixteen_bit])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinite_statistics_name_operator_term_and_iteration(bad: float) -> None:
    dag = two_linears()
    rows = lossvar_rows(dag, [I8], [1.0, 1.0, 1.0])
    rows[B, I8, terms.LOSSVAR, terms.W_VAR_GRAD] = [1.0, 1.0, bad]
    with pytest.raises(
        ObservationError, match=rf"lossvar\.w_var_grad of b#0 at int8>float32 is {bad} in iteration 12; the observed training"
    ):
        indicate(observe(dag, rows), dag)


def test_negative_sums_of_squares_are_refused() -> None:
    dag = two_linears()
    rows = lossvar_rows(dag, [I8], [1.0, -2.0])
    with pytest.raises(
        ObservationError, match=r"lossvar\.x_var_grad of a#0 at int8>float32 is -2\.0 in iteration 11, but a sum of squares"
    ):
        indicate(observe(dag, rows), dag)


def test_other_bad_observations_are_refused() -> None:
    dag = two_linears()
    with pytest.raises(ObservationError, match=r"the observations lack lossvar\.x_var_grad of a#0 at float16"):
        indicate(observe(dag, lossvar_rows(dag, [I8], [1.0])), dag, [F16])
    with pytest.raises(ObservationError, match="indicator 'hutchinson' needs observations by the collectors hutchinson"):
        indicate(None, dag, [I8])
    with pytest.raises(ObservationError, match="hold no iterations"):
        indicate(attrs.evolve(observe(dag, lossvar_rows(dag, [I8], [])), iterations=()), dag)
    with pytest.raises(ObservationError, match="no variants to rate with indicator 'flat'"):
        indicate(None, dag, [], Flat())
    with pytest.raises(ObservationError, match=r"there is no indicator 'tarot'; choose one of .*hutchinson, lossvar"):
        indicate(None, dag, [I8], "tarot")
    other = GraphBuilder("other")
    other.loss(other.linear("c", other.input("x", (1, 8)), 6))
    with pytest.raises(
        ObservationError, match=r"the observations are of another graph .*it has a#0, b#0, which this model lacks; it lacks c#0"
    ):
        indicate(observe(dag, lossvar_rows(dag, [I8], [1.0])), other.build())


@given(st.lists(st.floats(1e-30, 1e30), min_size=1, max_size=8))
def test_geometric_mean(values: list[float]) -> None:
    expected = math.exp(sum(math.log(v) for v in values) / len(values))
    assert geometric_mean(values) == pytest.approx(expected, rel=1e-9)
    assert geometric_mean([*values, *([0.0] * len(values))]) == pytest.approx(expected / 2, rel=1e-9)
    assert geometric_mean([0.0, 0.0]) == 0.0


def test_one_direction_an_update_is_not_low_on_average() -> None:
    """Squares of one random direction are the truth only in the mean: their geometric mean is half of it or less.

    Each update's gradient is another power of ten, and 2,000 updates of χ² with one degree of freedom stand for directions.
    """
    draw = random.Random(0)
    norms = [10.0 ** draw.uniform(-3, 3) for _ in range(2000)]
    values = [3.0 * norm * draw.gauss(0, 1) ** 2 for norm in norms]
    averaged = UpdateMean(tuple(norms))
    truth = 3.0 * geometric_mean(norms)
    error = averaged.error(values)
    assert error == pytest.approx(truth * math.sqrt(2 / 2000), rel=0.15)
    assert abs(averaged.mean(values) - truth) < 3 * error
    assert geometric_mean(values) < 0.4 * truth
    assert UpdateMean(None).mean(values) == geometric_mean(values)
    assert (UpdateMean(None).error(values), UpdateMean((1.0,)).error([2.0])) == (None, None)


def test_an_update_without_a_gradient_counts_as_nothing() -> None:
    assert UpdateMean((0.0, 4.0)).mean([0.0, 12.0]) == pytest.approx(6.0)
    assert UpdateMean((0.0, 0.0)).mean([0.0, 0.0]) == 0.0


class Flat:
    """A third party's indicator: the same number everywhere."""

    name = "flat"
    collectors: tuple[str, ...] = ()
    summary = "one number"

    def __init__(self, value: float = 1.0) -> None:
        self.value = value

    def omega(
        self, dag: PrecisionDag, variants: Sequence[Variant], observations: Observations | None
    ) -> dict[OpId, dict[Variant, float]]:
        return {operator.op_id: dict.fromkeys(variants, self.value) for operator in dag.adjustable}

    def notes(self, dag: PrecisionDag, observations: Observations | None) -> tuple[str, ...]:
        return ()


class Plugin:
    def __init__(self, *offered: object) -> None:
        self.offered = list(offered)

    @hookimpl
    def qsync_register_indicators(self) -> list[object]:
        return self.offered


def registry_with(*offered: object) -> Registry:
    registry = Registry()
    registry.register(Plugin(*offered), "third-party")
    return registry


def test_plugins_register_indicators() -> None:
    registry = registry_with(Flat())
    assert set(available_indicators(registry)) == {"flat", *(indicator.name for indicator in BUILT_IN)}
    found = indicate(None, two_linears(), [I8], get_indicator("flat", registry))
    assert found.indicator == "flat"
    assert found.omega[A][I8] == 1.0


def test_bad_indicators_of_plugins_are_named() -> None:
    said: list[str] = []
    found = available_indicators(registry_with(object(), Flat()), said.append)
    assert set(found) == {"flat", *(indicator.name for indicator in BUILT_IN)}
    lacks = "it lacks part of an indicator's interface (name, collectors, summary, omega, notes; see "
    assert len(said) == 1
    assert said[0].startswith(f"plugin third-party (builtins.object) is disabled: {lacks}")
    with pytest.raises(ObservationError, match=r"there is no indicator 'foo'; choose one of flat, .*; plugin third-party \(bui"):
        get_indicator("foo", registry_with(object(), Flat()))
    silent = Flat()
    silent.collectors = None  # type: ignore[assignment]
    nameless = Flat()
    nameless.name = "a b"
    for offered, says in ((Flat, "it is a class"), (silent, "it lacks part of"), (nameless, "its name is 'a b', and must be text")):
        said.clear()
        assert set(available_indicators(registry_with(offered), said.append)) == {i.name for i in BUILT_IN}
        assert f"is disabled: {says}" in said[0]
    clash = Flat()
    clash.name = "lossvar"
    with pytest.raises(PluginError, match="two indicators are called 'lossvar'"):
        available_indicators(registry_with(clash))
    for value in (math.nan, -1.0):
        with pytest.raises(
            ObservationError, match=rf"indicator 'flat' gave {value} for a#0 at int8>float32; Ω must be a finite number ≥ 0"
        ):
            indicate(None, two_linears(), [I8], Flat(value))


def hutchinson_rows(dag: PrecisionDag, variants: list[Variant], values: list[float]) -> dict:
    names = [terms.OPERANDS, terms.GRADIENT, terms.OUTPUT]
    found = {}
    for operator in dag.adjustable:
        for variant in variants:
            for name in names if variant.output is not FLOAT32 else names[:2]:
                found[operator.op_id, variant, terms.HUTCHINSON, name] = list(values)
    return found


def test_hutchinson_is_the_default_where_it_was_observed() -> None:
    dag = two_linears()
    rows = lossvar_rows(dag, [I8, F16], [1.0, 1.0]) | hutchinson_rows(dag, [I8, F16], [1.0, 4.0])
    found = indicate(observe(dag, rows), dag, [I8, F16, F32])
    assert found.indicator == "hutchinson"
    assert found.omega[A] == {I8: pytest.approx(math.sqrt(2 * 8)), F16: pytest.approx(math.sqrt(3 * 12)), F32: 0.0}
    assert found.notes[0].startswith("geometric mean (without norms of gradients")
    rows[None, None, terms.RUN, terms.GRADIENT_SQ_NORM] = [1.0, 16.0]
    found = indicate(observe(dag, rows), dag, [I8, F16, F32])
    # The geometric mean of ‖g‖² is 4: twice (2 / 1 and 8 / 16) for int8, whose standard error is half their difference.
    assert found.omega[A] == {I8: pytest.approx(4 * 1.25), F16: pytest.approx(4 * (3 / 1 + 12 / 16) / 2), F32: 0.0}
    assert found.errors[A] == {I8: pytest.approx(4 * 0.75), F16: pytest.approx(4 * (3 / 1 - 12 / 16) / 2)}
    assert found.notes == ("mean over 2 updates of one random direction each; no masks that could flip",)


def test_hutchinson_weighs_flips_by_the_root_of_the_noise() -> None:
    """A + B/√noise, operands' and output's noise added, a windowed estimate below the plain one not counted."""
    dag = two_linears()
    rows = hutchinson_rows(dag, [F16], [1.0, 1.0])
    for op_id, flips in ((A, [6.0, -5.0]), (B, [0.0, 0.0])):
        for name, values in (
            (terms.OPERANDS_FLIPS, flips),
            (terms.OUTPUT_FLIPS, [2.0, 1.0]),
            (terms.OPERANDS_NOISE, [0.0625, 0.04]),
            (terms.OUTPUT_NOISE, [0.1875, 0.0]),
        ):
            rows[op_id, F16, terms.HUTCHINSON, name] = values
    found = indicate(observe(dag, rows), dag, [F16])
    assert found.omega[A][F16] == pytest.approx(math.sqrt((3 + 8 / 0.5) * 3))
    assert found.omega[B][F16] == pytest.approx(math.sqrt((3 + 2 / 0.5) * (3 + 1 / 0.2)))


def test_flips_count_where_every_variant_stores_and_none_rounds_an_operand() -> None:
    """As a ladder of storages alone has it; operators that are trained have no such variant."""
    dag, stored = two_linears(), Variant.named("float32@nf4")
    dag = attrs.evolve(dag, operators=tuple(attrs.evolve(op, frozen=op.op_id == A) for op in dag.operators))
    values = {term: [2.0, 2.0] for term in terms.SHIFTS} | {terms.STORED_FLIPS: [6.0, 6.0], terms.STORED_NOISE: [0.25, 0.25]}
    found = indicate(observe(dag, {(A, stored, terms.HUTCHINSON, term): two for term, two in values.items()}), dag, [stored])
    assert found.omega[A][stored] == pytest.approx(4 + 6 / 0.5)


def test_the_fallback_says_why() -> None:
    dag = two_linears()
    observed = observe(dag, lossvar_rows(dag, [I8], [1.0]))
    observed = attrs.evolve(observed, settings={"without hutchinson": "the derivative for 'fused' is not implemented"})
    found = indicate(observed, dag)
    assert found.indicator == "lossvar"
    assert found.notes[0] == "lossvar in place of hutchinson: the derivative for 'fused' is not implemented"


def test_an_operator_that_no_gradient_came_back_to_is_lowered_last() -> None:
    dag = two_linears()
    rows = {key: values for key, values in hutchinson_rows(dag, [I8], [1.0]).items() if key[0] == A}
    found = indicate(observe(dag, rows), dag)
    assert found.omega[B] == found.omega[A]
    assert found.omega[A][I8] > 0
    assert found.notes[-1].startswith(f"no gradient came back to {B}: what rounding there does is not known, and Ω is set to")


def test_zeros_that_were_observed_are_believed() -> None:
    dag = two_linears()
    rows = {key: [0.0 for _ in values] if key[0] == B else values for key, values in hutchinson_rows(dag, [I8], [1.0]).items()}
    found = indicate(observe(dag, rows), dag)
    assert found.omega[B] == {I8: 0.0}
    assert not found.notes[-1].startswith("no gradient")
