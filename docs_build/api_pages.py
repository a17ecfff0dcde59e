"""mkdocs hook: a reference of what docs/stability.md promises in Python, from its docstrings, read without importing anything.

The table of that page says which modules; names of ``qsync_torch`` are those of its ``__init__``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from nav_section import extend_section

ROOT = Path(__file__).parents[1]
STABILITY = ROOT / "docs" / "stability.md"
SCRIPT = ROOT / "packages" / "qsync-torch" / "src" / "qsync_torch" / "__init__.py"
INTRODUCTION = """# Reference in Python

What [is public and stable](../stability.md), from its docstrings. Everything else in the packages may change in any release.

"""
_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):<code>(~?)([^<]+)</code>")
_PAGE_OF_DOCS = re.compile(r"docs/((?:design/|decisions/)?[\w-]+)(?:\.md(#[\w-]+)?)")


def rows() -> Iterator[tuple[list[str], list[str], str]]:
    """Of each row of the table its modules, the names in them where it lists some, and what they are in words."""
    table = STABILITY.read_text(encoding="utf-8").split("## In Python", 1)[1]
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 2:
            modules = re.findall(r"`([\w.]+)`", cells[0])
            names = re.findall(r"`(\w+)`", cells[1]) if len(modules) == 1 else []
            yield modules, names, cells[1]


def script_names() -> dict[str, str]:
    """The public names of ``qsync_torch``, and in which module each is."""
    for node in ast.parse(SCRIPT.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_PUBLIC":
            found: dict[str, str] = ast.literal_eval(node.value)
            return found
    raise LookupError(f"{SCRIPT} lists no public names")


def pages() -> dict[str, dict[str, str]]:
    """By title of a group the Markdown of its pages, by file: a page for each name of a script, and for each module."""
    of_scripts = {
        f"api/qsync_torch.{name}.md": _page(f"qsync.{name}", [f"{module}.{name}"], "`import qsync_torch as qsync`", f"qsync.{name}")
        for name, module in script_names().items()
    }
    of_modules = {}
    for modules, names, what in rows():
        for module in modules if modules != ["qsync_torch"] else ():
            entries = [f"{module}.{name}" for name in names] or [module]
            of_modules[f"api/{module}.md"] = _page(module, entries, f"{what[:1].upper()}{what[1:]}".replace("](", "](../"))
    return {"In a training script": of_scripts, "Modules": of_modules}


def _page(title: str, entries: list[str], what: str, heading: str = "") -> str:
    options = f"\n    options: {{heading: {heading}}}\n\n" if heading else "\n\n"
    return f"# {title}\n\n{what}\n\n" + "".join(f"::: {entry}{options}" for entry in entries)


def on_config(config: Any) -> Any:
    """Put the pages under "Reference"."""
    extend_section(config.nav, "Reference", ["api/index.md", *({title: list(found)} for title, found in pages().items())])
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages, and the list of them."""
    listed = INTRODUCTION
    for title, found in pages().items():
        listed += f"## {title}\n\n"
        for page, text in found.items():
            files.append(File.generated(config, page, content=text))
            listed += f"- [{page[4:-3]}]({page[4:]})\n"
        listed += "\n"
    files.append(File.generated(config, "api/index.md", content=listed))
    return files


def on_page_content(text: str, *, page: Any, **_: Any) -> str:
    """Turn what docstrings write for other readers, ``:func:`name``` and the paths of pages, into code and links."""
    if not page.file.src_uri.startswith("api/"):
        return text
    text = _ROLE.sub(lambda match: f"<code>{match[2].rpartition('.')[2] if match[1] else match[2]}</code>", text)
    return _PAGE_OF_DOCS.sub(lambda match: f'<a href="../{match[1]}.html{match[2] or ""}">{match[0]}</a>', text)
