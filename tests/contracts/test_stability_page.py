"""docs/stability.md promises what is there: commands, kinds, hooks, names and modules."""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import click
import pytest

from contracts.environment import MODULES, ROOT
from qsync_core.artifacts.schema import KINDS, schema_version
from qsync_core.cli.root import cli
from qsync_core.kernels.backend import BACKEND_API_VERSION
from qsync_core.plugins import hooks

PAGE = (ROOT / "docs" / "stability.md").read_text()
SECTIONS = {text.split("\n", 1)[0]: text for text in PAGE.split("\n## ")[1:]}


def named(text: str) -> list[str]:
    """What stands in backquotes."""
    return re.findall(r"`([^`]+)`", text)


def table(section: str) -> list[list[str]]:
    """The rows of a section's table, without its head."""
    rows = [line.strip("|").split("|") for line in SECTIONS[section].splitlines() if line.startswith("|")]
    return rows[2:]


def test_every_command_is_named():
    first = SECTIONS["Commands"].split(":", 1)[0]
    assert [name.removeprefix("qsync ") for name in named(first)] == cli.list_commands(click.Context(cli))


def test_environment_variables_are_those_that_the_source_reads():
    source = "".join(path.read_text() for path in ROOT.glob("packages/*/src/**/*.py"))
    read = set(re.findall(r"(?:environ(?:\.get)?[\[(]|[A-Z]_VARIABLE = )\"(QSYNC_\w+)\"", source))
    assert {name for name in named(SECTIONS["Commands"]) if name.startswith("QSYNC_")} == read


def test_kinds_and_schema_versions_are_the_present_ones():
    found = {named(kind)[0]: int(version) for kind, version in table("Artifacts")}
    assert found == {kind: schema_version(kind) for kind in KINDS}


def test_hooks_and_the_version_of_the_backends_interface_are_the_present_ones():
    section = SECTIONS["For plugins"]
    assert {name for name in named(section) if name.startswith("qsync_") and "." not in name} == {
        name for name in vars(hooks) if name.startswith("qsync_")
    }
    assert f"`BACKEND_API_VERSION` {BACKEND_API_VERSION}" in section


def test_the_names_of_qsync_torch_are_those_that_it_offers():
    import qsync_torch

    first = SECTIONS["In a training script"].split(". Under a plan")[0]
    assert set(named(first)) - {"qsync_torch"} == set(qsync_torch._PUBLIC)


def rows() -> list[tuple[str, list[str]]]:
    """Each module of the page, with the names in it that the page promises (where its row names one module)."""
    found = []
    for modules, what in table("In Python"):
        names = [name for name in named(what) if name.isidentifier()]
        found += [(module, names if modules.count("`") == 2 else []) for module in named(modules)]
    return found


@pytest.mark.parametrize(("module", "names"), rows(), ids=[module for module, _ in rows()])
def test_a_module_of_the_page_is_there_with_its_names(module, names):
    spec = find_spec(module)
    assert spec is not None
    assert spec.name.split(".")[0] in MODULES.values()
    tree = ast.parse(Path(spec.origin).read_text())
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    defined |= {alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert set(names) <= defined
    assert ast.get_docstring(tree)
