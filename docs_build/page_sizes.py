"""mkdocs hook: a page that a browser would be slow to show fails the build."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

LARGEST = 150_000
"""Bytes of a page's HTML."""


def on_post_build(*, config: Any) -> None:
    """Raise PluginError for the largest page where it is too large."""
    size, page = max((path.stat().st_size, path) for path in Path(config.site_dir).rglob("*.html"))
    if size > LARGEST:
        name = page.relative_to(config.site_dir)
        raise PluginError(f"{name} has {size:,} bytes, and no page may have more than {LARGEST:,}: split it")
