"""Options that several commands share."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from qsync_core.artifacts.atomic_file import check_writable, is_standard_output
from qsync_core.cli.output import PRINT_TO_STDERR

Command = Callable[..., Any]


class Assignment(click.ParamType[Any]):
    """``KEY=VALUE``, which becomes a pair of texts.

    Args:
        name: in the words of a command's help: ``GROUP=PATH``.
        example: of a value, for the error.
    """

    def __init__(self, name: str, example: str) -> None:
        self.name, self._example = name, example

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Split at the first ``=``."""
        if isinstance(value, tuple):
            return value
        key, separator, rest = str(value).partition("=")
        if not (separator and key and rest):
            self.fail(f"write {self.name}, for example {self._example}; got {value!r}", param, ctx)
        return key, rest


def _paths(ctx: click.Context, param: click.Parameter, value: tuple[tuple[str, str], ...]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for group, path in value:
        if group in found:
            raise click.BadParameter(f"group {group!r} is given twice", ctx, param)
        found[group] = Path(path)
    return found


def group_paths_option(option: str, name: str, text: str) -> Callable[[Command], Command]:
    """An option ``GROUP=PATH``, repeated; the command's parameter of that name is a ``dict[str, Path]``; ``text`` is its help."""
    path = Assignment("GROUP=PATH", "infer=t4.qsync")
    return click.option(option, name, type=path, multiple=True, callback=_paths, help=text)


profiles_option = group_paths_option("--profile", "profiles", "Profile of a device group, once per group of the cluster.")


class FiniteRange(click.FloatRange):
    """A range of numbers without NaN, which compares as if it were within every range, and without infinities."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Read a finite number within the range."""
        found: float = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return found


def artifact_argument(name: str) -> Callable[[Command], Command]:
    """An argument that names an artifact file (read with :func:`qsync_core.artifacts.files.load`, which reports what is wrong)."""
    return click.argument(name, type=click.Path(path_type=Path))


def plan_options(command: Command) -> Command:
    """What a person asks of a plan, as :class:`qsync_planner.allocator.Request` has it.

    The command's parameters are ``solver: str, objective: str, omega_limit: float | None, tolerance: float, batch: str,
    keep: tuple[str, ...]``.
    """
    for option in (
        click.option(
            "--batch",
            default="equal",
            show_default=True,
            help="equal: every rank keeps the job's batch; free: samples may move to training ranks, of one global batch, and the "
            "script must honour it.",
        ),
        click.option(
            "--keep",
            multiple=True,
            metavar="NAME|re:REGEX",
            help="Operators that stay at the base precision: a module with all in it, or a pattern of whole names; repeatable.",
        ),
        click.option("--tolerance", default=0.0, show_default=True, help="Share by which it may be slower than uniform precision."),
        click.option("--omega-limit", type=float, metavar="Ω", help="Largest Σ Ω, for --minimise time."),
        click.option(
            "--minimise",
            "objective",
            default="omega",
            show_default=True,
            help="omega: the least Σ Ω within time and memory; memory: the least within the time; time: the shortest within "
            "--omega-limit.",
        ),
        click.option(
            "--solver",
            default="auto",
            show_default=True,
            help="auto, exact, greedy, or a baseline: uniform, full, dynamic-batch.",
        ),
    ):
        command = option(command)
    return command


class OutputPath(click.Path):
    """A file that the command writes: refused before any work where it cannot be written.

    A command whose output is its standard output (``-o /dev/stdout``) prints on standard error instead, so that the two do not mix.
    """

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path.

        Raises:
            ArtifactError: when nothing can be written there.
        """
        path: Path = super().convert(value, param, ctx)  # type: ignore[assignment]
        check_writable(path)
        if ctx is not None and is_standard_output(path) and not os.path.samefile(path, os.devnull):
            ctx.meta[PRINT_TO_STDERR] = True
        return path


OUTPUT = OutputPath()


def output_option(what: str, *, required: bool = True) -> Callable[[Command], Command]:
    """``-o/--output PATH``; the command's parameter is ``output: Path``, None where it is not required and not given."""
    return click.option("-o", "--output", type=OUTPUT, required=required, help=f"Where to write the {what}.")
