"""mkdocs hook: every ``docs/results/kernels/*.json``, a run of the kernel suite, becomes a page with tables and drawings.

Tables and drawings are those of the suite itself (``bench/kernels``).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from nav_section import extend_section

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "bench"))

from kernels.page import suite_page  # noqa: E402
from kernels.suite_file import read_suite  # noqa: E402

SUITES = ROOT / "docs" / "results" / "kernels"


def on_files(files: Files, *, config: Any) -> Files:
    """Add a page for every run, and its drawings."""
    for path in sorted(SUITES.glob("*.json")):
        slug = path.stem

        def place(name: str, svg: str, slug: str = slug) -> str:
            files.append(File.generated(config, f"results/kernels/{slug}/{name}.svg", content=svg))
            return f"![{name}]({slug}/{name}.svg)"

        page = suite_page(read_suite(path), place)
        files.append(File.generated(config, f"results/kernels/{slug}.md", content=page))
    return files


def on_config(config: Any) -> Any:
    """Put the pages under "Results"."""
    extend_section(config.nav, "Results", (f"results/kernels/{path.stem}.md" for path in sorted(SUITES.glob("*.json"))))
    return config
