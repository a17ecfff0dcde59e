"""How commands print: JSON for programs, rich text for people, and progress only on a terminal."""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click

from qsync_core.errors import QSyncError
from qsync_core.printable import is_printable, printable
from qsync_core.progress import ProgressCallback, silent

if TYPE_CHECKING:
    from rich.console import Console

_WIDTH_OF_FILES = 132
"""Columns where the output is not a terminal: wide enough that tables are not cut."""

PRINT_TO_STDERR = "qsync_core.print_to_stderr"
"""Key of a click context's ``meta`` where standard output belongs to the artifact that the command writes."""

_LINE_EVERY_S = 10.0
_SPELLED = "qsync_core.spelled"
_SPELLING = {
    "→": "->",
    "×": "x",
    "–": "-",
    "…": "...",
    "µ": "u",
    "Ω": "Omega",
    "Σ": "sum of",
    "±": "+-",
    "≤": "<=",
    "≥": ">=",
    "²": "^2",
}

json_option = click.option("--json", "json_flag", is_flag=True, help="Print one JSON object instead of text.")
"""The option that every command has; the command's parameter is ``json_flag``."""


def emit(json_flag: bool, data: dict[str, Any], render: Callable[[Console], None]) -> None:
    """Print a command's result on standard output.

    Args:
        json_flag: print ``data`` as one JSON object.
        data: the result; strings, numbers, lists and dictionaries only.
        render: prints the same for people.
    """
    context = click.get_current_context(silent=True)
    stream = sys.stderr if context is not None and PRINT_TO_STDERR in context.meta else sys.stdout
    if stream is None:  # closed, `qsync ... >&-`
        return
    try:
        if json_flag:
            # Escapes are read everywhere; letters only where the stream has them.
            is_unicode = (stream.encoding or "").lower().startswith("utf")
            text = json.dumps(data, ensure_ascii=not is_unicode, indent=2, allow_nan=False)
            stream.write((text if is_printable(text) else json.dumps(data, indent=2, allow_nan=False)) + "\n")
        else:
            render(open_console(file=stream, highlight=False))
        stream.flush()
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise  # `qsync ... | head`: click ends the program without a word
        # Python would try to write what is left once more at its end, and complain.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        raise QSyncError(f"cannot print the result: {error.strerror or error}") from None


def open_console(**options: Any) -> Console:
    """Make a console that prints text as it stands: no markup unless asked for, and nothing that a terminal obeys.

    Where it prints to no terminal it is wide enough for tables.
    """
    from rich.console import Console
    from rich.segment import Segment

    class SafeConsole(Console):
        def render(self, *arguments: Any, **more: Any) -> Iterator[Segment]:
            for segment in super().render(*arguments, **more):
                if segment.control or is_printable(segment.text):
                    yield segment
                else:
                    yield Segment(printable(segment.text), segment.style)

    stream = options.get("file") or (sys.stderr if options.get("stderr") else sys.stdout)
    wide = {} if stream is None or stream.isatty() else {"width": _WIDTH_OF_FILES}
    return SafeConsole(**{"markup": False, **wide, **options})


def print_table(console: Console, header: Collection[str], rows: Iterable[Iterable[Any]], title: str | None = None) -> None:
    """Print rows, under a header unless it is empty; cells are taken literally, brackets included, unless they are rich's own."""
    from rich.table import Table
    from rich.text import Text

    table = Table(*header, title=title, title_justify="left", box=None, pad_edge=False, show_header=bool(header))
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    console.print(table)


def say(text: str) -> None:
    """Print a line on standard error: a note, a warning, an error."""
    click.echo(printable(text), err=True)


def spell_out_foreign_letters() -> None:
    """Make the standard streams print what their encoding lacks (``Ω`` on an ASCII one) in other letters instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_SPELLED)


def _spell(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters = error.object[error.start : error.end]
    return "".join(_SPELLING.get(letter) or letter.encode("ascii", "backslashreplace").decode() for letter in letters), error.end


codecs.register_error(_SPELLED, _spell)


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
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}", markup=False),
    )
    with Progress(*columns, console=open_console(stderr=True), transient=True) as progress:
        task = progress.add_task(description, total=None, text="")
        yield lambda done, total, text: progress.update(task, completed=done, total=total, text=text)


@contextlib.contextmanager
def progress_lines() -> Iterator[ProgressCallback]:
    """Progress where there is no terminal: a line on standard error when another stage begins, and every ten seconds within one."""
    started, last, stage = time.monotonic(), float("-inf"), ""

    def update(done: int, total: int, what: str, /) -> None:
        nonlocal last, stage
        now = time.monotonic() - started
        if what.partition(":")[0] == stage and now - last < _LINE_EVERY_S:
            return
        last, stage = now, what.partition(":")[0]
        say(f"[{now:4.0f} s] {what}" + (f" ({done} of {total})" if total > 1 else ""))

    yield update


@contextlib.contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """A line on standard error that says how far something is; where that is no terminal nothing is printed."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.text import Text

    with open_console(stderr=True).status("") as status:
        yield lambda text: status.update(Text(text))
