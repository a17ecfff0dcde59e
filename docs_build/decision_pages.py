"""mkdocs hook: the list of decision records, so that adding one is adding a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from nav_section import extend_section

DECISIONS = Path(__file__).parents[1] / "docs" / "decisions"
INTRODUCTION = """# Decisions

Choices that a reader may wonder about: context, decision, consequences.

"""


def records() -> list[Path]:
    """The records, by file name."""
    return sorted(path for path in DECISIONS.glob("*.md") if path.name != "index.md")


def heading(path: Path) -> str:
    """The first line of a record."""
    return path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")


def on_config(config: Any) -> Any:
    """Put the records under "Decisions"."""
    extend_section(config.nav, "Decisions", (f"decisions/{path.name}" for path in records()))
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Add the list."""
    listed = "\n".join(f"- [{heading(path)}]({path.name})" for path in records())
    files.append(File.generated(config, "decisions/index.md", content=f"{INTRODUCTION}{listed}\n"))
    return files
