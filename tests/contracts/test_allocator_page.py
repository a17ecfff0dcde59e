"""The page with the allocator's mathematics calls things as the code does."""

from __future__ import annotations

import re

import pytest

from contracts.environment import ROOT

PAGE = (ROOT / "docs" / "design" / "exact-allocator.md").read_text(encoding="utf-8")
SOURCES = [ROOT / "packages" / "qsync-core" / "src", ROOT / "packages" / "qsync-planner" / "src"]
EXACT = SOURCES[1] / "qsync_planner" / "allocator" / "exact"

CODE = re.sub(r"^```.*?^```", "", PAGE, flags=re.M | re.S)
"""The page without its formulas, whose letters are explained in it."""
NAMES = sorted({name for token in re.findall(r"`([^`]+)`", CODE) for name in re.findall(r"^_?[A-Za-z]\w+(?:\.\w+)*", token)})
FORMULA = {"dur", "ready", "left", "work", "opt", "disp", "dev", "start", "used", "charged", "count", "code", "max"}
"""Symbols of the page's formulas."""
TEXT = "\n".join(path.read_text(encoding="utf-8") for folder in SOURCES for path in sorted(folder.rglob("*.py")))


def test_the_modules_in_the_table_are_those_of_the_exact_allocator():
    table = PAGE.split("| module |", 1)[1].split("\n\n", 1)[0]
    named = {name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1] if "|" in line else "")}
    assert named
    assert sorted(name for name in named if not (EXACT / f"{name}.py").exists()) == []


@pytest.mark.parametrize("name", [name for name in NAMES if name not in FORMULA])
def test_every_name_in_code_is_one_of_the_source(name):
    modules = {path.stem for folder in SOURCES for path in folder.rglob("*.py")} | {"qsync_planner", "qsync_core", "qsync"}
    for part in name.split("."):
        assert part in modules or part in ("allocator", "exact") or re.search(rf"\b{re.escape(part)}\b", TEXT), f"{part} of {name}"
