"""mkdocs hook: ``memory-shares.json``, once it is measured, becomes a page of its own, with text and tables.

Text and tables are the benchmark's (``bench/steps/shares_page.py``).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from nav_section import extend_section

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "bench"))

from steps.shares_page import shares_page  # noqa: E402

MEASURED = ROOT / "docs" / "results" / "memory-shares.json"
PAGE = "memory-shares.md"


def on_files(files: Files, *, config: Any) -> Files:
    """Add the page."""
    if MEASURED.exists():
        rows = json.loads(MEASURED.read_text(encoding="utf-8"))["rows"]
        files.append(File.generated(config, PAGE, content=shares_page(rows)))
    return files


def on_config(config: Any) -> Any:
    """Put it under "Results"."""
    extend_section(config.nav, "Results", [PAGE] if MEASURED.exists() else [])
    return config
