"""What error messages say to install, and from where."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from qsync_core.plugins.installing import pip_install


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """Packages by name, with the text of their direct_url.json."""
    found: dict[str, str | None] = {}

    def distribution(name: str) -> SimpleNamespace:
        if name not in found:
            raise metadata.PackageNotFoundError(name)
        return SimpleNamespace(read_text=lambda file: found[name] if file == "direct_url.json" else None)

    monkeypatch.setattr(metadata, "distribution", distribution)
    return found


def of_folder(path: Path, *, editable: bool) -> str:
    return json.dumps({"url": path.as_uri(), "dir_info": {"editable": True} if editable else {}})


def test_a_package_of_an_index_is_named(installed: dict[str, str | None]) -> None:
    installed["qsync-torch"] = None
    assert pip_install("qsync-torch", "plan") == "pip install 'qsync-torch[plan]'"
    assert pip_install("qsync-planner") == "pip install qsync-planner"


def test_one_of_a_clone_is_taken_from_there(installed: dict[str, str | None], tmp_path: Path) -> None:
    folder = tmp_path / "my clone" / "qsync-torch"
    installed["qsync-torch"] = of_folder(folder, editable=True)
    assert pip_install("qsync-torch", "plan") == f"pip install -e '{folder}[plan]'"
    installed["qsync-torch"] = of_folder(folder, editable=False)
    assert pip_install("qsync-torch", "plan") == f"pip install '{folder}[plan]'"


def test_one_that_is_not_installed_is_looked_for_beside_the_core(installed: dict[str, str | None], tmp_path: Path) -> None:
    installed["qsync-core"] = of_folder(tmp_path / "qsync-core", editable=True)
    assert pip_install("qsync-planner") == "pip install qsync-planner"
    (tmp_path / "qsync-planner").mkdir()
    assert pip_install("qsync-planner") == f"pip install -e '{tmp_path / 'qsync-planner'}'"
