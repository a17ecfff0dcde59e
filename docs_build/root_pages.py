"""mkdocs hook: what stands at the top of the repository, and the packages' changelogs, become pages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {"ARCHITECTURE.md": "architecture.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"} | {
    f"packages/{name}/CHANGELOG.md": f"changelog/{name}.md"
    for name in ("qsync-core", "qsync-planner", "qsync-torch", "qsync-kernels-triton", "qsync-kernels-cutlass")
}


def page_text(name: str) -> str:
    """The file with its links turned: those into docs/ stay links, those to other files of the repository become their path."""

    def turned(match: re.Match[str]) -> str:
        text, target = match[1], match[2]
        if "://" in target or target.startswith("#"):
            return match[0]
        if target == "docs/decisions":
            return f"[{text}](decisions/index.md)"
        if target.startswith("docs/") and target.split("#")[0].endswith(".md"):
            return f"[{text}]({target.removeprefix('docs/')})"
        if target in PAGES:
            return f"[{text}]({PAGES[target]})"
        return text if text.startswith("`") else f"{text} (`{target}`)"

    return re.sub(r"\[([^\]]+)\]\(([^)]+)\)", turned, (ROOT / name).read_text(encoding="utf-8"))


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=page_text(name)))
    return files


def on_serve(server: Any, **_: Any) -> Any:
    """Watch the originals."""
    for name in PAGES:
        server.watch(str(ROOT / name))
    return server
