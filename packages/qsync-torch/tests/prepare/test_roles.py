"""Who trains, with which ladder and budget, where no cluster file describes the groups."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

import attrs
import pytest

from qsync_core.ir.cluster import Cluster, DeviceGroup
from qsync_core.ir.plan import Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import DeviceKind, DeviceType
from qsync_core.ir.variant import Variant
from qsync_torch.prepare.measuring import Probe
from qsync_torch.prepare.participants import Group, Participant, Wish
from qsync_torch.prepare.roles import contradiction, described_groups, otherwise, renamed

FLOAT32, BFLOAT16 = Variant.of(Precision.FLOAT32), Variant.of(Precision.BFLOAT16)
GIB = 1 << 30
FAST = DeviceType("NVIDIA H200", DeviceKind.CUDA, 1.0, 0, "9.0")
HALF = attrs.evolve(FAST, share=0.5)
CPU = DeviceType("cpu", DeviceKind.CPU)


def group(name: str, device: DeviceType, *memories: int) -> Group:
    members = (Participant(rank, "host", "kernel", (0,), device, memory, "", {}) for rank, memory in enumerate(memories))
    return Group(name, tuple(members))


def roles(
    groups: list[Group],
    step_ns: dict[str, int],
    wishes: Mapping[str, Wish] = MappingProxyType({}),
    profiled: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, DeviceGroup]:
    ladders = {name: (BFLOAT16, FLOAT32) if "h200" in name else (FLOAT32,) for name in step_ns}
    probes = {name: Probe.of(Probe(ns, ladders[name]).value) for name, ns in step_ns.items()}
    return {entry.name: entry for entry in described_groups(groups, probes, wishes, profiled)}


GPUS = [group("h200", FAST, 140 * GIB, 138 * GIB), group("h200-50", HALF, 140 * GIB)]


def test_the_fastest_trains_in_full_precision_and_the_others_have_their_ladders():
    found = roles(GPUS, {"h200": 5, "h200-50": 9})
    assert [(entry.role, entry.ladder, entry.count) for entry in found.values()] == [
        (Role.TRAIN, (FLOAT32,), 2),
        (Role.INFER, (BFLOAT16, FLOAT32), 1),
    ]
    assert roles(GPUS, {"h200": 9, "h200-50": 5})["h200-50"].role is Role.TRAIN


def trains(profiled: dict[str, int], wishes: Mapping[str, Wish] = MappingProxyType({})) -> set[str]:
    found = roles(GPUS, {"h200": 900, "h200-50": 500}, wishes, profiled)
    return {name for name, entry in found.items() if entry.role is Role.TRAIN}


def test_profiles_count_more_than_the_first_steps_once_all_groups_have_one():
    assert trains({}) == trains({"h200": 500}) == trains({"h200": 900, "h200-50": 500}) == {"h200-50"}
    assert trains({"h200": 500, "h200-50": 900}) == {"h200"}
    assert trains({"h200": 98, "h200-50": 100}) == {"h200-50"}, "alike: the first guess stays"
    assert trains({"h200": 500, "h200-50": 900}, {"h200": Wish(Role.INFER)}) == {"h200-50"}
    assert trains({"h200": 500, "h200-50": 900}, {"h200-50": Wish(Role.TRAIN)}) == {"h200-50"}


def test_other_roles_than_at_first_are_a_sentence():
    first, settled = (
        Cluster("job", tuple(roles(GPUS, steps).values())) for steps in ({"h200": 9, "h200-50": 5}, {"h200": 5, "h200-50": 9})
    )
    assert otherwise(first, settled, {"h200": 2_000_000, "h200-50": 5_500_000}) == (
        "h200 trains, and not h200-50 as the first few steps had it: by the profiles its step in full precision takes 2.00 ms, "
        "that of h200-50 5.50 ms; what depends on the roles is made again"
    )


def test_roles_that_the_profiles_speak_against_are_a_warning():
    cluster = Cluster("job", tuple(roles(GPUS, {"h200": 9, "h200-50": 5}).values()))
    assert contradiction(cluster, {"h200": 2_000_000, "h200-50": 5_500_000}) == (
        "h200-50 trains and h200 infers, as was said, but by the profiles h200-50 is the slower one: its step in full precision "
        "takes 5.50 ms, that of h200 2.00 ms; exchange the roles, unless it is meant so"
    )
    assert contradiction(cluster, {"h200": 2_000_000}) == ""
    assert contradiction(cluster, {"h200": 98, "h200-50": 100}) == ""
    assert contradiction(Cluster("job", cluster.groups[1:]), {"h200-50": 5}) == ""


def test_a_gpus_budget_is_the_jobs_part_of_the_smallest():
    found = roles(GPUS, {"h200": 5, "h200-50": 9}, {"h200-50": Wish(memory_bytes=20 * GIB)})
    assert {name: entry.memory_bytes for name, entry in found.items()} == {"h200": 138 * GIB, "h200-50": 20 * GIB}
    assert roles(GPUS, {"h200": 5, "h200-50": 9})["h200-50"].memory_bytes == 70 * GIB


@pytest.mark.parametrize(
    "wishes, trains",
    [
        ({"h200-50": Wish(Role.TRAIN)}, {"h200-50"}),
        ({"h200": Wish(Role.INFER)}, {"h200-50"}),
        ({"h200": Wish(Role.TRAIN), "h200-50": Wish(Role.TRAIN)}, {"h200", "h200-50"}),
        ({"h200": Wish(Role.INFER), "h200-50": Wish(Role.INFER)}, set()),
    ],
)
def test_a_persons_word_on_roles_stands_above_what_was_measured(wishes, trains):
    found = roles(GPUS, {"h200": 5, "h200-50": 9}, wishes)
    assert {name for name, entry in found.items() if entry.role is Role.TRAIN} == trains


def test_a_cpu_with_a_budget_has_a_rung_that_saves_memory_though_none_saves_time():
    cpus = [group("a", CPU, 0), group("b", CPU, 0)]
    assert roles(cpus, {"a": 5, "b": 9})["b"].ladder == (FLOAT32,)
    found = roles(cpus, {"a": 5, "b": 9}, {"b": Wish(memory_bytes=GIB)})
    assert (found["b"].ladder, found["b"].memory_bytes, found["a"].memory_bytes) == ((BFLOAT16, FLOAT32), GIB, 0)


def test_one_group_trains_without_being_measured():
    (only,) = described_groups([GPUS[0]], {}, {}, {})
    assert (only.role, only.ladder) == (Role.TRAIN, (FLOAT32,))


def test_a_group_that_the_folder_does_not_know_in_the_place_of_another_may_be_mistyped():
    assert re.match(
        r"this folder was made with b, not here now, and does not know bb; where QSYNC_GROUP", renamed("ab", ["a", "bb"])
    )
    assert [renamed(*groups) for groups in [("ab", "ab"), ("ab", "a"), ("a", "ab"), ("", "ab")]] == [""] * 4
