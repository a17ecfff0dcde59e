"""From peaks of tensors to budgets of processes and back."""

from __future__ import annotations

from fractions import Fraction

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import hybrid_cluster, hybrid_profiles, resnet

from qsync_core.artifacts.files import digest
from qsync_core.errors import InfeasibleError
from qsync_core.ir.cluster import Cluster
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import DeviceMemory, Profile, RungMemory
from qsync_core.ir.variant import Variant
from qsync_planner.allocator import Inputs, Request, allocate
from qsync_planner.replayer.process_memory import MARGIN, ProcessMemory
from qsync_planner.replayer.replay import Replayer, plan_variants

DAG = resnet()
RUNGS = tuple(Variant.of(precision) for precision in (Precision.INT8, Precision.FLOAT32))
MEMORY = DeviceMemory(700 << 20, (RungMemory(RUNGS[0], 1000, 1100), RungMemory(RUNGS[1], 2000, 2080)))
CLUSTER = hybrid_cluster()
FULL = {operator.op_id: RUNGS[1] for operator in DAG.adjustable}
PLAIN = {name: attrs.evolve(profile, dag_digest=digest(DAG)) for name, profile in hybrid_profiles(DAG).items()}
PROFILES = {name: attrs.evolve(profile, memory=MEMORY) for name, profile in PLAIN.items()}


@given(
    st.integers(0, 2**33),
    st.fractions(min_value=1, max_value=2, max_denominator=10**6),
    st.fractions(min_value=0, max_value=Fraction(1, 4), max_denominator=1000),
    st.integers(1, 2**38),
)
def test_the_largest_peak_within_a_budget_fits_it_and_one_byte_more_does_not(
    outside: int, reserve: Fraction, margin: Fraction, budget: int
) -> None:
    process = ProcessMemory(outside, reserve, margin)
    most = process.tensors_within(budget)
    if most > 1:
        assert process.process_bytes(most) <= budget
    assert process.process_bytes(most + 1) > budget
    assert process.tensors_within(process.process_bytes(budget)) >= budget
    assert process.reserved_bytes(budget) + outside <= process.process_bytes(budget)


def test_by_hand() -> None:
    process = ProcessMemory.of(PROFILES["infer"])
    assert process == ProcessMemory(700 << 20, Fraction(11, 10), MARGIN)
    assert process.reserved_bytes(1000) == 1100
    assert process.process_bytes(1000) == (700 << 20) + 1144  # 1,100 and a twenty-fifth of it
    assert process.tensors_within((700 << 20) + 1144) == 1000
    assert process.tensors_within(0) == 0, "no budget stays none"
    assert process.tensors_within(1 << 20) == 1, "a budget below the context is not none"


def test_segments_that_can_grow_give_back_what_they_do_not_need() -> None:
    profile = on_gpus(MEMORY, {"expandable_segments": "True"})["infer"]
    assert ProcessMemory.of(profile).reserve == Fraction(26, 25)


def test_a_profile_without_a_record_counts_tensors_alone() -> None:
    process = ProcessMemory.of(PLAIN["infer"])
    assert (
        [process.process_bytes(n) for n in (0, 1, 10**10)] == [process.tensors_within(n) for n in (0, 1, 10**10)] == [0, 1, 10**10]
    )


def limited(memory_bytes: int) -> Cluster:
    groups = tuple(attrs.evolve(group, memory_bytes=memory_bytes if group.name == "infer" else 0) for group in CLUSTER.groups)
    return attrs.evolve(CLUSTER, groups=groups)


def test_a_plan_keeps_to_its_budget_with_everything_that_a_process_takes() -> None:
    free = Replayer(Inputs(DAG, CLUSTER, PROFILES)).memory("infer", FULL)
    budget = free.process_bytes - 1
    for profiles, fits in ((PLAIN, True), (PROFILES, False)):
        plan = allocate(Inputs(DAG, limited(budget), profiles), Request("uniform"))
        assert plan.group("infer").memory_budget_bytes == budget
        estimate = Replayer(Inputs(DAG, CLUSTER, profiles)).memory("infer", FULL)
        assert (estimate.process_bytes <= budget) is fits
        chosen = Replayer(Inputs(DAG, CLUSTER, profiles)).memory("infer", plan_variants(plan, CLUSTER)["infer"])
        assert chosen.process_bytes <= budget


def test_a_plan_names_the_parts_and_they_add_up() -> None:
    plan = allocate(Inputs(DAG, CLUSTER, PROFILES), Request("uniform"))
    for name, parts in plan.memory.items():
        peak = plan.group(name).predicted_peak_bytes
        beside = parts["outside PyTorch's allocator"] + parts["allocator's reserve"] + parts["margin"]
        assert sum(parts.values()) - beside == peak
        assert sum(parts.values()) == ProcessMemory.of(PROFILES[name]).process_bytes(peak)
        assert parts["outside PyTorch's allocator"] == 700 << 20
        weights = sum(parameter.numel * 4 for parameter in DAG.parameters)
        assert parts["parameters"] == weights
        assert all(nbytes > 0 for part, nbytes in parts.items() if part != "measured beside these")


def test_a_budget_that_is_too_small_is_named_with_what_is_beside_tensors() -> None:
    with pytest.raises(InfeasibleError, match="beside tensors") as caught:
        allocate(Inputs(DAG, limited(800 << 20), PROFILES), Request("uniform"))
    smallest = caught.value.smallest_bytes
    assert f"({smallest:,} bytes)" in str(caught.value)
    plan = allocate(Inputs(DAG, limited(smallest), PROFILES), Request("uniform"))
    assert sum(plan.memory["infer"].values()) <= smallest
    with pytest.raises(InfeasibleError):
        allocate(Inputs(DAG, limited(smallest - 1), PROFILES), Request("uniform"))


def on_gpus(memory: DeviceMemory | None, software: dict[str, str]) -> dict[str, Profile]:
    return {name: attrs.evolve(p, memory=memory, software={**p.software, **software}) for name, p in PROFILES.items()}


@pytest.mark.parametrize(
    ("memory", "software", "said"),
    [
        (None, {}, "does not say what a process takes beside tensors"),
        (MEMORY, {"expandable_segments": "True"}, ""),
    ],
)
def test_a_plan_says_what_its_budget_may_not_hold(memory: DeviceMemory | None, software: dict[str, str], said: str) -> None:
    plan = allocate(Inputs(DAG, limited(1 << 40), on_gpus(memory, software)), Request("uniform"))
    notes = [note for note in plan.notes if note.startswith("group infer: its profile")]
    assert len(notes) == bool(said)
    assert all(said in note for note in notes)


def test_fixed_segments_are_a_remark_where_the_budget_has_little_left() -> None:
    profiles = on_gpus(MEMORY, {"expandable_segments": "False"})
    plan = allocate(Inputs(DAG, limited(1 << 40), profiles), Request("uniform"))
    taken = sum(plan.memory["infer"].values())
    assert not any("expandable segments" in note for note in plan.notes)
    plan = allocate(Inputs(DAG, limited(taken * 5 // 4), profiles), Request("uniform"))
    assert sum(plan.memory["infer"].values()) == taken
    assert any("group infer" in note and "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in note for note in plan.notes)
