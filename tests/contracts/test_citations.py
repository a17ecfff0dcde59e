"""Every page of the documentation that source, tests or documents cite is there, with the section that they name.

A citation is the page's path and, for a section, the anchor of its heading: ``docs/design/indicator.md#element-variance``.
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache
from pathlib import Path

import pytest

from contracts.environment import ROOT

FOLDERS = ("packages", "tests", "docs", "docs_build", "examples")
SUFFIXES = (".py", ".md", ".toml", ".ini", ".yml")
CITATION = re.compile(r"(?<![\w-])docs/((?:[\w-]+/)*[\w-]+\.md)(?:#([\w-]+))?")


def anchor(heading: str) -> str:
    """The anchor that mkdocs gives to a heading."""
    plain = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page's headings, those in code blocks left out."""
    prose = re.sub(r"^( *)```.*?^\1```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return frozenset(anchor(heading) for heading in re.findall(r"^#+ (.+)$", prose, flags=re.M))


def problem(page: str, section: str) -> str:
    """Why a citation leads nowhere; empty where it leads somewhere."""
    path = ROOT / "docs" / page
    if not path.exists():
        return "no such page"
    return "" if not section or section in anchors(path) else "no such section"


def cited() -> dict[tuple[str, str], list[str]]:
    """Files and lines by the page and section that they cite."""
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")) if path.suffix in SUFFIXES]
    files += [path for path in sorted(ROOT.iterdir()) if path.suffix in SUFFIXES]
    found: dict[tuple[str, str], list[str]] = {}
    for path in files:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for page, section in CITATION.findall(line):
                found.setdefault((page, section), []).append(f"{path.relative_to(ROOT)}:{number}")
    return found


@pytest.mark.parametrize(("page", "section", "wanted"), [
    ("glossary.md", "", ""),
    ("glossary.md", "variant", ""),
    ("glossary.md", "nothing-like-it", "no such section"),
    ("nothing-like-it.md", "", "no such page"),
])  # fmt: skip
def test_a_citation_that_leads_nowhere_is_found(page, section, wanted):
    assert problem(page, section) == wanted


def test_headings_inside_code_are_no_sections():
    assert "trainpy" not in anchors(ROOT / "docs" / "flow.md")


def test_every_citation_leads_to_a_section():
    found = cited()
    assert any(page.startswith("design/") and section for page, section in found)
    wrong = {
        f"docs/{page}#{section}": (why, places) for (page, section), places in found.items() if (why := problem(page, section))
    }
    assert wrong == {}
