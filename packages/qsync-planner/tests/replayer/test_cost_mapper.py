"""The cost mapper: casts by hand on small graphs, and incremental updates against rebuilding."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import pytest
from hand_models import BF16, FP16, FP32, I8, I8_BF16, cast_ns, op, profile
from hypothesis import given
from hypothesis import strategies as st
from random_models import assignments, changes, dags, profiles
from synthetic import BFLOAT16, FLOAT16, FLOAT32, INT8, GraphBuilder

from hypothesis_profiles import tries
from qsync_core.errors import PlanError
from qsync_core.ir import semantics
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import DeviceKind, OpCost
from qsync_core.ir.variant import Variant
from qsync_planner.replayer.cost_mapper import CostMapper
from qsync_planner.replayer.cost_model import CostModel


def mapper(dag: PrecisionDag, variants: Mapping[OpId, Variant], costs: Mapping[str, OpCost] | None = None) -> CostMapper:
    return CostMapper(dag, CostModel(dag, profile(dag, costs or {})), variants)


def charges(built: CostMapper) -> dict[str, list[tuple[str, Precision, Precision, int]]]:
    """(site, source, target, elements) of every cast charged, per operator that has any."""
    return {
        operator.op_id.fqn: [(p.cast.site, p.cast.key.source, p.cast.key.target, p.cast.numel) for p in charged]
        for operator, charged in zip(built.dag.operators, built.charged, strict=True)
        if charged
    }


def test_one_int8_linear_is_charged_each_of_its_four_casts() -> None:
    g = GraphBuilder("m")
    x = g.unary("norm", "layer_norm", g.input("x", (4, 8)), guarded=True)
    g.loss(g.linear("fc", x, 16))
    built = mapper(g.build(), {op("fc"): I8})
    assert charges(built) == {
        "fc": [
            ("input", FLOAT32, INT8, 32),
            ("weight", FLOAT32, INT8, 128),
            ("grad_output", FLOAT32, BFLOAT16, 64),
            ("grad_input", BFLOAT16, FLOAT32, 32),
        ]
    }
    position = built.dag.index[op("fc")]
    assert built.forward[position].compute_ns == cast_ns(FLOAT32, INT8, 32) + cast_ns(FLOAT32, INT8, 128)
    assert built.backward[position].compute_ns == cast_ns(FLOAT32, BFLOAT16, 64) + cast_ns(BFLOAT16, FLOAT32, 32)


@pytest.mark.parametrize("site", ["input", "weight", "grad_output"])
def test_a_wrong_entry_of_the_table_changes_what_is_charged(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    g = GraphBuilder("m")
    x = g.unary("norm", "layer_norm", g.input("x", (4, 8)), guarded=True)
    g.loss(g.linear("fc", x, 16))
    dag = g.build()
    right = charges(mapper(dag, {op("fc"): I8}))["fc"]
    wrong = semantics.CastTarget(Precision.FLOAT16)
    entry = (lambda variant, products: (wrong,)) if site == "grad_output" else lambda variant: wrong
    monkeypatch.setattr(semantics, "TABLE", attrs.evolve(semantics.TABLE, **{site: entry}))
    semantics.steps_of.cache_clear()
    try:
        charged = charges(mapper(dag, {op("fc"): I8}))["fc"]
    finally:
        monkeypatch.undo()
        semantics.steps_of.cache_clear()
    assert [row for row in charged if row[0] == site] == [
        (site, source, Precision.FLOAT16, numel) for name, source, _, numel in right if name == site
    ]
    assert [row for row in charged if row[0] != site] == [row for row in right if row[0] != site]


def query_key_value(variants: Mapping[str, Variant]) -> CostMapper:
    g = GraphBuilder("m")
    x = g.unary("norm", "layer_norm", g.input("x", (4, 8)), guarded=True)
    q, k, v = (g.linear(name, x, 8) for name in "qkv")
    context = g.join("context", "matmul", [q, k, v])
    g.loss(g.linear("out", context, 8))
    return mapper(g.build(), {op(name): variant for name, variant in ({"out": FP32} | dict(variants)).items()})


def test_consumers_of_one_tensor_share_a_cast_charged_to_the_first() -> None:
    weight, grad_out = ("weight", FLOAT32, BFLOAT16, 64), []
    assert charges(query_key_value(dict.fromkeys("qkv", BF16))) == {
        "q": [("input", FLOAT32, BFLOAT16, 32), weight, *grad_out, ("grad_input", BFLOAT16, FLOAT32, 32)],
        "k": [weight],
        "v": [weight],
        "out": [("input", BFLOAT16, FLOAT32, 32), ("grad_input", FLOAT32, BFLOAT16, 32)],
    }


@pytest.mark.parametrize("views", [((0,), (0,)), ((0,), (1,))])
def test_different_views_of_one_tensor_are_cast_apart(views: tuple[tuple[int], tuple[int]]) -> None:
    g = GraphBuilder("m")
    x = g.unary("norm", "layer_norm", g.input("x", (4, 8)), guarded=True)
    g.loss(g.join("add", "add", [g.linear("l1", x, 16), g.linear("l2", x, 16)]))
    read = dict(zip(("l1", "l2"), views, strict=True))
    operators = tuple(attrs.evolve(o, views=read.get(o.op_id.fqn, ())) for o in g.build().operators)
    found = charges(mapper(attrs.evolve(g.build(), operators=operators), {op("l1"): BF16, op("l2"): BF16}))
    own = ("input", FLOAT32, BFLOAT16, 32)
    assert [own in found[name] for name in ("l1", "l2")] == [True, views[0] != views[1]]


def test_the_shared_cast_moves_on_when_its_first_consumer_no_longer_needs_it() -> None:
    built = query_key_value(dict.fromkeys("qkv", BF16))
    built.update({op("q"): FP32})
    found = charges(built)
    assert "q" not in found
    assert found["k"][0] == ("input", FLOAT32, BFLOAT16, 32)
    assert ("grad_input", BFLOAT16, FLOAT32, 32) in found["k"]
    # The product wants one format: k and v, measured in bfloat16, deliver float32 beside q's, each by a cast of its own result.
    own = [("output", BFLOAT16, FLOAT32, 32), ("grad_output", FLOAT32, BFLOAT16, 32)]
    assert found["v"] == [("weight", FLOAT32, BFLOAT16, 64), own[1], own[0]]
    assert "context" not in found
    built.rollback()
    assert charges(built) == charges(query_key_value(dict.fromkeys("qkv", BF16)))


def test_int8_consumers_share_the_quantized_copy_but_not_the_gradient_casts() -> None:
    found = charges(query_key_value(dict.fromkeys("qkv", I8)))
    assert [c[0] for c in found["q"]] == ["input", "weight", "grad_output", "grad_input"]
    assert [c[0] for c in found["k"]] == ["weight", "grad_output", "grad_input"]
    assert [c[0] for c in found["v"]] == ["weight", "grad_output", "grad_input"]


def test_different_casts_of_one_tensor_are_not_shared() -> None:
    found = charges(query_key_value({"q": I8, "k": BF16, "v": FP16}))
    assert [found[name][0] for name in "qkv"] == [("input", FLOAT32, precision, 32) for precision in (INT8, BFLOAT16, FLOAT16)]


def test_an_operator_that_reads_one_tensor_twice_casts_it_once() -> None:
    g = GraphBuilder("m")
    x = g.unary("norm", "layer_norm", g.input("x", (4, 8)), guarded=True)
    low = g.linear("low", x, 8)
    total = g.join("sum", "add", [low, low, g.linear("high", x, 8)])
    g.loss(g.linear("out", total, 8))
    found = charges(mapper(g.build(), {op("low"): BF16, op("high"): FP32, op("out"): FP32}))
    assert found["sum"] == [("input", BFLOAT16, FLOAT32, 32), ("grad_input", FLOAT32, BFLOAT16, 32)]


def test_dependents_follow_the_widest_input_and_float16_with_bfloat16_gives_float32() -> None:
    g = GraphBuilder("m")
    x = g.unary("norm", "layer_norm", g.input("x", (4, 8)), guarded=True)
    a, b = g.linear("a", x, 8), g.linear("b", x, 8)
    y = g.unary("relu", "relu", g.join("sum", "add", [a, b]))
    g.loss(g.linear("c", y, 8))
    dag = g.build()
    built = mapper(dag, {op("a"): BF16, op("b"): BF16, op("c"): BF16})
    positions = [dag.index[op(name)] for name in ("sum", "relu")]
    assert [built.states[i].evaluation.output for i in positions] == [BFLOAT16, BFLOAT16]
    change = built.update({op("b"): FP16})
    assert [built.states[i].evaluation.output for i in positions] == [FLOAT32, FLOAT32]
    # b, sum, relu and c are evaluated again; a and the loss are not: nothing about them follows from b.
    assert change.evaluated == [dag.index[op(name)] for name in ("b", "sum", "relu", "c")]
    built.rollback()
    assert [built.states[i].evaluation.output for i in positions] == [BFLOAT16, BFLOAT16]


def test_an_input_without_gradient_has_none_to_cast() -> None:
    g = GraphBuilder("m")
    g.loss(g.linear("out", g.linear("fc", g.input("x", (4, 8)), 8), 8))
    assert [c[0] for c in charges(mapper(g.build(), {op("fc"): I8_BF16, op("out"): FP32}))["fc"]] == ["input", "weight"]


def test_an_operator_that_can_not_be_lowered_stays_as_traced() -> None:
    g = GraphBuilder("m")
    g.loss(g.linear("tied", g.input("x", (4, 8)), 8, not_applicable="its weight is tied to the embedding"))
    dag = g.build()
    assert charges(mapper(dag, {})) == {}
    with pytest.raises(PlanError, match=r"variant of operator tied#0 cannot be chosen: its weight is tied to the embedding"):
        mapper(dag, {op("tied"): BF16})


def test_bad_changes_are_refused_by_name_and_leave_nothing_behind() -> None:
    g = GraphBuilder("m")
    x = g.unary("relu", "relu", g.input("x", (4, 8)))
    g.loss(g.linear("fc", x, 8))
    built = mapper(g.build(), {op("fc"): FP32})
    before = (list(built.states), list(built.forward), list(built._variant))
    with pytest.raises(PlanError, match=r"model 'm' has no operator gone#0; is the plan for another model\?"):
        built.update({op("fc"): BF16, op("gone"): BF16})
    with pytest.raises(PlanError, match=r"relu#0 cannot be chosen: a relu is dependent, it follows its inputs"):
        built.update({op("fc"): BF16, op("relu"): BF16})
    float8 = Variant.of(Precision.FLOAT8_E4M3FN)
    with pytest.raises(
        PlanError, match=r"no cost of operator fc#0 \(linear\) in float8_e4m3fn>float32, only in: bfloat16, float16"
    ):
        built.update({op("fc"): float8})
    assert (built.states, built.forward, built._variant) == before
    built.update({op("fc"): BF16})
    with pytest.raises(RuntimeError, match="pending"):
        built.update({op("fc"): FP32})


def test_operators_that_are_alike_share_what_was_worked_out_for_them() -> None:
    g = GraphBuilder("m")
    x = g.unary("norm", "layer_norm", g.input("x", (4, 8)), guarded=True)
    alike, wider, slower = g.linear("alike", g.linear("first", x, 8), 8), g.linear("wider", x, 16), g.linear("slower", x, 8)
    g.loss(g.join("all", "cat", [alike, wider, slower], (4, 32)))
    dag = g.build()
    cost = OpCost(0, 5, 0, 7, saves_inputs=(0,))
    costs = {"first": cost, "alike": cost, "wider": cost, "slower": OpCost(0, 6, 0, 7, saves_inputs=(0,))}
    built = mapper(dag, dict.fromkeys((o.op_id for o in dag.adjustable), FP32), costs)
    first, same, wide, slow = (built.states[dag.index[op(name)]].evaluation for name in ("first", "alike", "wider", "slower"))
    assert first is same
    assert (wide.output_bytes, wide.forward_compute_ns) == (4 * 16 * 4, 5)
    assert (slow.output_bytes, slow.forward_compute_ns) == (4 * 8 * 4, 6)


def test_every_adjustable_operator_needs_a_variant() -> None:
    g = GraphBuilder("m")
    g.loss(g.linear("fc", g.input("x", (4, 8)), 8))
    with pytest.raises(PlanError, match=r"no variant is given for operator fc#0"):
        mapper(g.build(), {})


def state(built: CostMapper) -> tuple[object, ...]:
    return [state.evaluation for state in built.states], built.charged, built.forward, built.backward


@tries(150)
@given(st.data())
def test_incremental_updates_equal_a_rebuild_bit_for_bit(data: st.DataObject) -> None:
    dag = data.draw(dags())
    measured = data.draw(profiles(dag, data.draw(st.sampled_from(list(DeviceKind)))))
    model = CostModel(dag, measured)
    variants = data.draw(assignments(dag))
    built = CostMapper(dag, model, variants)
    for change, keep in data.draw(st.lists(st.tuples(changes(dag), st.booleans()), max_size=6)):
        built.update(change)
        assert state(built) == state(CostMapper(dag, CostModel(dag, measured), {**variants, **change}))
        if keep:
            built.commit()
            variants = {**variants, **change}
        else:
            built.rollback()
        assert state(built) == state(CostMapper(dag, model, variants))
