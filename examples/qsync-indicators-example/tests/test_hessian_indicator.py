"""The indicator ``hessian`` against numbers worked by hand, and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import pytest
from qsync_indicators_example import terms
from qsync_indicators_example.hessian import Hessian
from synthetic import BFLOAT16, FLOAT16, FLOAT32, INT8, GraphBuilder

from qsync_core.artifacts.files import digest
from qsync_core.errors import ObservationError
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.observations import Observations, Series
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Granularity
from qsync_core.ir.variant import Variant
from qsync_planner.indicate import indicate

I8, BF16, F32 = Variant.of(INT8), Variant.of(BFLOAT16), Variant.of(FLOAT32)
A = OpId("a")


def one_linear() -> PrecisionDag:
    g = GraphBuilder("one", batch_size=4)
    g.loss(g.linear("a", g.input("x", (4, 8)), 6))
    return g.build()


def observed(dag: PrecisionDag, eigenvalue: Sequence[float], errors: Mapping[Variant, Sequence[float]]) -> Observations:
    rows = {(None, terms.TOP_EIGENVALUE): eigenvalue, (None, terms.WEIGHT_NUMEL): [48.0] * len(eigenvalue)}
    rows |= {(variant, terms.WEIGHT_ERROR): values for variant, values in errors.items()}
    series = tuple(Series(A, variant, terms.HESSIAN, term, tuple(values)) for (variant, term), values in rows.items())
    return Observations(dag.model, digest(dag), tuple(range(7, 7 + len(eigenvalue))), 2, "budget", series)


def test_worked_by_hand() -> None:
    dag = one_linear()
    observations = observed(dag, [-6.0, -6.0], {I8: [4.0, 4.0], BF16: [0.5, 0.5]})
    sensitivity = indicate(observations, dag, [I8, BF16, F32], Hessian())
    # |−6| / 48 · 4 and |−6| / 48 · 0.5: the sign of the curvature does not matter.
    assert sensitivity.omega[A] == {I8: pytest.approx(0.5), BF16: pytest.approx(0.0625), F32: 0.0}
    assert sensitivity.indicator == "hessian"
    assert "update 7" in sensitivity.notes[0]


def test_formats_of_gradients_do_not_matter() -> None:
    dag = one_linear()
    observations = observed(dag, [6.0], {I8: [4.0]})
    other = Variant.of(INT8, sixteen_bit=FLOAT16)
    assert Hessian().omega(dag, [other], observations)[A][other] == pytest.approx(0.5)


def test_another_rounding_of_the_weight_was_not_observed() -> None:
    dag = one_linear()
    observations = observed(dag, [6.0], {I8: [4.0]})
    per_tensor = Variant.of(INT8, w_granularity=Granularity.PER_TENSOR)
    with pytest.raises(ObservationError, match=r"lack hessian\.weight_error of a#0 at int8"):
        indicate(observations, dag, [per_tensor], Hessian())


def test_missing_collector_and_negative_errors() -> None:
    dag = one_linear()
    observations = observed(dag, [6.0], {I8: [-4.0]})
    with pytest.raises(ObservationError, match=r"hessian\.weight_error of a#0 at int8 is -4\.0 in iteration 7"):
        indicate(observations, dag, [I8], Hessian())
    with pytest.raises(ObservationError, match=r"lack hessian\.top_eigenvalue of a#0"):
        indicate(attrs.evolve(observations, series=observations.series[2:]), dag, [I8], Hessian())
