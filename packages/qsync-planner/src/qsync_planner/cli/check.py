"""``qsync indicate --check``.  Whatever is slow to import is imported inside the functions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import click

from qsync_core.cli.output import progress_bar
from qsync_planner.cli.table import print_table

if TYPE_CHECKING:
    from rich.console import Console

    from qsync_core.ir.dag import PrecisionDag
    from qsync_core.ir.observations import Observations
    from qsync_core.ir.sensitivity import Sensitivity
    from qsync_core.ir.variant import Variant
    from qsync_planner.indicator_check.compare import Check


@attrs.frozen
class CheckRequest:
    """What the command line asks for; its options say what each is."""

    truth: Path | None
    job: str | None
    budget_s: float
    device: str
    against: str | None
    page: Path | None


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
        ObservationError: when the truth is of another graph or lacks a variant, an indicator can not be computed, the budget is no
            finite number or too small, or nobody can measure the job.
        ArtifactError: when truth or page can not be written; before anything is measured.
        PluginError: naming an indicator that was asked for and fails.
    """
    from qsync_core.artifacts.atomic_file import check_writable, write_atomically
    from qsync_core.errors import ObservationError
    from qsync_planner.indicator_check import compare, read_truth
    from qsync_planner.indicator_check.page import render_page

    if observations is None:
        raise click.UsageError("--check needs OBSERVATIONS; they say which updates and batches to measure")
    if request.page is not None and request.page.suffix not in (".html", ".htm"):
        raise ObservationError(f"the comparison is written as a page; give --page a name that ends in .html, got {request.page}")
    if not (math.isfinite(request.budget_s) and request.budget_s > 0):
        raise ObservationError(f"--budget is a number of seconds, finite and greater than 0; got {request.budget_s:g}")
    if request.truth is not None and request.job is not None and not request.truth.exists():
        check_writable(request.truth)
    if request.page is not None:
        check_writable(request.page)
    variants = sorted({variant for by_variant in sensitivity.omega.values() for variant in by_variant}, key=str)
    omegas = {sensitivity.indicator: sensitivity.omega}
    others, notes = _others(observations, dag, variants, request.against, sensitivity.indicator)
    omegas |= {name: other.omega for name, other in others.items()}
    measured = _truth(observations, dag, variants, request)
    check = compare(omegas, read_truth(measured, dag), [*notes, *_differences(observations, measured)])
    if request.page is not None:
        try:
            write_atomically(request.page, render_page(check).encode())
        except OSError as error:
            raise ObservationError(f"can not write {request.page}: {error.strerror or error}") from None
    return check


def render_check(console: Console, check: Check, page: Path | None) -> None:
    """Print the comparison for people."""
    from qsync_planner.indicator_check.rows import LEGEND, agreement_table, decrement_table, sentences

    batches = f"{check.iterations} batch{'es' if check.iterations != 1 else ''}"
    console.print(f"\nagainst the truth, measured on {batches}:", markup=False)
    for table in (agreement_table(check), decrement_table(check)):
        if table.rows:
            print_table(console, list(table.header), [list(row) for row in table.rows])
            console.print()
    console.print(f"{LEGEND}\n", markup=False)
    for sentence in sentences(check):
        console.print(sentence, markup=False)
    console.print(f"wrote {page}" if page else "with --page PAGE.html this is a picture", markup=False)


def _others(
    observations: Observations, dag: PrecisionDag, variants: list[Variant], against: str | None, first: str
) -> tuple[dict[str, Sensitivity], list[str]]:
    """The other indicators: those that were named, or all whose collectors ran; and a note for each of these that failed."""
    from qsync_core.errors import QSyncError
    from qsync_planner.indicate import indicate
    from qsync_planner.indicators import available_indicators
    from qsync_planner.indicators.blame import blamed, observed_collectors

    if against is not None:
        names = dict.fromkeys(filter(None, (name.strip() for name in against.split(","))))
        return {name: indicate(observations, dag, variants, name) for name in names if name != first}, []
    observed = observed_collectors(observations)
    found: dict[str, Sensitivity] = {}
    notes: list[str] = []
    for name, indicator in available_indicators(announce=notes.append).items():
        try:
            with blamed(indicator, observations):
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
            click.echo(f"the truth is read from {request.truth}; remove that file to measure it again", err=True)
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
                announce=lambda text: click.echo(text, err=True),
                progress=update,
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
    """In what the truth was measured otherwise than the indicators were observed."""
    notes = []
    if measured.batch_size != observations.batch_size:
        notes.append(
            f"the truth was measured on batches of {measured.batch_size} samples, the indicators were observed on "
            f"{observations.batch_size}: magnitudes differ"
        )
    for name in ("seed", "warmup"):
        ours, theirs = observations.settings.get(name), measured.settings.get(name)
        if ours != theirs:
            notes.append(f"the truth was measured with {name} {theirs}, the indicators were observed with {ours}: other updates")
    return notes
