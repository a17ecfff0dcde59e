"""Which sets of groups are planned, and what each is to the others that are left."""

from __future__ import annotations

from types import SimpleNamespace

from qsync_core.cluster_file import parse_cluster
from qsync_core.ir.plan import Role
from qsync_core.run_folder import key_of
from qsync_torch.prepare import planning
from qsync_torch.prepare.planning import part_of, survivors

GROUP = '[[group]]\nname = "{0}"\ndevice = "{1}"\ncount = 1\nrole = "{2}"\n{3}\n'
LADDER = 'ladder = ["float16", "float32"]\nmemory = "8 GiB"'
CLUSTER = parse_cluster(
    GROUP.format("v100", "V100", "train", "")
    + GROUP.format("t4", "T4", "infer", LADDER)
    + GROUP.format("a10", "A10", "infer", LADDER)
    + '[[link]]\nbetween = ["v100", "t4"]\nbandwidth_gbps = 10\n[[link]]\nbetween = ["a10", "t4"]\nbandwidth_gbps = 5\n'
)
PROFILES = {name: SimpleNamespace(steps=[SimpleNamespace(iteration_ns=ns)]) for name, ns in (("v100", 3), ("t4", 9), ("a10", 5))}


def roles(*names: str) -> dict[str, Role]:
    return {group.name: group.role for group in part_of(CLUSTER, names, PROFILES).groups}


def test_every_set_of_groups_that_may_be_left_is_planned_the_whole_job_first():
    found = [key_of(names) for names in survivors(CLUSTER)]
    assert found == ["a10+t4+v100", "t4+v100", "a10+v100", "a10+t4", "v100", "t4", "a10"]


def test_groups_keep_their_roles_where_one_trains():
    assert roles("t4", "v100") == {"v100": Role.TRAIN, "t4": Role.INFER}


def test_without_a_training_group_the_fastest_that_is_left_trains():
    assert roles("t4", "a10") == {"t4": Role.INFER, "a10": Role.TRAIN}
    part = part_of(CLUSTER, ["t4"], PROFILES)
    assert [(group.role, [rung.label for rung in group.ladder]) for group in part.groups] == [(Role.TRAIN, ["float32"])]
    assert part.group("t4").memory_bytes == 8 << 30


def test_links_go_with_their_groups():
    assert [set(link.between) for link in part_of(CLUSTER, ["t4", "a10"], PROFILES).links] == [{"t4", "a10"}]


def test_groups_whose_collectives_were_not_measured_are_planned_with_those_of_all(monkeypatch):
    """A verdict on three groups counts what collectives take from compute; so does the plan of the two that it recommends."""
    known = {"a10+t4+v100": "of all", "t4": "of two T4s"}
    given = {}
    monkeypatch.setattr(planning, "digest", str)
    monkeypatch.setattr(planning, "from_bytes", lambda *_, **__: None)
    folder = SimpleNamespace(parts={"sensitivity": SimpleNamespace(sha256="")}, read=lambda _: b"", is_kept=lambda *_: False)
    flow = planning.Planning(folder, "graph", CLUSTER, SimpleNamespace(stage=lambda _: lambda *__: None))
    monkeypatch.setattr(planning.Planning, "profiles", lambda _: PROFILES)
    monkeypatch.setattr(planning.Planning, "_costs", lambda _, names: known.get(key_of(names)))
    monkeypatch.setattr(planning.Planning, "_decided", lambda *_: {})

    def planned(_, key, names, cluster, profiles, sensitivity, costs, inputs):
        given[key] = costs
        assert inputs["communication"] == (costs or "")
        return {}

    monkeypatch.setattr(planning.Planning, "_planned", planned)
    flow.plan()
    several = dict.fromkeys(("a10+t4+v100", "t4+v100", "a10+v100", "a10+t4"), "of all")
    assert given == {**several, "v100": None, "t4": "of two T4s", "a10": None}


def test_steps_of_a_few_more_samples_than_measured_ones_are_not_measured_again(monkeypatch):
    profiles = {
        "v100": SimpleNamespace(batches=[SimpleNamespace(batch_size=57)]),
        "t4": SimpleNamespace(batches=[SimpleNamespace(batch_size=39)]),
        "a10": SimpleNamespace(batches=[]),
    }
    plan = SimpleNamespace(recommended_way=None, local_batches={})
    folder = SimpleNamespace(run=SimpleNamespace(load_plan=lambda _: plan))
    flow = planning.Planning(folder, SimpleNamespace(batch_size=48), CLUSTER, SimpleNamespace(stage=None))
    monkeypatch.setattr(planning.Planning, "profiles", lambda _: profiles)
    for wanted, measured in (
        ({"v100": 58, "t4": 38, "a10": 48}, {}),
        ({"v100": 59, "t4": 37, "a10": 47}, {"v100": 59, "t4": 37}),
        ({"v100": 57, "t4": 39, "a10": 46}, {"a10": 46}),
    ):
        plan.local_batches = wanted
        assert flow.batches_to_measure() == measured
