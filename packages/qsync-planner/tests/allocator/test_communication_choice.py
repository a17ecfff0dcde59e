"""The way to communicate as part of a plan: what is considered, what is chosen, and what is said of it."""

from __future__ import annotations

import random
import sys

import attrs
import pytest
from planning_cases import Case, random_case, random_costs

from nightly import each_once
from qsync_core.artifacts.files import digest
from qsync_core.errors import ClusterError, InfeasibleError, PlanError, QSyncError
from qsync_core.ir.communication import PYTORCH_DEFAULTS, CollectiveCosts, CommunicationSettings, MeasuredCollectives, buckets_under
from qsync_core.ir.dag import Bucket
from qsync_core.ir.plan import PrecisionPlan
from qsync_core.ir.profile import CollectiveModel, DeviceKind
from qsync_planner.allocator import Inputs, Request, allocate
from qsync_planner.allocator.communication import how_to_apply, parse_settings, ways_to_communicate
from qsync_planner.allocator.greedy import solve_greedy
from qsync_planner.allocator.problem import SearchState
from qsync_planner.allocator.solution import Solution
from qsync_planner.replayer.replay import Replayer

MEBIBYTE = 1024 * 1024


def job(seed: int = 3, **options: object) -> tuple[Case, CollectiveCosts]:
    """A drawn job on GPUs and its costs."""
    case = random_case(seed, kind=DeviceKind.CUDA)
    return case, random_costs(case, random.Random(seed), **options)  # type: ignore[arg-type]


def period_ns(case: Case, costs: CollectiveCosts, way: CommunicationSettings, plan: PrecisionPlan) -> int:
    """The plan's period under one way, replayed from scratch."""
    variants = {g.group: {op_id: a.variant for op_id, a in g.assignments.items()} for g in plan.groups}
    replayer = Replayer(Inputs(case.dag, case.cluster, case.profiles, communication=costs), settings=way)
    return replayer.replay(variants).iteration_ns


def test_settings_that_a_person_writes() -> None:
    assert parse_settings("ctas=2, bucket=25,broadcast=off") == {
        "max_ctas": 2,
        "bucket_cap_mb": 25.0,
        "broadcast_buffers": False,
    }
    assert parse_settings("bucket=own,view=on,static=off") == {
        "bucket_cap_mb": None,
        "gradient_as_bucket_view": True,
        "static_graph": False,
    }
    assert parse_settings("") == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ctas=two", r"are written ctas=N,bucket=MIB\|own,.*, got 'ctas=two': the number of CTAs must be a whole number"),
        ("ctas=-1", "got 'ctas=-1': the number of CTAs must be a whole number"),
        ("ctas=65", "max_ctas must be at most 64, got 65"),
        ("bucket=big", "the bucket cap must be in MiB, or 'own', got 'big'"),
        ("bucket=0", "bucket_cap_mb must be above 0 and at most 1e[+]06 MiB, got 0.0"),
        ("bucket=nan", "bucket_cap_mb must be above 0 .* got nan"),
        ("broadcast=no", "broadcast is on or off, got 'no'"),
        ("channels=2", "there is no setting 'channels'"),
        ("ctas=2,ctas=4", "the communication setting 'ctas' is given twice in 'ctas=2,ctas=4'"),
    ],
)
def test_settings_that_make_no_sense(text: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        parse_settings(text)


def test_every_measured_way_is_considered_once() -> None:
    case, costs = job()
    big = attrs.evolve(case.dag, buckets=tuple(attrs.evolve(b, nbytes=60 * MEBIBYTE) for b in case.dag.buckets))
    ways = ways_to_communicate(case.dag, costs, {})
    assert ways[-1] == PYTORCH_DEFAULTS
    # The graph is small: 50 and 100 MiB are one bucket, as the smallest cap that holds everything.
    assert {(way.max_ctas, way.bucket_cap_mb, way.broadcast_buffers) for way in ways} == {
        (ctas, cap, broadcast) for ctas in (0, 2) for cap in (None, 50.0) for broadcast in (True, False)
    }
    assert all(way.gradient_as_bucket_view for way in ways[:-1])
    assert (
        len({(way.max_ctas, way.broadcast_buffers, buckets_under(case.dag, way.bucket_cap_mb)) for way in ways[:-1]})
        == len(ways) - 1
    )
    fixed = ways_to_communicate(case.dag, costs, {"max_ctas": 2, "broadcast_buffers": True})
    assert {(way.max_ctas, way.broadcast_buffers) for way in fixed} == {(2, True)}
    assert ways_to_communicate(big, costs, {"bucket_cap_mb": None})[-1] == PYTORCH_DEFAULTS
    without_buffers = attrs.evolve(costs, broadcast_ns=0)
    assert all(way.broadcast_buffers for way in ways_to_communicate(case.dag, without_buffers, {}))


def test_what_was_not_measured_or_the_graph_does_not_have_is_refused() -> None:
    case, costs = job()
    with pytest.raises(PlanError, match=r"with 4 CTAs were not measured \(the costs have NCCL's own number of CTAs, 2 CTAs\)"):
        ways_to_communicate(case.dag, costs, {"max_ctas": 4})
    unused = attrs.evolve(case.dag, buckets=case.dag.buckets[1:] or (Bucket((), 0),))
    with pytest.raises(PlanError, match=r"buckets of another size need a graph .* leave bucket out of the communication settings"):
        ways_to_communicate(unused, costs, {"bucket_cap_mb": 50.0})
    assert {way.bucket_cap_mb for way in ways_to_communicate(unused, costs, {})} == {None}


def _with_other_ranks(case: Case, costs: CollectiveCosts) -> CollectiveCosts:
    return attrs.evolve(costs, ranks={name: count + 1 for name, count in costs.ranks.items()})


def _with_other_groups(case: Case, costs: CollectiveCosts) -> CollectiveCosts:
    def renamed(by_group: dict[str, object]) -> dict[str, object]:
        return {name.replace("infer", "weak"): value for name, value in by_group.items()}

    measured = tuple(
        attrs.evolve(entry, slowdown=renamed(dict(entry.slowdown)), transfer_share=renamed(dict(entry.transfer_share)))
        for entry in costs.measured
    )
    names = ("ranks", "devices", "software", "copy_ns_per_byte")
    return attrs.evolve(costs, measured=measured, **{name: renamed(dict(getattr(costs, name))) for name in names})


def _with_another_share(case: Case, costs: CollectiveCosts) -> CollectiveCosts:
    return attrs.evolve(costs, devices={name: attrs.evolve(device, share=0.5) for name, device in costs.devices.items()})


def _of_another_graph(case: Case, costs: CollectiveCosts) -> CollectiveCosts:
    return attrs.evolve(costs, dag_digest="0" * 64)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (_with_other_ranks, ClusterError, r"measured with \d ranks of group 'train0', but cluster 'drawn' has \d; run 'qsync comm"),
        (_with_other_groups, ClusterError, r"of groups train0, weak0, but cluster 'drawn' has infer0, train0; run 'qsync comm"),
        (
            _with_another_share,
            ClusterError,
            "gets share 1 of each device-train0, but the collective costs were measured with share 0.5",
        ),
        (_of_another_graph, PlanError, r"the collective costs are of another graph \('small', digest 0{12}\)"),
    ],
)
def test_costs_of_another_job_are_refused(change: object, error: type[QSyncError], words: str) -> None:
    case, costs = job()
    with pytest.raises(error, match=words):
        allocate(Inputs(*case.arguments, communication=change(case, costs)))  # type: ignore[operator]


def test_settings_without_costs_are_refused() -> None:
    case, _ = job()
    with pytest.raises(PlanError, match="communication settings need measured costs: run 'qsync communicate'"):
        allocate(case.inputs, Request(communication={"max_ctas": 2}))


@each_once({"solver": ["auto", "greedy", "uniform", "full", "dynamic-batch"], "seed": range(6)})
def test_plan_limit_and_baselines_are_each_under_their_best_way(solver: str, seed: int) -> None:
    case, costs = job(seed)
    ways = ways_to_communicate(case.dag, costs, {})
    plan = allocate(Inputs(*case.arguments, communication=costs), Request(solver))
    best = {}
    for baseline in ("uniform", "full"):
        alone = allocate(Inputs(*case.arguments, communication=costs), Request(baseline))
        best[baseline] = min(period_ns(case, costs, way, alone) for way in ways)
        assert plan.baselines[baseline] == best[baseline]
    slowed = any(c for entry in costs.measured for c in entry.slowdown.values())
    assert plan.time_limit_ns == best["uniform"] + (int(best["uniform"] * 0.002) if slowed else 0)
    chosen = plan.communication
    assert chosen is not None
    assert chosen.alternatives[0].settings == chosen.settings
    assert chosen.alternatives[0].iteration_ns == plan.predicted_iteration_ns
    assert {choice.settings for choice in chosen.alternatives} == set(ways)
    if solver != "dynamic-batch":
        for choice in chosen.alternatives:
            assert choice.iteration_ns == period_ns(case, costs, choice.settings, plan)
    if solver in ("auto", "greedy"):
        assert plan.predicted_iteration_ns <= plan.time_limit_ns
        assert plan == allocate(Inputs(*case.arguments, communication=costs), Request(solver))
    assert plan.input_digests["communication"] == digest(costs)


def test_the_reason_has_the_figures() -> None:
    case = random_case(3, kind=DeviceKind.CUDA)
    names = [group.name for group in case.cluster.groups]
    ranks = sum(group.count for group in case.cluster.groups)
    costs = CollectiveCosts(
        case.dag.model,
        digest(case.dag),
        {group.name: group.count for group in case.cluster.groups},
        {name: case.profiles[name].device for name in names},
        {name: {} for name in names},
        (
            MeasuredCollectives(0, CollectiveModel(ranks, "nccl", 20_000.0, 0.5), {"train0": 0.12, "infer0": 0.24}),
            MeasuredCollectives(2, CollectiveModel(ranks, "nccl", 20_000.0, 0.5), {"train0": 0.0, "infer0": 0.0}),
        ),
        dict.fromkeys(names, 0.0),
        100_000,
    )
    plan = allocate(Inputs(*case.arguments, communication=costs))
    assert plan.communication is not None
    settings = plan.communication.settings
    assert (settings.max_ctas, settings.broadcast_buffers) == (2, False)
    words = plan.communication.reason
    assert "2 NCCL CTAs, no broadcast of buffers, gradients in the buckets: " in words
    assert "with PyTorch's defaults, whose open all-reduces take 12% of train0's and 24% of infer0's compute" in words
    assert (
        "without the broadcast of buffers (100.0 µs a step) rank 0, which evaluates and saves, computes the same bit for bit"
        in words
    )
    assert how_to_apply(plan.communication) == (
        "DistributedDataParallel(model, **applied.ddp_options())",
        "NCCL_MAX_CTAS=2 in the environment of every rank, or "
        "init_process_group(…, pg_options=qsync_torch.process_group_options(plan))",
    )
    free = attrs.evolve(costs, measured=(attrs.evolve(costs.measured[1], max_ctas=0),), broadcast_ns=0)
    plan = allocate(Inputs(*case.arguments, communication=free), Request(communication={"bucket_cap_mb": None}))
    assert plan.communication is not None
    assert plan.communication.settings == CommunicationSettings(gradient_as_bucket_view=True)
    assert plan.communication.reason.startswith("with bucket as asked for, gradients in the buckets: ")
    assert plan.communication.reason.endswith(", as with PyTorch's defaults, which take more memory")
    plan = allocate(Inputs(*case.arguments, communication=free), Request(communication={"gradient_as_bucket_view": False}))
    assert plan.communication is not None
    assert plan.communication.settings == PYTORCH_DEFAULTS
    assert plan.communication.reason.startswith("with view as asked for, PyTorch's defaults: ")
    assert plan.communication.reason.endswith(", and no faster in the 1 other way")


def test_a_budget_that_gradients_fit_once_is_enough() -> None:
    case, costs = job(1)
    lean = allocate(Inputs(*case.arguments, communication=costs), Request("exact", objective="memory", tolerance=10))
    budget = lean.group("infer0").predicted_peak_bytes
    tight = case.with_memory(budget)
    plan = allocate(Inputs(*tight.arguments, communication=costs), Request("exact", tolerance=10))
    assert plan.communication is not None
    assert plan.communication.settings.gradient_as_bucket_view
    assert plan.group("infer0").predicted_peak_bytes <= budget
    with pytest.raises(InfeasibleError, match="no precision plan fits the memory of group 'infer0'"):
        allocate(Inputs(*tight.arguments, communication=costs), Request(communication={"gradient_as_bucket_view": False}))


@pytest.mark.parametrize("tolerance", [0.0, 10.0])
def test_a_plan_is_looked_for_under_the_ways_that_can_keep_the_limit(tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest of each number of CTAs, uniform precision's best first, and one more at most, from a plan that keeps T there."""
    case, costs = job(2)
    searched: list[tuple[CommunicationSettings, bool]] = []

    def solve(state: SearchState, starts: object, limit_ns: int, *further: object, **options: object) -> Solution:
        searched.append((state.replayer.settings, state.prediction.iteration_ns <= limit_ns))
        return solve_greedy(state, starts, limit_ns)  # type: ignore[arg-type]

    monkeypatch.setattr(sys.modules[allocate.__module__], "solve_exactly", solve)
    plan = allocate(Inputs(*case.arguments, communication=costs), Request("exact", tolerance=tolerance))
    uniform = allocate(Inputs(*case.arguments, communication=costs), Request("uniform", tolerance=tolerance))
    assert uniform.communication is not None
    tried = [way for way, _ in searched]
    assert tried[0] == uniform.communication.settings
    assert all(keeps for _, keeps in searched)
    assert len(set(tried)) == len(tried)
    assert len(tried) <= len(costs.measured) + 1
    if tolerance:
        assert {way.max_ctas for way in tried} == {entry.max_ctas for entry in costs.measured}
    assert plan.communication is not None
    assert plan.communication.settings in tried


def test_what_was_not_measured_is_a_note_on_gpus_alone() -> None:
    for kind, told in ((DeviceKind.CUDA, True), (DeviceKind.CPU, False)):
        case = random_case(5, kind=kind)
        plan = allocate(case.inputs)
        assert plan.communication is None
        notes = [note for note in plan.notes if note.startswith("what all-reduces take from compute was not measured")]
        assert len(notes) == told
        costs = random_costs(case, random.Random(5))
        assert not any("not measured, so" in note for note in allocate(Inputs(*case.arguments, communication=costs)).notes)


def test_costs_that_slow_nothing_down_give_the_plan_that_is_found_without() -> None:
    """All-reduces as the profiles and links have them, no slowdown, no copies, no broadcast: the same problem."""
    case = random_case(7, kind=DeviceKind.CUDA)
    without = allocate(case.inputs, Request("exact"))
    replayer = Replayer(Inputs(case.dag, case.cluster, case.profiles))
    names = [group.name for group in case.cluster.groups]
    sizes = tuple(sorted({bucket.nbytes: ns for bucket, ns in zip(replayer.buckets, replayer.collective_ns, strict=True)}.items()))
    ranks = sum(group.count for group in case.cluster.groups)
    costs = CollectiveCosts(
        case.dag.model,
        digest(case.dag),
        {group.name: group.count for group in case.cluster.groups},
        {name: case.profiles[name].device for name in names},
        {name: {} for name in names},
        (MeasuredCollectives(0, CollectiveModel(ranks, "nccl", 0.0, 0.0, sizes), dict.fromkeys(names, 0.0)),),
        dict.fromkeys(names, 0.0),
    )
    plan = allocate(
        Inputs(*case.arguments, communication=costs),
        Request("exact", communication={"bucket_cap_mb": None, "gradient_as_bucket_view": False}),
    )
    assert plan.groups == without.groups
    assert (plan.objective, plan.bound, plan.time_limit_ns) == (without.objective, without.bound, without.time_limit_ns)


@pytest.mark.parametrize("seed", [1180, 1304, 1489])
def test_no_plan_is_faster_than_the_fastest_under_contention(seed: int) -> None:
    """One way to communicate, every assignment replayed."""
    case = random_case(seed, kind=DeviceKind.CUDA, blocks=1)
    costs = random_costs(case, random.Random(seed))
    uniform = allocate(Inputs(*case.arguments, communication=costs), Request("uniform"))
    assert uniform.communication is not None
    way = uniform.communication.settings
    fixed = {name: value for name, value in attrs.asdict(way).items() if name != "static_graph"}
    fast = allocate(Inputs(*case.arguments, communication=costs), Request("exact", objective="time", communication=fixed))
    replayer = Replayer(Inputs(case.dag, case.cluster, case.profiles, communication=costs), settings=way)
    shortest = min(replayer.replay({"infer0": chosen}).iteration_ns for chosen in case.assignments("infer0"))
    assert fast.predicted_iteration_ns == fast.time_limit_ns == shortest


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 10])
def test_other_objectives_keep_their_limits_under_contention(seed: int) -> None:
    case, costs = job(seed)
    best = allocate(Inputs(*case.arguments, communication=costs), Request("exact"))
    lean = allocate(Inputs(*case.arguments, communication=costs), Request("exact", objective="memory"))
    assert lean.predicted_iteration_ns <= lean.time_limit_ns == best.time_limit_ns
    assert lean.group("infer0").predicted_peak_bytes <= best.group("infer0").predicted_peak_bytes
    fast = allocate(Inputs(*case.arguments, communication=costs), Request("exact", objective="time"))
    assert fast.predicted_iteration_ns <= fast.time_limit_ns
    assert fast.communication is not None
    assert fast.predicted_iteration_ns == min(choice.iteration_ns for choice in fast.communication.alternatives)
