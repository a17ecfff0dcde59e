"""Dynamic batch: the balancer against enumeration, the scaling of profiles, and what a plan says of local batches."""

from __future__ import annotations

import itertools
import math
import statistics
from functools import partial

import attrs
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from planning_cases import random_case

from qsync_core.errors import InfeasibleError, PlanError
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import BatchStep, DeviceKind, MixedStep, Profile, StepMeasurement
from qsync_core.ir.variant import Variant
from qsync_planner.allocator import BatchProfile, Inputs, Request, allocate
from qsync_planner.allocator.batch_scaling import BatchScaling, _between, _growth_of
from qsync_planner.allocator.dynamic_batch import balance, replay_batches
from qsync_planner.replayer.replay import Replayer


@given(
    groups=st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 12), st.integers(0, 50), st.integers(0, 20)), min_size=1, max_size=3
    ),
    total=st.integers(1, 40),
)
def test_balances_as_enumeration_does(groups: list[tuple[int, int, int, int]], total: int) -> None:
    counts, largest = [g[0] for g in groups], [g[1] for g in groups]
    times = [lambda b, fixed=g[2], slope=g[3]: fixed + slope * b for g in groups]
    best = math.inf
    for batches in itertools.product(*(range(1, most + 1) for most in largest)):
        if sum(c * b for c, b in zip(counts, batches, strict=True)) == total:
            best = min(best, max(time(b) for time, b in zip(times, batches, strict=True)))
    found = balance(counts, total, largest, times, near=4)
    if found is None:
        assert best == math.inf
        return
    assert sum(c * b for c, b in zip(counts, found, strict=True)) == total
    assert all(1 <= b <= most for b, most in zip(found, largest, strict=True))
    assert max(time(b) for time, b in zip(times, found, strict=True)) == best


def test_prefers_batches_near_the_traced_one_among_equals() -> None:
    assert balance([1, 1], 16, [15, 15], [lambda b: 5, lambda b: 5], near=8) == (8, 8)


def test_large_jobs_are_balanced_too() -> None:
    counts, total = [2048, 2048], 32 * 4096
    found = balance(counts, total, [63, 63], [lambda b: 3 * b, lambda b: 5 * b], near=32)
    assert found == (40, 24)


@pytest.mark.parametrize("kind", list(DeviceKind))
@pytest.mark.parametrize("seed", range(4))
def test_plan_keeps_the_global_batch_and_says_what_happens_to_local_ones(seed: int, kind: DeviceKind) -> None:
    case = random_case(seed, kind=kind)
    plan = allocate(case.inputs, Request("dynamic-batch"))
    counts = {group.name: group.count for group in case.cluster.groups}
    assert sum(counts[name] * batch for name, batch in plan.local_batches.items()) == 4 * sum(counts.values())
    for name, batch in plan.local_batches.items():
        change = "unchanged" if batch == 4 else f"{100 * (batch - 4) / 4:+.0f}%"
        sentence = f"{name}: local batch 4 → {batch} ({change}; from one profile, compute taken as proportional to the batch)"
        assert sentence in plan.notes
    assert {a.variant.label for group in plan.groups for a in group.assignments.values()} == {"float32"}
    # The baseline of any plan is summed up from arrays; this plan is replayed with profiles at its batches.
    assert plan.predicted_iteration_ns == plan.baselines["dynamic-batch"]
    assert all(sum(plan.memory[group.group].values()) == group.predicted_peak_bytes for group in plan.groups)


def doubled(profile: Profile, fixed_ns: int) -> Profile:
    """A profile at twice the batch size where every kernel takes ``fixed_ns`` whatever the batch."""
    costs = tuple(
        attrs.evolve(
            cost,
            forward_compute_ns=2 * cost.forward_compute_ns - fixed_ns,
            backward_compute_ns=2 * cost.backward_compute_ns - fixed_ns,
        )
        for cost in profile.costs
    )
    return attrs.evolve(profile, costs=costs, dag_digest="another")


@given(seed=st.integers(0, 1000), batch=st.integers(1, 12))
def test_two_profiles_give_the_line_through_both(seed: int, batch: int) -> None:
    case = random_case(seed, blocks=1, kind=DeviceKind.CPU)
    profile = case.profiles["infer0"]
    fixed = 100
    assume(min(min(c.forward_compute_ns, c.backward_compute_ns) for c in profile.costs) > fixed)
    scaling = BatchScaling(Inputs(*case.arguments, further={"infer0": BatchProfile(8, doubled(profile, fixed))}), "infer0")
    scaled = scaling.profile_at(batch)
    for before, after in zip(profile.costs, scaled.costs, strict=True):
        assert after.forward_compute_ns == pytest.approx(fixed + (before.forward_compute_ns - fixed) * batch / 4, abs=1)
        assert after.forward_dispatch_ns == before.forward_dispatch_ns
    assert scaling.busy_ns(1_000_000, 4) == 1_000_000
    assert scaling.busy_ns(1_000_000, batch) <= scaling.busy_ns(1_000_000, batch + 1)


def test_one_profile_scales_compute_and_leaves_dispatch_and_the_optimizer() -> None:
    case = random_case(1, kind=DeviceKind.CPU)
    profile = case.profiles["infer0"]
    scaled = BatchScaling(case.inputs, "infer0").profile_at(8)
    for before, after in zip(profile.costs, scaled.costs, strict=True):
        assert after.forward_compute_ns == 2 * before.forward_compute_ns
        assert after.backward_dispatch_ns == before.backward_dispatch_ns
    assert scaled.optimizer_compute_ns == profile.optimizer_compute_ns


BASE = Variant.plain(Precision.FLOAT32)


def with_steps(profile: Profile, ratios: dict[int, tuple[float, float]]) -> Profile:
    """With a whole step, and such at other batch sizes whose forward and backward take these parts of what the first one's take."""
    costs = [profile.cost(op_id, BASE) for op_id in profile.cost_index]
    forward, backward = sum(cost.forward_compute_ns for cost in costs), sum(cost.backward_compute_ns for cost in costs)

    def step(fw: float, bw: float) -> StepMeasurement:
        times = round(fw * forward), round(bw * backward), profile.optimizer_compute_ns
        return StepMeasurement(BASE, sum(times), 0, times[0], 0, times[1], 0, times[2], 0)

    found = tuple(BatchStep(batch, step(*both)) for batch, both in ratios.items())
    return attrs.evolve(profile, steps=(step(1.0, 1.0),), batches=found)


def scaling_of(seed: int, ratios: dict[int, tuple[float, float]]) -> BatchScaling:
    case = random_case(seed, kind=DeviceKind.CPU)
    measured = {**case.profiles, "infer0": with_steps(case.profiles["infer0"], ratios)}
    return BatchScaling(case.inputs.with_profiles(measured), "infer0")


def test_steps_measured_at_other_batches_say_what_kernels_take_there() -> None:
    """A product on few SMs takes as long for 3 samples as for 4, and half of it for 2."""
    scaling = scaling_of(1, {2: (0.5, 0.4), 3: (1.0, 0.9), 6: (2.0, 1.6)})
    profile = scaling.profile
    assert scaling.batch_size == 4
    for batch, fw, bw in ((1, 0.25, 0.2), (2, 0.5, 0.4), (3, 1.0, 0.9), (5, 1.5, 1.3), (6, 2.0, 1.6), (9, 3.0, 2.4)):
        scaled = scaling.profile_at(batch)
        for before, after in zip(profile.costs, scaled.costs, strict=True):
            assert after.forward_compute_ns == pytest.approx(fw * before.forward_compute_ns, abs=1)
            assert after.backward_compute_ns == pytest.approx(bw * before.backward_compute_ns, abs=1)
            assert after.forward_dispatch_ns == before.forward_dispatch_ns
        kernels = scaling.kernels_at(batch)[1]
        assert kernels.tolist() == [[cost.forward_compute_ns, cost.backward_compute_ns] for cost in scaled.costs]
    assert scaling.profile_at(3).steps[0] == profile.batches[1].step
    assert scaling.profile_at(5).steps[0].forward_compute_ns == pytest.approx(1.5 * profile.steps[0].forward_compute_ns, abs=2)


@given(fixed=st.floats(0.0, 1.0), measured=st.sampled_from([(2,), (3,), (7,), (2, 3), (3, 6), (6, 7)]), batch=st.integers(1, 12))
def test_one_other_batch_shows_what_does_not_shrink_with_samples(fixed: float, measured: tuple[int, ...], batch: int) -> None:
    """Beyond what was measured too, where kernels take a constant and an amount for each sample."""

    def part(size: int) -> float:
        return fixed + (1 - fixed) * size / 4

    scaling = scaling_of(1, {size: (part(size), 1.0) for size in measured})
    scaled = scaling.profile_at(batch)
    for before, after in zip(scaling.profile.costs, scaled.costs, strict=True):
        assert after.forward_compute_ns == pytest.approx(part(batch) * before.forward_compute_ns, rel=1e-3, abs=1)
        assert after.backward_compute_ns == before.backward_compute_ns


def predicted_ns(known: dict[int, int], traced: int, batch: int) -> int:
    """A step of which some batches were measured."""
    steps = {size: StepMeasurement(BASE, ns, 0, ns, 0, 0, 0, 0, 0) for size, ns in known.items()}
    growth = _growth_of(traced, steps.pop(traced), steps)
    return round(known[traced] * (_between(growth[0], batch) if growth else batch / traced))


@pytest.mark.parametrize("traced", [8, 16, 48, 128])
def test_two_rounds_of_measuring_predict_the_split_that_is_found(traced: int) -> None:
    """As ``qsync prepare`` measures: steps of the split that is predicted to be the fastest, twice.

    Some of a step is fixed, some is proportional to its samples, and some takes its time in waves of a few samples.
    """
    errors = []
    for fixed, slower, waves in itertools.product((0.0, 0.15, 0.3, 0.45), (1.3, 1.6, 2.0, 2.5), ((1, 1), (1, 2), (2, 3), (3, 4))):

        def true_ns(slower: float, fixed: float, wave: int, batch: int) -> int:
            in_waves = math.ceil(batch / wave) / math.ceil(traced / wave)
            return round(1e6 * slower * (fixed + (1 - fixed) * (0.6 * batch / traced + 0.4 * in_waves)))

        true = [partial(true_ns, times, fixed, wave) for times, wave in zip((1.0, slower), waves, strict=True)]
        known = [{traced: of(traced)} for of in true]
        predicted = [partial(predicted_ns, measured, traced) for measured in known]
        for rounds_left in (2, 1, 0):
            split = balance([1, 1], 2 * traced, [2 * traced - 1] * 2, predicted, traced)
            assert split is not None
            for measured, of, batch in zip(known, true, split, strict=True):
                measured |= {batch: of(batch)} if rounds_left else {}
        first, second = (max(of(batch) for of, batch in zip(steps, split, strict=True)) for steps in (predicted, true))
        errors.append(abs(first / second - 1))
    assert statistics.mean(errors) < 0.01
    assert statistics.quantiles(errors, n=20)[-1] < 0.05


def test_a_step_that_was_measured_at_the_traced_batch_again_says_nothing_of_others() -> None:
    again, once = scaling_of(1, {4: (0.9, 0.9)}), scaling_of(1, {})
    assert again.kernels_at(7)[1].tolist() == once.kernels_at(7)[1].tolist()


def test_noise_of_steps_at_other_batches_makes_no_larger_batch_faster() -> None:
    scaling = scaling_of(2, {1: (0.6, 0.6), 2: (1.1, 0.5), 5: (0.9, 1.2), 6: (1.3, 1.1)})
    busy = [scaling.busy_ns(1_000_000, batch) for batch in range(1, 9)]
    assert busy == sorted(busy)


RUNG = Variant.named("int8")


@given(ratios=st.tuples(st.floats(0.3, 1.0), st.floats(0.3, 1.0)), batch=st.integers(1, 7))
def test_a_rung_lies_between_the_batches_at_which_it_was_measured(ratios: tuple[float, float], batch: int) -> None:
    """Whatever the base does there: a rung's step that waits for its CPU does not shrink with its samples."""
    profile = scaling_of(1, {2: (0.5, 0.5)}).profile
    whole = attrs.evolve(profile.steps[0], variant=RUNG)

    def part(of: float) -> StepMeasurement:
        times = {name: round(of * getattr(whole, name)) for name in ("iteration_ns", "forward_compute_ns", "backward_compute_ns")}
        return attrs.evolve(whole, **times)

    found = tuple(BatchStep(size, part(ratio)) for size, ratio in zip((2, 3), sorted(ratios), strict=True))
    mixed = MixedStep(tuple(profile.cost_index)[:1], part(0.9))
    case = random_case(1, kind=DeviceKind.CPU)
    measured = attrs.evolve(profile, steps=(*profile.steps, whole), batches=(profile.batches[0], *found), mixed=(mixed,))
    scaled = BatchScaling(case.inputs.with_profiles({**case.profiles, "infer0": measured}), "infer0").profile_at(batch)
    rung = scaled.steps[1].iteration_ns
    known = {4: whole, **{one.batch_size: one.step for one in found}}
    if batch in known:
        assert rung == known[batch].iteration_ns
    elif batch < 2:
        assert rung <= found[0].step.iteration_ns
    else:
        assert rung >= whole.iteration_ns
    # Of some layers alone nothing was measured there: it is the whole step's other batch, not the rung's of all layers.
    assert batch == 4 or scaled.mixed[0].step.iteration_ns not in [one.step.iteration_ns for one in found]


def test_batches_are_balanced_by_measured_steps_and_notes_say_so() -> None:
    for seed in range(6):
        case = random_case(seed, kind=DeviceKind.CPU)
        stepped = case.inputs.with_profiles({**case.profiles, "infer0": with_steps(case.profiles["infer0"], {})})
        plain = allocate(stepped, Request("dynamic-batch"))
        if (batch := plain.local_batches["infer0"]) == 4:
            continue
        slow = {**case.profiles, "infer0": with_steps(case.profiles["infer0"], {batch: (9.0, 9.0) if batch > 4 else (1.0, 1.0)})}
        measured = allocate(case.inputs.with_profiles(slow), Request("dynamic-batch"))
        assert measured.baselines["dynamic-batch"] == measured.predicted_iteration_ns >= plain.baselines["dynamic-batch"]
        notes = [note for note in measured.notes if note.startswith("infer0: local batch")]
        there = "this batch" if measured.local_batches["infer0"] == batch else batch
        assert f"from steps measured at {there})" in notes[0]
        return
    raise AssertionError("no case has uneven batches")


def test_a_faster_group_gets_more_and_the_job_gets_faster() -> None:
    gains = []
    for seed in range(6):
        case = random_case(seed, kind=DeviceKind.CPU)
        plan = allocate(case.inputs, Request("dynamic-batch"))
        gains.append(plan.baselines["full"] - plan.baselines["dynamic-batch"])
    assert min(gains) >= 0
    assert max(gains) > 0


def test_memory_limits_a_local_batch() -> None:
    case = random_case(3, kind=DeviceKind.CPU)
    free = allocate(case.inputs, Request("dynamic-batch"))
    peak = free.group("infer0").predicted_peak_bytes
    assert allocate(case.with_memory(peak).inputs, Request("dynamic-batch")).local_batches == free.local_batches
    with pytest.raises(
        InfeasibleError, match=r"dynamic-batch is not possible: the global batch of \d+ does not fit the groups' memory"
    ):
        allocate(case.with_memory(1).inputs, Request("dynamic-batch"))


def test_second_profiles_that_do_not_go_with_the_first_are_refused() -> None:
    case = random_case(0)
    profile = case.profiles["infer0"]
    with pytest.raises(PlanError, match="the second profile of group 'infer0' is at batch size 4, as the first"):
        allocate(Inputs(*case.arguments, further={"infer0": BatchProfile(4, profile)}))
    fewer = dict(list(profile.cost_index.items())[1:])
    with pytest.raises(PlanError, match=r"the second profile of group 'infer0' \(batch size 8\) has other operators"):
        allocate(Inputs(*case.arguments, further={"infer0": BatchProfile(8, attrs.evolve(profile, cost_index=fewer))}))
    with pytest.raises(PlanError, match="a second profile was given for group 'nobody', but the cluster has train0, infer0"):
        allocate(Inputs(*case.arguments, further={"nobody": BatchProfile(8, profile)}))


@pytest.mark.parametrize("kind", list(DeviceKind))
@pytest.mark.parametrize("seed", range(4))
def test_no_split_of_the_batch_is_faster(seed: int, kind: DeviceKind) -> None:
    """Also where the CPU binds part of the step, so that its time is not in proportion to what is computed."""
    case = random_case(seed, kind=kind, infer_groups=1 + seed % 2)
    slow = {name: 1 + 40 * number for number, name in enumerate(case.profiles)}
    profiles = {name: with_dispatch(profile, slow[name]) for name, profile in case.profiles.items()}
    counts = {group.name: group.count for group in case.cluster.groups}
    total = 4 * sum(counts.values())
    replayer = Replayer(Inputs(case.dag, case.cluster, profiles))
    best = min(
        replay_batches(replayer, {}, local)[1].iteration_ns
        for sizes in itertools.product(range(1, total), repeat=len(counts))
        for local in [dict(zip(counts, sizes, strict=True))]
        if sum(counts[name] * batch for name, batch in local.items()) == total
    )
    plan = allocate(Inputs(case.dag, case.cluster, profiles), Request("dynamic-batch"))
    assert plan.predicted_iteration_ns <= best * 1.001


def with_dispatch(profile: Profile, factor: int) -> Profile:
    costs = tuple(
        attrs.evolve(
            cost, forward_dispatch_ns=factor * cost.forward_dispatch_ns, backward_dispatch_ns=factor * cost.backward_dispatch_ns
        )
        for cost in profile.costs
    )
    return attrs.evolve(profile, costs=costs)
