"""``qsync indicate`` and its ``--check``.  Slow imports happen inside the functions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from qsync_core.cli.options import OUTPUT, FiniteRange, output_option
from qsync_core.cli.output import emit, json_option, print_table, progress_bar, say
from qsync_planner.cli.writing import check_page

if TYPE_CHECKING:
    from rich.console import Console

    from qsync_core.ir.dag import PrecisionDag
    from qsync_core.ir.observations import Observations
    from qsync_core.ir.sensitivity import Sensitivity
    from qsync_core.ir.variant import Variant
    from qsync_planner.indicator_check.compare import Check


_PATH = click.Path(path_type=Path)


@click.command()
@click.argument("observations", required=False, type=_PATH)
@click.option("--dag", type=_PATH, help="PrecisionDag of the model.")
@click.option("--indicator", default="auto", show_default=True, help="Which indicator; --list shows them.")
@click.option("--cluster", type=_PATH, help="Rate the variants of this cluster's ladders instead of the observed ones.")
@output_option("Sensitivity", required=False)
@click.option("--check", "check_flag", is_flag=True, help="Compare with the truth, measured by lowering one operator at a time.")
@click.option("--truth", type=_PATH, help="With --check: the measured truth; read where there is such a file, else written.")
@click.option("--job", help="With --check: measure the truth of this job (a name or file.py:function).")
@click.option(
    "--budget",
    type=FiniteRange(min=0, min_open=True),
    default=120.0,
    show_default=True,
    help="With --job: seconds that measuring may take.",
)
@click.option("--device", default="", help="With --job: cpu, cuda or cuda:0.  [that of the observations]")
@click.option("--chains", is_flag=True, help="With --job: also measure what fused chains keep in 8 bit.")
@click.option("--against", help="With --check: further indicators, as in hutchinson,lossvar.  [all that the observations allow]")
@click.option("--page", type=OUTPUT, help="With --check: write the comparison as an HTML page with pictures.")
@click.option("--list", "list_flag", is_flag=True, help="List the installed indicators and stop.")
@json_option
def indicate(
    observations: Path | None,
    dag: Path | None,
    indicator: str,
    cluster: Path | None,
    output: Path | None,
    check_flag: bool,
    truth: Path | None,
    job: str | None,
    budget: float,
    device: str,
    chains: bool,
    against: str | None,
    page: Path | None,
    list_flag: bool,
    json_flag: bool,
) -> None:
    """Turn OBSERVATIONS into the sensitivity of every operator at every precision.

    With --check also compare it, and other indicators, with the measured truth: --truth names a file with it, --job measures it.
    """
    from qsync_core.artifacts.files import load, save
    from qsync_core.cluster_file import read_cluster
    from qsync_core.ir.dag import PrecisionDag
    from qsync_core.ir.observations import Observations
    from qsync_core.units import format_estimate
    from qsync_planner.indicate import indicate as compute
    from qsync_planner.indicators import available_indicators

    if list_flag:
        found = available_indicators(announce=say)
        rows = [{"name": i.name, "collectors": list(i.collectors), "summary": i.summary} for i in found.values()]
        emit(
            json_flag,
            {"indicators": rows},
            lambda console: print_table(console, ["indicator", "what"], [[r["name"], r["summary"]] for r in rows]),
        )
        return
    for_check = {"--truth": truth, "--job": job, "--chains": chains or None, "--against": against, "--page": page}
    check_usage(check_flag, {**for_check, "--device": device or None})
    if dag is None or (output is None and not check_flag):
        raise click.UsageError(f"Missing option '{'--dag' if dag is None else '-o'}'.")
    variants = [v for group in read_cluster(cluster).groups for v in group.ladder] if cluster else []
    observed = load(observations, Observations) if observations else None
    graph = load(dag, PrecisionDag)
    sensitivity = compute(observed, graph, variants, indicator)
    if output is not None:
        save(sensitivity, output)
    ranked = sorted(
        (
            (value, str(op_id), variant.label, sensitivity.errors.get(op_id, {}).get(variant))
            for op_id, by in sensitivity.omega.items()
            for variant, value in by.items()
        ),
        key=lambda row: (-row[0], row[1], row[2]),
    )
    data: dict[str, Any] = {
        "output": None if output is None else str(output),
        "model": sensitivity.model,
        "indicator": sensitivity.indicator,
        "operators": len(sensitivity.omega),
        "variants": sorted({variant for by in sensitivity.omega.values() for variant in map(str, by)}),
        "notes": list(sensitivity.notes),
        "omega": [{"operator": name, "label": label, "omega": value, "error": error} for value, name, label, error in ranked],
    }

    check = None
    if check_flag:
        check = run_check(sensitivity, observed, graph, CheckRequest(truth, job, budget, device, against, page, chains))
        data["check"] = check.as_dict()

    def render(console: Console) -> None:
        where = f" → {output}" if output else ""
        console.print(f"{sensitivity.model}: Ω of {len(sensitivity.omega)} operators by {sensitivity.indicator}{where}")
        for note in sensitivity.notes:
            console.print(f"  {note}")
        rows = [[name, label, format_estimate(value, error)] for value, name, label, error in ranked[:10]]
        print_table(console, ["most sensitive", "at", "Ω"], rows)
        if check is not None:
            render_check(console, check, page)

    emit(json_flag, data, render)


@attrs.frozen
class CheckRequest:
    """What the command line asks for; its options say what each is."""

    truth: Path | None
    job: str | None
    budget_s: float
    device: str
    against: str | None
    page: Path | None
    chains: bool = False


def check_usage(check_flag: bool, options: Mapping[str, object]) -> None:
    """Refuse options that only a check reads, where there is none.

    Raises:
        UsageError: naming the first of them.
    """
    if not check_flag and (given := [name for name, value in options.items() if value is not None]):
        raise click.UsageError(f"{given[0]} is for --check; add it, or leave {given[0]} out")


def run_check(sensitivity: Sensitivity, observations: Observations | None, dag: PrecisionDag, request: CheckRequest) -> Check:
    """Compare an indicator, and others on the same observations, with the truth; measure it where it is not there.

    Raises:
        UsageError: when there is neither a truth nor a job to measure it of.
        ObservationError: when the truth is of another graph or lacks a variant, an indicator cannot be computed, the budget is no
            finite number or too small, or no installed package can measure the job.
        ArtifactError: when truth or page cannot be written; before anything is measured.
        PluginError: naming an indicator that was asked for and fails.
    """
    from qsync_core.artifacts.atomic_file import check_writable, write_or_refuse
    from qsync_core.errors import ObservationError
    from qsync_planner.indicator_check import compare, read_kept_inputs, read_truth
    from qsync_planner.indicator_check.page import render_page

    if observations is None:
        raise click.UsageError("--check needs OBSERVATIONS; they say which updates and batches to measure")
    check_page(request.page, "the comparison", "give --page", ObservationError)
    if not (math.isfinite(request.budget_s) and request.budget_s > 0):
        raise ObservationError(f"--budget is a number of seconds, finite and greater than 0; got {request.budget_s:g}")
    if request.truth is not None and request.job is not None and not request.truth.exists():
        check_writable(request.truth)
    if request.chains and request.job is None:
        raise click.UsageError("--chains says what to measure; name the job with --job")
    adjustable = {operator.op_id for operator in dag.adjustable}
    variants = sorted({v for op_id, by_variant in sensitivity.omega.items() if op_id in adjustable for v in by_variant}, key=str)
    others, notes = _others(observations, dag, variants, request.against, sensitivity.indicator)
    measured = _truth(observations, dag, variants, request)
    omegas = {sensitivity.indicator: sensitivity.omega, **{name: other.omega for name, other in others.items()}}
    check = compare(omegas, read_truth(measured, dag), [*notes, *_differences(observations, measured)])
    raters = {name: omega for name, omega in omegas.items() if omega.keys() - adjustable}
    truth = read_kept_inputs(measured, dag, set.intersection(*map(set, raters.values())) - adjustable) if raters else None
    if truth is not None:
        check = attrs.evolve(check, kept_inputs=compare(raters, truth))
    if request.page is not None:
        write_or_refuse(request.page, render_page(check).encode(), ObservationError)
    return check


def render_check(console: Console, check: Check, page: Path | None) -> None:
    """Print the comparison for people."""
    from qsync_planner.indicator_check.page import KEPT_INPUTS, LEGEND, agreement_table, decrement_table, sentences

    batches = f"{check.iterations} batch{'es' if check.iterations != 1 else ''}"
    console.print(f"\nagainst the truth, measured on {batches}:")
    for table in (agreement_table(check), decrement_table(check)):
        if table.rows:
            print_table(console, list(table.header), [list(row) for row in table.rows])
            console.print()
    if check.kept_inputs is not None:
        console.print(f"{KEPT_INPUTS}:")
        kept = agreement_table(check.kept_inputs)
        print_table(console, list(kept.header), [list(row) for row in kept.rows])
        console.print()
    console.print(f"{LEGEND}\n")
    for sentence in sentences(check):
        console.print(sentence)
    console.print(f"wrote {page}" if page else "with --page PAGE.html this is a picture")


def _others(
    observations: Observations, dag: PrecisionDag, variants: list[Variant], against: str | None, first: str
) -> tuple[dict[str, Sensitivity], list[str]]:
    """The other indicators: those that were named, or all whose collectors ran; and a note for each of these that failed."""
    from qsync_core.errors import QSyncError
    from qsync_planner.indicate import indicate
    from qsync_planner.indicators import available_indicators
    from qsync_planner.indicators.registry import guarded, observed_collectors

    if against is not None:
        names = dict.fromkeys(filter(None, (name.strip() for name in against.split(","))))
        return {name: indicate(observations, dag, variants, name) for name in names if name != first}, []
    observed = observed_collectors(observations)
    found: dict[str, Sensitivity] = {}
    notes: list[str] = []
    for name, indicator in available_indicators(announce=notes.append).items():
        try:
            with guarded(indicator, observations):
                if name != first and set(observed).issuperset(indicator.collectors):
                    found[name] = indicate(observations, dag, variants, indicator)
        except QSyncError as error:
            notes.append(f"{name} is left out: {error}")
    return found, notes


def _truth(observations: Observations, dag: PrecisionDag, variants: list[Variant], request: CheckRequest) -> Observations:
    """The truth: of a file, of the observations themselves, or measured now."""
    from qsync_core.artifacts.files import load, save
    from qsync_core.errors import ObservationError
    from qsync_core.ir import observations as terms
    from qsync_core.ir.observations import Observations
    from qsync_core.ir.precision import Precision
    from qsync_core.ir.variant import Variant
    from qsync_core.plugins.hooks import TruthRequest
    from qsync_core.plugins.registry import Registry

    if request.truth is not None and (request.job is None or request.truth.exists()):
        if request.job is not None:
            say(f"the truth is read from {request.truth}; remove that file to measure it again")
        elif not request.truth.exists():
            raise ObservationError(f"there is no file {request.truth}; add --job JOB to measure the truth and write it there")
        return load(request.truth, Observations)
    if request.job is None:
        if any(series.collector == terms.MONTECARLO for series in observations.series):
            return observations
        raise click.UsageError("--check needs the truth: --truth FILE that has it, or --job JOB to measure it")
    lowered = [variant for variant in variants if variant != Variant.plain(Precision.FLOAT32)]
    registry = Registry.load()
    with progress_bar("truth") as update:
        measured = registry.measure_truth(
            TruthRequest(
                job=request.job,
                dag=dag,
                observations=observations,
                variants=lowered,
                budget_s=request.budget_s,
                device=request.device,
                announce=say,
                progress=update,
                chains=request.chains,
            )
        )
    if measured is None:
        raise ObservationError(
            f"no installed package can measure the truth of {request.job}; install qsync-torch{registry.all_disabled()}"
        )
    if request.truth is not None:
        save(measured, request.truth)
    return measured


def _differences(observations: Observations, measured: Observations) -> list[str]:
    """Say in what the truth was measured otherwise than the indicators were observed."""
    notes = []
    if measured.batch_size != observations.batch_size:
        notes.append(
            f"the truth was measured on batches of {measured.batch_size} samples, the indicators were observed on "
            f"{observations.batch_size}: magnitudes differ"
        )
    if missing := set(observations.iterations).difference(measured.iterations):
        seen = len(observations.iterations)
        both = f"{seen - len(missing)} of the {seen} observed updates"
        notes.append(f"the truth was measured at {both}: magnitudes differ by as much as batches do")
    for name in ("seed", "warmup"):
        ours, theirs = observations.settings.get(name), measured.settings.get(name)
        if ours != theirs:
            notes.append(f"the truth was measured with {name} {theirs}, the indicators were observed with {ours}: other updates")
    return notes
