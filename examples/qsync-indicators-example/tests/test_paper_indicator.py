"""``paper``: Proposition 3 worked by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import pytest
from qsync_indicators_example import terms
from qsync_indicators_example.paper import Paper, epsilon, gamma
from synthetic import FLOAT16, FLOAT32, INT8, GraphBuilder

from qsync_core.artifacts.files import digest
from qsync_core.errors import ObservationError
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.observations import Observations, Series
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_planner.indicate import indicate

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


PAPER_TERMS = {
    terms.V_SQ_NORM: 12.0,
    terms.X_SQ_NORM: 3.0,
    terms.GV_SQ_NORM: 0.5,
    terms.V_NUMEL: 16.0,
    terms.X_NUMEL: 48.0,
    terms.GV_NUMEL: 12.0,
    terms.V_EXPONENT: 1.0,
    terms.X_EXPONENT: -2.0,
    terms.GV_EXPONENT: -3.0,
}


def paper_rows(dag: PrecisionDag, scale: Sequence[float] = (1.0,)) -> dict[tuple[OpId, Variant | None, str, str], Sequence[float]]:
    rows: dict[tuple[OpId, Variant | None, str, str], Sequence[float]] = {}
    for operator in dag.adjustable:
        for term, value in PAPER_TERMS.items():
            rows[operator.op_id, None, terms.PAPER, term] = [value] * len(scale)
        rows[operator.op_id, I8, terms.PAPER, terms.V_SCALE_SQ] = [0.01 * s for s in scale]
        rows[operator.op_id, I8, terms.PAPER, terms.X_SCALE_SQ] = [0.0004 * s for s in scale]
    return rows


def test_paper_is_proposition_3_worked_by_hand() -> None:
    """Operator a has depth 1 of 3; γ = 1/N with N = 2 observed samples (cross entropy, mean)."""
    dag = two_linears()
    found = indicate(observe(dag, paper_rows(dag)), dag, [I8, F16, F32], Paper())
    gamma_sq, eps_sq = 0.25, 2.0**-18
    v_hat = 12 + 0.01 * 16 / 6
    forward = (3 * 0.01 * 16 + v_hat * 0.0004 * 48) / 6
    backward = (0.5 * 0.01 * 16 + v_hat * 2.0**-6 * eps_sq * 12) / 6
    assert found.omega[A][I8] == pytest.approx(gamma_sq * 1 * forward + 2 * backward, rel=1e-12)
    assert found.omega[B][I8] == pytest.approx(gamma_sq * 2 * forward + 1 * backward, rel=1e-12)
    v_hat = 12 + 4 * eps_sq * 16 / 6
    gv_hat = 0.5 + 2.0**-6 * eps_sq * 12 / 6
    forward = eps_sq * (3 * 4 * 16 + v_hat * 2.0**-4 * 48) / 6
    backward = eps_sq * (gv_hat * 4 * 16 + v_hat * 2.0**-6 * 12) / 6
    assert found.omega[A][F16] == pytest.approx(gamma_sq * 1 * forward + 2 * backward, rel=1e-12)
    assert found.omega[A][F32] == 0
    assert found.notes == ("γ = 0.5; arithmetic mean over 1 iterations",)


def test_paper_averages_arithmetically() -> None:
    dag = two_linears()

    def at(scale: Sequence[float]) -> float:
        return indicate(observe(dag, paper_rows(dag, scale)), dag, [I8], Paper()).omega[A][I8]

    assert at([1.0, 5.0]) == pytest.approx((at([1.0]) + at([5.0])) / 2, rel=1e-12)


def test_paper_constants() -> None:
    assert epsilon(Precision.FLOAT16) == 2.0**-9
    assert epsilon(Precision.BFLOAT16) == 2.0**-6
    dag = two_linears()
    assert gamma(dag, 2) == 0.5
    assert gamma(attrs.evolve(dag, loss="mse"), 2) == pytest.approx(2 / (2 * 5))
    assert gamma(attrs.evolve(dag, loss_reduction="sum"), 2) == 1.0
    assert gamma(attrs.evolve(dag, loss="mse", loss_reduction="sum"), 2) == 2.0
    assert gamma(attrs.evolve(dag, loss="custom"), 2) == 0.5


def test_paper_says_when_it_assumed_gamma_and_names_missing_scales() -> None:
    dag = attrs.evolve(two_linears(), loss="custom")
    found = indicate(observe(dag, paper_rows(dag)), dag, [F16], Paper())
    assert found.notes == ("γ = 0.5, assumed for the loss kind 'custom'; arithmetic mean over 1 iterations",)
    with pytest.raises(ObservationError, match=r"the observations lack paper\.v_scale_sq of a#0 at int8"):
        indicate(observe(dag, paper_rows(dag)), dag, [Variant.of(INT8)], Paper())
