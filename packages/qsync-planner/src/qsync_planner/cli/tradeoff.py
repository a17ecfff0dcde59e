"""``qsync plan --pareto``.  Whatever is slow to import is imported inside the command."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from qsync_core.cli.output import emit, progress_bar
from qsync_core.units import format_bytes, format_ns
from qsync_planner.cli.table import print_table

if TYPE_CHECKING:
    from rich.console import Console

    from qsync_core.ir.cluster import Cluster
    from qsync_core.ir.dag import PrecisionDag
    from qsync_core.ir.profile import Profile
    from qsync_core.ir.sensitivity import Sensitivity
    from qsync_planner.allocator.exact.tradeoff import Tradeoff


def show_tradeoff(
    dag: PrecisionDag,
    cluster: Cluster,
    profiles: Mapping[str, Profile],
    sensitivity: Sensitivity | None,
    output: Path | None,
    json_flag: bool,
) -> None:
    """Find the trade-off curve and print it; with ``output`` also write it as an HTML page.

    Raises:
        PlanError: without a sensitivity or HiGHS, or when the page can not be written or has another name than a page's.
    """
    from qsync_core.artifacts.atomic_file import write_atomically
    from qsync_core.errors import PlanError
    from qsync_planner.allocator.exact.tradeoff import tradeoff
    from qsync_planner.reporting.tradeoff_page import render_page

    if output is not None and output.suffix not in (".html", ".htm"):
        raise PlanError(f"the trade-off curve is written as a page; give it a name that ends in .html, got {output}")
    with progress_bar("trade-off curve") as update:
        found = tradeoff(dag, cluster, profiles, sensitivity, progress=update)
    if output is not None:
        try:
            write_atomically(output, render_page(found).encode())
        except OSError as error:
            raise PlanError(f"can not write {output}: {error.strerror or error}") from None
    data = {"output": None if output is None else str(output), **found.as_dict()}
    emit(json_flag, data, lambda console: _render(console, found, output))


def _render(console: Console, found: Tradeoff, output: Path | None) -> None:
    from qsync_planner.reporting.tradeoff_page import gap_text, memory_lines, operators_lines

    groups = list(found.budgets[-1])
    where = f" → {output}" if output else ""
    console.print(f"{found.model}: trade-off of Ω by {found.indicator}, step time and memory{where}", markup=False)
    header = ["plan", "step time", "Ω", "proven within", *(f"peak of {name}" for name in groups), "operators", "how to get it"]
    rows = [
        [
            number,
            format_ns(point.iteration_ns),
            f"{point.omega:.4g}",
            gap_text(point),
            *(format_bytes(point.peak_bytes[name]) for name in groups),
            "\n".join(operators_lines(point)),
            "\n".join([" ".join(point.arguments), *memory_lines(point.memory)]),
        ]
        for number, point in enumerate(found.points, 1)
    ]
    print_table(console, header, rows)
    for name, duration_ns in sorted(found.baselines.items()):
        console.print(f"{name} precision: {format_ns(duration_ns)}", markup=False)
    if output is None:
        console.print("with -o PAGE.html this is a picture to pick from", markup=False)
