"""What is asked of the plans of a run folder: that they may move samples, that operators stay; from stored profiles."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import attrs
import pytest

from qsync_core.artifacts.files import digest, from_bytes, to_bytes
from qsync_core.cluster_file import parse_cluster
from qsync_core.ir.communication import PYTORCH_DEFAULTS, CollectiveCosts, CommunicationSettings, MeasuredCollectives
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.plan import PrecisionPlan
from qsync_core.ir.profile import CollectiveModel, Profile
from qsync_core.run_folder import RunFolder
from qsync_planner.allocator import Inputs, Request, allocate
from qsync_torch.prepare import planning
from qsync_torch.prepare.asked import Asked
from qsync_torch.prepare.board import Board
from qsync_torch.prepare.folder import Folder, Made

STORED = resources.files("qsync_torch.demo").joinpath("h200_resnet50")
TOGETHER, TIMELINE = "plan infer+train", "timeline infer+train"


@pytest.fixture
def measured(tmp_path: Path) -> tuple[Folder, PrecisionDag]:
    """A run folder that lacks nothing but plans."""
    folder = Folder(RunFolder(tmp_path), None, writes=True)
    folder.run.ledger.parent.mkdir()
    dag = from_bytes(STORED.joinpath("dag.qsync").read_bytes(), PrecisionDag)
    names = ("profile train", "profile infer", "sensitivity")
    stored = {name: STORED.joinpath(f"{name.replace(' ', '.')}.qsync").read_bytes() for name in names}
    folder.publish({name: Made({"graph": digest(dag)}, stored[name]) for name in names})
    folder.made.clear()
    return folder, dag


@pytest.mark.slow
def test_samples_move_only_where_that_is_asked_for(measured, monkeypatch):
    folder, dag = measured
    text = STORED.joinpath("cluster.toml").read_text("utf-8")
    cluster = parse_cluster(text.replace("count = 2", "count = 1"), "the stored cluster")  # alone, nobody to communicate with

    def uniform(inputs: Inputs, request: Request) -> PrecisionPlan:
        """Quick, and with the batches of a plan that was free to choose them."""
        plan = allocate(inputs, attrs.evolve(request, solver="uniform", batch="equal"))
        moved = request.batch == "free" and len(plan.groups) == 2
        return attrs.evolve(plan, local_batches={"train": 160, "infer": 96}) if moved else plan

    monkeypatch.setattr(planning, "allocate", uniform)

    def plan(batch: str) -> Mapping[str, int]:
        folder.made.clear()
        folder.publish(*planning.Planning(folder, dag, cluster, Board(None), Asked(batch=batch)).plan())
        return from_bytes(folder.read(TOGETHER), PrecisionPlan).local_batches

    assert plan("equal") == {"train": 128, "infer": 128}
    timeline = folder.run.path / folder.parts[TIMELINE].file
    assert timeline.is_file()

    assert plan("free") == {"train": 160, "infer": 96}
    assert (TIMELINE in folder.parts, timeline.exists()) == (False, False)
    assert plan("free") == {"train": 160, "infer": 96}
    assert folder.made == []

    assert plan("equal") == {"train": 128, "infer": 128}
    assert timeline.is_file()


def test_plans_are_made_anew_for_what_is_asked_and_kept_for_as_long_as_it_is_asked(measured):
    folder, dag = measured
    text = STORED.joinpath("cluster.toml").read_text("utf-8")
    cluster = parse_cluster(text.replace("count = 2", "count = 1"), "the stored cluster")

    def plan(**asked: Any) -> tuple[PrecisionPlan, list[str]]:
        folder.made.clear()
        folder.publish(*planning.Planning(folder, dag, cluster, Board(None), Asked(**asked)).plan())
        return from_bytes(folder.read(TOGETHER), PrecisionPlan), list(folder.made)

    lowest, made = plan(solver="uniform")
    assert TOGETHER in made
    assert plan(solver="uniform") == (lowest, [])
    full, made = plan(solver="full")
    assert TOGETHER in made
    kept, made = plan(solver="uniform", keep=("fc", "re:layer4.*conv1"))
    assert TOGETHER in made
    chosen = {name: plan.group("infer").assignments for name, plan in (("low", lowest), ("full", full), ("kept", kept))}
    stay = {op_id for op_id in chosen["low"] if op_id.fqn == "fc" or re.match(r"layer4.*conv1$", op_id.fqn)}
    assert len(stay) == 4
    for op_id, assigned in chosen["kept"].items():
        assert assigned.variant == chosen["full" if op_id in stay else "low"][op_id].variant
    assert any("kept at float32, as asked (--keep): fc, re:layer4.*conv1" in note for note in kept.notes)


def test_plans_are_for_what_the_script_gives_its_wrapper_and_made_anew_where_that_changes(measured):
    folder, dag = measured
    text = STORED.joinpath("cluster.toml").read_text("utf-8")
    cluster = parse_cluster(text.replace("count = 2", "count = 1"), "the stored cluster")
    profiles = {name: from_bytes(folder.read(f"profile {name}"), Profile) for name in ("train", "infer")}
    slow = MeasuredCollectives(0, CollectiveModel(2, "nccl", 20_000.0, 0.02), dict.fromkeys(profiles, 0.1))
    costs = CollectiveCosts(
        dag.model,
        digest(dag),
        {group.name: group.count for group in cluster.groups},
        {name: profile.device for name, profile in profiles.items()},
        {name: {} for name in profiles},
        (slow,),
        dict.fromkeys(profiles, 0.005),
        100_000,
    )
    folder.publish({"communication infer+train": Made({"graph": digest(dag)}, to_bytes(costs))})

    reasons: list[str] = []

    def settings(**decided: Any) -> tuple[CommunicationSettings, list[str]]:
        folder.made.clear()
        asked = planning.Planning(folder, dag, cluster, Board(None), Asked(solver="uniform"), communication=decided)
        folder.publish(*asked.plan())
        communication = from_bytes(folder.read(TOGETHER), PrecisionPlan).communication
        assert communication is not None
        reasons.append(communication.reason)
        return communication.settings, list(folder.made)

    free, made = settings()
    assert TOGETHER in made
    assert (free.gradient_as_bucket_view, free.broadcast_buffers) == (True, False)
    defaults = attrs.asdict(PYTORCH_DEFAULTS)
    del defaults["max_ctas"]
    own, made = settings(**defaults)
    assert own == PYTORCH_DEFAULTS
    assert TOGETHER in made
    assert settings(**defaults) == (own, [])
    assert "DistributedDataParallel has them" not in reasons[0]
    words = "with bucket, broadcast, view and static as the script's DistributedDataParallel has them, PyTorch's defaults: "
    assert reasons[1].startswith(words)
    # Where a parameter is in no bucket of the graph's, others cannot be made: the first step then says what differs.
    part = attrs.evolve(dag, buckets=dag.buckets[1:])
    wanted = defaults | {"bucket_cap_mb": 50.0}
    for graph, left in ((dag, wanted), (part, {name: value for name, value in wanted.items() if name != "bucket_cap_mb"})):
        assert planning.Planning(folder, graph, cluster, Board(None), communication=wanted)._decided(costs) == left
