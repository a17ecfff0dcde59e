"""Tables of the commands, printed without borders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def print_table(console: Console, header: list[str], rows: list[list[Any]]) -> None:
    """Print rows under a header; cells are taken literally, brackets included."""
    from rich.table import Table
    from rich.text import Text

    table = Table(*header, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    console.print(table)
