"""Laws of the allocator: names do not matter, bytes repeat, the deadlines say what the recurrence does, more room never hurts."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path

import attrs
import pytest
import random_models
from hypothesis import assume, given
from hypothesis import strategies as st
from planning_cases import LADDERS, Case, random_case

from hypothesis_profiles import tries
from nightly import nightly
from qsync_core.artifacts.files import digest, to_bytes
from qsync_core.ir.cluster import Cluster
from qsync_core.ir.dag import Bucket, Operator, Parameter, PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import PrecisionPlan
from qsync_core.ir.variant import Variant
from qsync_planner.allocator import SOLVERS, Inputs, Request, allocate
from qsync_planner.replayer.replay import Replayer

HAS_EXACT = "exact" in SOLVERS and importlib.util.find_spec("highspy") is not None
exact_only = pytest.mark.skipif(not HAS_EXACT, reason="the solver 'exact' needs the extra qsync-planner[exact]")
EXACT = pytest.param("exact", marks=exact_only)


# Names


def renamed(case: Case, names: Mapping[str, str]) -> Case:
    """The same problem with other names of modules; the order of execution stays, whatever is kept by name is sorted by it anew."""

    def op_id(old: OpId) -> OpId:
        return OpId(names[old.fqn], old.call)

    def parameter(old: str) -> str:
        owner, _, leaf = old.rpartition(".")
        return f"{names[owner]}.{leaf}"

    def operator(old: Operator) -> Operator:
        return attrs.evolve(
            old,
            op_id=op_id(old.op_id),
            inputs=tuple(map(op_id, old.inputs)),
            parameters=tuple(map(parameter, old.parameters)),
            variant_group=names[old.variant_group],
        )

    dag = attrs.evolve(
        case.dag,
        operators=tuple(map(operator, case.dag.operators)),
        parameters=tuple(Parameter(parameter(p.fqn), p.shape, p.dtype, p.requires_grad) for p in case.dag.parameters),
        buckets=tuple(Bucket(tuple(map(parameter, bucket.parameters)), bucket.nbytes) for bucket in case.dag.buckets),
    )
    profiles = {
        name: attrs.evolve(
            profile,
            dag_digest=digest(dag),
            cost_index=dict(sorted((op_id(old), by_variant) for old, by_variant in profile.cost_index.items())),
        )
        for name, profile in case.profiles.items()
    }
    omega = {op_id(old): by_variant for old, by_variant in case.sensitivity.omega.items()}
    sensitivity = attrs.evolve(case.sensitivity, dag_digest=digest(dag), omega={key: omega[key] for key in sorted(omega)})
    return Case(dag, case.cluster, profiles, sensitivity)


def module_names(dag: PrecisionDag) -> list[str]:
    """Every module's name once, in order of execution, without graph inputs."""
    return list(dict.fromkeys(operator.op_id.fqn for operator in dag.operators if operator.kind != "input"))


def shuffled(dag: PrecisionDag, rng: random.Random) -> dict[str, str]:
    """Any permutation of the modules' names; graph inputs keep theirs."""
    names = module_names(dag)
    kept = {operator.op_id.fqn: operator.op_id.fqn for operator in dag.operators}
    return kept | dict(zip(names, rng.sample(names, len(names)), strict=True))


def siblings_shuffled(dag: PrecisionDag, rng: random.Random) -> dict[str, str]:
    """A permutation of the names that children of one module have, at every module: the tree of modules stays as it is."""
    children: dict[tuple[str, ...], list[str]] = {}
    paths = {name: tuple(name.split(".")) for name in module_names(dag)}
    for path in paths.values():
        for depth, part in enumerate(path):
            known = children.setdefault(path[:depth], [])
            if part not in known:
                known.append(part)
    renaming = {prefix: dict(zip(parts, rng.sample(parts, len(parts)), strict=True)) for prefix, parts in children.items()}
    names = {operator.op_id.fqn: operator.op_id.fqn for operator in dag.operators}
    return names | {name: ".".join(renaming[path[:depth]][part] for depth, part in enumerate(path)) for name, path in paths.items()}


def without_names(plan: PrecisionPlan) -> object:
    """What a plan decides and predicts, by position."""
    groups = [
        (
            group.group,
            [assignment.variant for assignment in group.assignments.values()],
            group.predicted_peak_bytes,
            group.predicted_busy_ns,
        )
        for group in plan.groups
    ]
    return groups, plan.objective, plan.bound, plan.time_limit_ns, plan.predicted_iteration_ns, plan.baselines, plan.local_batches


def with_tight_memory(case: Case, share: float) -> Case:
    """A budget between the leanest and the largest of the uniform plans (all of one share on every inference group)."""
    replayer = Replayer(Inputs(case.dag, case.cluster, case.profiles))
    for group in case.cluster.groups:
        if group.name.startswith("infer"):
            plans = [{operator.op_id: rung for operator in case.dag.adjustable} for rung in group.ladder]
            peaks = [replayer.replay({group.name: plan}).groups[group.name].peak_bytes for plan in plans]
            case = case.with_memory(min(peaks) + int(share * (max(peaks) - min(peaks))), group.name)
    return case


def with_equal_sensitivities(case: Case) -> Case:
    """Every operator as sensitive as the first: ties everywhere, which nothing but positions may break."""
    first = case.sensitivity.omega[case.dag.adjustable[0].op_id]
    return attrs.evolve(case, sensitivity=attrs.evolve(case.sensitivity, omega=dict.fromkeys(case.sensitivity.omega, first)))


def assert_names_do_not_matter(case: Case, names: Mapping[str, str], solver: str, tolerance: float) -> None:
    for drawn in (case, with_equal_sensitivities(case)):
        plan = allocate(drawn.inputs, Request(solver, tolerance=tolerance))
        other = renamed(drawn, names)
        assert [o.op_id.fqn for o in other.dag.operators] == [names[o.op_id.fqn] for o in drawn.dag.operators]
        assert without_names(allocate(other.inputs, Request(solver, tolerance=tolerance))) == without_names(plan)


@pytest.mark.parametrize("solver", ["greedy", EXACT])
@tries(12)
@given(
    seed=st.integers(0, 10_000),
    ladder=st.sampled_from(LADDERS[:2]),
    infer_groups=st.integers(1, 2),
    shared=st.booleans(),
    share=st.sampled_from([0.3, 0.6, 1.0]),
    tolerance=st.sampled_from([0.1, 0.2, 0.4]),
)
def test_any_names_give_the_same_plan_where_the_model_is_one_block(
    solver: str, seed: int, ladder: tuple[Variant, ...], infer_groups: int, shared: bool, share: float, tolerance: float
) -> None:
    case = with_tight_memory(random_case(seed, blocks=2, ladder=ladder, infer_groups=infer_groups, shared=shared), share)
    assert_names_do_not_matter(case, shuffled(case.dag, random.Random(seed)), solver, tolerance)


@pytest.mark.parametrize("solver", ["greedy", EXACT])
@tries(8)
@given(seed=st.integers(0, 10_000), share=st.sampled_from([0.3, 1.0]), tolerance=st.sampled_from([0.1, 0.3]))
def test_any_names_in_the_same_tree_of_modules_give_the_same_plan(solver: str, seed: int, share: float, tolerance: float) -> None:
    """Blocks are subtrees of the module tree, which is what names may tell a solver."""
    case = with_tight_memory(random_case(seed, blocks=4, ladder=LADDERS[seed % 3]), share)
    assert_names_do_not_matter(case, siblings_shuffled(case.dag, random.Random(seed)), solver, tolerance)


@exact_only
@tries(8)
@given(seed=st.integers(0, 10_000), share=st.sampled_from([0.3, 1.0]))
def test_the_exact_solver_knows_nothing_of_the_tree_either(seed: int, share: float) -> None:
    case = with_tight_memory(random_case(seed, blocks=4, ladder=LADDERS[seed % 3]), share)
    assert_names_do_not_matter(case, shuffled(case.dag, random.Random(seed)), "exact", 0.1)


# Bytes


def fingerprints() -> dict[str, str]:
    """Per solver a digest of the bytes of some plans."""
    solvers = [solver for solver in SOLVERS if HAS_EXACT or solver not in ("exact", "auto")]
    found = {}
    for solver in solvers:
        hashed = hashlib.sha256()
        for seed in range(4):
            case = random_case(seed, blocks=1 + seed, ladder=LADDERS[seed % 3], infer_groups=1 + seed % 2, shared=seed % 2 == 1)
            if solver not in ("full", "dynamic-batch"):
                case = with_tight_memory(case, 0.5)
            hashed.update(to_bytes(allocate(case.inputs, Request(solver, tolerance=0.1))))
        found[solver] = hashed.hexdigest()
    return found


@pytest.mark.parametrize("hash_seed", ["1", *nightly("2")])
@pytest.mark.slow
def test_the_same_input_gives_the_same_bytes_again_and_in_processes_that_hash_otherwise(hash_seed: str) -> None:
    first = fingerprints()
    assert fingerprints() == first
    script = (
        "import json, sys; sys.path[:0] = sys.argv[1:]; "
        "from test_allocator_properties import fingerprints; print(json.dumps(fingerprints()))"
    )
    tests, _, _, root = Path(__file__).parents[1:5]
    done = subprocess.run(
        [sys.executable, "-c", script, str(tests / "allocator"), str(tests), str(root / "tests")],
        env=os.environ | {"PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == first


# The deadline form


@attrs.frozen
class Clock:
    """One group's step: its computation before the optimizer, when each bucket is ready, the optimizer, and its CPU's sum."""

    compute_ns: int
    ready_ns: tuple[int, ...]
    optimizer_ns: int
    dispatch_ns: int = 0


def period_by_recurrence(groups: Sequence[Clock], durations_ns: Sequence[int]) -> Fraction:
    """How much later the slowest group begins from step to step, read off many steps played one after the other.

    start_n = max(max over groups of ready, end_{n-1}), end_n = start_n + duration; a group's optimizer waits for the last bucket,
    and its next step for the optimizer.
    """
    total = sum(durations_ns) + sum(g.compute_ns + g.optimizer_ns + g.dispatch_ns for g in groups)
    warm_up, window = total + 10, 60  # a slower group is overtaken by 1 ns a step at least
    begins = [0] * len(groups)
    end = 0
    for step in range(warm_up + window):
        if step == warm_up:
            settled = list(begins)
        for bucket, duration in enumerate(durations_ns):
            start = max([end, *(begin + g.ready_ns[bucket] for begin, g in zip(begins, groups, strict=True))])
            end = start + duration
        for i, group in enumerate(groups):
            computed = begins[i] + group.compute_ns
            if durations_ns:
                computed = max(computed, end)
            begins[i] = max(computed + group.optimizer_ns, (step + 1) * group.dispatch_ns)
    return max(Fraction(now - then, window) for now, then in zip(begins, settled, strict=True))


def keeps_deadlines(groups: Sequence[Clock], durations_ns: Sequence[int], limit_ns: int) -> bool:
    """Each group by itself: every bucket in time for what follows it, and the group alone within the limit."""
    for group in groups:
        for bucket, ready in enumerate(group.ready_ns):
            if ready > limit_ns - group.optimizer_ns - sum(durations_ns[bucket:]):
                return False
        if group.compute_ns + group.optimizer_ns > limit_ns or group.dispatch_ns > limit_ns:
            return False
    return True


@st.composite
def clocks(draw: st.DrawFn, buckets: int) -> Clock:
    compute = draw(st.integers(0, 40))
    ready = draw(st.lists(st.integers(0, compute), min_size=buckets, max_size=buckets))
    return Clock(compute, tuple(ready), draw(st.integers(0, 12)), draw(st.sampled_from([0, 0, 25, 60])))


@tries(300)
@given(data=st.data(), buckets=st.integers(0, 4), count=st.integers(1, 4), off=st.integers(-3, 3))
def test_the_period_is_at_most_t_exactly_where_every_group_keeps_its_deadlines(
    data: st.DataObject, buckets: int, count: int, off: int
) -> None:
    groups = [data.draw(clocks(buckets)) for _ in range(count)]
    durations = data.draw(st.lists(st.integers(0, 20), min_size=buckets, max_size=buckets))
    period = period_by_recurrence(groups, durations)
    limit = int(period) + off
    assert keeps_deadlines(groups, durations, limit) == (period <= limit)


@tries(60)
@given(case=random_models.cases(most_operators=6))
def test_the_replayer_gives_the_period_of_the_recurrence_and_exactly_that_keeps_the_deadlines(case: random_models.Case) -> None:
    groups = tuple(attrs.evolve(group, sync_per_step=False) for group in case.cluster.groups)
    replayer = Replayer(Inputs(case.dag, Cluster("free", groups), case.profiles))
    predicted = replayer.replay({})
    clocks = [
        Clock(found.forward_ns + found.backward_ns, found.bucket_ready_ns, found.optimizer_ns, found.dispatch_ns)
        for found in predicted.groups.values()
    ]
    assert period_by_recurrence(clocks, replayer.collective_ns) == predicted.iteration_ns
    assert keeps_deadlines(clocks, replayer.collective_ns, predicted.iteration_ns)
    assert not keeps_deadlines(clocks, replayer.collective_ns, predicted.iteration_ns - 1)


# More room


def proven(plan: PrecisionPlan) -> bool:
    """Whether a plan comes with a proof that none is better, to what floating point allows."""
    return plan.bound is not None and plan.objective - plan.bound <= 1e-6 * max(plan.objective, 1e-9)


def no_worse(plan: PrecisionPlan, than: PrecisionPlan) -> bool:
    return plan.objective <= than.objective + 2e-6 * max(than.objective, 1e-9)


CASES = st.builds(
    random_case,
    st.integers(0, 10_000),
    blocks=st.integers(1, 3),
    infer_groups=st.integers(1, 2),
    train=st.integers(0, 1),
    shared=st.booleans(),
)


@exact_only
@tries(20)
@given(case=CASES, share=st.floats(0.0, 1.0), tolerances=st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0)))
def test_more_time_never_gives_a_worse_optimum(case: Case, share: float, tolerances: tuple[float, float]) -> None:
    case = with_tight_memory(case, share)
    short, long = (allocate(case.inputs, Request("exact", tolerance=tolerance)) for tolerance in sorted(tolerances))
    assert proven(short)
    assert proven(long)
    assert no_worse(long, short)


@exact_only
@tries(20)
@given(case=CASES, shares=st.tuples(st.floats(0.0, 1.2), st.floats(0.0, 1.2)), tolerance=st.sampled_from([0.0, 0.1, 0.5]))
def test_more_memory_never_gives_a_worse_optimum(case: Case, shares: tuple[float, float], tolerance: float) -> None:
    """T is the time of uniform precision, which more memory may make shorter; the law is that of one T."""
    tight, roomy = (
        allocate(with_tight_memory(case, share).inputs, Request("exact", tolerance=tolerance)) for share in sorted(shares)
    )
    assert proven(tight)
    assert proven(roomy)
    assume(roomy.time_limit_ns >= tight.time_limit_ns)
    assert no_worse(roomy, tight)


@exact_only
@tries(20)
@given(case=CASES, share=st.floats(0.0, 1.2), tolerance=st.sampled_from([0.0, 0.1, 0.5]), solver=st.sampled_from(SOLVERS))
def test_no_solver_beats_a_proven_optimum(case: Case, share: float, tolerance: float, solver: str) -> None:
    assume(solver not in ("full", "dynamic-batch"))
    case = with_tight_memory(case, share)
    best = allocate(case.inputs, Request("exact", tolerance=tolerance))
    assert proven(best)
    assert no_worse(best, allocate(case.inputs, Request(solver, tolerance=tolerance)))
