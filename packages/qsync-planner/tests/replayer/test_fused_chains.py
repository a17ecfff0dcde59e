"""Fused chains in the replayer: time and memory by hand, against a second implementation, and incremental against full."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import pytest
from brute_force_calibration import learn
from brute_force_clocks import fastest_pace, write_program
from brute_force_memory import levels_bytes
from brute_force_walk import Walker
from chained_models import CHOSEN, IMAGE, ChainBuilder, block, chained_dags, chained_profiles, chosen, way, ways, with_chains
from hand_models import BF16, FP32, I8, I8_BF16, cast_ns, op, profile, single_group
from hypothesis import example, given
from hypothesis import strategies as st
from random_models import assignments, changes
from synthetic import BFLOAT16, FLOAT32, INT8, GraphBuilder

from hypothesis_profiles import tries
from qsync_core.chains.finding import chains_of
from qsync_core.errors import PlanError
from qsync_core.ir.chain import UNFUSED, Activation, ChainForm, ChainVariant
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import DeviceKind, OpCost, Profile
from qsync_core.ir.variant import Variant
from qsync_planner.matching import Inputs
from qsync_planner.replayer.chains import Chosen
from qsync_planner.replayer.cost_mapper import CostMapper
from qsync_planner.replayer.cost_model import CostModel
from qsync_planner.replayer.memory import MemoryLedger
from qsync_planner.replayer.replay import Replayer

FUSED, SAVED = ChainVariant(), ChainVariant(saved=INT8)
RELU = ChainForm(Activation.RELU)
NO_FLOATS = ChainForm(Activation.RELU, float_result=False)
KEEPS_INPUT = OpCost(0, 0, 0, 0, saves_inputs=(0,))
ELEMENTS = 2 * 3 * 2 * 2


def two_convolutions() -> PrecisionDag:
    """conv1 → norm → ReLU → conv2 → loss; every activation has 24 elements."""
    g = ChainBuilder("m")
    g.loss(g.conv2d("conv2", block("b", g, g.input("x", IMAGE)), 3, 1))
    return g.build()


NORM, CONV1, CONV2 = op("b.norm"), op("b.conv"), op("conv2")
CHAIN_COSTS = {
    way(RELU, FLOAT32, None, None): OpCost(0, 7, 0, 9, saved_own_bytes=24),
    way(RELU, FLOAT32, None, INT8): OpCost(0, 8, 0, 10, saved_own_bytes=24 + 12 + 24 + 3),
    way(NO_FLOATS, FLOAT32, I8, None): OpCost(0, 5, 0, 9, saved_own_bytes=24),
    way(NO_FLOATS, FLOAT32, I8, INT8): OpCost(0, 6, 0, 10, saved_own_bytes=24 + 12 + 24 + 3),
}


def measured(dag: PrecisionDag) -> Profile:
    """Unfused: the norm takes 20 + 30 ns and keeps its input, the ReLU 10 + 10 and keeps its output, which is conv2's input."""
    costs = {
        "b.conv": KEEPS_INPUT,
        "b.norm": OpCost(0, 20, 0, 30, saves_inputs=(0,), saved_own_bytes=24),
        "b.relu": OpCost(0, 10, 0, 10, saves_output=True),
        "conv2": KEEPS_INPUT,
    }
    return with_chains(profile(dag, costs), dag, {NORM: CHAIN_COSTS})


def mapper(dag: PrecisionDag, variants: Mapping[OpId, Chosen]) -> CostMapper:
    return CostMapper(dag, CostModel(dag, measured(dag)), variants)


def total_ns(built: CostMapper) -> int:
    return sum(work.compute_ns for work in (*built.forward, *built.backward))


def test_a_fused_chain_takes_its_own_time_and_its_copy_costs_nothing() -> None:
    dag = two_convolutions()
    variants: dict[OpId, Chosen] = {CONV1: FP32, CONV2: I8}
    unfused, fused = mapper(dag, variants), mapper(dag, {**variants, NORM: FUSED})
    # conv2's casts: input and weight to int8, its gradient to bfloat16, the input's gradient back to float32.
    after = cast_ns(FLOAT32, INT8, 9) + cast_ns(FLOAT32, BFLOAT16, ELEMENTS) + cast_ns(BFLOAT16, FLOAT32, ELEMENTS)
    assert total_ns(unfused) == 20 + 30 + 10 + 10 + cast_ns(FLOAT32, INT8, ELEMENTS) + after
    assert total_ns(fused) == 5 + 9 + after
    assert total_ns(mapper(dag, {**variants, NORM: SAVED})) == 6 + 10 + after
    assert [c.cast.site for c in fused.charged[dag.index[CONV2]]] == ["weight", "grad_output", "grad_input"]
    assert [work.compute_ns for work in fused.forward] == [0, 0, 0, 5, cast_ns(FLOAT32, INT8, 9), 0]
    assert total_ns(mapper(dag, {CONV1: FP32, CONV2: FP32, NORM: FUSED})) == 7 + 9


def test_what_a_fused_chain_keeps() -> None:
    dag = two_convolutions()

    def saved(variant: Variant, how: ChainVariant) -> int:
        return MemoryLedger(mapper(dag, {CONV1: FP32, CONV2: variant, NORM: how}), distributed=False).saved_bytes()

    floats, bytes_ = ELEMENTS * 4, ELEMENTS
    # conv1 keeps the batch, which is counted with the batch.
    assert saved(FP32, UNFUSED) == floats + 24 + floats  # the norm's input and statistics; the ReLU's output, conv2's input
    assert saved(I8, UNFUSED) == floats + 24 + floats + bytes_  # and conv2's copy
    assert saved(I8, FUSED) == floats + 24 + bytes_  # no ReLU's output
    assert saved(I8, SAVED) == (24 + 12 + 24 + 3) + bytes_  # statistics, scales, x̂ in 8 bit, bits
    assert saved(FP32, SAVED) == (24 + 12 + 24 + 3) + floats


def test_no_float_result_is_allocated_where_nothing_reads_it() -> None:
    dag = two_convolutions()
    moments = MemoryLedger(mapper(dag, {CONV1: FP32, CONV2: I8, NORM: SAVED}), distributed=False).moments_bytes()
    floats, bytes_, own = ELEMENTS * 4, ELEMENTS, 24 + 12 + 24 + 3
    # input, conv1, (norm), chain, conv2, loss
    assert moments[:6] == [0, floats, floats, floats + own + bytes_, own + bytes_ + floats, own + bytes_ + floats + 4]


def test_what_is_said_of_chains_must_fit() -> None:
    dag = two_convolutions()
    with pytest.raises(PlanError, match=r"model 'm' has no chain b\.relu#0; is the plan for another model\?"):
        mapper(dag, {CONV1: FP32, CONV2: FP32, op("b.relu"): FUSED})
    with pytest.raises(
        PlanError, match=r"no cost of chain b\.norm#0, fused, with float result in bfloat16.*leave the chain unfused"
    ):
        mapper(dag, {CONV1: BF16, CONV2: BF16, NORM: FUSED})
    built = mapper(dag, {CONV1: FP32, CONV2: I8})
    with pytest.raises(PlanError, match=r"no cost of chain"):
        built.update({CONV1: I8_BF16, NORM: FUSED})
    assert total_ns(built) == total_ns(mapper(dag, {CONV1: FP32, CONV2: I8}))
    with pytest.raises(ValueError, match="keeps an 8-bit copy or its input as it is, got bfloat16"):
        ChainVariant(saved=BFLOAT16)


def residual_block() -> PrecisionDag:
    g = ChainBuilder("m")
    x = g.unary("pool", "pool", g.input("x", IMAGE))
    y = g.conv2d("b.conv", x, 3, 1)
    norm = g.called("b.norm", "batch_norm", y)
    between = g.unary("between", "pool", x)
    relu = g.called("b.relu", "relu", g.called("b.add", "add", norm, between))
    g.loss(g.join("join", "join", [relu, g.conv2d("conv2", relu, 3, 1)]))
    return g.build()


def test_a_chain_runs_at_its_last_operator() -> None:
    dag = residual_block()
    rows = {
        way(ChainForm(Activation.RELU, True, True), FLOAT32, None, None): OpCost(
            0, 1, 0, 1, saved_own_bytes=5, workspace_bytes=1000
        )
    }
    built = CostMapper(
        dag, CostModel(dag, with_chains(profile(dag, {}), dag, {NORM: rows})), {CONV1: FP32, CONV2: FP32, NORM: FUSED}
    )
    ledger = MemoryLedger(built, distributed=False)
    moments, f = ledger.moments_bytes(), ELEMENTS * 4
    at = {name: dag.index[op(name)] for name in ("b.conv", "between", "b.relu")}
    # x is read by `between`, conv1's output and that of `between` by the chain, at the ReLU; the norm's input is kept.
    assert moments[at["between"]] == 3 * f
    assert moments[at["b.relu"]] == 3 * f + 5 + 1000
    last = 2 * len(dag.operators) - 1
    # Backward: gradients of the result, of conv1's output and of `between` meet; the input and 5 bytes are still kept.
    gradients = 9 * 4  # of conv2's weight
    assert moments[last - at["b.relu"]] == f + 5 + 3 * f + gradients + 1000
    assert moments[last - at["between"]] == f + f + f + gradients  # gradients of conv1's output, of `between`, of x


@st.composite
def plans(draw: st.DrawFn) -> tuple[PrecisionDag, Profile, dict[OpId, Chosen]]:
    dag = draw(chained_dags())
    made = draw(chained_profiles(dag, draw(st.sampled_from(list(DeviceKind)))))
    said = {chain.name: draw(st.sampled_from(CHOSEN)) for chain in chains_of(dag)}
    return dag, made, {**draw(assignments(dag)), **said}


def gated_images() -> tuple[PrecisionDag, Profile, dict[OpId, Chosen]]:
    """silu(gate) · up → down: its function passes 16 bits on, and the convolution reads floats, of which it makes its own copy."""
    g = ChainBuilder("m")
    x = g.input("x", IMAGE)
    gate, up = g.conv2d("gate", x, 3, 1), g.conv2d("up", x, 3, 1)
    g.loss(g.conv2d("down", g.called("product", "mul", g.called("silu", "silu", gate), up), 3, 1))
    dag = g.build()
    costs = {chain.name: dict.fromkeys(ways(chain), OpCost(1, 2, 3, 4, saved_own_bytes=5)) for chain in chains_of(dag)}
    variants: dict[OpId, Chosen] = {op("gate"): I8_BF16, op("up"): I8_BF16, op("down"): I8, op("silu"): FUSED}
    return dag, with_chains(profile(dag, {}), dag, costs), variants


@tries(60)
@given(plans())
@example(gated_images())
def test_time_and_memory_equal_those_of_a_second_implementation(plan: tuple[PrecisionDag, Profile, dict[OpId, Chosen]]) -> None:
    dag, made, variants = plan
    walker = Walker(dag, made, chains_of(dag))
    walked = walker.walk(variants)
    built = CostMapper(dag, CostModel(dag, made), variants)
    ledger = MemoryLedger(built)
    assert (ledger.static_bytes, ledger.moments_bytes()) == levels_bytes(walker, walked, several_ranks=True)
    replayer = Replayer(
        Inputs(
            dag,
            attrs.evolve(single_group(), groups=(attrs.evolve(single_group().groups[0], device=made.device.name),)),
            {"g": made},
        )
    )
    program = write_program(walker, walked, learn(walker, FP32), [0] * len(dag.buckets), 0.0, synchronises=False)
    assert replayer.replay({"g": variants}).iteration_ns == fastest_pace([program], [0] * len(dag.buckets))


@tries(50)
@given(plans(), st.data())
def test_updates_equal_a_model_made_anew(plan: tuple[PrecisionDag, Profile, dict[OpId, Chosen]], data: st.DataObject) -> None:
    dag, made, variants = plan
    model = CostModel(dag, made)
    built = CostMapper(dag, model, variants)
    ledger = MemoryLedger(built)
    for change, hows, keep in data.draw(st.lists(st.tuples(changes(dag), chosen(dag), st.booleans()), max_size=5)):
        touched = built.update({**change, **hows})
        before = ledger.refresh(touched.evaluated, touched.producers)
        after: dict[OpId, Chosen] = {**variants, **change, **hows}
        assert state(built, ledger) == anew(dag, model, after)
        if keep:
            built.commit()
            variants = after
        else:
            built.rollback()
            ledger.restore(before)
        assert state(built, ledger) == anew(dag, model, variants)


def anew(dag: PrecisionDag, model: CostModel, variants: Mapping[OpId, Chosen]) -> object:
    built = CostMapper(dag, model, variants)
    return state(built, MemoryLedger(built))


def state(built: CostMapper, ledger: MemoryLedger) -> object:
    return built.charged, built.forward, built.backward, ledger.moments_bytes(), ledger.estimate()


def test_a_model_without_chains_is_planned_as_before() -> None:
    g = GraphBuilder("m")
    x = g.unary("norm", "layer_norm", g.input("x", (4, 8)), guarded=True)
    g.loss(g.linear("fc", x, 16))
    dag = g.build()
    built = CostMapper(dag, CostModel(dag, profile(dag, {})), {op("fc"): FP32})
    built.update({op("fc"): I8})
    assert "chains" not in vars(built.model)  # not even looked for


def test_formats_do_not_depend_on_fusing() -> None:
    dag = two_convolutions()
    rows = {way(form, precision, None, None): OpCost(0, 1, 0, 1) for form in (RELU,) for precision in (FLOAT32, BFLOAT16)}
    model = CostModel(dag, with_chains(profile(dag, {}), dag, {NORM: rows}))
    for variant in (FP32, BF16):
        outputs: list[list[Precision]] = []
        for how in (UNFUSED, FUSED):
            built = CostMapper(dag, model, {CONV1: variant, CONV2: FP32, NORM: how})
            outputs.append([entry.evaluation.output for entry in built.states])
        assert outputs[0] == outputs[1]
