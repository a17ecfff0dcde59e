"""Chains in the exact solver's programs: time and memory as replayed, the best of all plans, and no worse than greedy."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

import attrs
import pytest
from chained_models import IMAGE, ChainBuilder, block, chained_dags, chained_profiles
from hypothesis import Phase, given
from hypothesis import strategies as st
from random_models import RUNGS
from synthetic import FLOAT32, INT8

from hypothesis_profiles import tries
from qsync_core.artifacts.files import digest
from qsync_core.chains.finding import chains_of
from qsync_core.errors import InfeasibleError
from qsync_core.ir.chain import ChainVariant
from qsync_core.ir.cluster import Cluster, DeviceGroup
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Role
from qsync_core.ir.profile import DeviceKind, Profile
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.variant import Variant
from qsync_planner.allocator import Inputs, Request, allocate
from qsync_planner.allocator.exact.group_program import GroupProgram, Quantity
from qsync_planner.allocator.exact.program import Limits
from qsync_planner.allocator.exact.search import PROVEN_GAP
from qsync_planner.allocator.problem import GroupProblem, build_problem
from qsync_planner.replayer.replay import Replayer

pytest.importorskip("highspy")

LADDER = (RUNGS[0], RUNGS[3], RUNGS[4])
SAVED = ChainVariant(saved=INT8).rated_as
_MOST = 500
"""Plans that are enumerated."""


@attrs.frozen
class Job:
    dag: PrecisionDag
    cluster: Cluster
    profiles: dict[str, Profile]
    sensitivity: Sensitivity

    def group(self) -> GroupProblem:
        return build_problem(Inputs(self.dag, self.cluster, self.profiles, self.sensitivity), with_chains=True).groups[0]

    def replayer(self) -> Replayer:
        return Replayer(Inputs(self.dag, self.cluster, self.profiles))

    def with_memory(self, memory_bytes: int) -> Job:
        group = attrs.evolve(self.cluster.groups[0], memory_bytes=memory_bytes)
        return attrs.evolve(self, cluster=attrs.evolve(self.cluster, groups=(group,)))


@st.composite
def jobs(draw: st.DrawFn, dag: PrecisionDag | None = None, image: tuple[int, ...] = IMAGE) -> Job:
    dag = dag or draw(chained_dags(5, image))
    kind = draw(st.sampled_from(list(DeviceKind)))
    ladder = draw(st.sampled_from([RUNGS[:2] + RUNGS[4:], LADDER, (RUNGS[0], RUNGS[4])]))
    group = DeviceGroup("g", f"chip-{kind}", 1, Role.INFER, FLOAT32, ladder, sync_per_step=draw(st.booleans()))
    measured = attrs.evolve(draw(chained_profiles(dag, kind)), dag_digest=digest(dag))
    rate = st.integers(1, 50).map(float)
    omega: dict[OpId, dict[Variant, float]] = {
        operator.op_id: {rung: draw(rate) if rung.compute is not FLOAT32 else 0.0 for rung in ladder} for operator in dag.adjustable
    }
    omega |= {chain.name: {SAVED: draw(rate)} for chain in chains_of(dag)}
    return Job(dag, Cluster("c", (group,)), {"g": measured}, Sensitivity(dag.model, digest(dag), "", "drawn", omega))


def branching() -> PrecisionDag:
    """Chains that are read by products of other variants and by an addition, and end some operators behind their first one."""
    g = ChainBuilder("m")
    x = block("a", g, g.conv2d("stem", g.input("x", IMAGE), 3, 1))
    y = g.called("b.norm", "batch_norm", g.conv2d("b.conv", x, 3, 1), affine=3)
    other = g.conv2d("other", x, 3, 1)
    z = g.called("b.relu", "relu", g.called("b.add", "add", y, other))
    g.loss(g.join("join", "join", [z, g.conv2d("c", z, 3, 1), g.conv2d("d", z, 3, 1)]))
    return g.build(first_bucket=20, bucket=20)


@tries(4, phases=(Phase.explicit, Phase.generate))
@given(jobs(branching()), st.data())
def test_a_plan_in_the_program_takes_what_it_takes_when_replayed(job: Job, data: st.DataObject) -> None:
    """Its period, and its memory at every single moment."""
    group, replayer = job.group(), job.replayer()
    plans = data.draw(st.lists(st.tuples(*(st.integers(0, unit.top) for unit in group.units)), min_size=12, max_size=12))
    times = [replayer.replay({"g": group.variants(rungs)}).groups["g"].period_ns for rungs in plans]
    assert _least(GroupProgram(group, replayer), Quantity.TIME, plans) == pytest.approx([ns * 1e-3 for ns in times], abs=1e-5)
    ledgers = [replayer.group_state("g", group.variants(rungs)).memory for rungs in plans]
    for moment in range(2 * len(job.dag.operators)):
        program = GroupProgram(group, replayer)
        program.memory.add(moment)
        found = [peak * 2**20 for peak in _least(program, Quantity.MEMORY, plans)]
        assert found == pytest.approx([ledger.static_bytes + ledger.moments_bytes()[moment] for ledger in ledgers], abs=0.1), moment


def _least(program: GroupProgram, quantity: Quantity, plans: Sequence[Sequence[int]]) -> list[float]:
    """What the program takes for plans at least."""
    found = []
    for rungs in plans:
        for columns, rung in zip(program.choices.columns, rungs, strict=True):
            for index, column in enumerate(columns):
                program.program.bound(column, float(index == rung), float(index == rung))
        program.minimise(quantity)
        found.append(program.program.solve(Limits()).objective)
    return found


def every_plan(job: Job) -> list[tuple[float, int, int]]:
    """Σ Ω, period and peak of all of them."""
    group, replayer = job.group(), job.replayer()
    found = []
    for rungs in itertools.product(*(range(len(unit.rungs)) for unit in group.units)):
        predicted = replayer.replay({"g": group.variants(rungs)})
        found.append((group.omega(rungs), predicted.iteration_ns, predicted.groups["g"].peak_bytes))
    return found


@tries(12, phases=(Phase.explicit, Phase.generate))
@given(jobs(), st.sampled_from([0.0, 0.05, 0.3]), st.floats(0, 1))
def test_the_best_of_all_plans(job: Job, tolerance: float, share: float) -> None:
    group = job.group()
    if math.prod(len(unit.rungs) for unit in group.units) > _MOST:
        return
    plans = every_plan(job)
    peaks = [peak for _, _, peak in plans]
    budget = min(peaks) + int(share * (max(peaks) - min(peaks)))
    tight = job.with_memory(budget)
    found = allocate(Inputs(tight.dag, tight.cluster, tight.profiles, tight.sensitivity), Request("exact", tolerance=tolerance))
    best = min(omega for omega, period, peak in plans if period <= found.time_limit_ns and peak <= budget)
    assert found.objective == pytest.approx(best)
    assert found.bound is not None
    assert found.bound <= best + 1e-6
    greedy = allocate(Inputs(tight.dag, tight.cluster, tight.profiles, tight.sensitivity), Request("greedy", tolerance=tolerance))
    assert greedy.time_limit_ns == found.time_limit_ns
    assert greedy.objective >= best - 1e-9
    fastest = allocate(Inputs(tight.dag, tight.cluster, tight.profiles, tight.sensitivity), Request(objective="time"))
    assert fastest.predicted_iteration_ns == min(period for _, period, peak in plans if peak <= budget)


@tries(6, phases=(Phase.explicit, Phase.generate))
@given(jobs(image=(64, 3, 64, 64)))
def test_the_least_memory_of_all_plans(job: Job) -> None:
    if math.prod(len(unit.rungs) for unit in job.group().units) > _MOST:
        return
    plans = every_plan(job)
    if not all(period for _, period, _ in plans):
        return  # a solver cannot tell some nanoseconds from a limit of none
    found = allocate(Inputs(job.dag, job.cluster, job.profiles, job.sensitivity), Request(objective="memory", tolerance=0.05))
    least = min(peak for _, period, peak in plans if period <= found.time_limit_ns)
    assert least <= found.groups[0].predicted_peak_bytes <= least * (1 + PROVEN_GAP)
    smallest = min(peak for _, _, peak in plans)
    tight = job.with_memory(smallest - 1)
    with pytest.raises(InfeasibleError, match="smallest feasible budget is ") as refused:
        allocate(Inputs(tight.dag, tight.cluster, tight.profiles, tight.sensitivity), Request("exact"))
    (told,) = re.findall(r"smallest feasible budget is .*?\(([\d,]+) bytes\)", str(refused.value))
    assert smallest <= int(told.replace(",", "")) <= smallest * (1 + PROVEN_GAP)
