"""Who is of which group, and who may measure at the same time."""

from __future__ import annotations

import json
from collections.abc import Mapping

import attrs
import pytest

from qsync_core.artifacts.codec import to_plain
from qsync_core.cluster_file import parse_cluster
from qsync_core.errors import ClusterError, QSyncError
from qsync_core.ir.plan import Role
from qsync_core.ir.profile import DeviceKind, DeviceType
from qsync_torch.prepare.participants import Group, Participant, Wish, crowded, find_groups, form_groups, gather, waves

CPU = DeviceType("cpu", DeviceKind.CPU)
V100 = DeviceType("Tesla V100-SXM2-32GB", DeviceKind.CUDA, 1.0, 0, "7.0")
T4 = DeviceType("Tesla T4", DeviceKind.CUDA, 1.0, 0, "7.5")
HALF = DeviceType("NVIDIA H200", DeviceKind.CUDA, 0.5, 0, "9.0")
GIB = 1 << 30


def participant(
    rank: int, device: DeviceType, group: str = "", kernel: str = "one", cores: tuple[int, ...] = (0, 1)
) -> Participant:
    memory = 0 if device.kind is DeviceKind.CPU else 15 * GIB
    return Participant(rank, f"host-{kernel}", kernel, cores, device, memory, group, {})


def ranks(groups: list[Group]) -> dict[str, tuple[int, ...]]:
    return {group.name: group.ranks for group in groups}


def test_devices_of_one_type_and_share_are_a_group():
    found = form_groups([participant(0, V100), participant(1, T4), participant(2, T4), participant(3, HALF), participant(4, V100)])
    assert ranks(found) == {"v100": (0, 4), "t4": (1, 2), "h200-50": (3,)}
    assert [group.first.rank for group in found] == [0, 1, 3]


def test_a_device_that_nobody_knows_gives_a_name_that_files_can_have():
    odd = attrs.evolve(T4, name="Ångström/9000 (beta)")
    (group,) = form_groups([participant(0, odd)])
    assert group.name == "ngstr-m-9000-beta"


def test_the_environment_tells_equal_devices_apart():
    found = form_groups([participant(0, CPU, "strong"), participant(1, CPU, "weak"), participant(2, CPU)])
    assert ranks(found) == {"strong": (0,), "weak": (1,), "cpu": (2,)}


def test_a_named_group_has_devices_of_one_type():
    with pytest.raises(
        ClusterError, match=r"group 'a' has devices of different types \(Tesla T4 at 100% and Tesla V100.*ranks 0, 1\)"
    ):
        form_groups([participant(0, V100, "a"), participant(1, T4, "a")])


def test_a_wish_for_a_group_that_is_not_there_names_those_that_are():
    with pytest.raises(ClusterError, match="--group names 't5', but the groups of this job are v100, t4"):
        form_groups([participant(0, V100), participant(1, T4)], ["t4", "t5"])


DESCRIBED = """
[[group]]
name = "day"
device = "V100"
count = 2
role = "train"

[[group]]
name = "night"
device = "T4"
count = 4
role = "infer"
memory = "15 GiB"
ladder = ["float16", "float32"]

[[group]]
name = "away"
device = "H200"
count = 1
share = 0.5
role = "infer"
ladder = ["float32"]
"""


def test_described_groups_are_found_by_device_and_by_name():
    described = parse_cluster(DESCRIBED)
    found = find_groups([participant(0, T4), participant(1, V100), participant(2, T4, "night"), participant(3, HALF)], described)
    assert ranks(found) == {"day": (1,), "night": (0, 2), "away": (3,)}
    assert ranks(find_groups([participant(0, V100)], described)) == {"day": (0,)}


@pytest.mark.parametrize(
    "one, text",
    [
        (participant(3, CPU), r"rank 3 on host-one: no group matches this device \(cpu, cpu\)"),
        (
            participant(3, T4, "evening"),
            r"rank 3 on host-one: QSYNC_GROUP is 'evening', but the cluster file's groups are day, night",
        ),
        (participant(3, T4, "day"), r"rank 3 on host-one has Tesla T4 at 100%, but its group 'day' is described with V100 at 100%"),
        (
            attrs.evolve(participant(3, T4), memory_bytes=8 * GIB),
            r"group 'night' is described with memory 15 GiB, but rank 3 .* has 8 GiB",
        ),
    ],
)
def test_a_participant_that_does_not_fit_the_description_is_named(one, text):
    with pytest.raises(ClusterError, match=text):
        find_groups([one], parse_cluster(DESCRIBED))


def names(found: list[list[Group]]) -> list[list[str]]:
    return [[group.name for group in wave] for wave in found]


def test_groups_measure_at_once_unless_their_first_ranks_share_cores():
    a, b = Group("a", (participant(0, CPU),)), Group("b", (participant(1, CPU),))
    assert names(waves([a, b])) == [["a"], ["b"]]
    elsewhere = Group("c", (participant(2, CPU, kernel="two"), participant(3, CPU)))
    assert names(waves([a, b, elsewhere])) == [["a", "c"], ["b"]]
    pinned = [Group(str(core), (participant(core, CPU, cores=(core,)),)) for core in range(2)]
    assert names(waves(pinned)) == [["0", "1"]]
    on_gpus = [Group("t4", (participant(0, T4),)), Group("v100", (participant(1, V100),))]
    assert names(waves(on_gpus)) == [["t4", "v100"]]


def test_more_threads_than_cores_are_told_with_what_to_set():
    def on(rank: int, threads: int, **where: object) -> Participant:
        return attrs.evolve(participant(rank, CPU, **where), software={"threads": str(threads)})

    assert crowded([on(0, 2), on(1, 2)]) == (
        "the 2 processes on host-one have 4 threads for 2 cores: they wait for each other, and what is measured of them may be far "
        "off; set OMP_NUM_THREADS=1 for each, here and in training"
    )
    assert crowded([on(0, 1), on(1, 2), on(2, 1)]).endswith("far off; set OMP_NUM_THREADS=1 for each, here and in training")
    assert crowded([on(rank, 1) for rank in range(3)]) == (
        "the 3 processes on host-one have 3 threads for 2 cores: they wait for each other, and what is measured of them may be far "
        "off; start one for each core at most, here and in training"
    )
    assert crowded([on(0, 1), on(1, 1)]) == "", "a core for each"
    assert crowded([on(0, 2), on(1, 2, cores=(2, 3))]) == "", "cores of their own"
    assert crowded([on(0, 2), on(1, 2, kernel="two")]) == "", "another machine"
    assert crowded([on(0, 2), participant(1, T4)]) == "", "a GPU's process computes on no core"
    assert crowded([on(0, 4)]) == "", "one process, whose script may know why"


def test_a_wish_is_parsed():
    assert Wish.parse("night=role:infer, share:0.5,memory:20 GiB") == ("night", Wish(Role.INFER, 0.5, 20 * GIB))


@pytest.mark.parametrize(
    "text, said",
    [
        ("night", "written NAME=role:infer"),
        ("=role:infer", "written NAME=role:infer"),
        ("a=role:both", "'role:both' is not understood: 'both' is not a valid Role"),
        ("a=share:2", "'share:2' is not understood: a share is above 0 and at most 1"),
        ("a=share:nan", "a share is above 0 and at most 1"),
        ("a=memory:12", "'memory:12' is not understood: 12 bytes, less than 1 MiB; write its unit, such as '12 GiB'"),
        ("a=memory:much", "'memory:much' is not understood: not a size"),
        ("a=memory:0", "'memory:0' is not understood: a memory is above 0; leave it out for no limit"),
        ("a=memory:1GiB,role:infer,memory:2GiB", "'memory:2GiB' is not understood: memory is given twice"),
        ("a=speed:9", "'speed:9' is not understood: known are role, share and memory"),
    ],
)
def test_a_wish_that_is_wrong_says_what(text, said):
    with pytest.raises(QSyncError, match=said):
        Wish.parse(text)


def test_a_group_that_two_options_speak_of_is_refused():
    assert Wish.parse_all(["a=role:train", "b=role:infer"]) == {"a": Wish(Role.TRAIN), "b": Wish(Role.INFER)}
    with pytest.raises(QSyncError, match="--group b is given twice: write all of it in one, as b=role:infer,memory:20GiB"):
        Wish.parse_all(["b=role:infer", "a=role:train", "b=memory:9GiB"])


@pytest.mark.parametrize(
    "told, said",
    [
        (
            json.dumps(to_plain(participant(1, CPU, "../../x"))),
            r"QSYNC_GROUP is '\.\./\.\./x' there, but a group's name has up to 64",
        ),
        (json.dumps(to_plain(participant(1, CPU)) | {"cores": "all"}), r"cores: expected a list, got str"),
        ("7", "expected the fields of a Participant, got int"),
        ("{", "its description cannot be read"),
    ],
)
def test_a_rank_that_is_no_participant_is_named(told, said):
    class Two:
        def told(self, facts: Mapping[str, str]) -> dict[int, Mapping[str, str]]:
            return {0: facts, 1: {"participant": told}}

    with pytest.raises(QSyncError, match=f"rank 1 says what it cannot: .*{said}"):
        gather(Two(), participant(0, CPU))
