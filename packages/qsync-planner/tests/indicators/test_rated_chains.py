"""Ω of what fused chains keep in 8 bit."""

from __future__ import annotations

import json
import math
from pathlib import Path

import attrs
import pytest
from chained_models import IMAGE, ChainBuilder, block
from test_cli_check import run
from test_indicators import Flat, observe

from qsync_core.artifacts.files import digest, save
from qsync_core.chains.finding import chains_of
from qsync_core.errors import ObservationError, PluginError
from qsync_core.ir import observations as terms
from qsync_core.ir.chain import ChainVariant
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.observations import Observations, Series
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_planner.indicate import indicate
from qsync_planner.indicator_check import compare, read_kept_inputs, read_truth
from qsync_planner.indicators.hutchinson import Hutchinson
from qsync_planner.indicators.interface import Omega

I8, F32 = Variant.of(Precision.INT8), Variant.of(Precision.FLOAT32)
SAVED = ChainVariant(saved=Precision.INT8)
NORM = OpId("a.norm")


def model() -> PrecisionDag:
    g = ChainBuilder("m")
    g.loss(g.conv2d("head", block("a", g, g.input("x", IMAGE)), 3, 1))
    return g.build()


def observed(dag: PrecisionDag, kept: tuple[float, float] = (1.0, 4.0)) -> Observations:
    rows: dict[tuple[OpId, Variant | None, str, str], tuple[float, ...]] = {
        (operator.op_id, I8, terms.HUTCHINSON, term): (1.0, 1.0)
        for operator in dag.adjustable
        for term in (terms.OPERANDS, terms.OUTPUT, terms.GRADIENT)
    }
    rows |= {(o.op_id, I8, terms.MONTECARLO, half): (3.0, 3.0) for o in dag.adjustable for half in HALVES}
    rows |= {(chain.name, SAVED.rated_as, terms.MONTECARLO, half): (1.0, 1.0) for chain in chains_of(dag) for half in HALVES}
    return observe(dag, rows | {(NORM, SAVED.rated_as, terms.HUTCHINSON, terms.KEPT_INPUT): kept})


HALVES = (terms.FIRST_HALF, terms.SECOND_HALF)


def test_hutchinson_rates_a_kept_input() -> None:
    dag = model()
    for variants in ((), (I8, F32)):
        found = indicate(observed(dag), dag, variants)
        assert found.indicator == "hutchinson"
        assert found.omega[NORM] == {SAVED.rated_as: pytest.approx(2.0)}
        assert {op_id for op_id, by in found.omega.items() if I8 in by} == {o.op_id for o in dag.adjustable}
    assert SAVED.rated_as.label == "int8 saved"
    seen = observed(dag)
    norms = Series(None, None, terms.RUN, terms.GRADIENT_SQ_NORM, (1.0, 4.0))
    found = indicate(attrs.evolve(seen, series=(*seen.series, norms)), dag)
    assert found.omega[NORM] == {SAVED.rated_as: pytest.approx(2.0 * (1 / 1 + 4 / 4) / 2)}
    assert found.errors[dag.adjustable[0].op_id] == {I8: pytest.approx(2.0 * (3 / 1 - 3 / 4) / 2)}
    assert NORM not in found.errors  # both updates say the same


def test_comparing_leaves_out_what_the_truth_is_not_of() -> None:
    """Ω of chains stands beside that of operators, in variants of its own."""
    dag = model()
    seen = observed(dag)
    omegas = {"hutchinson": indicate(seen, dag).omega}
    assert [variant.name for variant in compare(omegas, read_truth(seen, dag)).variants] == ["int8"]
    kept = read_kept_inputs(seen, dag, [NORM])
    assert kept is not None
    assert [variant.name for variant in compare(omegas, kept).variants] == ["int8 saved"]


def test_hutchinson_rates_what_a_copy_behind_a_shortcut_adds() -> None:
    """By hand: geometric means of A + B/√noise over two iterations, with the copy's terms and with the operand's own."""
    dag, reader = model(), OpId("head")
    rows = {(reader, I8, terms.HUTCHINSON, term): values for term, values in COPIED.items()}
    plain = {(o.op_id, I8, terms.HUTCHINSON, t): (1.0, 1.0) for o in dag.adjustable for t in PLAIN}
    flips = {(o.op_id, I8, terms.HUTCHINSON, t): v for o in dag.adjustable for t, v in OWN_FLIPS.items()}
    found = indicate(observe(dag, plain | flips | rows), dag, [I8, WIDE, F32])
    # output and gradient 1 each: A is 3 with the own copy and 4, 6 with the chain's; B/√noise is 2/√4 = 1, and 3/√9 = 1.
    own, chain = 4.0, math.sqrt(5.0 * 7.0)
    assert found.omega[reader][I8] == pytest.approx(own)
    assert found.copies == {reader: {I8: pytest.approx(chain - own), WIDE: pytest.approx(math.sqrt(4.0 * 6.0) - 3.0)}}
    assert indicate(observed(dag), dag, [I8]).copies == {}


PLAIN = (terms.OPERANDS, terms.OUTPUT, terms.GRADIENT)
OWN_FLIPS = {
    terms.OPERANDS_FLIPS: (2.0, 2.0),
    terms.OPERANDS_NOISE: (4.0, 4.0),
    terms.OUTPUT_FLIPS: (0.0, 0.0),
    terms.OUTPUT_NOISE: (0.0, 0.0),
}
COPIED = {terms.COPY: (2.0, 4.0), terms.COPY_FLIPS: (3.0, 3.0), terms.COPY_NOISE: (9.0, 9.0)}
WIDE = Variant.of(Precision.INT8, output=Precision.FLOAT32)
"""Reads the same copy, and its output is not rounded."""


def test_an_indicator_that_knows_nothing_of_it_rates_none() -> None:
    dag = model()
    assert NORM not in indicate(observed(dag), dag, [I8, F32], Flat()).omega


@pytest.mark.parametrize(("name", "value"), [(NORM, math.nan), (NORM, -1.0), (OpId("head"), 1.0), (OpId("elsewhere"), 1.0)])
def test_what_an_indicator_says_of_chains_is_checked(name: OpId, value: float) -> None:
    class Mine(Hutchinson):
        def kept_inputs(self, observations: Observations) -> Omega:
            return {name: {SAVED.rated_as: value}}

    dag = model()
    with pytest.raises((ObservationError, PluginError), match="kept input of"):
        indicate(observed(dag), dag, [I8], Mine())


def test_the_check_against_the_truth_has_chains_in_a_table_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dag = model()
    save(dag, "dag.qsync")
    save(attrs.evolve(observed(dag), dag_digest=digest(dag)), "o.qsync")
    result = run("o.qsync", "--dag", "dag.qsync", "--check", "--truth", "o.qsync", "--json")
    assert result.exit_code == 0, result.exception
    data = json.loads(result.stdout)
    assert {row["label"] for row in data["omega"]} == {"int8", "int8 saved"}
    assert data["check"]["operators"] == [str(o.op_id) for o in dag.adjustable]
    assert [variant["name"] for variant in data["check"]["variants"]] == ["int8"]
    assert data["check"]["variants"][0]["truth"] == pytest.approx([3.0, 3.0])
    kept = data["check"]["kept_inputs"]
    assert (kept["operators"], kept["indicators"], kept["kept_inputs"]) == ([str(NORM)], ["hutchinson"], None)
    (column,) = kept["variants"]
    assert (column["name"], column["truth"]) == ("int8 saved", pytest.approx([1.0]))
    assert column["agreement"]["hutchinson"]["median_ratio"] == pytest.approx(2.0)
    output = run("o.qsync", "--dag", "dag.qsync", "--check", "--truth", "o.qsync", "--page", "p.html").output
    assert "inputs of fused chains, kept for backward in 8 bit, one chain at a time" in output
    rows = [line.split()[2] for line in output.splitlines() if line.split()[:2] == ["int8", "saved"]]
    assert rows == ["hutchinson", "truth"]
    assert "What fused chains keep in 8 bit" in Path("p.html").read_text(encoding="utf-8")


def test_chains_are_not_compared_where_they_were_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dag = model()
    save(dag, "dag.qsync")
    seen = attrs.evolve(observed(dag), dag_digest=digest(dag))
    save(seen, "o.qsync")
    of_operators = [s for s in seen.series if s.collector != terms.MONTECARLO or s.variant != SAVED.rated_as]
    save(attrs.evolve(seen, series=tuple(of_operators)), "t.qsync")
    arguments = ["o.qsync", "--dag", "dag.qsync", "--check", "--truth", "t.qsync"]
    assert json.loads(run(*arguments, "--json").stdout)["check"]["kept_inputs"] is None
    assert "inputs of fused chains" not in run(*arguments).output
    assert "--chains says what to measure; name the job with --job" in run(*arguments, "--chains").output
