"""``qsync indicate``, ``qsync plan``, ``qsync plan --diff`` and ``qsync explain`` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import click
import pytest
from click.testing import CliRunner, Result
from synthetic import FLOAT32_RUNG, LADDER, T4, V100, roofline_profile, transformer

from clusters import cluster_text
from qsync_core.artifacts.files import digest, load, save
from qsync_core.errors import ClusterError, InfeasibleError, PlanError, QSyncError
from qsync_core.ir.communication import CollectiveCosts, CommunicationSettings, MeasuredCollectives
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.observations import LOSSVAR, W_VAR_GRAD, X_VAR_GRAD, Y_VAR_GRAD, Observations, Series
from qsync_core.ir.plan import PrecisionPlan
from qsync_core.ir.profile import CollectiveModel, Profile
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.timeline import Timeline
from qsync_planner.plugin import qsync_register_commands

CLUSTER = cluster_text(
    "hybrid",
    (20, 32),
    train={"device": "V100", "count": 2, "base": "float32"},
    infer={"device": "T4", "count": 2, "ladder": ["int8>float32", "float16", "float32"], "memory": "15 GiB"},
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The artifacts of a small transformer, and two batch sizes of it."""
    for name, batch in (("dag", 4), ("dag8", 8)):
        dag = transformer(layers=2, hidden=768, heads=12, batch=batch, tokens=128)
        save(dag, tmp_path / f"{name}.qsync")
        for group, chip, ladder in (("train", V100, (FLOAT32_RUNG,)), ("infer", T4, LADDER)):
            profile = attrs.evolve(roofline_profile(dag, chip, ladder), dag_digest=digest(dag))
            save(profile, tmp_path / f"{group}-{name}.qsync")
        if name == "dag":
            series = tuple(
                Series(op.op_id, v, LOSSVAR, term, (1.0 + i, 2.0))
                for i, op in enumerate(dag.adjustable)
                for v in LADDER[:2]
                for term in (X_VAR_GRAD, W_VAR_GRAD, Y_VAR_GRAD)
            )
            save(Observations(dag.model, digest(dag), (10, 11), 2, "budget", series), tmp_path / "observations.qsync")
    (tmp_path / "cluster.toml").write_text(CLUSTER, encoding="utf-8")
    return tmp_path


def run(*arguments: object) -> Result:
    """Run a planner command; QSyncErrors come out as exceptions."""
    group = click.Group()
    qsync_register_commands(group)
    result = CliRunner().invoke(group, [str(argument) for argument in arguments])
    if isinstance(result.exception, QSyncError):
        raise result.exception
    return result


def plan_arguments(folder: Path, output: str, *more: object) -> list[object]:
    return [
        *("plan", "--dag", folder / "dag.qsync", "--cluster", folder / "cluster.toml"),
        *("--profile", f"train={folder}/train-dag.qsync", "--profile", f"infer={folder}/infer-dag.qsync"),
        *("-o", folder / output, *more),
    ]


def indicate(folder: Path) -> Path:
    output = folder / "sensitivity.qsync"
    arguments = ["indicate", folder / "observations.qsync", "--dag", folder / "dag.qsync", "--cluster", folder / "cluster.toml"]
    assert run(*arguments, "-o", output).exit_code == 0
    return output


def test_from_observations_to_an_explained_plan(folder: Path) -> None:
    sensitivity = indicate(folder)
    found = load(sensitivity, Sensitivity)
    assert found.indicator == "lossvar"
    result = run(*plan_arguments(folder, "plan.qsync", "--sensitivity", sensitivity))
    assert result.exit_code == 0
    plan = load(folder / "plan.qsync", PrecisionPlan)
    assert plan.solver == "auto"
    assert plan.input_digests["sensitivity"] == digest(found)
    for text in ("this plan", "baseline uniform", "verdict: ", "train (2 × V100)", "infer (2 × T4)", "15 GiB"):
        assert text in result.output
    result = run("explain", folder / "plan.qsync", "layer.1.attention")
    assert result.exit_code == 0
    assert "layer.1.attention.query#0" in result.output
    assert "layer.0" not in result.output
    assert "a training group keeps its base precision" in result.output


@pytest.fixture
def costs(folder: Path) -> Path:
    """What communication costs the folder's job."""
    dag = load(folder / "dag.qsync", PrecisionDag)
    devices = {name: load(folder / f"{name}-dag.qsync", Profile).device for name in ("train", "infer")}
    measured = tuple(
        MeasuredCollectives(ctas, CollectiveModel(4, "nccl", 30_000.0, 0.05), {"train": slow, "infer": 2 * slow})
        for ctas, slow in ((0, 0.12), (2, 0.02))
    )
    found = CollectiveCosts(
        dag.model,
        digest(dag),
        {"train": 2, "infer": 2},
        devices,
        {"train": {}, "infer": {}},
        measured,
        {"train": 0.001, "infer": 0.002},
    )
    save(found, folder / "costs.qsync")
    return folder / "costs.qsync"


def test_a_negative_amount_of_memory_is_explained(folder: Path) -> None:
    result = run(*plan_arguments(folder, "plan.qsync", "--sensitivity", indicate(folder)))
    plan = load(folder / "plan.qsync", PrecisionPlan)
    parts = {group.group: {"parameters": 5, "measured beside these": 0} for group in plan.groups}
    said = []
    for beside in (3, -3):
        parts[plan.groups[0].group] |= {"measured beside these": beside}
        save(attrs.evolve(plan, memory=parts), folder / "parts.qsync")
        said.append("a negative amount: measured steps had that much less" in run("explain", folder / "parts.qsync").output)
    assert (result.exit_code, said) == (0, [False, True])


def test_a_plan_says_how_to_communicate_and_replays_so(folder: Path, costs: Path) -> None:
    result = run(*plan_arguments(folder, "plan.qsync", "--sensitivity", indicate(folder), "--communication", costs))
    assert result.exit_code == 0
    plan = load(folder / "plan.qsync", PrecisionPlan)
    assert plan.communication is not None
    assert plan.communication.settings.max_ctas == 2
    explained = run("explain", folder / "plan.qsync").output
    for output in (result.output, explained):
        words = " ".join(output.split())
        assert "communication of this plan" in words
        assert "PyTorch's defaults" in words
        assert "apply it: DistributedDataParallel(model, **applied.ddp_options())" in words
        assert "NCCL_MAX_CTAS=2 in the environment of every rank" in words
    data = json.loads(run("explain", folder / "plan.qsync", "--json").output)["communication"]
    assert data["settings"]["max_ctas"] == 2
    assert data["alternatives"][0] == {
        "label": plan.communication.settings.label,
        "settings": attrs.asdict(plan.communication.settings),
        "iteration_ns": plan.predicted_iteration_ns,
    }
    job = plan_arguments(folder, "x")[1:-2]
    replayed = json.loads(run("replay", folder / "plan.qsync", *job, "--communication", costs, "--json").output)
    assert replayed["iteration_ns"] == plan.predicted_iteration_ns
    assert CommunicationSettings(**replayed["communication"]) == plan.communication.settings
    others = {choice.settings: choice.iteration_ns for choice in plan.communication.alternatives}
    result = run("replay", folder / "plan.qsync", *job, "--communication", costs, "--communication-settings", "ctas=0", "--json")
    ways = [way for way in others if way == attrs.evolve(plan.communication.settings, max_ctas=0)]
    assert [others[way] for way in ways] == [json.loads(result.output)["iteration_ns"]]
    text = " ".join(run("replay", folder / "plan.qsync", *job).output.split())
    assert "without what open all-reduces take from compute: pass --communication" in text
    assert "an iteration, with 2 NCCL CTAs" in " ".join(
        run("replay", folder / "plan.qsync", *job, "--communication", costs).output.split()
    )


def test_settings_of_communication_that_are_given(folder: Path, costs: Path) -> None:
    uniform = ("--solver", "uniform", "--communication", costs, "--communication-settings")
    run(*plan_arguments(folder, "tiny.qsync", *uniform, "bucket=1e-9"))
    tiny = load(folder / "tiny.qsync", PrecisionPlan)
    replayed = json.loads(run("replay", folder / "tiny.qsync", *plan_arguments(folder, "x")[1:-2], "--json").output)
    trained = [p for p in load(folder / "dag.qsync", PrecisionDag).parameters if p.requires_grad]
    for group in tiny.groups:  # buckets and where gradients live are the plan's, without any costs too
        assert len(replayed["groups"][group.group]["bucket_ready_ns"]) == len(trained)
        assert replayed["groups"][group.group]["peak_bytes"] == group.predicted_peak_bytes
    assert run(*plan_arguments(folder, "a.qsync", *uniform, "ctas=0,bucket=own,view=off")).exit_code == 0
    plan = load(folder / "a.qsync", PrecisionPlan)
    assert plan.communication is not None
    assert plan.communication.settings == CommunicationSettings()
    for text, words in (
        ("ctas=3", "all-reduces with 3 CTAs were not measured"),
        ("ctas", "communication settings are written ctas=N"),
    ):
        with pytest.raises(PlanError, match=words):
            run(*plan_arguments(folder, "b.qsync", *uniform, text))
    for command in (
        plan_arguments(folder, "b.qsync", "--solver", "uniform"),
        ["replay", folder / "a.qsync", *plan_arguments(folder, "x")[1:-2]],
    ):
        with pytest.raises(PlanError, match="communication settings need measured costs: run 'qsync communicate'"):
            run(*command, "--communication-settings", "ctas=0")
    fewer = attrs.evolve(load(costs, CollectiveCosts), ranks={"train": 2, "infer": 1})
    save(fewer, costs)
    with pytest.raises(ClusterError, match="measured with 1 ranks of group 'infer', but cluster 'hybrid' has 2"):
        run("replay", folder / "a.qsync", *plan_arguments(folder, "x")[1:-2], "--communication", costs)
    result = run(*plan_arguments(folder, "c.html", "--pareto", "--communication", costs))
    assert result.exit_code == 2
    assert "--pareto has no contention in it" in result.output
    assert not (folder / "b.qsync").exists()


def test_json_of_every_command(folder: Path) -> None:
    sensitivity = indicate(folder)
    result = run("indicate", folder / "observations.qsync", "--dag", folder / "dag.qsync", "-o", folder / "s.qsync", "--json")
    data = json.loads(result.output)
    assert data["indicator"] == "lossvar"
    assert data["operators"] == 13
    assert data["omega"][0]["omega"] >= data["omega"][-1]["omega"]
    data = json.loads(run(*plan_arguments(folder, "a.qsync", "--sensitivity", sensitivity, "--json")).output)
    plan = load(folder / "a.qsync", PrecisionPlan)
    assert data["predicted_iteration_ns"] == plan.predicted_iteration_ns
    assert set(data["baselines_ns"]) == {"full", "uniform", "dynamic-batch"}
    assert run(*plan_arguments(folder, "b.qsync", "--solver", "full")).exit_code == 0
    data = json.loads(run("plan", "--diff", folder / "a.qsync", folder / "b.qsync", "--json").output)
    assert data["totals"]["solver"] == {"before": "auto", "after": "full"}
    data = json.loads(run("explain", folder / "a.qsync", "--json").output)
    assert len(data["groups"][1]["operators"]) == 13
    data = json.loads(run("indicate", "--list", "--json").output)
    assert [row["name"] for row in data["indicators"]][:2] == ["hutchinson", "lossvar"]


def test_diff_as_text(folder: Path) -> None:
    run(*plan_arguments(folder, "a.qsync", "--solver", "full"))
    run(*plan_arguments(folder, "b.qsync", "--solver", "uniform"))
    result = run("plan", "--diff", folder / "a.qsync", folder / "b.qsync")
    assert result.exit_code == 0
    assert "infer: 13 operators differ" in result.output
    assert "train: 0 operators differ" in result.output


@pytest.mark.parametrize("how", [("--solver", "dynamic-batch"), ("--batch", "free")])
@pytest.mark.parametrize("second_profile", [False, True])
def test_replaying_a_balanced_plan_gives_what_the_plan_says(folder: Path, second_profile: bool, how: tuple[str, str]) -> None:
    for name in ("infer-dag", "infer-dag8"):  # slow enough that batches are moved
        profile = load(folder / f"{name}.qsync", Profile)
        costs = tuple(
            attrs.evolve(c, forward_compute_ns=500 * c.forward_compute_ns, backward_compute_ns=500 * c.backward_compute_ns)
            for c in profile.costs
        )
        save(attrs.evolve(profile, costs=costs), folder / f"{name}.qsync")
    further = (
        ["--batch-dag", folder / "dag8.qsync", "--batch-profile", f"infer={folder}/infer-dag8.qsync"] if second_profile else []
    )
    rated = ["--sensitivity", indicate(folder)] if how[0] == "--batch" else []
    assert run(*plan_arguments(folder, "balanced.qsync", *how, *rated, *further)).exit_code == 0
    plan = load(folder / "balanced.qsync", PrecisionPlan)
    assert plan.local_batches["train"] > 4 > plan.local_batches["infer"]
    arguments = ["replay", folder / "balanced.qsync", "--dag", folder / "dag.qsync", "--cluster", folder / "cluster.toml"]
    arguments += ["--profile", f"train={folder}/train-dag.qsync", "--profile", f"infer={folder}/infer-dag.qsync", *further]
    data = json.loads(run(*arguments, "--json", "-o", folder / "balanced-timeline.qsync").output)
    assert data["iteration_ns"] == plan.predicted_iteration_ns
    assert data["local_batches"] == dict(plan.local_batches)
    peaks = {group.group: group.predicted_peak_bytes for group in plan.groups}
    assert {name: group["peak_bytes"] for name, group in data["groups"].items()} == peaks
    timeline = load(folder / "balanced-timeline.qsync", Timeline)
    assert (timeline.iteration_ns, dict(timeline.peak_bytes)) == (plan.predicted_iteration_ns, peaks)
    assert "local batch" in run(*arguments).output


def test_dynamic_batch_takes_profiles_at_a_second_batch_size(folder: Path) -> None:
    more = ["--solver", "dynamic-batch", "--batch-dag", folder / "dag8.qsync"]
    more += [x for g in ("train", "infer") for x in ("--batch-profile", f"{g}={folder}/{g}-dag8.qsync")]
    result = run(*plan_arguments(folder, "plan.qsync", *more))
    assert result.exit_code == 0
    assert "from two profiles" in result.output
    wrong = ["--batch-dag", folder / "dag8.qsync", "--batch-profile", f"infer={folder}/infer-dag.qsync"]
    with pytest.raises(PlanError, match="was not measured for the graph"):
        run(*plan_arguments(folder, "plan.qsync", "--solver", "full", *wrong))
    result = run(*plan_arguments(folder, "plan.qsync", "--solver", "full", "--batch-dag", folder / "dag8.qsync"))
    assert result.exit_code == 2
    assert "--batch-dag and --batch-profile go together" in result.output
    result = run(*plan_arguments(folder, "plan.qsync", *more, "--batch-profile", f"infer={folder}/infer-dag.qsync"))
    assert result.exit_code == 2
    assert "group 'infer' is given twice" in result.output


def test_missing_options_are_named(folder: Path) -> None:
    for arguments, name in (
        (["plan"], "--dag"),
        (["plan", "--dag", folder / "dag.qsync"], "--cluster"),
        (["indicate", folder / "observations.qsync"], "--dag"),
        (["indicate", folder / "observations.qsync", "--dag", folder / "dag.qsync"], "-o"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2
        assert f"Missing option '{name}'." in result.output


def test_a_failed_plan_writes_nothing_and_leaves_the_old_one(folder: Path) -> None:
    run(*plan_arguments(folder, "plan.qsync", "--solver", "full"))
    before = (folder / "plan.qsync").read_bytes()
    (folder / "cluster.toml").write_text(CLUSTER.replace("15 GiB", "1 MiB"), encoding="utf-8")
    with pytest.raises(InfeasibleError, match="no precision plan fits the memory of group 'infer'"):
        run(*plan_arguments(folder, "plan.qsync", "--sensitivity", indicate(folder)))
    assert (folder / "plan.qsync").read_bytes() == before
    assert not list(folder.glob("*.tmp"))
