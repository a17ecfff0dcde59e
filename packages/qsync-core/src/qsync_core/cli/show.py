"""``qsync show``: what an artifact file holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from qsync_core.artifacts import files as artifact
from qsync_core.artifacts import schema
from qsync_core.artifacts.codec import to_plain
from qsync_core.artifacts.summary import summarize
from qsync_core.cli.options import artifact_argument
from qsync_core.cli.output import emit, json_option

if TYPE_CHECKING:
    from rich.console import Console


@click.command()
@artifact_argument("path")
@json_option
def show(path: Path, json_flag: bool) -> None:
    """Print what an artifact holds: a summary, or with --json the whole content."""
    loaded = artifact.load(path)
    kind = type(loaded).__name__
    digest = artifact.digest(loaded)

    def render(console: Console) -> None:
        from rich.table import Table

        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_row("kind", kind)
        table.add_row("digest", digest)
        for name, value in summarize(loaded):
            table.add_row(name, value)
        console.print(table)

    content = to_plain(loaded) if json_flag else {}
    emit(json_flag, {"kind": kind, "schema_version": schema.schema_version(kind), "digest": digest, "content": content}, render)
