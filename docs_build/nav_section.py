"""Adding pages to a section of mkdocs.yml's navigation, for pages that come and go with files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def extend_section(nav: list[Any], section: str, pages: Iterable[Any]) -> None:
    """Append pages, or groups of pages, to the section of that title."""
    for entry in nav:
        if isinstance(entry, dict) and section in entry:
            entry[section].extend(pages)
            return
    raise KeyError(f"mkdocs.yml has no section {section!r}")
