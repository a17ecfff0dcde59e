"""``write_report``: everything about a prepared job on one page (docs/report.md)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from qsync_core.artifacts.atomic_file import write_or_refuse
from qsync_core.artifacts.files import load
from qsync_core.artifacts.perfetto import comparison_to_perfetto, to_perfetto
from qsync_core.artifacts.whole_file import read_whole
from qsync_core.errors import ArtifactError, PlanError
from qsync_core.ir.communication import CollectiveCosts
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.plan import PrecisionPlan
from qsync_core.ir.profile import Profile
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.timeline import Timeline
from qsync_core.run_folder import RunFolder
from qsync_core.units import format_bytes, format_ns
from qsync_planner.allocator.exact.program import is_installed as has_highs
from qsync_planner.allocator.exact.search import Effort
from qsync_planner.allocator.exact.tradeoff import tradeoff
from qsync_planner.matching import Inputs
from qsync_planner.reporting.charts import (
    memory_figure,
    precisions_figure,
    sensitivity_figure,
    steps_figure,
    timeline_figure,
)
from qsync_planner.reporting.page import Fact, Lines, Page, Section, Table, render, require_pages
from qsync_planner.reporting.tradeoff_page import tradeoff_section
from qsync_planner.reporting.ways_to_run import Job, WayToRun, predicted_timeline, ways_to_run

_MAX_START_BYTES = 1 << 20
_CURVE_BUDGETS, _CURVE_LIMITS = 2, 5
_CURVE_EFFORT = Effort(gap=1e-2, work=5_000, columns=2_000)
"""A coarser trade-off curve than that of ``qsync plan --pareto``, which is for picking: seconds."""
_CURVE_OPERATORS = 250
"""Curves of larger models take longer than a report may."""


def write_report(run: RunFolder, *, first: Sequence[Section] = (), title: str = "") -> Path:
    """Write ``report.html`` and, beside it, the predicted and the measured step as one trace for Perfetto.

    There is no trace where neither is known: no operator's time is in batches that no profile has.

    Args:
        run: a finished run folder: its plan for all groups is reported.  A measured timeline is shown where there is one.
        first: sections of the caller's own, after the facts.
        title: of the page; by default the model's name.

    Returns:
        The page's path.

    Raises:
        PlanError: when qsync-planner's extra ``report`` is not installed, or the folder is not finished or cannot be written.
        ArtifactError: when a file cannot be read.
    """
    require_pages()
    job, measured = read_job(run)
    plans = [(names, run.load_plan(names)) for names in run.planned_groups()]
    return write_job_report(run, job, measured, plans, first=(*first, *_start_section(run)), title=title)


def write_job_report(
    run: RunFolder,
    job: Job,
    measured: Timeline | None,
    plans: Sequence[tuple[Sequence[str], PrecisionPlan]] = (),
    *,
    first: Sequence[Section] = (),
    title: str = "",
) -> Path:
    """The same of a job that is in memory; ``plans`` are those of the sets of groups that may be there.

    Raises:
        PlanError: when qsync-planner's extra ``report`` is not installed, or the folder cannot be written.
    """
    predicted = predicted_timeline(job)
    page = render(report_page(job, predicted, measured, plans, first=first, title=title))
    write_or_refuse(run.report, page.encode(), PlanError)
    if timeline := predicted or measured:
        trace = comparison_to_perfetto(predicted, measured) if predicted and measured else to_perfetto(timeline)
        write_or_refuse(run.trace, json.dumps(trace).encode(), PlanError)
    else:  # one that lies there is of another plan
        run.trace.unlink(missing_ok=True)
    return run.report


def read_job(run: RunFolder) -> tuple[Job, Timeline | None]:
    """What is in a run folder of the job of all its groups, and its measured step where there is one.

    Raises:
        PlanError: when it is no run folder, has no plan for all groups, or that or a measurement is of another graph.
        ArtifactError: when a file is missing or cannot be read.
    """
    cluster = run.read_cluster()
    names = [group.name for group in cluster.groups]
    plan = run.load_plan(names)
    # Costs of other numbers of ranks than the cluster file's lie there too, and the plan is made without them.
    costs, apart = run.communication(names), [name for name in names if f"communication:{name}" in plan.input_digests]
    measured = run.timeline("measured", names)
    inputs = Inputs(
        load(run.dag, PrecisionDag),
        cluster,
        {name: load(run.profile(name), Profile) for name in names},
        load(run.sensitivity, Sensitivity),
        communication=load(costs, CollectiveCosts) if "communication" in plan.input_digests and costs.is_file() else None,
        apart={name: load(path, CollectiveCosts) for name in apart if (path := run.communication([name])).is_file()},
    )
    return Job(inputs, plan), load(measured, Timeline) if measured.is_file() else None


def _start_section(run: RunFolder) -> list[Section]:
    """What ``qsync prepare`` says in its end of how training is started."""
    if not run.start.is_file():
        return []
    try:
        text = read_whole(run.start, _MAX_START_BYTES, "files of this name").decode("utf-8")
        return [Section("How to train", (), (Lines(text.strip()),))]
    except (OSError, UnicodeDecodeError) as reason:
        raise ArtifactError(f"cannot read {run.start}: {reason}") from None


def report_page(
    job: Job,
    predicted: Timeline | None,
    measured: Timeline | None,
    plans: Sequence[tuple[Sequence[str], PrecisionPlan]] = (),
    *,
    first: Sequence[Section] = (),
    title: str = "",
) -> Page:
    """The page of :func:`write_job_report`."""
    plan = job.plan
    ways = ways_to_run(job, measured)
    counts = {group.name: group.count for group in job.cluster.groups}
    sections = [
        *first,
        Section(
            "Where the time of a step goes",
            (f"One rank of each group, {_batches(job)}. Hatched is time in which the device does nothing.",),
            (steps_figure(ways, counts),),
        ),
        Section("Precision of every operator", _lowered_sentences(plan), (precisions_figure(job.dag, plan),)),
    ]
    if sensitivity := sensitivity_figure(job.sensitivity, plan):
        sections.append(Section("Sensitivity", (), (sensitivity,)))
    sections += [_memory_section(plan, measured), *_curve_section(job)]
    if timeline := timeline_figure(predicted, measured):
        sections.append(Section("Timeline", _timeline_sentences(predicted, measured), (timeline,)))
    sections += [*_subsets_section(job, plans), _details_section(job)]
    groups = ", ".join(f"{group.group}: {group.count} × {group.device.name}{_share(group.device.share)}" for group in plan.groups)
    return Page(title or f"QSync report: {plan.model}", sections, _verdict(job), _facts(job, ways, measured), groups)


def _batches(job: Job) -> str:
    if job.keeps_batches:
        return "with the same batch"
    sizes = ", ".join(f"{job.batch(group.name)} of {group.name}" for group in job.cluster.groups)
    return f"with the same batch of {job.dag.batch_size} samples, but under the plan with {sizes}"


def _share(share: float) -> str:
    return "" if share == 1 else f" at {share:.0%}"


def _verdict(job: Job) -> str:
    plan = job.plan
    if plan.verdict is None:
        return f"A step is predicted to take {format_ns(plan.predicted_iteration_ns)}."
    return f"{plan.verdict.sentence[0].upper()}{plan.verdict.sentence[1:]}."


def _facts(job: Job, ways: Sequence[WayToRun], measured: Timeline | None) -> list[Fact]:
    plan = job.plan
    planned = next(way for way in ways if way.title == "QSync")
    beside = "predicted"
    if measured is not None and measured.iteration_ns:
        error = plan.predicted_iteration_ns / measured.iteration_ns - 1
        beside = f"predicted; measured {format_ns(measured.iteration_ns)} ({error:+.1%})"
    facts = [Fact("Step", format_ns(plan.predicted_iteration_ns), beside)]
    speedup = f", {plan.verdict.speedup:.2f} × {ways[0].title}" if plan.verdict else ""
    facts.append(Fact("Throughput", f"{planned.samples_per_second:,.1f}", f"samples/s{speedup}"))
    for group in plan.groups:
        lowered = sum(assignment.variant.compute is not group.base for assignment in group.assignments.values())
        if lowered:
            facts.append(Fact(f"Lowered on {group.group}", f"{lowered} of {len(group.assignments)}", "operators"))
    if plan.indicator:
        largest = max((way.omega for way in ways), default=0.0)
        below = f"{plan.objective / largest:.2g} of uniform precision's" if largest else ""
        facts.append(Fact("Gradient error Σ Ω", f"{plan.objective:.3g}", below))
    for group in plan.groups:
        if group.memory_budget_bytes:
            beside = f"of {format_bytes(group.memory_budget_bytes)}"
            facts.append(Fact(f"Memory on {group.group}", format_bytes(plan.process_bytes(group)), beside))
    return facts


def _lowered_sentences(plan: PrecisionPlan) -> list[str]:
    found = []
    for group in plan.groups:
        counts = Counter(assignment.variant.label for assignment in group.assignments.values())
        found.append(f"{group.group}: " + ", ".join(f"{count} {label}" for label, count in counts.most_common()) + ".")
    return found


def _memory_section(plan: PrecisionPlan, measured: Timeline | None) -> Section:
    rows = []
    for group in plan.groups:
        seen = measured.peak_bytes.get(group.group, 0) if measured else 0
        budget = format_bytes(group.memory_budget_bytes) if group.memory_budget_bytes else "no limit given"
        whole = sum(plan.memory.get(group.group, {}).values())
        cells = (format_bytes(whole) if whole else "", budget, format_bytes(group.predicted_peak_bytes))
        rows.append((group.group, *cells, format_bytes(seen) if seen else "not measured"))
    table = Table(("group", "process, predicted", "budget", "tensors at their peak, predicted", "measured"), rows)
    return Section("Memory against the budget", (), (memory_figure(plan), table))


def _curve_section(job: Job) -> list[Section]:
    title = "Other plans"
    if not has_highs():
        return [Section(title, ("The trade-off curve needs HiGHS: qsync-planner's extra 'exact'",))]
    if len(job.dag.adjustable) > _CURVE_OPERATORS or not job.keeps_batches:
        return [Section(title, ("‘qsync plan --pareto’ draws the trade-off between Ω, time and memory.",))]
    try:
        curve = tradeoff(
            job.inputs,
            budgets=_CURVE_BUDGETS,
            limits=_CURVE_LIMITS,
            effort=_CURVE_EFFORT,
        )
    except PlanError as reason:  # a model whose steps no program describes
        return [Section(title, (f"There is no trade-off curve: {reason}.",))]
    if len(curve.points) < 2:
        return [Section(title, ("No other plan is better than this one in Ω, in step time or in memory.",))]
    return [tradeoff_section(curve, title, job.plan.predicted_iteration_ns, folded=True)]


def _timeline_sentences(predicted: Timeline | None, measured: Timeline | None) -> list[str]:
    both = "Predicted and measured steps" if predicted and measured else "The step"
    name = RunFolder(".").trace.name
    sentences = [f"{both} of all ranks are also in {name}, beside this page: open it in ui.perfetto.dev to look closer."]
    if measured and measured.rank_group:
        sentences.append(
            "Measured steps are recorded operator by operator, which slows them down; ranks are shown level at the ends of their "
            "collectives."
        )
    return sentences


def _subsets_section(job: Job, plans: Sequence[tuple[Sequence[str], PrecisionPlan]]) -> list[Section]:
    rows = []
    for names, plan in plans:
        batches = sum(group.count * plan.local_batches.get(group.group, job.dag.batch_size) for group in plan.groups)
        samples = job.dag.accumulate * batches
        period = plan.predicted_iteration_ns
        rate = f"{samples * 1e9 / period:,.1f}" if period else ""
        memory = ", ".join(f"{group.group} {format_bytes(plan.process_bytes(group))}" for group in plan.groups)
        rows.append((", ".join(names), format_ns(period), rate, " ".join(_lowered_sentences(plan)), memory))
    if len(rows) < 2:
        return []
    header = ("groups", "step", "samples/s", "operators", "memory")
    table = Table(header, rows, words=frozenset((0, 3, 4)))
    return [
        Section(
            "When groups are missing", ("A restart without some of the groups takes the plan of those that are there.",), (table,)
        )
    ]


def _details_section(job: Job) -> Section:
    plan = job.plan
    operators = [
        (
            str(op_id),
            *(cell for group in plan.groups for cell in (group.assignments[op_id].variant.label, group.assignments[op_id].reason)),
        )
        for op_id in plan.operator_ids
    ]
    header = ("operator", *(cell for group in plan.groups for cell in (group.group, "because")))
    tables = [
        Table(
            header,
            operators,
            words=frozenset(range(len(header))),
            summary=f"Why every one of {len(operators)} operators is what it is",
        )
    ]
    settings = [
        (group.group, name, value) for group in plan.groups for name, value in sorted(plan.software.get(group.group, {}).items())
    ]
    if settings:
        tables.append(
            Table(
                ("group", "setting", "value"),
                settings,
                words=frozenset((0, 1, 2)),
                summary="Software and settings that the prediction rests on",
            )
        )
    inputs = [(name, digest) for name, digest in sorted(plan.input_digests.items())]
    tables.append(Table(("artifact", "digest"), inputs, words=frozenset((0, 1)), summary="Artifacts that the plan was made from"))
    communication = (
        [f"Communication: {plan.communication.settings.label}; {plan.communication.reason}."] if plan.communication else []
    )
    notes = [f"{note[0].upper()}{note[1:]}." for note in plan.notes if note]
    return Section("Details", [*communication, *notes], tables)
