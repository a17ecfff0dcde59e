"""Jobs to report: drawn ones, ones with names that attack the page, and a whole run folder of stored profiles."""

from __future__ import annotations

import shutil
from pathlib import Path

import attrs
from planning_cases import Case, random_case

from qsync_core.artifacts.files import digest, load, save
from qsync_core.cluster_file import read_cluster
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.profile import Profile
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.timeline import Timeline
from qsync_core.run_folder import RunFolder
from qsync_planner.allocator import Inputs, allocate
from qsync_planner.reporting.ways_to_run import Job, predicted_timeline

DATA = Path(__file__).resolve().parents[4] / "tests" / "data"
EVIL = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>\"'&{{ 7 * 7 }}"


def job_of(case: Case) -> Job:
    return Job(case.inputs, allocate(case.inputs))


def measured_like(timeline: Timeline, factor: float = 1.03) -> Timeline:
    """A measurement that took longer than predicted, in every part."""
    intervals = tuple(
        attrs.evolve(i, start_ns=round(i.start_ns * factor), duration_ns=round(i.duration_ns * factor)) for i in timeline.intervals
    )
    period = round(timeline.iteration_ns * factor)
    return attrs.evolve(timeline, source="measured", iteration_ns=period, intervals=intervals)


def evil_job() -> Job:
    """Every text of the artifacts that may hold anything holds :data:`EVIL`."""
    case = random_case(3, infer_groups=2, ladder=None)
    names = {operator.op_id: OpId(f"{operator.op_id.fqn}{EVIL}", operator.op_id.call) for operator in case.dag.operators}
    operators = tuple(
        attrs.evolve(o, op_id=names[o.op_id], inputs=tuple(names[i] for i in o.inputs), variant_group=f"{o.variant_group}{EVIL}")
        for o in case.dag.operators
    )
    dag = attrs.evolve(case.dag, model=EVIL, operators=operators)
    cluster = attrs.evolve(
        case.cluster, name=EVIL, groups=tuple(attrs.evolve(g, device=f"{g.device}{EVIL}") for g in case.cluster.groups)
    )
    profiles = {
        name: attrs.evolve(
            profile,
            model=EVIL,
            dag_digest=digest(dag),
            device=attrs.evolve(profile.device, name=f"{profile.device.name}{EVIL}"),
            cost_index={names[op_id]: by for op_id, by in profile.cost_index.items()},
            costs=tuple(attrs.evolve(cost, backend=EVIL) for cost in profile.costs),
            software={"torch": EVIL},
        )
        for name, profile in case.profiles.items()
    }
    omega = {names[op_id]: by for op_id, by in case.sensitivity.omega.items()}
    sensitivity = attrs.evolve(case.sensitivity, model=EVIL, dag_digest=digest(dag), omega=omega, indicator=EVIL)
    inputs = Inputs(dag, cluster, profiles, sensitivity)
    plan = allocate(inputs)
    return Job(inputs, attrs.evolve(plan, notes=(*plan.notes, EVIL)))


def stored_run(path: Path, name: str = "h200/resnet50") -> RunFolder:
    """A run folder of profiles that were measured on a GPU, with plans for both sets of groups, and a measured step."""
    run, source = RunFolder(path), DATA / name
    for folder in (path / "profiles", run.plan(()).parent, run.timeline("measured", ()).parent):
        folder.mkdir(parents=True)
    shutil.copy(source / "cluster.toml", run.cluster)
    shutil.copy(source / "dag.qsync", run.dag)
    shutil.copy(source / "sensitivity.qsync", run.sensitivity)
    cluster, dag, sensitivity = read_cluster(run.cluster), load(run.dag, PrecisionDag), load(run.sensitivity, Sensitivity)
    names = [group.name for group in cluster.groups]
    for group in names:
        shutil.copy(source / f"profile.{group}.qsync", run.profile(group))
    profiles = {group: load(run.profile(group), Profile) for group in names}
    inputs = Inputs(dag, cluster, profiles, sensitivity)
    plan = allocate(inputs)
    save(plan, run.plan(names))
    alone = attrs.evolve(cluster, groups=cluster.groups[:1], links=(attrs.evolve(cluster.links[0], between=("train", "train")),))
    save(allocate(Inputs(dag, alone, {"train": profiles["train"]}, sensitivity)), run.plan(["train"]))
    predicted = predicted_timeline(Job(inputs, plan))
    assert predicted is not None
    save(measured_like(predicted), run.timeline("measured", names))
    return run
