"""What the documents at the top of the repository point to is there."""

from __future__ import annotations

import re
import tomllib

import pytest

from contracts.environment import MODULES, ROOT

DOCUMENTS = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", *(f"packages/{name}/README.md" for name in MODULES)]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_relative_link_leads_somewhere(document):
    path = ROOT / document
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text())
    missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert missing == []


def test_every_file_in_the_table_of_paper_sections_is_there():
    table = (ROOT / "ARCHITECTURE.md").read_text().split("## Where the paper is", 1)[1]
    missing = []
    package = ""
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 3 or cells[1] in ("package", "---"):
            continue
        package = cells[1]
        source = ROOT / "packages" / f"qsync-{package}" / "src" / f"qsync_{package.replace('-', '_')}"
        missing += [f"{package}: {name}" for name in re.findall(r"`([^`]+)`", cells[2]) if not (source / name).exists()]
    assert package
    assert missing == []


def test_every_tox_environment_that_contributing_names_exists_and_the_other_way_round():
    table = (ROOT / "CONTRIBUTING.md").read_text().split("## Environments", 1)[1].split("\n\n`tox run`", 1)[0]
    named = {
        name for line in table.splitlines() if line.startswith("| `") for name in re.findall(r"`([\w-]+)`", line.split("|")[1])
    }
    defined = set(re.findall(r"^\[testenv:([\w-]+)\]", (ROOT / "tox.ini").read_text(), flags=re.M))
    assert named == defined


@pytest.mark.parametrize("distribution", MODULES)
def test_the_changelog_has_an_entry_for_the_current_version(distribution):
    package = ROOT / "packages" / distribution
    version = tomllib.loads((package / "pyproject.toml").read_text())["project"]["version"]
    entry = (package / "CHANGELOG.md").read_text().split(f"## {version}", 1)[1].split("\n## ")[0]
    assert re.search(r"^- \w", entry, flags=re.M), f"{distribution} {version} has no line in its changelog"


@pytest.mark.parametrize("distribution", MODULES)
def test_a_changelog_tells_each_version_once_and_as_it_is(distribution):
    text = (ROOT / "packages" / distribution / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (\S+)", text, flags=re.M)
    assert len(versions) == len(set(versions))
    first = text.split("\n## ")[1] if len(versions) == 1 else ""
    assert re.findall(r"now the default|than before|instead of \d", first) == [], "a first version has nothing to compare with"


@pytest.mark.parametrize("distribution", MODULES)
def test_the_modules_that_a_readme_names_exist(distribution):
    text = (ROOT / "packages" / distribution / "README.md").read_text()
    source = ROOT / "packages" / distribution / "src" / MODULES[distribution]
    column = {"| module | what |": 1, "| what | where |": 2}
    missing = []
    for head, cell in column.items():
        for table in text.split(head)[1:]:
            rows = [line for line in table.split("\n\n")[0].splitlines()[2:] if line.startswith("|")]
            names = [name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[cell])]
            places = [*source.rglob("*.py"), *source.rglob("*/")]
            known = {".".join(place.relative_to(source).with_suffix("").parts) for place in places}
            known |= {name.rpartition(".")[2] for name in known}
            missing += [name for name in names if name not in known]
    assert missing == []
