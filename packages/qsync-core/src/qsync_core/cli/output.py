"""How commands print: JSON for programs, rich text for people, and progress only on a terminal."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from qsync_core.progress import ProgressCallback, silent

if TYPE_CHECKING:
    from rich.console import Console

_WIDTH_OF_FILES = 132
"""Columns where the output is not a terminal: wide enough that tables are not cut."""


json_option = click.option("--json", "json_flag", is_flag=True, help="Print one JSON object instead of text.")
"""The option that every command has; the command's parameter is ``json_flag``."""


def emit(json_flag: bool, data: dict[str, Any], render: Callable[[Console], None]) -> None:
    """Print a command's result on standard output.

    Args:
        json_flag: print ``data`` as one JSON object.
        data: the result; strings, numbers, lists and dictionaries only.
        render: prints the same for people.
    """
    if json_flag:
        click.echo(json.dumps(data, ensure_ascii=False, indent=2, allow_nan=False))
        return
    from rich.console import Console

    width = None if sys.stdout.isatty() else _WIDTH_OF_FILES
    render(Console(file=sys.stdout, highlight=False, width=width))


@contextlib.contextmanager
def progress_bar(description: str) -> Iterator[ProgressCallback]:
    """A progress bar on standard error; where that is no terminal nothing is printed.

    Example::

        with progress_bar("profile") as update:
            update(3, 10, "conv2d int8")
    """
    if not sys.stderr.isatty():
        yield silent
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(description, total=None, text="")
        yield lambda done, total, text: progress.update(task, completed=done, total=total, text=text)


@contextlib.contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """A line on standard error that says how far something is; where that is no terminal nothing is printed."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status("") as status:
        yield lambda text: status.update(Text(text))
