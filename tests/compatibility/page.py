"""The table of docs/compatibility.md: what it says of each feature, and which tests run it."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import attrs

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "compatibility.md"
FOLDERS = ("tests/compatibility", "tests/gpu", "bench/robustness", "packages/qsync-torch/tests")
"""Where the tests are that the page names."""
COLUMNS = ("what", "under a plan", "what to write, or what it is refused with", "since torch", "test")
SUPPORTED, CONDITION, REFUSED = "supported", "with a condition", "refused"
ANSWERS = (SUPPORTED, CONDITION, REFUSED)


@attrs.frozen
class Row:
    """One feature.

    Attributes:
        what: its name.
        answer: one of :data:`ANSWERS`.
        text: a line to write, or a condition; a refused one's sentence is in quotation marks, with "…" for what differs.
        since: the first version of torch that has it, of those that QSync supports.
        tests: ``file.py::function``, with a parameter in brackets where one is meant.
    """

    what: str
    answer: str
    text: str
    since: str
    tests: tuple[str, ...]

    @property
    def sentences(self) -> list[re.Pattern[str]]:
        """The quoted sentences, to be found in what is raised."""
        quoted = re.findall(r'"([^"]+)"', self.text.replace("`", ""))
        return [re.compile(".+?".join(map(re.escape, sentence.split("…")))) for sentence in quoted]


def cells(line: str) -> list[str]:
    """Of a line of a table."""
    return [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


@cache
def rows() -> tuple[Row, ...]:
    """The table, from the page."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    assert tuple(cells(lines[0])) == COLUMNS, lines[0]
    found = []
    for line in lines[2:]:
        what, answer, text, since, tests = cells(line)
        found.append(Row(what, answer, text, since, tuple(re.findall(r"`([^`]+)`", tests))))
    return tuple(found)


def row_of(test: str) -> Row:
    """The row that names a test of this suite."""
    return next(row for row in rows() if test in row.tests)


def suite() -> list[str]:
    """Every test of this folder, as the page names them."""
    return [f"{path.name}::{name}" for path in sorted(Path(__file__).parent.glob("test_*.py")) for name in functions_in(path)]


@cache
def functions_in(path: Path) -> tuple[str, ...]:
    """Names of the test functions of a file."""
    body = ast.parse(path.read_text()).body
    return tuple(node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"))


def places(test: str) -> list[str]:
    """The files, relative to the repository, that have a test which the page names."""
    file, _, function = test.partition("[")[0].partition("::")
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob(file) if function in functions_in(path)]
    return [str(path.relative_to(ROOT)) for path in found]
