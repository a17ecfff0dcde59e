"""Who may import whom (the contracts stand in pyproject.toml), and nobody imports what it does not declare."""

from __future__ import annotations

import re
import sys
import tomllib

import grimp
import pytest

from contracts.environment import MODULES, ROOT, pyproject, run

MODULE_OF_DISTRIBUTION = {
    "vl-convert-python": "vl_convert",
    "attrs": "attr",
    "msgpack": "msgpack",
    "pyyaml": "yaml",
    "scikit-learn": "sklearn",
    "nvidia-cutlass": "cutlass",
}
BROUGHT_ALONG = {"torch": {"functorch"}}
"""Further modules of a distribution."""


def test_the_contracts_cover_every_package():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    assert set(config["root_packages"]) == set(MODULES.values())
    sources = {module for contract in config["contracts"] for module in contract.get("source_modules", ())}
    assert {module for module in sources if "." not in module} == set(MODULES.values())


def test_import_linter_keeps_every_contract():
    linter = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = run(sys.executable, "-I", "-c", linter, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    assert re.search(r"Contracts: \d+ kept, 0 broken", done.stdout)


@pytest.mark.parametrize("distribution", MODULES)
def test_a_package_imports_only_what_it_or_the_core_declares(distribution):
    declared = set()
    for name in {distribution, "qsync-core"}:
        project = pyproject(name)["project"]
        lines = [*project["dependencies"], *(line for extra in project.get("optional-dependencies", {}).values() for line in extra)]
        declared |= {re.match(r"[\w-]+", line)[0].lower() for line in lines}
    allowed = {MODULE_OF_DISTRIBUTION.get(name, name.replace("-", "_")) for name in declared}
    allowed |= {module for name in declared for module in BROUGHT_ALONG.get(name, ())}
    module = MODULES[distribution]
    graph = grimp.build_graph(module, include_external_packages=True)
    external = {name.split(".")[0] for name in graph.modules if not name.startswith(module)} - sys.stdlib_module_names
    undeclared = {
        name: sorted(graph.find_modules_that_directly_import(name))
        for name in external - allowed - {"qsync_core", "attrs"}
        if name in graph.modules
    }
    assert undeclared == {}
