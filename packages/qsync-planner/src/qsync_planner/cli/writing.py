"""What commands write as a page or a trace."""

from __future__ import annotations

from pathlib import Path

from qsync_core.errors import QSyncError


def check_page_name(path: Path | None, what: str, advice: str, error: type[QSyncError]) -> None:
    """Raise ``error`` where a page is to be written to a file that no browser takes for one."""
    if path is not None and path.suffix not in (".html", ".htm"):
        raise error(f"{what} is written as a page; {advice} a name that ends in .html, got {path}")


def write_text(path: Path, text: str, error: type[QSyncError]) -> None:
    """Write a whole file, or raise ``error`` with the reason and leave what was there."""
    from qsync_core.artifacts.atomic_file import write_atomically

    try:
        write_atomically(path, text.encode())
    except OSError as reason:
        raise error(f"cannot write {path}: {reason.strerror or reason}") from None
