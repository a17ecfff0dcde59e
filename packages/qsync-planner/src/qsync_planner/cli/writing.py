"""What commands write as a page."""

from __future__ import annotations

from pathlib import Path

from qsync_core.errors import QSyncError


def check_page(path: Path | None, what: str, advice: str, error: type[QSyncError]) -> None:
    """Refuse a page before the work for it; where ``path`` is None none is asked for.

    Raises:
        QSyncError: ``error``, for the name of a file that no browser takes for a page.
        PlanError: when qsync-planner's extra ``report`` is not installed.
    """
    from qsync_planner.reporting import require_pages

    if path is None:
        return
    if path.suffix not in (".html", ".htm"):
        raise error(f"{what} is written as a page; {advice} a name that ends in .html, got {path}")
    require_pages()
