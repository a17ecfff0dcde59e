"""Who trains, with which ladder and budget, where no cluster file describes the groups."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

import attrs
import pytest

from qsync_core.cluster_file import parse_cluster
from qsync_core.ir.cluster import Cluster, DeviceGroup
from qsync_core.ir.dag import OpClass, Operator, PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import DeviceKind, DeviceType
from qsync_core.ir.variant import Variant
from qsync_torch.prepare.cluster_text import cluster_text
from qsync_torch.prepare.measuring import Probe
from qsync_torch.prepare.participants import Group, Participant, Wish
from qsync_torch.prepare.roles import (
    alike_at_last,
    all_alike,
    compared,
    contradiction,
    described_groups,
    of_one_kind,
    otherwise,
    renamed,
    roles_said,
    short_of_memory,
    to_repeat,
    unstorable,
    with_storages,
)

FLOAT32, BFLOAT16 = Variant.of(Precision.FLOAT32), Variant.of(Precision.BFLOAT16)
GIB = 1 << 30
FAST = DeviceType("NVIDIA H200", DeviceKind.CUDA, 1.0, 0, "9.0")
HALF = attrs.evolve(FAST, share=0.5)
CPU = DeviceType("cpu", DeviceKind.CPU)


def group(name: str, device: DeviceType, *memories: int) -> Group:
    members = (Participant(rank, "host", "kernel", (0,), device, memory, "", {}) for rank, memory in enumerate(memories))
    return Group(name, tuple(members))


def probed(
    step_ns: Mapping[str, int],
    spread_ns: Mapping[str, int] = MappingProxyType({}),
    again_ns: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Probe]:
    ladders = {name: (BFLOAT16, FLOAT32) if "h200" in name else (FLOAT32,) for name in step_ns}
    return {
        name: Probe.of(Probe(ns, ladders[name], spread_ns.get(name, 0), again_ns.get(name, 0)).value)
        for name, ns in step_ns.items()
    }


@pytest.mark.parametrize(("named", "why"), [("", "their devices look alike"), ("cpu", "QSYNC_GROUP names no other")])
def test_ranks_that_are_one_group_are_told_how_to_be_more(named, why):
    members = tuple(attrs.evolve(member, group=named) for member in group("cpu", CPU, 0, 0).members)
    told = of_one_kind([Group("cpu", members)])
    assert told.startswith(f"all 2 ranks are one group, cpu, because {why}: none has to keep up with another, ")
    assert told.endswith("as QSYNC_GROUP=a for some and QSYNC_GROUP=b for the others")
    assert of_one_kind(CPUS) == of_one_kind([group("cpu", CPU, 0)]) == ""


def roles(
    groups: list[Group],
    step_ns: dict[str, int],
    wishes: Mapping[str, Wish] = MappingProxyType({}),
    profiled: Mapping[str, int] = MappingProxyType({}),
    spread_ns: Mapping[str, int] = MappingProxyType({}),
    again_ns: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, DeviceGroup]:
    probes = probed(step_ns, spread_ns, again_ns)
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
    assert otherwise(first, settled, {"h200": 2_000_000, "h200-50": 5_500_000}, Precision.FLOAT32) == (
        "h200 trains, and not h200-50 as the first few steps had it: by the profiles its step in full precision takes 2.00 ms, "
        "that of h200-50 5.50 ms; what depends on the roles is made again"
    )


def test_roles_that_the_profiles_speak_against_are_a_warning():
    cluster = Cluster("job", tuple(roles(GPUS, {"h200": 9, "h200-50": 5}).values()))
    assert contradiction(cluster, {"h200": 2_000_000, "h200-50": 5_500_000}, Precision.FLOAT32) == (
        "h200-50 trains and h200 infers, as was said, but by the profiles h200-50 is the slower one: its step in full precision "
        "takes 5.50 ms, that of h200 2.00 ms; exchange the roles, unless it is meant so"
    )
    assert contradiction(cluster, {"h200": 2_000_000}, Precision.FLOAT32) == ""
    assert contradiction(cluster, {"h200": 98, "h200-50": 100}, Precision.FLOAT32) == ""
    assert contradiction(Cluster("job", cluster.groups[1:]), {"h200-50": 5}, Precision.FLOAT32) == ""


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


@pytest.mark.parametrize(
    "budgets, trains",
    [((2, 5), "b"), ((5, 2), "a"), ((5, 5.2), "a"), ((2, 0), "b"), ((0, 5), "a"), ((0, 0), "a")],  # in GiB; 0 is no limit
)
def test_of_groups_that_are_alike_one_with_the_most_memory_trains(budgets, trains):
    wishes = {name: Wish(memory_bytes=round(budget * GIB)) for name, budget in zip("ab", budgets, strict=True) if budget}
    found = roles(CPUS, {"a": 100, "b": 100}, wishes, profiled={"a": 90, "b": 100})
    assert {name for name, entry in found.items() if entry.role is Role.TRAIN} == {trains}
    assert roles(CPUS, {"a": 60, "b": 100}, wishes, again_ns={"a": 60, "b": 100})["a"].role is Role.TRAIN, "the fastest, else"


def test_one_group_trains_without_being_measured():
    (only,) = described_groups([GPUS[0]], {}, {}, {})
    assert (only.role, only.ladder) == (Role.TRAIN, (FLOAT32,))


def test_a_group_that_the_folder_does_not_know_in_the_place_of_another_may_be_mistyped():
    assert re.match(
        r"this folder was made with b, not here now, and does not know bb; where QSYNC_GROUP", renamed("ab", ["a", "bb"])
    )
    assert [renamed(*groups) for groups in [("ab", "ab"), ("ab", "a"), ("a", "ab"), ("", "ab")]] == [""] * 4


CPUS = [group("a", CPU, 0), group("b", CPU, 0)]


@pytest.mark.parametrize("a", [80, 95, 100, 105, 120])
def test_of_two_equal_devices_the_same_one_trains_whatever_their_steps_happened_to_take(a: int) -> None:
    found = roles(CPUS, {"a": a, "b": 100}, profiled={"a": 200 - a, "b": 100})
    assert [entry.role for entry in found.values()] == [Role.TRAIN, Role.INFER]


@pytest.mark.parametrize("profiled", [{"a": 35, "b": 24}, {"a": 24, "b": 35}, {"a": 350, "b": 24}])
def test_groups_that_were_alike_stay_so_whatever_their_profiles_say(profiled: dict[str, int]) -> None:
    assert roles(CPUS, {"a": 100, "b": 100}, profiled=profiled)["a"].role is Role.TRAIN
    unequal = {"h200": 100, "h200-50": 80}, {"h200": 15, "h200-50": 10}
    found = roles(GPUS, unequal[0], spread_ns=unequal[1], profiled={"h200": profiled["a"], "h200-50": profiled["b"]})
    assert found["h200"].role is Role.TRAIN


def test_equal_devices_are_told_apart_by_a_difference_that_repeats():
    first = {"a": 100, "b": 60}
    assert to_repeat(CPUS, probed(first)) == CPUS
    assert to_repeat(CPUS, probed({"a": 100, "b": 90})) == to_repeat(GPUS, probed({"h200": 5, "h200-50": 9})) == []
    for again, fastest in (({"a": 110, "b": 65}, "b"), ({"a": 60, "b": 100}, "a"), ({"a": 60, "b": 62}, "a"), ({}, "a")):
        assert roles(CPUS, first, again_ns=again)[fastest].role is Role.TRAIN, again
    assert roles(CPUS, first, again_ns={"a": 110, "b": 65}, profiled={"a": 50, "b": 90})["b"].role is Role.TRAIN, "and stay so"


def test_what_equal_devices_took_is_told_over_both_moments():
    probes = probed({"a": 6_000_000, "b": 4_000_000}, {"a": 200_000, "b": 100_000}, {"a": 4_000_000, "b": 4_000_000})
    assert compared(CPUS, probes, Precision.FLOAT32).startswith(
        "a step in full precision takes 5.10 ms ± 1.10 ms on a, 4.00 ms ± 100.0 µs on b: by these first steps the groups are alike"
    )


def test_another_number_of_threads_is_told_apart_by_less():
    other = attrs.evolve(CPUS[1], members=tuple(attrs.evolve(member, software={"threads": "2"}) for member in CPUS[1].members))
    steps = {"a": 100, "b": 90}
    assert roles([CPUS[0], other], steps, again_ns=steps)["b"].role is Role.TRAIN


def test_an_option_on_roles_stands_above_a_name():
    groups = [group("train", CPU, 0), group("infer1", CPU, 0), group("c", CPU, 0)]
    assert roles_said(groups, {}) == {"train": Role.TRAIN, "infer1": Role.INFER}
    assert roles_said(groups, {"train": Wish(Role.INFER)}) == {"train": Role.INFER, "infer1": Role.INFER}
    assert roles_said(CPUS, {"a": Wish(memory_bytes=GIB)}) == {}


def test_steps_within_their_uncertainty_do_not_say_which_group_is_faster():
    assert trains_of({"h200": 100, "h200-50": 80}, {}) == {"h200-50"}
    assert trains_of({"h200": 100, "h200-50": 80}, {"h200": 15, "h200-50": 10}) == {"h200"}


def trains_of(step_ns: dict[str, int], spread_ns: dict[str, int]) -> set[str]:
    return {name for name, entry in roles(GPUS, step_ns, spread_ns=spread_ns).items() if entry.role is Role.TRAIN}


@pytest.mark.parametrize(
    "first, second", [("train", "infer"), ("Train", "INFER"), ("train0", "infer_1"), ("train", "b"), ("a", "infer")]
)
def test_groups_that_are_called_train_and_infer_are_taken_at_their_word(first: str, second: str) -> None:
    groups = [group(second, FAST, 140 * GIB), group(first, HALF, 140 * GIB)]
    found = roles(groups, {second: 5, first: 9}, profiled={second: 5, first: 9})
    assert {name: entry.role for name, entry in found.items()} == {first: Role.TRAIN, second: Role.INFER}
    wished = roles(groups, {second: 5, first: 9}, {first: Wish(Role.INFER)})
    assert wished[first].role is Role.INFER, "an option stands above a name"


def test_a_name_that_only_begins_so_says_nothing():
    groups = [group("trainer", HALF, 140 * GIB), group("inference-box", FAST, 140 * GIB)]
    found = roles(groups, {"trainer": 9, "inference-box": 5})
    assert [entry.role for entry in found.values()] == [Role.INFER, Role.TRAIN]


def test_what_the_first_steps_took_is_told_with_its_uncertainty():
    told = compared(
        GPUS, probed({"h200": 2_000_000, "h200-50": 5_500_000}, {"h200": 10_000, "h200-50": 250_000}), Precision.FLOAT32
    )
    assert told == "a step in full precision takes 2.00 ms ± 10.0 µs on h200, 5.50 ms ± 250.0 µs on h200-50"
    scattered = probed({"a": 2_000_000, "b": 300_000}, {"a": 1_500_000, "b": 9_000})
    assert compared(CPUS, scattered, Precision.FLOAT32).endswith(
        "; so uncertain a step of a says little, and the verdict may be wrong: see that nothing else runs there, and prepare again "
        "with --fresh"
    )
    assert compared(GPUS, {}, Precision.FLOAT32) == compared(GPUS[:1], probed({"h200": 5}), Precision.FLOAT32) == ""
    assert compared(GPUS, probed({"h200": 5, "h200-50": 9}), Precision.BFLOAT16).startswith("a step in bfloat16 takes ")


def test_where_all_groups_are_alike_there_is_nothing_to_do():
    probes = probed({"a": 2_000_000, "b": 2_200_000}, {"a": 90_000, "b": 90_000})
    assert compared(CPUS, probes, Precision.FLOAT32) == (
        "a step in full precision takes 2.00 ms ± 90.0 µs on a, 2.20 ms ± 90.0 µs on b: by these first steps the groups are alike"
    )
    assert alike_at_last(CPUS, probes, {"a": 2_000_000, "b": 2_400_000}, Precision.FLOAT32) == (
        "these groups are alike by their profiles too: none has to keep up with another, and where all have the memory there is "
        "nothing for QSync to do; train without it"
    )


def test_where_profiles_tell_groups_apart_there_is_something_to_do():
    probes, unlike = probed({"a": 2_000_000, "b": 2_200_000}), {"a": 3_000_000, "b": 2_000_000}
    assert alike_at_last(CPUS, probes, unlike, Precision.FLOAT32) == (
        "groups whose first steps were alike are not by their profiles, which plans go by: a step in full precision takes 3.00 ms "
        "on a, 2.00 ms on b; where a is not the slower one, something else ran there: prepare again with --fresh while nothing does"
    )
    again = probed({"a": 3_000_000, "b": 2_000_000}, again_ns={"a": 3_000_000, "b": 2_000_000})
    assert alike_at_last(CPUS, again, unlike, Precision.FLOAT32) == "", "the first steps had said so"
    assert alike_at_last(CPUS, probes, {"a": 3_000_000}, Precision.FLOAT32) == "", "nothing is known of b"


def test_roles_of_equal_devices_are_no_contradiction_by_noise():
    cluster = Cluster("job", tuple(roles(CPUS, {"a": 100, "b": 100}).values()))
    assert contradiction(cluster, {"a": 110, "b": 90}, Precision.FLOAT32) == ""
    warning = contradiction(cluster, {"a": 200, "b": 90}, Precision.FLOAT32)
    assert warning.startswith("a trains and b infers, as was said, but by the profiles a is the slower one")


def test_groups_are_alike_where_all_were_compared_and_none_differs():
    steps, spreads = {"a": 2_000_000, "b": 2_200_000}, {"a": 90_000, "b": 90_000}
    assert all_alike(CPUS, probed(steps, spreads))
    unlike = {"a": 2_000_000, "b": 9_000_000}
    assert all_alike(CPUS, probed(unlike, spreads))  # of equal devices one moment says nothing
    assert not all_alike(CPUS, probed(unlike, spreads, unlike))
    assert not all_alike(CPUS, probed({"a": 2_000_000}, spreads))
    assert not all_alike(CPUS[:1], probed(steps, spreads))


def graph_of_frozen(frozen: bool = True) -> PrecisionDag:
    """One layer in bfloat16, whose weight has 4096 bytes."""
    operator = Operator(
        OpId("a"), "linear", OpClass.ADJUSTABLE, (OpId("$input.x"),), ((4, 64),), (4, 32), weight_shape=(32, 64),
        weight_format=Precision.BFLOAT16, frozen=frozen,
    )  # fmt: skip
    source = Operator(OpId("$input.x"), "input", OpClass.FIXED, (), (), (4, 64))
    return PrecisionDag("m", (source, operator), (), base=Precision.BFLOAT16)


def test_one_card_that_is_short_of_memory_infers_where_frozen_weights_fill_it():
    dag, fits, too_large = graph_of_frozen(), probed({"h200": 5}), probed({"h200": 2**62})
    small = [group("h200", FAST, 8 * 4096)]

    def role(groups, probes, wishes=MappingProxyType({}), dag=dag):
        (entry,) = described_groups(groups, probes, short_of_memory(groups, probes, wishes, dag), {})
        return entry.role

    assert role(small, too_large) is Role.INFER
    assert role(small, fits) is role(small, {}) is Role.TRAIN, "it has the memory"
    assert role([group("h200", FAST, 11 * 4096)], too_large) is Role.TRAIN, "frozen weights are little of it"
    assert role(small, too_large, dag=graph_of_frozen(frozen=False)) is Role.TRAIN
    assert role(small, too_large, {"h200": Wish(Role.TRAIN)}) is Role.TRAIN, "a person says so"
    budget = {"h200": Wish(memory_bytes=8 * 4096)}
    assert role([group("h200", FAST, GIB)], fits, budget) is Role.INFER
    assert short_of_memory(GPUS, probed({"h200": 2**62, "h200-50": 5}), {}, dag) == {}, "of several groups the fastest trains"


def test_a_step_that_does_not_fit_is_no_time():
    told = compared(GPUS, probed({"h200": 2_000_000, "h200-50": 2**62}), Precision.BFLOAT16)
    assert told == "a step in bfloat16 takes 2.00 ms ± 0.0 µs on h200, more than the memory of h200-50"


def test_frozen_weights_that_fill_a_budget_may_be_stored_otherwise():
    dag = graph_of_frozen()
    ladder = tuple(Variant.named(name) for name in ("int8", "bfloat16", "float32"))
    base = Variant.plain(Precision.FLOAT32)

    def labels(dag, role=Role.INFER, memory_bytes=8 * 4096):
        rungs = ladder if role is Role.INFER else (base,)
        group = DeviceGroup("g", "cpu", 1, role, Precision.FLOAT32, rungs, memory_bytes=memory_bytes)
        return [rung.label for rung in with_storages([group], dag)[0].ladder]

    assert labels(dag) == ["int8", "bfloat16@nf4", "bfloat16@int8-block", "bfloat16", "float32"]
    plain = ["int8", "bfloat16", "float32"]
    assert labels(dag, memory_bytes=11 * 4096) == labels(dag, memory_bytes=0) == plain
    assert labels(dag, Role.TRAIN) == ["float32"]
    assert labels(graph_of_frozen(frozen=False)) == plain
    without = DeviceGroup("g", "cpu", 1, Role.INFER, Precision.FLOAT32, (ladder[0], ladder[2]), memory_bytes=9)
    assert with_storages([without], dag)[0].ladder == with_storages([attrs.evolve(without, ladder=ladder)], dag)[0].ladder
    (group,) = with_storages([DeviceGroup("g", "cpu", 1, Role.INFER, Precision.FLOAT32, ladder, memory_bytes=9)], dag)
    assert parse_cluster(cluster_text("m", [group], [])).groups[0].ladder == group.ladder


def test_frozen_weights_that_fill_a_budget_and_cannot_be_stored_are_told():
    dag = graph_of_frozen()
    held = attrs.evolve(dag, operators=tuple(attrs.evolve(one, not_storable="it is read in a way") for one in dag.operators))

    def told(dag, role=Role.INFER, memory_bytes=8 * 4096):
        group = DeviceGroup("g", "cpu", 1, role, Precision.FLOAT32, (BFLOAT16, FLOAT32), memory_bytes=memory_bytes)
        return unstorable(Cluster("m", (group,)), dag)

    assert re.fullmatch(
        r"4 KiB of frozen weights stay as they are on g: that of \S+ cannot be stored otherwise, because it is read in a way",
        told(held),
    )
    assert told(dag) == told(held, Role.TRAIN) == told(held, memory_bytes=0) == told(held, memory_bytes=11 * 4096) == ""
