"""The source keeps its arrangement: no import cycles, rooms that a reader surveys, few floors, citations that lead somewhere."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator

from contracts.environment import ROOT

sys.path.insert(0, str(ROOT / "bench"))

from structure.imports import cycles, floors, import_graph, modules, room_graph, room_sizes, within
from structure.texts import Citations, text_files, written_apart

GRAPH = import_graph(modules(ROOT))
TEXTS = text_files(ROOT)
DIRECTLY = {"qsync_torch": 12, "qsync_core": 10, "qsync_planner": 8}
"""Modules beside a package's folders, at most."""
IN_A_ROOM = 18
FLOORS = 10
LEANS = re.compile(r"(Of|As|By|In|With|For|Per|Its|Those)\b")
"""How a docstring begins that says nothing without the name it stands under, which a tooltip does not show."""


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every docstring: of modules, classes and functions, and behind what has a value."""
    for node in ast.walk(ast.parse(source)):
        statements = getattr(node, "body", None)
        for statement in statements if isinstance(statements, list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                text = statement.value.value
                if isinstance(text, str):
                    yield statement.lineno, text.strip()


def test_no_modules_import_each_other_in_a_circle():
    assert cycles(GRAPH) == []


def test_no_rooms_import_each_other_in_a_circle():
    assert cycles(room_graph(GRAPH)) == []


def test_no_room_holds_more_modules_than_a_reader_can_survey():
    full = {folder: size for folder, size in room_sizes(ROOT).items() if size > DIRECTLY.get(folder, IN_A_ROOM)}
    assert full == {}


def test_the_rooms_of_qsync_torch_stand_on_few_floors():
    assert floors(room_graph(within(GRAPH, "qsync_torch"))) <= FLOORS


def test_every_citation_leads_somewhere():
    assert Citations(ROOT, TEXTS).dead() == []


def test_cannot_is_one_word():
    assert written_apart(TEXTS) == []


def test_the_first_line_of_a_docstring_stands_alone():
    leaning = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in sorted(ROOT.glob("packages/*/src/**/*.py"))
        for line, text in docstrings(path.read_text(encoding="utf-8"))
        if LEANS.match(text)
    ]
    assert leaning == [], "say what it is or does, a verb first for functions: " + "; ".join(leaning)
