"""``qsync replay`` and ``qsync verify`` as commands: output, files, exit codes and messages."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest
from click.testing import CliRunner, Result
from synthetic import FLOAT16_RUNG, INT8_RUNG, T4, V100, hybrid_cluster, hybrid_profiles, transformer

from clusters import cluster_text
from qsync_core.artifacts.files import digest, load, save
from qsync_core.cli.root import cli
from qsync_core.ir.plan import Assignment, GroupPlan, PrecisionPlan
from qsync_core.ir.timeline import Timeline
from qsync_planner.matching import Inputs
from qsync_planner.replayer.replay import Replayer

TOML = cluster_text(
    "hybrid",
    (20, 32),
    train={"device": "V100", "count": 2, "base": "float32"},
    infer={"device": "T4", "count": 2, "base": "float32", "ladder": ["int8>float32", "float16", "float32"]},
)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """A small job in files: graph, profiles, cluster and a uniform float16 plan."""
    folder = tmp_path_factory.mktemp("job")
    dag, cluster = transformer(layers=1, batch=2, tokens=32), hybrid_cluster()
    profiles = {name: attrs.evolve(p, dag_digest=digest(dag)) for name, p in hybrid_profiles(dag).items()}
    replayer = Replayer(Inputs(dag, cluster, profiles))
    variants = {"train": replayer.base_variants("train"), "infer": dict.fromkeys((o.op_id for o in dag.adjustable), FLOAT16_RUNG)}
    groups = tuple(
        GroupPlan(
            group.name,
            group.role,
            group.count,
            profiles[group.name].device,
            group.base,
            {op_id: Assignment(variant, "aten", "", "") for op_id, variant in variants[group.name].items()},
        )
        for group in cluster.groups
    )
    ids = tuple(operator.op_id for operator in dag.adjustable)
    plan = PrecisionPlan(dag.model, digest(dag), ids, {}, "uniform", "random", 0, 0, 0.0, None, groups, "train")
    save(dag, folder / "dag.qsync")
    save(plan, folder / "plan.qsync")
    for name, found in profiles.items():
        save(found, folder / f"{name}.qsync")
    (folder / "cluster.toml").write_text(TOML)
    return {"folder": folder, "replayer": replayer, "variants": variants, "plan": plan}


def qsync(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def replay(folder: Path, *more: object, plan: str = "plan.qsync") -> Result:
    profiles = [f"--profile={name}={folder / name}.qsync" for name in ("train", "infer")]
    return qsync("replay", folder / plan, "--dag", folder / "dag.qsync", "--cluster", folder / "cluster.toml", *profiles, *more)


def test_a_trace_that_can_not_be_written_is_one_sentence(job: dict[str, object], tmp_path: Path) -> None:
    result = replay(job["folder"], "--perfetto", tmp_path / "missing" / "trace.json")  # type: ignore[arg-type]
    assert isinstance(result.exception, SystemExit)
    assert result.exit_code == 1
    missing = tmp_path / "missing"
    assert f"error: cannot write {missing / 'trace.json'}: there is no folder {missing}; make it, or name another" in result.output


def test_replay_prints_what_the_replayer_says(job: dict[str, object]) -> None:
    result = replay(job["folder"], "--json")  # type: ignore[arg-type]
    assert result.exit_code == 0, result.output
    expected = job["replayer"].replay(job["variants"])  # type: ignore[attr-defined]
    printed = json.loads(result.output)
    assert printed["iteration_ns"] == expected.iteration_ns
    assert printed["groups"]["infer"]["peak_bytes"] == expected.groups["infer"].peak_bytes
    text = replay(job["folder"]).output  # type: ignore[arg-type]
    assert "infer" in text
    assert "peak memory" in text


def test_parts_of_the_model_are_left_out_by_name(job: dict[str, object]) -> None:
    folder: Path = job["folder"]  # type: ignore[assignment]
    whole = json.loads(replay(folder, "--json").output)
    less = json.loads(replay(folder, "--json", "--without", "casts", "--without", "dispatch").output)
    assert (whole["without"], less["without"]) == ([], ["casts", "dispatch"])
    assert less["iteration_ns"] < whole["iteration_ns"]
    assert {group["dispatch_ns"] for group in less["groups"].values()} == {0}
    assert "an iteration, without casts, dispatch" in replay(folder, "--without", "casts", "--without", "dispatch").output
    refused = replay(folder, "--without", "kernels")
    assert refused.exit_code == 2
    assert "'kernels' is not one of 'casts', 'formats', 'dispatch', 'contention'" in refused.output


def test_replay_writes_the_timeline_and_a_trace(job: dict[str, object], tmp_path: Path) -> None:
    result = replay(job["folder"], "-o", tmp_path / "t.qsync", "--perfetto", tmp_path / "t.json")  # type: ignore[arg-type]
    assert result.exit_code == 0, result.output
    timeline = load(tmp_path / "t.qsync", Timeline)
    assert timeline == job["replayer"].timeline(job["variants"])  # type: ignore[attr-defined]
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == len(timeline.intervals)


def test_a_plan_for_other_groups_is_refused_and_nothing_is_written(job: dict[str, object], tmp_path: Path) -> None:
    plan: PrecisionPlan = job["plan"]  # type: ignore[assignment]
    folder: Path = job["folder"]  # type: ignore[assignment]
    save(attrs.evolve(plan, groups=plan.groups[:1]), folder / "half.qsync")
    result = replay(folder, "-o", tmp_path / "t.qsync", plan="half.qsync")
    assert result.exit_code == 1
    assert "the plan is for groups train, but cluster 'hybrid' has infer, train" in str(result.exception) + result.output
    assert not (tmp_path / "t.qsync").exists()


def test_verify_compares_and_limits_the_error(job: dict[str, object], tmp_path: Path) -> None:
    predicted: Timeline = job["replayer"].timeline(job["variants"])  # type: ignore[attr-defined]
    stretched = tuple(attrs.evolve(i, duration_ns=i.duration_ns * 2) for i in predicted.intervals)
    measured = attrs.evolve(predicted, source="measured", iteration_ns=2 * predicted.iteration_ns, intervals=stretched)
    save(predicted, tmp_path / "p.qsync")
    save(measured, tmp_path / "m.qsync")
    result = qsync("verify", tmp_path / "p.qsync", tmp_path / "m.qsync", "--json", "--top", 3)
    assert result.exit_code == 0, result.output
    printed = json.loads(result.output)
    assert printed["iteration_ns"]["error"] == -0.5
    assert {row["error"] for row in printed["phases"]} == {-0.5}
    assert len(printed["operators"]) == 3
    assert printed["worst"] == printed["operators"][0]
    text = qsync("verify", tmp_path / "p.qsync", tmp_path / "m.qsync").output
    assert "worst cost: " in text
    assert "-50.0%" in text
    failed = qsync("verify", tmp_path / "p.qsync", tmp_path / "m.qsync", "--max-error", 10)
    assert failed.exit_code == 1
    assert "off by -50.0%, more than the 10% allowed" in str(failed.exception) + failed.output


def test_the_rungs_of_the_cluster_file_are_those_of_the_profile() -> None:
    # The hand-written TOML and the synthetic ladder must mean the same variants, or every test above would fail at the profile.
    assert hybrid_cluster().group("infer").ladder[:2] == (INT8_RUNG, FLOAT16_RUNG)
    assert (T4.name, V100.name) == ("T4", "V100")
