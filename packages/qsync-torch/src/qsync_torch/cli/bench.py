"""``qsync bench``: kernel backends beside PyTorch's own 16-bit products, on a job's shapes or named ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qsync_core.artifacts.atomic_file import write_atomically
from qsync_core.cli.options import OUTPUT
from qsync_core.cli.output import emit, json_option, print_table, progress_bar
from qsync_core.errors import BackendError, QSyncError
from qsync_core.units import format_ns
from qsync_torch.cli.options import batch_size_option, chosen_device, device_option, graph_named

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from rich.console import Console

    from qsync_torch.benchmarking.problems import Problem
    from qsync_torch.benchmarking.results import Row, Suite


@click.command()
@click.argument("job", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--backend", default="auto", help="Backends to compare, joined by +.  [all that are installed]")
@click.option(
    "--shape", "shapes", multiple=True, metavar="MxKxN", help="Rows × contracted × columns; RxC: a tensor to quantize; repeatable."
)
@click.option("--op", default="", help="Only kernels whose name contains this: linear, output, grad_weight, quantize.")
@device_option
@batch_size_option()
@click.option("--configs", type=click.IntRange(min=1), default=3, show_default=True, help="Configurations of each backend to try.")
@click.option("--rounds", type=click.IntRange(min=5), default=15, show_default=True, help="Samples of each contender.")
@click.option("--html", type=OUTPUT, default=None, help="Write one HTML page.")
@json_option
def bench(
    job: str | None,
    arguments: tuple[str, ...],
    backend: str,
    shapes: tuple[str, ...],
    op: str,
    device: str,
    batch_size: int | None,
    configs: int,
    rounds: int,
    html: Path | None,
    json_flag: bool,
) -> None:
    """Compare kernel backends: time, share of what the device allows, and error, beside PyTorch's own product in 16 bit.

    JOB is a script with the line qsync.hybrid(...), whose own ARGUMENTS stand behind --, a named model (resnet50,
    bert-base:seq=384), file.py:function or a traced graph: each distinct product of it is measured once.  Without JOB and --shape
    it is a layer of a transformer and one of an image model; small ones on a CPU.
    """
    from qsync_core.kernels.choice import AUTO_BACKEND, split_chain
    from qsync_torch.benchmarking.bench import compare
    from qsync_torch.benchmarking.contenders import Backends
    from qsync_torch.benchmarking.page import render
    from qsync_torch.benchmarking.results import as_data

    if job is None and batch_size is not None:
        raise QSyncError("--batch-size is for a JOB; a --shape has its rows")
    backends = Backends(configs, configs, split_chain(backend))
    chosen = _chosen_problems(job, arguments, shapes, op, batch_size, target := chosen_device(device))
    with progress_bar("bench") as update:
        found = compare(chosen, backends, target, rounds=rounds, progress=update)
    _check_that_some_ran(found, tuple(backends.by_name))
    if html is not None:
        write_atomically(html, render(found).encode())
    emit(json_flag, as_data(found), lambda console: _render(found, html, console))
    if found.wrong:
        raise BackendError(_what_is_wrong(found.wrong))
    named = () if backend == AUTO_BACKEND else tuple(f"{name}: failed: " for name in backends.by_name)
    if failed := [why for why in found.left_out.values() if why.startswith(named)]:
        raise BackendError(f"{failed[0]}; --backend names it (kernels without it: {len(failed)})")


def _chosen_problems(
    job: str | None, arguments: Sequence[str], texts: Sequence[str], op: str, batch_size: int | None, device: torch.device
) -> list[Problem]:
    """What is to be compared.

    Raises:
        QSyncError: when a shape or the job cannot be read, or nothing is left.
    """
    from qsync_torch.benchmarking.problems import problems
    from qsync_torch.benchmarking.shapes import read_shapes, shapes_of, usual_shapes
    from qsync_torch.devices import gradient_format

    sets = [read_shapes(texts)] if texts else []
    if job is not None:
        sets.append(shapes_of(graph_named(job, arguments, batch_size)))
    sets = sets or [usual_shapes(device.type)]
    sixteen_bit = gradient_format(device)
    every = [one for shapes in sets for one in problems(shapes, sixteen_bit, sixteen_bit, float8=device.type == "cuda")]
    if not every:
        raise QSyncError(f"{job} has no product that could run in 8 bit, so there is nothing to compare")
    chosen = [one for one in every if op in one.op]
    if not chosen:
        raise QSyncError(f"--op {op!r} is in no kernel's name; there are {', '.join(dict.fromkeys(one.op for one in every))}")
    return chosen


def _check_that_some_ran(found: Suite, names: Sequence[str]) -> None:
    """Raise BackendError when none of the backends ran anything."""
    from qsync_torch.benchmarking.results import reasons

    if not any(row.contender in names for row in found.rows):
        raise BackendError(f"none of the backends ran a kernel: {' | '.join(reasons(found))}")


def _what_is_wrong(wrong: Sequence[Row]) -> str:
    from qsync_torch.benchmarking.page import relative

    first, more = wrong[0], f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return (
        f"{first.contender} is wrong on {first.op} {first.formats} {first.shape}{more}: its relative error against float64 is "
        f"{relative(first.error)}, and {relative(first.allowed)} is what its formats explain; find out where: pytest --pyargs "
        f"qsync_torch.conformance --backend {first.contender}"
    )


def _render(found: Suite, html: Path | None, console: Console) -> None:
    from qsync_torch.benchmarking.page import figure, relative
    from qsync_torch.benchmarking.results import by_problem, fastest_of, reasons, speedup, standings

    console.print(f"kernels on {found.device}; × 16 bit: how many times faster than PyTorch's own product in 16 bit")
    lines: list[tuple[Any, ...]] = []
    for rows in by_problem(found.rows).values():
        fastest = fastest_of(rows)
        for number, row in enumerate(rows):
            head = (
                (f"{row.op} {row.formats}", row.shape + (f" ({row.count}×)" if row.count > 1 else "")) if not number else ("", "")
            )
            who = f"{row.contender} {row.config}".strip() + (" *" if row is fastest else "")
            error = relative(row.error) + (" WRONG" if row.is_wrong else "")
            note = f", {row.share_note}" if row.share_note else ""
            share = "–" if row.is_wrong else f"{row.share:.0%} {row.bound}{note}"
            rate = f"{figure(row.tflops)} {row.unit}"
            lines.append(
                (*head, who, f"{format_ns(round(row.median_ns))} ±{row.spread:.0%}", _ratio(speedup(row, rows)), rate, share, error)
            )
    print_table(console, ("kernel", "shape", "by", "time", "× 16 bit", "rate", "share of", "error"), lines)
    console.print("")
    every = [
        (one.contender, one.ran, one.fastest, one.wrong, _ratio(one.speedup), relative(one.largest_error))
        for one in standings(found)
    ]
    print_table(console, ("contender", "ran", "fastest (*)", "wrong", "× 16 bit, mean", "largest error"), every)
    for why, what in reasons(found).items():
        console.print(f"left out: {why} ({len(what)}: {what[0]}{', …' if len(what) > 1 else ''})", soft_wrap=True)
    if html is not None:
        console.print(f"wrote {html}", soft_wrap=True)


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
