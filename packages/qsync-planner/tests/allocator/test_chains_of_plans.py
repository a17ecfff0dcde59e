"""Chains as choices of a plan: fused where that is faster, their inputs in 8 bit where memory is short, and never silently."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import pytest
from chained_models import IMAGE, ChainBuilder, block, ways, with_chains
from hand_models import BF16, FP32, I8, profile, single_group
from synthetic import INT8

from qsync_core.artifacts.files import digest
from qsync_core.chains.finding import chains_of
from qsync_core.errors import PlanError
from qsync_core.ir.chain import UNFUSED, ChainForm, ChainVariant
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import PrecisionPlan
from qsync_core.ir.profile import OpCost, Profile
from qsync_core.ir.semantics import chain_result
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.variant import Variant
from qsync_planner.allocator import Inputs, Request, allocate
from qsync_planner.allocator.exact.tradeoff import tradeoff
from qsync_planner.allocator.problem import build_problem
from qsync_planner.allocator.verdict import error_notes
from qsync_planner.replayer.replay import Replayer, plan_variants

LADDER = (I8, BF16, FP32)
FUSED, SAVED = ChainVariant(), ChainVariant(saved=INT8)
SLOW = OpId("b1.norm")
"""The chain that is slower fused."""


def model() -> PrecisionDag:
    """Five blocks, the third with a residual, and a head."""
    g = ChainBuilder("m")
    x = block("b0", g, g.input("x", IMAGE))
    x = block("b2", g, block("b1", g, x), x)
    x = block("b4", g, block("b3", g, x))
    g.loss(g.conv2d("head", x, 3, 1))
    return g.build()


def measured(dag: PrecisionDag) -> Profile:
    """Unfused, norms take 40 + 40 ns and ReLUs 10 + 10; fused, a chain takes 30 + 30, and twice 5 more with its input in 8 bit."""
    keeps = OpCost(0, 100, 0, 200, saves_inputs=(0,))
    faster = {
        v: attrs.evolve(keeps, forward_compute_ns=ns, backward_compute_ns=2 * ns)
        for v, ns in zip(LADDER, (300, 60, 85), strict=True)
    }
    costs: dict[str, OpCost | Mapping[Variant, OpCost]] = {o.op_id.fqn: faster for o in dag.adjustable}
    for chain in chains_of(dag):
        costs[chain.name.fqn] = OpCost(0, 40, 0, 40, saves_inputs=(0,), saved_own_bytes=24)
        costs[chain.last.fqn] = OpCost(0, 10, 0, 10, saves_output=True)

    def cost(name: OpId, way: tuple[ChainForm, Variant]) -> OpCost:
        eight_bit = way[1].saved.needs_scale
        ns = (70 if name == SLOW else 30) + 5 * eight_bit
        return OpCost(0, ns, 0, ns, saved_own_bytes=24 + 27 * eight_bit, backend="hand")

    tables = {chain.name: {way: cost(chain.name, way) for way in ways(chain, LADDER)} for chain in chains_of(dag)}
    return attrs.evolve(with_chains(profile(dag, costs), dag, tables), dag_digest=digest(dag))


def rated(dag: PrecisionDag, *, chains: bool = True) -> Sensitivity:
    omega: dict[OpId, dict[Variant, float]] = {o.op_id: {I8: 4.0, BF16: 1.0, FP32: 0.0} for o in dag.adjustable}
    if chains:
        omega |= {chain.name: {SAVED.rated_as: 0.5} for chain in chains_of(dag)}
    return Sensitivity("m", digest(dag), "", "hand", omega)


def plan(solver: str = "greedy", *, memory_bytes: int = 0, chains: bool = True, **options: object) -> PrecisionPlan:
    dag = model()
    cluster = single_group(memory_bytes=memory_bytes)
    cluster = attrs.evolve(cluster, groups=(attrs.evolve(cluster.groups[0], ladder=LADDER),))
    found = allocate(Inputs(dag, cluster, {"g": measured(dag)}, rated(dag, chains=chains)), Request(solver, **options))  # type: ignore[arg-type]
    replayed = Replayer(Inputs(dag, cluster, {"g": measured(dag)})).replay(plan_variants(found, cluster))
    assert replayed.iteration_ns == found.predicted_iteration_ns
    assert replayed.groups["g"].peak_bytes == found.groups[0].predicted_peak_bytes
    return found


def said(found: PrecisionPlan) -> dict[str, ChainVariant]:
    return {name.fqn: entry.variant for name, entry in found.groups[0].chains.items()}


def test_with_memory_to_spare_a_chain_is_fused_where_that_is_faster() -> None:
    found = plan()
    assert said(found) == {f"b{i}.norm": UNFUSED if i == 1 else FUSED for i in range(5)}
    assert found.objective < plan("uniform").objective
    assert [entry.backend for entry in found.groups[0].chains.values()] == ["hand", "", "hand", "hand", "hand"]
    assert all(
        entry.reason.startswith(entry.variant.label) or entry.variant.label in entry.reason
        for entry in found.groups[0].chains.values()
    )


def test_a_plan_says_which_chains_it_cannot_fuse_and_what_has_none() -> None:
    assert not any("unfused, because" in note or "by themselves" in note for note in plan().notes)
    g = ChainBuilder("m")
    x = g.linear("fc", g.input("x", (4, 8)), 8)
    x = g.linear("next", g.unary("tanh", "tanh", g.written_out("rms", x, affine=8)), 8)
    g.loss(g.linear("last", g.called("ln", "layer_norm", x), 8))
    dag = g.build()
    some = {
        chain.name: {way: OpCost(0, 1, 0, 1) for way in ways(chain, LADDER)} for chain in chains_of(dag) if "ln" in chain.name.fqn
    }
    cluster = single_group()
    cluster = attrs.evolve(cluster, groups=(attrs.evolve(cluster.groups[0], ladder=LADDER),))
    made = attrs.evolve(with_chains(profile(dag, {}), dag, some), dag_digest=digest(dag))
    found = allocate(Inputs(dag, cluster, {"g": made}, rated(dag)), Request("greedy"))
    [unmeasured, alone] = [note for note in found.notes if "unfused, because" in note or "by themselves" in note]
    assert unmeasured.startswith("group g: 1 × rms_norm stay unfused, because its profile does not have their costs")
    assert "qsync profile --chains" in unmeasured
    assert alone.endswith("quantized by themselves: 1 × tanh before next: no producer computes it")


def test_a_plan_says_the_forms_of_what_it_fuses() -> None:
    [group] = plan().groups
    chains = {chain.name: chain for chain in chains_of(model())}
    variants = {name: entry.variant for name, entry in group.assignments.items()}
    assert group.chain_forms == {
        name: chains[name].form(chain_result(chains[name], variants).float_result)
        for name, entry in group.chains.items()
        if entry.variant.fused
    }


def test_time_that_fusing_saves_goes_into_precision() -> None:
    # 4 × (50 + 50 - 60) ns saved are enough for some convolutions in float32 (255 ns) instead of bfloat16 (180 and casts).
    without = attrs.evolve(measured(model()), chains=())
    cluster = single_group()
    cluster = attrs.evolve(cluster, groups=(attrs.evolve(cluster.groups[0], ladder=LADDER),))
    unfused = allocate(Inputs(model(), cluster, {"g": without}, rated(model())), Request("greedy"))
    assert unfused.groups[0].chains == {}
    assert unfused.time_limit_ns == plan().time_limit_ns
    assert plan().objective < unfused.objective
    assert plan().predicted_iteration_ns <= plan().time_limit_ns


@pytest.mark.parametrize("with_chains", [True, False])
def test_noise_of_copies_behind_shortcuts_counts_where_chains_may_be_fused(with_chains: bool) -> None:
    dag, cluster = model(), single_group()
    cluster = attrs.evolve(cluster, groups=(attrs.evolve(cluster.groups[0], ladder=LADDER),))
    sensitivity = attrs.evolve(rated(dag), copies={OpId("b3.conv"): {I8: 3.0}})  # which reads b2's result: it has a residual
    problem = build_problem(Inputs(dag, cluster, {"g": measured(dag)}, sensitivity), with_chains=with_chains)
    omega = {unit.name: unit.omega for unit in problem.groups[0].units if not unit.is_chain}
    assert omega.pop("b3.conv") == (7.0 if with_chains else 4.0, 1.0, 0.0)
    assert set(omega.values()) == {(4.0, 1.0, 0.0)}


def test_a_plan_and_its_note_count_the_noise_of_copies() -> None:
    dag, cluster = model(), single_group()
    cluster = attrs.evolve(cluster, groups=(attrs.evolve(cluster.groups[0], ladder=LADDER),))
    copies, flips = ({o.op_id: {BF16: value} for o in dag.adjustable} for value in (3.0, 0.5))
    sensitivity = attrs.evolve(rated(dag), copies=copies, flips=flips, masks=dict.fromkeys(flips, 1.0))
    found = allocate(Inputs(dag, cluster, {"g": measured(dag)}, sensitivity), Request("greedy"))
    lowered = sum(entry.variant == BF16 for entry in found.groups[0].assignments.values())
    assert lowered > 1
    assert found.objective == pytest.approx(4.0 * lowered)
    [note] = error_notes(sensitivity, found.groups)
    assert f"Σ Ω {found.objective:.3g}:" in note


@pytest.mark.slow
def test_with_memory_short_inputs_are_kept_in_8_bit_and_their_noise_counts() -> None:
    free = plan()
    peaks = {}
    for budget in range(free.groups[0].predicted_peak_bytes, 0, -40):
        try:
            found = plan(memory_bytes=budget)
        except PlanError:
            break
        peaks[budget] = found
        assert found.groups[0].predicted_peak_bytes <= budget
    tightest = peaks[min(peaks)]
    saved = [how for how in said(tightest).values() if how == SAVED]
    assert saved
    operators = sum({I8: 4.0, BF16: 1.0, FP32: 0.0}[entry.variant] for entry in tightest.groups[0].assignments.values())
    assert tightest.objective == pytest.approx(operators + 0.5 * len(saved))
    flips = {o.op_id: {I8: 2.0, BF16: 0.5} for o in model().adjustable}
    [note] = error_notes(attrs.evolve(rated(model()), flips=flips, masks=dict.fromkeys(flips, 1.0)), tightest.groups)
    assert f"Σ Ω {tightest.objective:.3g}:" in note
    # Without chains no plan is that small.
    cluster = single_group(memory_bytes=min(peaks))
    cluster = attrs.evolve(cluster, groups=(attrs.evolve(cluster.groups[0], ladder=LADDER),))
    with pytest.raises(PlanError, match="no precision plan fits"):
        allocate(Inputs(model(), cluster, {"g": attrs.evolve(measured(model()), chains=())}, rated(model())), Request("greedy"))


def test_an_input_in_8_bit_is_no_choice_where_nothing_rates_it() -> None:
    found = plan(memory_bytes=plan().groups[0].predicted_peak_bytes, chains=False)
    assert set(said(found).values()) <= {FUSED, UNFUSED}


def test_a_chain_that_was_not_measured_for_all_its_neighbours_is_no_choice() -> None:
    dag = model()
    whole = measured(dag)
    rows = tuple(entry for entry in whole.chains if OpId("b0.norm") not in entry.chains or entry.form.float_result)
    cluster = single_group()
    cluster = attrs.evolve(cluster, groups=(attrs.evolve(cluster.groups[0], ladder=LADDER),))
    found = allocate(Inputs(dag, cluster, {"g": attrs.evolve(whole, chains=rows)}, rated(dag)), Request("greedy"))
    assert "b0.norm" in said(found)  # two readers: one of them is the addition, which reads floats
    rows = tuple(entry for entry in whole.chains if OpId("b0.norm") not in entry.chains or not entry.form.float_result)
    found = allocate(Inputs(dag, cluster, {"g": attrs.evolve(whole, chains=rows)}, rated(dag)), Request("greedy"))
    assert "b0.norm" not in said(found)


def test_solvers_that_do_not_choose_chains() -> None:
    for solver in ("uniform", "full"):
        assert said(plan(solver)) == {}
    assert said(plan("greedy", batch="free")) == {}


def test_the_best_plan_is_proven_with_chains() -> None:
    pytest.importorskip("highspy")
    solver, found = "exact", plan("exact")
    assert said(plan("auto")) == said(found)
    assert said(found) == said(plan())
    assert found.objective <= plan().objective
    assert "proven optimal" in found.notes
    assert found.groups[0].chains[SLOW].reason.startswith("unfused: fused would take +")
    tight = plan(solver, memory_bytes=plan().groups[0].predicted_peak_bytes * 3 // 4)
    assert tight.objective <= plan(memory_bytes=plan().groups[0].predicted_peak_bytes * 3 // 4).objective
    leanest = plan(solver, objective="memory")
    assert SAVED in said(leanest).values()
    assert leanest.groups[0].predicted_peak_bytes < found.groups[0].predicted_peak_bytes
    fastest = plan(solver, objective="time")
    assert FUSED in said(fastest).values()
    assert fastest.predicted_iteration_ns <= found.predicted_iteration_ns


def test_the_trade_off_curve_is_of_plans_with_chains() -> None:
    pytest.importorskip("highspy")
    dag = model()
    cluster = single_group()
    cluster = attrs.evolve(cluster, groups=(attrs.evolve(cluster.groups[0], ladder=LADDER),))
    curves = [
        tradeoff(Inputs(dag, cluster, {"g": profile}, rated(dag)), budgets=1, limits=4)
        for profile in (measured(dag), attrs.evolve(measured(dag), chains=()))
    ]
    least = [min(point.iteration_ns for point in curve.points) for curve in curves]
    assert least[0] < least[1]
    assert min(p.omega for p in curves[0].points if p.iteration_ns <= least[1]) < min(
        p.omega for p in curves[1].points if p.iteration_ns <= least[1]
    )
