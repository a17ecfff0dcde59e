"""``qsync indicate``.  Whatever is slow to import is imported inside the command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qsync_core.cli.output import emit, json_option
from qsync_planner.cli.table import print_table

if TYPE_CHECKING:
    from rich.console import Console

_PATH = click.Path(path_type=Path)


@click.command()
@click.argument("observations", required=False, type=_PATH)
@click.option("--dag", type=_PATH, help="PrecisionDag of the model.")
@click.option("--indicator", default="auto", show_default=True, help="Which indicator; --list shows them.")
@click.option("--cluster", type=_PATH, help="Rate the variants of this cluster's ladders instead of the observed ones.")
@click.option("-o", "--output", type=_PATH, help="Where to write the Sensitivity.")
@click.option("--check", "check_flag", is_flag=True, help="Compare with the truth, measured by lowering one operator at a time.")
@click.option("--truth", type=_PATH, help="With --check: the measured truth; read where there is such a file, else written.")
@click.option("--job", help="With --check: measure the truth of this job (a name or file.py:function).")
@click.option(
    "--budget",
    type=click.FloatRange(min=0, min_open=True),
    default=120.0,
    show_default=True,
    help="With --job: seconds that measuring may take.",
)
@click.option("--device", default="", help="With --job: cpu, cuda or cuda:0.  [that of the observations]")
@click.option("--against", help="With --check: further indicators, as in paper,random.  [all that the observations allow]")
@click.option("--page", type=_PATH, help="With --check: write the comparison as an HTML page with pictures.")
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
    from qsync_planner.cli.check import CheckRequest, check_usage, render_check, run_check
    from qsync_planner.indicate import indicate as compute
    from qsync_planner.indicators import available_indicators

    if list_flag:
        found = available_indicators(announce=lambda text: click.echo(text, err=True))
        rows = [{"name": i.name, "collectors": list(i.collectors), "summary": i.summary} for i in found.values()]
        emit(
            json_flag,
            {"indicators": rows},
            lambda console: print_table(console, ["indicator", "what"], [[r["name"], r["summary"]] for r in rows]),
        )
        return
    check_usage(check_flag, {"--truth": truth, "--job": job, "--against": against, "--page": page, "--device": device or None})
    if dag is None or (output is None and not check_flag):
        raise click.UsageError(f"Missing option '{'--dag' if dag is None else '-o'}'.")
    variants = [v for group in read_cluster(cluster).groups for v in group.ladder] if cluster else []
    observed = load(observations, Observations) if observations else None
    graph = load(dag, PrecisionDag)
    sensitivity = compute(observed, graph, variants, indicator)
    if output is not None:
        save(sensitivity, output)
    ranked = sorted(
        ((value, str(op_id), variant.label) for op_id, by in sensitivity.omega.items() for variant, value in by.items()),
        key=lambda row: (-row[0], row[1], row[2]),
    )
    data: dict[str, Any] = {
        "output": None if output is None else str(output),
        "model": sensitivity.model,
        "indicator": sensitivity.indicator,
        "operators": len(sensitivity.omega),
        "variants": sorted({variant for by in sensitivity.omega.values() for variant in map(str, by)}),
        "notes": list(sensitivity.notes),
        "omega": [{"operator": name, "label": label, "omega": value} for value, name, label in ranked],
    }

    check = None
    if check_flag:
        check = run_check(sensitivity, observed, graph, CheckRequest(truth, job, budget, device, against, page))
        data["check"] = check.as_dict()

    def render(console: Console) -> None:
        where = f" → {output}" if output else ""
        console.print(
            f"{sensitivity.model}: Ω of {len(sensitivity.omega)} operators by {sensitivity.indicator}{where}", markup=False
        )
        for note in sensitivity.notes:
            console.print(f"  {note}", markup=False)
        print_table(console, ["most sensitive", "at", "Ω"], [[name, label, f"{value:.4g}"] for value, name, label in ranked[:10]])
        if check is not None:
            render_check(console, check, page)

    emit(json_flag, data, render)
