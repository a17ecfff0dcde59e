"""What all five distributions say about themselves, from one place: ``[tool.qsync]`` of the root's pyproject.toml.

``python release/shared_metadata.py`` writes it into every pyproject.toml, copies LICENSE into every package and turns the links of
the packages' READMEs to the project's address, and that of SECURITY.md to the place where weaknesses are reported.  A contract test
fails where that was forgotten.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BEGIN = "# Shared by all packages: release/shared_metadata.py writes this part from [tool.qsync] of the root's pyproject.toml.\n"
END = "# End of the shared part.\n"


def shared(root: Path) -> dict[str, Any]:
    """The table ``[tool.qsync]``."""
    return tomllib.loads((root / "pyproject.toml").read_text())["tool"]["qsync"]


def packages(root: Path) -> list[Path]:
    """The folders of the distributions."""
    return sorted(path.parent for path in root.glob("packages/*/pyproject.toml"))


def file_address(table: dict[str, Any], path: str) -> str:
    """Where a reader finds a file of the repository."""
    return f"{table['repository']}/blob/main/{path}"


def block(table: dict[str, Any], distribution: str) -> str:
    """The shared part of one distribution's pyproject.toml, markers included."""
    addresses = {
        "Homepage": table["repository"],
        "Documentation": table["documentation"],
        "Issues": f"{table['repository']}/issues",
        "Security": table["security"],
        "Changelog": file_address(table, f"packages/{distribution}/CHANGELOG.md"),
    }
    classifiers = "".join(f"    {json.dumps(classifier)},\n" for classifier in table["classifiers"])
    return (
        f"{BEGIN}"
        f"license = {json.dumps(table['license'])}\n"
        'license-files = ["LICENSE"]\n'
        f"authors = [{{ name = {json.dumps(table['authors'])} }}]\n"
        f"keywords = {json.dumps(table['keywords'])}\n"
        f"classifiers = [\n{classifiers}]\n"
        + "".join(f"urls.{name} = {json.dumps(address)}\n" for name, address in addresses.items())
        + END
    )


def written(root: Path) -> dict[Path, str]:
    """Every file that holds shared metadata, as it should be.

    Raises:
        ValueError: when a pyproject.toml has no place for it.
    """
    table, licence = shared(root), (root / "LICENSE").read_text()
    files = {}
    for folder in packages(root):
        pyproject = folder / "pyproject.toml"
        text = pyproject.read_text()
        if BEGIN not in text or END not in text:
            raise ValueError(f"{pyproject} has no shared part; put these two lines into its [project] table:\n{BEGIN}{END}")
        before, rest = text.split(BEGIN, 1)
        files[pyproject] = before + block(table, folder.name) + rest.split(END, 1)[1]
        files[folder / "LICENSE"] = licence
        old = tomllib.loads(text)["project"].get("urls", {}).get("Homepage", table["repository"])
        readme = folder / "README.md"
        files[readme] = re.sub(rf"\]\({re.escape(old)}(?=[/)])", f"]({table['repository']}", readme.read_text())
    files[root / "SECURITY.md"] = _with_contact((root / "SECURITY.md").read_text(), table["security"])
    return files


def _with_contact(policy: str, contact: str) -> str:
    """SECURITY.md with the place to report to.

    Raises:
        ValueError: when the file names none, or several.
    """
    text, links = re.subn(r"(\[[^\]]+\])\([^)]*\)(?=, with the version)", lambda link: f"{link[1]}({contact})", policy)
    if links != 1:
        raise ValueError(f"SECURITY.md has {links} links to the place to report to; write one: [words](address), with the version")
    return text


def out_of_date(root: Path) -> list[Path]:
    """Files that differ from what they should be."""
    return [path for path, text in written(root).items() if not path.exists() or path.read_text() != text]


if __name__ == "__main__":
    contents = written(ROOT)
    for changed in out_of_date(ROOT):
        changed.write_text(contents[changed])
        print("wrote", changed.relative_to(ROOT))
