"""mkdocs hook: every sentence that QSync refuses with, by class of error, with the page that says more; read from the source."""

from __future__ import annotations

import ast
import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
ERRORS = ROOT / "packages" / "qsync-core" / "src" / "qsync_core" / "errors.py"
PAGE = "errors.md"
INTRODUCTION = """# When something is refused

What QSync refuses it refuses in a sentence or two: what, where, what it expected and got, and what to do next. Commands print it
and exit with 1, files stay whole; in a script it is an exception of one of the classes below, all of them
`qsync_core.errors.QSyncError`, **on every rank**: a rank that has nothing to do with it says `rank 3 refuses: …`, and that rank's
own output has the same sentence.

- A rank that does not come is waited for `QSYNC_RANK_TIMEOUT_S` seconds, 30 by default; the sentence names it. Look at what
  **that** rank printed last.
- `qsync doctor` says what is wrong with a machine, and [started on every rank](cluster-doctor.md) with a cluster.
- What goes together and what does not is in [compatibility](compatibility.md);
  [what a refusal does](training.md#when-a-rank-refuses) to the other ranks is in training under a plan.

Below are all sentences, … standing for names and figures: search for some words of yours.

"""


class Sentence(NamedTuple):
    """What one place in the source refuses with, and the page that its module cites."""

    kind: str
    text: str
    page: str


def kinds() -> dict[str, str]:
    """The classes of errors, with what each is."""
    tree = ast.parse(ERRORS.read_text(encoding="utf-8"))
    return {node.name: (ast.get_docstring(node) or "").partition("\n")[0] for node in tree.body if isinstance(node, ast.ClassDef)}


def sentences() -> Iterator[Sentence]:
    """All of them, in the order of the source."""
    known = kinds()
    for path in sorted(ROOT.glob("packages/*/src/**/*.py")):
        source = path.read_text(encoding="utf-8")
        cited = re.search(r"docs/((?:design/)?[\w-]+\.md(?:#[\w-]+)?)", source)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in known and node.args and (text := _text(node.args[0])):
                yield Sentence(node.func.id, text, cited[1] if cited else "")


def _text(node: ast.expr) -> str:
    """A literal's text, with … where something is put in; none for what is not a literal, or has no words of its own."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if not isinstance(node, ast.JoinedStr):
        return ""
    text = "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return text if len(re.findall(r"[A-Za-z]{2,}", text)) > 3 else ""


def page_text() -> str:
    """The page as Markdown."""
    found: dict[str, dict[str, str]] = {kind: {} for kind in kinds()}
    for kind, text, page in sentences():
        found[kind].setdefault(text, page)
    parts = [INTRODUCTION]
    for kind, what in kinds().items():
        if found[kind]:
            lines = [
                f"- {html.escape(text, quote=False)}{f' [→]({page})' if page else ''}" for text, page in sorted(found[kind].items())
            ]
            parts.append(
                "\n".join([f"## {kind}", "", what, "", *(line.replace("*", r"\*").replace("_", r"\_") for line in lines), ""])
            )
    return "\n".join(parts)


def on_files(files: Files, *, config: Any) -> Files:
    """Add the page."""
    files.append(File.generated(config, PAGE, content=page_text()))
    return files
