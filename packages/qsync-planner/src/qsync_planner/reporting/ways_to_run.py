"""The ways to run a job that its report compares, each with what one rank of every group does in a step."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from qsync_core.errors import InfeasibleError
from qsync_core.ir.cluster import Cluster
from qsync_core.ir.communication import PYTORCH_DEFAULTS
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import PrecisionPlan, Role
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.timeline import Timeline
from qsync_planner.allocator.allocate import allocate
from qsync_planner.allocator.communication import Ways
from qsync_planner.allocator.jobs import Jobs, samples_of, samples_per_second
from qsync_planner.allocator.request import Request
from qsync_planner.allocator.verdict import Means
from qsync_planner.matching import Inputs, check_plan
from qsync_planner.replayer.chains import Chosen
from qsync_planner.replayer.replay import Replayer, group_variants
from qsync_planner.step_parts import StepParts, exposed_waiting, group_parts


@attrs.frozen
class Job:
    """What a job's steps are predicted from: the inputs of its plan, with a sensitivity, and the plan.

    Raises:
        PlanError: when the plan is of another graph.
    """

    inputs: Inputs
    plan: PrecisionPlan

    def __attrs_post_init__(self) -> None:
        """Match the plan with its inputs."""
        check_plan(self.plan, self.dag)

    @property
    def dag(self) -> PrecisionDag:
        """The model."""
        return self.inputs.dag

    @property
    def cluster(self) -> Cluster:
        """The groups, as a job of this graph has them."""
        return self.inputs.cluster

    @property
    def sensitivity(self) -> Sensitivity:
        """Ω."""
        assert self.inputs.sensitivity is not None, "a job's report needs a sensitivity"
        return self.inputs.sensitivity

    def batch(self, group: str) -> int:
        """Samples of one rank in a micro-batch under the plan."""
        return self.plan.local_batches.get(group, self.dag.batch_size)

    @property
    def keeps_batches(self) -> bool:
        """Whether every rank has the traced batch under the plan: for others no single operator's cost is known."""
        return all(self.batch(group.name) == self.dag.batch_size for group in self.cluster.groups)


@attrs.frozen
class WayToRun:
    """One way to run a job.

    Attributes:
        iteration_ns: the period of its steps.
        samples: in a step, of all ranks.
        parts: one rank's step, by group; waiting_ns: what of it is waiting for other ranks.
        note: a reason not to take it.
        omega: Σ Ω over all inference devices.
    """

    title: str
    iteration_ns: int
    samples: int
    parts: Mapping[str, StepParts]
    waiting_ns: Mapping[str, int] = attrs.field(factory=dict)
    note: str = ""
    omega: float = 0.0

    @property
    def samples_per_second(self) -> float:
        """The samples that the whole job trains on in a second."""
        return samples_per_second(self.samples, self.iteration_ns)


def ways_to_run(job: Job, measured: Timeline | None = None) -> list[WayToRun]:
    """The best groups alone, full precision everywhere, uniform precision, the plan, and what its verdict recommends instead.

    Last is the plan as it was measured.
    Without an inference group nothing is lowered in any way.
    """
    found = _alone(job)
    if any(group.role is Role.INFER for group in job.cluster.groups):
        found += [*_baseline(job, "full", "full precision everywhere")]
        found += _baseline(job, "uniform", "uniform low precision")
    samples = samples_of(job.dag, job.cluster, {group.name: job.batch(group.name) for group in job.cluster.groups})
    found.append(_planned(job, samples))
    found += _recommended(job)
    if measured is not None:
        found.append(_of(measured, "QSync, measured", samples))
    return found


def predicted_timeline(job: Job) -> Timeline | None:
    """A step under the plan; None where its batches are not those of the profiles."""
    if not job.keeps_batches:
        return None
    return _replayer(job, job.plan).timeline(_variants(job.plan))


def _planned(job: Job, samples: int) -> WayToRun:
    timeline = predicted_timeline(job)
    if timeline is not None:
        return _of(timeline, "QSync", samples, omega=job.plan.objective)
    period = job.plan.predicted_iteration_ns
    parts = {
        group.group: StepParts(group.predicted_busy_ns, 0, 0, 0, max(0, period - group.predicted_busy_ns))
        for group in job.plan.groups
    }
    return WayToRun("QSync", period, samples, parts, note="batches differ between groups, so phases are not told apart")


def _recommended(job: Job) -> list[WayToRun]:
    """The way that the plan's verdict recommends, where that is another plan than this one; none where nothing need be planned."""
    best = job.plan.recommended_way
    if best is None or best.options in ("", Means.PLAIN.options):
        return []
    parts = {name: StepParts(best.iteration_ns, 0, 0, 0, 0) for name in best.groups}
    samples = samples_of(job.dag, job.cluster, best.local_batches)
    note = "predicted as a whole, so phases are not told apart"
    return [WayToRun(f"qsync prepare or plan … {best.options}", best.iteration_ns, samples, parts, note=note)]


def _baseline(job: Job, solver: str, title: str) -> list[WayToRun]:
    samples = samples_of(job.dag, job.cluster, {group.name: job.dag.batch_size for group in job.cluster.groups})
    try:
        plan = allocate(job.inputs, Request(solver))
    except InfeasibleError:
        if solver != "full":
            return []
        return [_of(_replayer(job, job.plan).timeline({}), title, samples, "does not fit in memory")]
    return [_of(_replayer(job, plan).timeline(_variants(plan)), title, samples, omega=plan.objective)]


def _alone(job: Job) -> list[WayToRun]:
    """The best groups alone, as the plan's verdict has them (:mod:`qsync_planner.allocator.verdict`)."""
    jobs = Jobs(Ways(job.inputs, {}), _variants(job.plan))
    if not jobs.training or len(jobs.names) < 2:
        return []
    best = jobs.best_alone()
    samples = samples_of(job.dag, job.cluster, best.local_batches)
    return [_of(jobs.timeline(best), f"{' and '.join(best.groups)} alone", samples)]


def _replayer(job: Job, plan: PrecisionPlan) -> Replayer:
    return Replayer(job.inputs, settings=plan.communication.settings if plan.communication else PYTORCH_DEFAULTS)


def _variants(plan: PrecisionPlan) -> dict[str, dict[OpId, Chosen]]:
    return {group.group: group_variants(group) for group in plan.groups}


def _of(timeline: Timeline, title: str, samples: int, note: str = "", omega: float = 0.0) -> WayToRun:
    groups = list(dict.fromkeys(timeline.rank_group.values()))
    parts = {name: group_parts(timeline, name) for name in groups}
    waits = {name: exposed_waiting(timeline, name) for name in groups}
    return WayToRun(title, timeline.iteration_ns, samples, parts, waits, note, omega)
